"""Connection to a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from llmrl._utils.imports import require


def connect(ray_init_config: Mapping[str, object] | None = None) -> ModuleType:
    """Return the module `ray`, connected to a cluster.

    `ray_init_config` contains arguments of `ray.init`, such as `{"address": "auto"}`, for a process that is not yet
    connected. Without an address, Ray takes `RAY_ADDRESS`, a cluster on this machine, or a new one; the address
    `"local"` always starts a new one. Raises MissingExtraError if Ray is not installed, ConnectionError if there is no
    cluster at the address, and RuntimeError if this process is connected to another cluster.
    """
    ray = require("ray", extra="ray")
    config = dict(ray_init_config or {})
    if not ray.is_initialized():
        # An existing cluster has its own dashboard; a new one on this machine needs none.
        here = {} if "address" in config else {"include_dashboard": False}
        ray.init(**{"log_to_driver": False, **here, **config})
        return ray
    address = str(config.get("address", ""))
    connected = ray.get_runtime_context().gcs_address
    if ":" in address and "://" not in address and address != connected:
        raise RuntimeError(
            f"ray_init_config asks for the cluster at {address}, but this process is connected to {connected}; "
            "call ray.shutdown() first, or leave the address out."
        )
    return ray
