"""What trainer and weight sync know of one model: what it computes in, and which of the engines' versions it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from llmrl.trainer.model.routing import RoutingCounts


@dataclass(slots=True)
class TrainedModel:
    """What is known of one model; `None` where it is unknown."""

    compute_dtype: torch.dtype | None = None
    """dtype of its forward pass: its policy's autocast, its sharding's, or that of its weights."""
    sharded_dtype: torch.dtype | None = None
    """dtype to which sharding casts gathered parameters; None leaves them as they are."""
    mesh: DeviceMesh | None = None
    """The ranks that it is sharded over."""
    engine_dtype: torch.dtype | None = None
    """dtype of the engines that its weights are sent to."""
    is_engine_int8: bool = False
    """Whether their linear layers compute in int8."""
    int8_difference: float | None = None
    """The log-prob difference that int8 made of the first batch on weights that they were sent."""
    engine_version: int | None = None
    """Version of the engines' weights that are its own, but for `num_updates`."""
    num_updates: int = 0
    """Optimizer steps since these weights were sent."""
    has_agreed: bool = False
    """Whether its log-probs were ever those of the engines, up to rounding."""
    warned_difference: float = 0.0
    """The log-prob difference that was warned of last."""
    routing: RoutingCounts | None = None
    """Where a mixture's routers sent tokens since `train_step` began last."""

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """Of the ranks that it is sharded over: they share the work on a batch. None where it is whole."""
        if self.mesh is None:
            return None
        return self.mesh.get_group() if self.mesh.ndim == 1 else torch.distributed.group.WORLD

    @property
    def coarsest_dtype(self) -> torch.dtype | None:
        """The known dtype with the largest rounding."""
        known = [dtype for dtype in (self.compute_dtype, self.engine_dtype) if dtype is not None]
        return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    @property
    def disagreement(self) -> str | None:
        """What is wrong with the dtypes, and what to do; None where they agree or one is not known.

        Example:
            >>> TrainedModel(compute_dtype=torch.float32, engine_dtype=torch.float32).disagreement is None
            True
            >>> print(TrainedModel(compute_dtype=torch.float32, engine_dtype=torch.bfloat16).disagreement)
            the engine computes in bfloat16 and the trainer in float32, so that small updates are lost to ...
        """
        trainer = _name(self.compute_dtype)
        engine = _name(self.engine_dtype)
        if None in (trainer, engine) or trainer == engine:
            return None
        return (
            f"the engine computes in {engine} and the trainer in {trainer}, so that small updates are lost to "
            f"rounding and importance ratios are off on-policy. Start the engine with dtype={trainer!r}, or let the "
            f"trainer compute in {engine}: TransformersWrapper(autocast_dtype=torch.{engine})."
        )


_known: WeakKeyDictionary[torch.nn.Module, TrainedModel] = WeakKeyDictionary()


def trained_model(model: torch.nn.Module) -> TrainedModel:
    """Return the record of a model, one for a peft model and its base."""
    get_base: Callable[[], torch.nn.Module] = getattr(model, "get_base_model", lambda: model)  # of peft
    return _known.setdefault(get_base(), TrainedModel())


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
