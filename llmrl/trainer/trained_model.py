"""State of one model that trainer and weight sync share: dtypes, sharding and the version of the engines' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from llmrl._utils.model_parts import without_adapters
from llmrl._utils.ranks import rank_and_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from llmrl.trainer.context import ContextRanks
    from llmrl.trainer.model.routing import RoutingCounts


@dataclass(slots=True)
class TrainedModel:
    """Record of one model; `None` means unknown."""

    compute_dtype: torch.dtype | None = None
    """dtype of the forward pass: that of autocast, of sharding, or of the weights."""
    scaler: torch.amp.GradScaler | None = None
    """Scaler of the loss, where float16 over float32 weights would lose small gradients; its state is part of a
    checkpoint."""
    sharded_dtype: torch.dtype | None = None
    """dtype to which sharding casts gathered parameters; None does not cast."""
    mesh: DeviceMesh | None = None
    """Ranks over which the model is sharded."""
    context: ContextRanks | None = None
    """Ranks that compute the same rows together; None if each rank computes its own rows."""
    engine_dtype: torch.dtype | None = None
    """dtype of the engines that receive the weights."""
    engine_length: int | None = None
    """`max_model_len` of these engines, on which the frequencies of LongRoPE depend."""
    is_engine_int8: bool = False
    """Whether the engines' linear layers compute in int8."""
    untested_arguments: tuple[str, ...] = ()
    """Names of the engines' arguments that llmrl has not compared with a trainer."""
    int8_difference: float | None = None
    """Log-prob difference of the first on-policy batch of an int8 engine."""
    engine_version: int | None = None
    """Version of the engines' weights that this model had `num_updates` optimizer steps ago."""
    num_updates: int = 0
    """Optimizer steps since the weights were sent."""
    has_agreed: bool = False
    """Whether the log-probs have ever agreed with the engines' up to rounding."""
    warned_difference: float = 0.0
    """Log-prob difference of the last warning."""
    routing: RoutingCounts | None = None
    """Routing counts since the last `train_step` began."""

    def compute_in(self, dtype: torch.dtype, device: torch.device) -> None:
        """Set the dtype of the forward pass over float32 weights; float16 gets a scaler."""
        self.compute_dtype = dtype
        if dtype != torch.float16:
            self.scaler = None
        elif self.scaler is None:
            self.scaler = torch.amp.GradScaler(device.type)

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """Process group of the ranks over which the model is sharded; None if it is not."""
        if self.mesh is None:
            return None
        return self.mesh.get_group() if self.mesh.ndim == 1 else torch.distributed.group.WORLD

    @property
    def place(self) -> tuple[int, int]:
        """Index of this rank and number of ranks in sharing micro-batches; a group that splits rows counts as one."""
        rank, num_ranks = rank_and_size(self.process_group)
        return rank // self.num_context_ranks, num_ranks // self.num_context_ranks

    @property
    def is_reporting(self) -> bool:
        """Whether this rank reports its micro-batches; of the ranks that split a row, only the first does."""
        return self.context is None or self.context.rank == 0

    @property
    def num_context_ranks(self) -> int:
        """Number of ranks that compute a row together."""
        return 1 if self.context is None else self.context.size

    @property
    def coarsest_dtype(self) -> torch.dtype | None:
        """Known dtype with the largest rounding error."""
        known = [dtype for dtype in (self.compute_dtype, self.engine_dtype) if dtype is not None]
        return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    @property
    def disagreement(self) -> str | None:
        """Message about differing dtypes and how to resolve them; None if they agree or one is unknown.

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
            f"rounding and on-policy importance ratios are not 1. Start the engine with dtype={trainer!r}, or let the "
            f"trainer compute in {engine}: TransformersWrapper(autocast_dtype=torch.{engine})."
        )


def half_dtype() -> torch.dtype:
    """Return the half-precision dtype of this machine: bfloat16, or float16 if its GPU has no bfloat16 (T4, V100)."""
    is_emulated = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if is_emulated else torch.bfloat16


_known: WeakKeyDictionary[torch.nn.Module, TrainedModel] = WeakKeyDictionary()


def trained_model(model: torch.nn.Module) -> TrainedModel:
    """Return the record of a model; a peft model and its base share one."""
    return _known.setdefault(without_adapters(model), TrainedModel())


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
