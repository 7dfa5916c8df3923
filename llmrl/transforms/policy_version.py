"""`PolicyVersion`: the version of the policy's weights at each step."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import StateDict


class PolicyVersion(KnownArguments, Transform):
    """Writes the version of the policy's weights to `"policy_version"` at reset and step: `[*batch]` int64, or a uuid.

    If weights change within a completion, `("policy_versions", "full")` has the exact version of each token.

    Args:
        version_type: `int` (or `"int"`) for a count, or `str` (or `"uuid"`) for a uuid that is unique across runs.
        source: function that returns the current count, such as the engine's counter; by default its own counter.

    Example:
        >>> transform = PolicyVersion()
        >>> transform.increment_version()
        >>> transform.version
        1
        >>> len(PolicyVersion("uuid").version)
        36
    """

    def __init__(
        self, version_type: type | Literal["int", "uuid"] = int, *, source: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        if version_type not in (int, "int", str, "uuid"):
            raise ValueError(
                f"version_type must be int, 'int', str or 'uuid', got {version_type!r}; "
                "pass a function that counts versions as the keyword source."
            )
        self.is_uuid = version_type in (str, "uuid")
        self._source = source
        self._count = 0
        self._run = uuid.uuid4()

    @property
    def count(self) -> int:
        """Number of weight updates."""
        return self._count if self._source is None else self._source()

    @property
    def version(self) -> int | str:
        """Current version. Setting it raises RuntimeError with a `source`, ValueError for uuids."""
        # Derived from the count, so that the uuid of each token's version can be computed.
        return str(uuid.uuid5(self._run, str(self.count))) if self.is_uuid else self.count

    @version.setter
    def version(self, version: int) -> None:
        if self._source is not None:
            raise RuntimeError("this PolicyVersion follows its source, which counts versions, so it cannot be set.")
        if self.is_uuid:
            raise ValueError("versions that are uuids are derived from a count: call increment_version().")
        self._count = version

    def increment_version(self) -> None:
        """Count one weight update; raise RuntimeError if a `source` counts them."""
        if self._source is not None:
            raise RuntimeError(
                "this PolicyVersion follows its source, which counts versions; update the engine instead."
            )
        self._count += 1

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        shape = next_tensordict.batch_size
        written = NonTensorData(self.version, batch_size=shape) if self.is_uuid else torch.full(shape, self.count)
        return next_tensordict.set("policy_version", written)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the version."""
        shape = observation_spec.shape
        spec = NonTensor(shape=tuple(shape), example_data="") if self.is_uuid else Unbounded(shape, dtype=torch.int64)
        observation_spec["policy_version"] = spec
        return observation_spec

    def get_extra_state(self) -> dict[str, int | str]:
        """Return the counter and the id of the run, from which uuids are derived."""
        return {"count": self._count, "run": str(self._run)}

    def set_extra_state(self, state: StateDict) -> None:
        """Restore a saved counter."""
        self._count = int(state["count"])
        self._run = uuid.UUID(str(state["run"]))

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object) -> None:
        # Older states have the entries themselves, or none of them.
        older = {name: state_dict.pop(f"{prefix}{name}", own) for name, own in self.get_extra_state().items()}
        state_dict.setdefault(f"{prefix}_extra_state", older)
        super()._load_from_state_dict(state_dict, prefix, *args)
