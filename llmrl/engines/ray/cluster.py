"""Ray: imported where it is used, and connected to once."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from llmrl._utils.imports import require


def connect(ray_init_config: Mapping[str, object] | None = None) -> ModuleType:
    """Return Ray, connected to a cluster: that of `address`, or the one this process is connected to.

    Without either Ray chooses: `RAY_ADDRESS`, one that runs on this machine, or a new one here (always: `"local"`).

    Args:
        ray_init_config: arguments of `ray.init` where this process is not connected yet, such as
            `{"address": "10.0.0.1:6379"}` or `{"address": "auto"}`.

    Raises:
        MissingExtraError: when Ray is not installed, naming the extra.
        ConnectionError: when there is no cluster at the address.
        RuntimeError: when this process is connected to another cluster than the one at the address.
    """
    ray = require("ray", extra="ray")
    config = dict(ray_init_config or {})
    if not ray.is_initialized():
        # A cluster that exists has its own dashboard and resources; a new one on this machine needs neither.
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
