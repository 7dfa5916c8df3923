"""`ReplayLoop`: runs the script's own loop over recorded batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor

from llmrl._utils.types import StateDict, Tokenizer
from llmrl.config.ranks import call_on_ranks, join_ranks
from llmrl.config.sections import GRPOConfig
from llmrl.engines import Engine
from llmrl.envs import DatasetChatEnv
from llmrl.replay.recorded import RecordedRun
from llmrl.runs.batch_source import BatchMaker
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.run import Run
from llmrl.runs.run_folder import random_states, restore_random_states, seed_all
from llmrl.runs.tracked import Stateful, restore_tracked, with_scaler
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.scripts.grpo import grpo
from llmrl.trainer.trained_model import trained_model
from llmrl.watch.step_metrics import Learned, log_probs_before, metrics_of

Result = TypeVar("Result")
OnStep = Callable[[int], object]
"""Callback that receives the number of a step before the step is computed."""


def pass_over(*_: object) -> None:
    """Do nothing before or after a step."""


def compute_on_ranks(num_ranks: int, function: Callable[..., Result], *arguments: object, on_step: OnStep) -> Result:
    """Call `function(*arguments, on_step)` on ranks, and return rank 0's result."""
    if num_ranks > 1:
        on_step = pass_over  # a callback does not work in other processes
    return call_on_ranks(num_ranks, function, *arguments, on_step)


@dataclass(slots=True)
class ComputedStep:
    """Results of the loop in one step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the updates."""
    log_probs: list[torch.Tensor] | None = None
    """Trainer's log-probs before the step, `[num_tokens]` per row; None after several updates."""


AfterStep = Callable[[ComputedStep, Mapping[str, Stateful]], None]
"""Callback with the results of a step and the loop's `model`, `optimizer`, `schedule`."""


@dataclass(slots=True)
class Computed:
    """Results of the loop in consecutive steps."""

    steps: list[ComputedStep] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Gradient of the first step's first update, after clipping: a tensor per parameter, sharded like the model. Empty
    if the update was skipped or the gradient was not requested."""
    before: StateDict | None = None
    """Content of a checkpoint before the first step, if requested."""
    after: dict[str, Stateful] = field(default_factory=dict)
    """The loop's objects after the last step: `model`, `optimizer`, `schedule`."""
    random: StateDict = field(default_factory=dict)
    """States of the random number generators after the last step."""


