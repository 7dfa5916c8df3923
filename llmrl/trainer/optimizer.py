"""The optimizer and its learning-rate schedule: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from llmrl._utils.arguments import check_choice, check_not_negative
from llmrl._utils.imports import require
from llmrl._utils.types import StateDict

MomentsName = Literal["float32", "8bit"]
ScheduleName = Literal["constant", "linear", "cosine"]
MOMENT_BYTES: dict[MomentsName, int] = {"float32": 8, "8bit": 2}
"""Bytes of the two moments of a parameter, without the scales of `8bit`."""


def make_optimizer(
    model: torch.nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    schedule: ScheduleName = "constant",
    warmup_steps: int = 0,
    num_steps: int | None = None,
    moments: MomentsName = "float32",
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return AdamW (arXiv:1711.05101) over the trained parameters, and its learning-rate schedule.

    Call `schedule.step()` once per batch, after its updates. State dicts restore the moments and the number of steps,
    but not the learning rate, weight decay or schedule, so a resumed run follows its configuration.

    Args:
        model: model with the parameters to optimise, those that require gradients.
        learning_rate: peak learning rate.
        weight_decay: weight decay of matrices; vectors (norms, biases) are not decayed.
        schedule: after the warm-up, `constant`, or `linear` or `cosine` decay to 0 at `num_steps`.
        warmup_steps: number of batches over which the learning rate rises from `learning_rate / (warmup_steps + 1)`.
        num_steps: number of batches of the whole training, including the warm-up; required for a decay.
        moments: `float32`, or `8bit`, with which bitsandbytes stores 2 bytes per parameter instead
            of 8 (arXiv:2110.02861): a code for each value and a scale for 256. Tensors of fewer
            than 4,096 values keep float32.

    Raises ValueError if a name is unknown, a number is invalid, the model has no trained parameter, or `8bit` is
    given for sharded weights, and MissingExtraError if bitsandbytes is needed and not installed.
    The optimizer raises ValueError when it loads a state dict with the other kind of moments.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer, schedule = make_optimizer(
        ...     model, learning_rate=1.0, schedule="linear", warmup_steps=1, num_steps=3)
        >>> rates = []
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     rates += schedule.get_last_lr()[:1]
        ...     schedule.step()
        >>> rates
        [0.5, 1.0, 0.5]
    """
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate must be a positive number, got {learning_rate}.")
    check_not_negative(weight_decay=weight_decay, warmup_steps=warmup_steps)
    check_choice(get_args(ScheduleName), schedule=schedule)
    check_choice(get_args(MomentsName), moments=moments)
    if schedule != "constant":
        if num_steps is None:
            raise ValueError(f"schedule={schedule!r} decays to 0 at the end of training: give num_steps.")
        if warmup_steps >= num_steps:
            raise ValueError(
                f"warmup_steps={warmup_steps} leaves no step of num_steps={num_steps} for the decay: "
                "use a smaller number."
            )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient; there is nothing to train.")
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    groups: list[dict[str, object]] = [
        {"params": parameters, "weight_decay": decay, "moments": moments}
        for parameters, decay in ((matrices, weight_decay), (vectors, 0.0))
        if parameters
    ]
    optimizer: torch.optim.Optimizer
    if moments == "8bit":
        if any(isinstance(parameter, DTensor) for parameter in trained):
            raise ValueError("moments='8bit' needs unsharded weights, but the model is sharded: use moments='float32'.")
        optimizer = _eight_bit_adamw(groups, learning_rate)
    else:
        # On GPU, the fused kernel makes no copies of the weights.
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, fused=all(p.is_cuda for p in trained) or None)
    optimizer.register_load_state_dict_pre_hook(_check_moments)
    return optimizer, WarmupSchedule(optimizer, schedule, warmup_steps=warmup_steps, num_steps=num_steps)


def _eight_bit_adamw(groups: list[dict[str, object]], learning_rate: float) -> torch.optim.Optimizer:
    class HookedAdamW(require("bitsandbytes", extra="optim").optim.AdamW8bit):  # type: ignore[misc]
        def load_state_dict(self, state_dict: StateDict, move_to_device: bool = True) -> None:
            """Load the state and call the registered hooks, which bitsandbytes does not call."""
            for check in self._optimizer_load_state_dict_pre_hooks.values():
                check(self, state_dict)
            super().load_state_dict(state_dict, move_to_device)
            for hook in self._optimizer_load_state_dict_post_hooks.values():
                hook(self)

    optimizer: torch.optim.Optimizer = HookedAdamW(groups, lr=learning_rate)
    return optimizer


def _check_moments(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
    saved = state_dict["param_groups"][0].get("moments", "float32")
    own = optimizer.param_groups[0]["moments"]
    if saved != own:
        raise ValueError(
            f"the state has moments={saved!r}, and the optimizer moments={own!r}: create the optimizer "
            f"with moments={saved!r}."
        )


class WarmupSchedule(LRScheduler):
    """Learning-rate schedule that depends only on the number of steps; see `make_optimizer`.

    Step `s`, counted from 0, multiplies the learning rate by

    - `(s + 1) / (warmup_steps + 1)` while `s < warmup_steps`, so that no step has a learning rate of 0;
    - then, with `t = (s - warmup_steps) / (num_steps - warmup_steps)`: 1, `1 - t`, or
      `(1 + cos(pi t)) / 2` (SGDR, arXiv:1608.03983, equation 5, without restarts).

    Loading a state dict, the optimizer's or the schedule's, does not change learning rates or weight decays.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: ScheduleName, *, warmup_steps: int, num_steps: int | None
    ) -> None:
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self._end = None if schedule == "constant" else num_steps
        self._weight_decays = [group["weight_decay"] for group in optimizer.param_groups]
        super().__init__(optimizer)
        optimizer.register_load_state_dict_post_hook(lambda _: self._write_rates())

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self._end is None:
            return 1.0
        part = min(1.0, (step - self.warmup_steps) / (self._end - self.warmup_steps))
        if self.schedule == "linear":
            return 1.0 - part
        return 0.5 * (1.0 + math.cos(math.pi * part))

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each parameter group at the current step."""
        return [rate * self.factor(self.last_epoch) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step; raise ValueError if `epoch` is given or the decay has ended."""
        if epoch is not None:
            raise ValueError(f"the schedule counts steps itself: call step() without epoch={epoch!r}.")
        if self._end is not None and self.last_epoch >= self._end:
            raise ValueError(f"the schedule has ended: its learning rate is 0 after num_steps={self._end} steps.")
        self.last_epoch += 1
        self._write_rates()

    def _write_rates(self) -> None:
        groups = zip(self.optimizer.param_groups, self.base_lrs, self.get_lr(), self._weight_decays, strict=True)
        for group, base_rate, rate, weight_decay in groups:
            group.update(initial_lr=base_rate, lr=rate, weight_decay=weight_decay)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the number of steps."""
        self.last_epoch = state_dict["last_epoch"]
        self._write_rates()
