"""`ReplayLoop`: runs the script's own loop over recorded batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from llmrl._utils.types import StateDict, Tokenizer
from llmrl.config.sections import GRPOConfig
from llmrl.engines import Engine
from llmrl.envs import DatasetChatEnv
from llmrl.replay.recorded import RecordedRun
from llmrl.runs.batch_source import BatchMaker
from llmrl.runs.grpo import grpo
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.run import Run
from llmrl.runs.run_folder import random_states, restore_random_states, seed_all
from llmrl.runs.tracked import Stateful, restore_tracked
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.watch.step_metrics import Learned, log_probs_before, metrics_of


@dataclass(slots=True)
class ComputedStep:
    """What the loop computed in one step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the updates."""
    log_probs: list[torch.Tensor] | None = None
    """Log-probs of the trainer before the step, `[num_tokens]` per row; None if it made several updates."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Gradient of the step's first update, after clipping, a tensor per parameter; empty if it was skipped, or if it
    was not requested."""
    before: StateDict | None = None
    """What a checkpoint before the step would hold, if it was requested."""
    after: dict[str, Stateful] = field(default_factory=dict)
    """The loop's objects after the step: `model`, `optimizer`, `schedule`."""
    random: StateDict = field(default_factory=dict)
    """States of the random number generators after the step."""


class ReplayLoop:
    """Stands in for `Run`: gives the loop recorded batches, and keeps what it computes in the last one.

    Args:
        run: the recorded run.
        cfg: configuration to compute with.
        step: last step.
        start: state to begin with (`RecordedRun.start_of`, or `ComputedStep.before`); None begins with
            the initial model.
        edit: called with the batch of the last step; returns the batch to train on instead.
        keep_before: keep the state before the last step, a copy of model and optimizer.
        keep_gradients: keep the gradients of the last step.
        on_step: called with the number of each step before it is computed.
    """

    def __init__(
        self,
        run: RecordedRun,
        cfg: GRPOConfig,
        step: int,
        *,
        start: StateDict | None,
        edit: Callable[[TensorDictBase], TensorDictBase] = lambda batch: batch,
        keep_before: bool = False,
        keep_gradients: bool = False,
        on_step: Callable[[int], object] = lambda step: None,
    ) -> None:
        self._run = run
        self._cfg = cfg
        self._start = start
        self._first = 1 if start is None else start["step"] + 1
        self._edit = edit
        self._keep_before = keep_before
        self._keep_gradients = keep_gradients
        self._on_step = on_step
        self._exit = contextlib.ExitStack()
        self._tracked: dict[str, Stateful] = {}
        self._batch: TensorDictBase | None = None
        self.result = ComputedStep(step)

    def play(self) -> ComputedStep:
        """Run the loop up to the step; return what it computed there."""
        from transformers.utils.logging import disable_progress_bar

        cfg = self._cfg
        disable_progress_bar()
        self._run.check_batches(self._first, self.result.step)  # before the model is loaded
        seed_all(cfg.seed)
        env = DatasetChatEnv([""], repeats=cfg.collect.group_size)  # it is not played
        with self._exit:
            grpo(cfg, cast(Run, self), TrainerDevice(cfg), _Sink(cfg.model.folder), env, {})
        self.result.after = self._tracked
        self.result.random = random_states()
        return self.result

    # What the loop asks of a `Run`

    def enter(self, part: contextlib.AbstractContextManager[Any]) -> Any:
        """Enter a context manager, and exit it after the loop."""
        return self._exit.enter_context(part)

    def track(self, collector: BatchMaker, engine: Engine, *, tokenizer: Tokenizer, **objects: Stateful) -> None:
        """Restore the state to begin with."""
        self._tracked = dict(objects)
        if self._start is not None:
            restore_tracked(self._tracked, self._start, self._run.folder.checkpoint_path)
        engine.policy_version = self._first - 2  # the version numbers continue
        collector.update_policy_weights_(cast(torch.nn.Module, objects["model"]))

    def steps(self, num_steps: int, **options: object) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield the recorded batches."""
        for step in range(self._first, self.result.step + 1):
            self._on_step(step)
            saved = self._run.batch(step)
            restore_random_states(saved["random"])
            self._batch = saved["batch"]
            if step == self.result.step:
                if self._keep_before:
                    states = {name: one.state_dict() for name, one in self._tracked.items()}
                    self.result.before = {"step": step - 1, "tracked": copy.deepcopy(states)}
                if self._keep_gradients:
                    self._watch_gradients()
                self._batch = self._edit(self._batch)
            yield step, self._batch

    def _watch_gradients(self) -> None:
        optimizer = cast(torch.optim.Optimizer, self._tracked["optimizer"])

        def keep(*_: object) -> None:
            if not self.result.gradients:
                parameters = [one for group in optimizer.param_groups for one in group["params"]]
                self.result.gradients = [one.grad.detach().clone() for one in parameters if one.grad is not None]

        self._exit.callback(optimizer.register_step_pre_hook(keep).remove)

    def timer(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure nothing."""
        return contextlib.nullcontext()

    def follow(self, update: Future[int]) -> int:
        """Return the version of an update."""
        return update.result()

    def log(self, step: int, learned: Learned, *, version: int, **metrics: float) -> dict[str, float]:
        """Keep what the last step computed."""
        if step == self.result.step and self._batch is not None:
            self.result.metrics = metrics_of(learned) | metrics
            self.result.log_probs = log_probs_before(learned, self._batch)
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
    """Takes the weights of the trainer, counts their versions and keeps none."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None) -> int:
        """Return the next version."""
        self.policy_version = self.policy_version + 1 if version is None else version
        return self.policy_version
