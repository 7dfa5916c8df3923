"""`PolicyVersion`: the version of the weights that generates, beside each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform


class PolicyVersion(Transform):
    """Writes the policy's version into `"policy_version"` (`[*batch]` int64) at reset and step.

    The version is counted once, by whoever holds the weights: pass the engine's counter as `source`. Per-token
    versions, exact also when weights change within a completion, are in `("policy_versions", "full")`.

    Args:
        source: gives the current version; by default a counter of its own, raised by `increment_version`.

    Example:
        >>> transform = PolicyVersion()
        >>> transform.increment_version()
        >>> transform.version
        1
    """

    def __init__(self, source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._source = source
        self._count = 0

    @property
    def version(self) -> int:
        """The current version."""
        return self._count if self._source is None else self._source()

    def increment_version(self) -> None:
        """Count one update of the weights.

        Raises:
            RuntimeError: when the version is counted elsewhere.
        """
        if self._source is not None:
            raise RuntimeError(
                "this PolicyVersion follows its source, which counts versions; update the engine instead."
            )
        self._count += 1

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("policy_version", torch.full(next_tensordict.batch_size, self.version))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["policy_version"] = Unbounded(observation_spec.shape, dtype=torch.int64)
        return observation_spec

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The counter."""
        return {"count": self._count}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Continue from a saved counter."""
        self._count = int(state_dict["count"])