class ReplayLoop:
    """Replacement for `Run` that gives the loop recorded batches and keeps the results.

    Under `torchrun`, every rank runs the same loop and reads the batches from the folder.

    Args:
        run: the recorded run.
        cfg: configuration to compute with.
        steps: consecutive steps to keep; the steps between the start and these are computed first.
        start: state to begin with (`RecordedRun.start_of`, or `Computed.before`); None begins with the initial model.
        is_own_start: begin with the first of `steps`, even if `start` is from an earlier step.
        edit: callable that receives each of `steps` and its batch, and returns the batch to train on.
        keep_before: keep the state before the first of `steps`, a copy of model and optimizer.
        keep_gradients: keep the gradient of the first of `steps`.
        on_step: callback that receives the number of each step before the step is computed.
        after_step: callback after each of `steps`.
    """

    def __init__(
        self,
        run: RecordedRun,
        cfg: GRPOConfig,
        steps: Sequence[int],
        *,
        start: StateDict | None,
        is_own_start: bool = False,
        edit: Callable[[int, TensorDictBase], TensorDictBase] = lambda step, batch: batch,
        keep_before: bool = False,
        keep_gradients: bool = False,
        on_step: OnStep = pass_over,
        after_step: AfterStep = pass_over,
    ) -> None:
        self._run = run
        self._cfg = cfg
        self._steps = steps
        self._start = start
        self._first = 1 if start is None else start["step"] + 1
        if is_own_start:
            self._first = steps[0]
        self._edit = edit
        self._keep_before = keep_before
        self._keep_gradients = keep_gradients
        self._on_step = on_step
        self._after_step = after_step
        self._exit = contextlib.ExitStack()
        self._tracked: dict[str, Stateful] = {}
        self._batch: TensorDictBase | None = None
        self._result = Computed()

    def play(self) -> Computed:
        """Run the loop up to the last step, and return the results."""
        from transformers.utils.logging import disable_progress_bar

        cfg = self._cfg
        disable_progress_bar()
        join_ranks(cfg)
        self._run.check_batches(self._first, self._steps[-1])  # fail before the model is loaded
        seed_all(cfg.seed)
        env = DatasetChatEnv([""], repeats=cfg.collect.group_size)  # not played; the loop needs one
        with self._exit:
            grpo(cfg, cast(Run, self), TrainerDevice(cfg), _Sink(cfg.model.folder), env, {})
        self._result.after = self._tracked
        self._result.random = random_states()
        return self._result

    # The methods of `Run` that the loop calls

    def enter(self, part: contextlib.AbstractContextManager[Any]) -> Any:
        """Enter a context manager, and exit it after the loop."""
        return self._exit.enter_context(part)

    def track(self, collector: BatchMaker, engine: Engine, *, tokenizer: Tokenizer, **objects: Stateful) -> None:
        """Restore the state to begin with."""
        self._tracked = with_scaler(objects)
        model = cast(torch.nn.Module, objects["model"])
        length = self._run.folder.machines.at(self._first).get("engine_length")
        trained_model(model).engine_length = length if isinstance(length, int) else None
        if self._start is not None:
            restore_tracked(self._tracked, self._start, self._run.folder.checkpoint_path)
        engine.policy_version = self._first - 2  # the update below adds one
        collector.update_policy_weights_(model)

    def steps(self, num_steps: int, **options: object) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield the recorded batches."""
        for step in range(self._first, self._steps[-1] + 1):
            self._on_step(step)
            saved = self._run.batch(step)
            restore_random_states(saved["random"])
            self._batch = saved["batch"]
            if step == self._steps[0] and self._keep_before:
                states = {name: one.state_dict() for name, one in self._tracked.items()}
                self._result.before = {"step": step - 1, "tracked": copy.deepcopy(states)}
            if step == self._steps[0] and self._keep_gradients:
                self._watch_gradients()
            if step in self._steps:
                self._batch = self._edit(step, self._batch)
            yield step, self._batch

    def _watch_gradients(self) -> None:
        optimizer = cast(torch.optim.Optimizer, self._tracked["optimizer"])

        def keep(*_: object) -> None:
            if not self._result.gradients and not self._result.steps:
                parameters = [one for group in optimizer.param_groups for one in group["params"]]
                self._result.gradients = [one.grad.detach().clone() for one in parameters if one.grad is not None]

        self._exit.callback(optimizer.register_step_pre_hook(keep).remove)

    def timer(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure nothing."""
        return contextlib.nullcontext()

    def follow(self, update: Future[int]) -> int:
        """Return the version of an update."""
        return update.result()

    def log(self, step: int, learned: Learned, *, version: int, **metrics: float) -> dict[str, float]:
        """Keep the results of the step."""
        if step in self._steps and self._batch is not None:
            log_probs = log_probs_before(learned, self._batch)
            computed = ComputedStep(step, metrics_of(learned) | metrics, log_probs)
            self._result.steps.append(computed)
            self._after_step(computed, self._tracked)
        return {}

    def evaluate(self, step: int, evaluator: object, **measured: float) -> dict[str, float]:
        """Evaluate nothing."""
        return {}

    def is_due(self, step: int, every: int | None) -> bool:
        """Return False: evaluations are not repeated."""
        return False

    def finish(self, evaluator: object = None, **measured: float) -> None:
        """Write nothing."""


class _Sink(NullEngine):
    """Engine that counts the versions of the trainer's weights and discards the weights."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None) -> int:
        """Return the next version."""
        if version is None:
            version = self.policy_version + 1
        self.policy_version = version
        return self.policy_version


def whole(number: torch.Tensor) -> torch.Tensor:
    """Return the full value of a scalar that was computed from tensors, which may be sharded."""
    if not isinstance(number, DTensor):
        return number
    return number.full_tensor()
