"""`Run`: the companion of a training loop that keeps what the loop need not show."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar, cast

from rich.console import Console
from tensordict import TensorDictBase

from llmrl._utils.terminal import printable
from llmrl._utils.types import Tokenizer
from llmrl.collectors import CollectionStalled, NoSignal
from llmrl.config.ranks import broadcast_from_rank0
from llmrl.config.resumed import resumed_config, save_config
from llmrl.config.sections import ScriptConfig
from llmrl.data import Rollout
from llmrl.engines import Engine
from llmrl.runs.batch_source import BatchMaker, BatchSource, Collected, played_by, restore, token_rows
from llmrl.runs.evaluation import BestEvaluation, Evaluator, metrics_of_evaluation
from llmrl.runs.exports import Exports, open_repository
from llmrl.runs.report import (
    ContinuedBy,
    Results,
    before_after_table,
    plot_curve,
    print_next_steps,
    resume_command,
)
from llmrl.runs.run_folder import BackgroundWrites, RunFolder, random_states, restore_random_states, seed_all
from llmrl.runs.tracked import Stateful, restore_tracked, save_tracked
from llmrl.watch.health import HealthJudge
from llmrl.watch.live_view import LiveView
from llmrl.watch.step_metrics import Learned, StepMeter, is_logged, log_probs_before, metrics_of, only_finite
from llmrl.watch.tracking import as_recorded, spread

Entered = TypeVar("Entered")
_NUM_SHOWN = 3
"""Answers that are shown where nothing can be learned from any."""


class NothingLearned(RuntimeError):
    """A run came to its end and no step of it changed the weights."""


class Run:
    """Folder, resumption, live view, trackers, checkpoints and the report of a training loop. A context manager.

    The loop is its caller's:

        with Run(cfg) as run:
            engine = run.enter(start_engine(cfg))
            ...
            run.track(collector, engine, tokenizer=tokenizer, model=model, optimizer=optimizer)
            for step, batch in run.steps(cfg.train.num_steps):
                report = train_step(loss, batch, optimizer)
                with run.timer("sync"):
                    version = run.follow(collector.start_update(model))
                run.log(step, report, version=version)
            run.finish()

    A run that was killed is resumed by the same loop: `track` restores the last checkpoint, and `steps` first gives the
    batches that were saved since, so that what a kill loses is the batch that was being collected. Where engine and
    loop are deterministic, the weights are then those of a run that was never killed, bit by bit.

    Ctrl-C ends the loop: a wait for a batch at once, a step when it is done, and what follows the loop still runs. A
    second one is a `KeyboardInterrupt` like any other.

    Args:
        cfg: its sections `run`, `seed`, `resume` and `dry_run` say what to do; all of it is saved as `config.yaml`.
        console: where it reports.
        continued_by: returns what continues the run, of its path and the entries to change; a command by default.

    Raises:
        FileExistsError, FileNotFoundError: when the folder holds a run, or none to resume.
        FolderInUseError: when another process runs in it.
        ValueError: when the run to be resumed is another one, see `resumed_config`; when a file of it is damaged.
        OSError: when the hub gives no repository `export.push_to_hub`.
    """

    def __init__(
        self, cfg: ScriptConfig, *, console: Console | None = None, continued_by: ContinuedBy = resume_command
    ) -> None:
        from transformers.utils.logging import disable_progress_bar

        self.cfg = cfg
        self.console = console or Console()
        self._continued_by = continued_by
        self._warn = functools.partial(self.console.print, style="bold red", highlight=False, markup=False)
        if cfg.export.push_to_hub is not None:  # before anything is trained, since the hub may refuse it
            open_repository(cfg.export.push_to_hub)
        for name, (old, new) in (resumed_config(cfg)[1] if cfg.resume else {}).items():
            self.console.print(f"resumed with {name}={new} in place of {old}", highlight=False, markup=False)
        self.folder = RunFolder(cfg.run.path, resume=cfg.resume, trackers=cfg.run.trackers)
        self.summary: dict[str, Results] = self.folder.read_summary()
        """What is written as `summary.json`."""
        self.why_stopped = ""
        """What ended the loop."""
        self._logged = {int(row["step"]): row for row in self.folder.read_metrics()}
        self.folder.drop_rollouts(self._logged)
        self._health = HealthJudge(self.folder.health, self._logged, max_staleness=cfg.collect.max_staleness)
        self._best = None if cfg.eval.metric is None else BestEvaluation(cfg.eval.metric, patience=cfg.eval.patience)
        self._best_saved: int | None = None  # step of the model that this process has saved as the best
        self._exports = Exports(cfg, self.folder, self._warn)
        self._exit = contextlib.ExitStack()
        self._writes = BackgroundWrites()
        self._tracked: dict[str, Any] = {}
        self._collector: BatchMaker | None = None
        self._engine: Engine | None = None
        self._lent: Engine | None = None
        self._ended_by: str | None = None  # the entry that ended the loop before its last step
        self._num_steps = 0
        self._step = 0  # the last that was begun, and what it trains on, until it has ended
        self._collected: Collected | None = None
        self._is_replay = False
        self._dropped_ids: set[str] = set()  # of rollouts that were logged before their step's batch came
        self._metrics: dict[str, float] = {}
        self._meter = StepMeter({})  # of the step
        self._view: LiveView | None = None
        self._is_ahead = self._is_interrupted = False
        self._update: Future[int] | None = None  # of the engines' weights; its error is still to be raised
        seed_all(cfg.seed)
        disable_progress_bar()  # the live view owns the terminal

    # What the loop is made of

    def enter(self, part: contextlib.AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager that is left at the end of the run, those entered last first."""
        return self._exit.enter_context(part)

    def lend(self, engine: Engine) -> Engine:
        """Take an engine of the caller's, which stays open: `track` gives it the model's weights, whatever it has."""
        self._lent = engine
        return engine

    def track(self, collector: BatchMaker, engine: Engine, *, tokenizer: Tokenizer, **objects: Stateful) -> None:
        """Name what a checkpoint holds; of a resumed run, restore it, and give the engine the weights, as one lent.

        Args:
            collector: an `LLMCollector` or `Demonstrations`; its place in the data is saved with every batch.
            engine: the engine to give the weights to; its versions count on from where they were.
            tokenizer: tokenizer, saved with the run, for its readers, and beside its model.
            objects: `model`, which the engine's weights are of, and whatever else of the loop has a `state_dict`:
                optimizer, schedule, buffer.

        Raises:
            ValueError: when the checkpoint lacks one of them.
        """
        self._collector = collector
        self._engine = engine
        self._tracked = dict(objects)
        self.folder.save_tokenizer(tokenizer)
        checkpoint = self.folder.load_checkpoint() if self.cfg.resume else None
        if self.cfg.resume:
            self._recall(0 if checkpoint is None else checkpoint["step"])
        if checkpoint is not None:
            restore_tracked(self._tracked, checkpoint, self.folder.checkpoint_path)
            restore(collector, checkpoint)
            self._step = checkpoint["step"]
        if checkpoint is not None or engine is self._lent:
            engine.policy_version = self._step - 1  # versions count on from where they were
            collector.update_policy_weights_(self._tracked["model"])
        save_config(self.cfg, self.folder.path)  # not before: a run that cannot be resumed keeps its own

    def _recall(self, checkpoint: int) -> None:
        """Take from the table what the loop knew; what it says of steps that are made anew is forgotten."""
        num_logged = max((step for step in self._logged if is_logged(self._logged, step, "train")), default=0)
        last = self.folder.last_replayed(checkpoint, num_logged, self.cfg.run.checkpoint_every)
        for step in [step for step in self._logged if step > last]:
            del self._logged[step]
        if self._best is not None:
            self._best.recall(self._logged)

    # The loop

    def steps(
        self,
        num_steps: int,
        *,
        target_reward: float | None = None,
        in_background: bool = False,
        needs_batch: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[int, TensorDictBase]]:
        """Return the steps to make, from 1, each with its batch, which is saved before it is given.

        Of a resumed run the steps since the checkpoint come first, with the batches of then. The steps end early where
        the data does, or nothing is left to learn from; `why_stopped` says so.

        Args:
            num_steps: number of steps of the whole run.
            target_reward: end after a step with this mean reward of its batch.
            in_background: draw batches in the background; where none is ready a step has an empty batch.
            needs_batch: whether a step has nothing to train on without new rows; asked in the background only.

        Raises:
            RuntimeError: before `track`.
        """
        if self._collector is None:
            raise RuntimeError("run.steps needs run.track(collector, engine, model=..., ...) before it.")
        self._is_ahead = in_background or self.cfg.collect.max_staleness is not None
        waiting, training = ("wait for a batch", "train, and generate") if self._is_ahead else ("generate", "train")
        self._num_steps = num_steps
        first_step = self._step
        collected: Collected | None = None
        with LiveView(num_steps, first_step=first_step, console=self.console) as self._view:
            for saved in self.folder.saved_batches(self._step + 1, self._warn):
                self._view.doing("train again on what was saved")
                collected = cast(Collected, saved)
                restore(self._collector, collected)
                yield self._begin(collected, is_replay=True)
                self._end()
            if (aside := self.folder.load_set_aside(self._step + 1)) is not None:
                collected = cast(Collected, aside)
                restore(self._collector, collected)  # what follows it is drawn
            if self.cfg.resume:
                self.console.print(f"resumed after step {self._step}, {self._step - first_step} of them replayed")
            started = time.perf_counter()
            source = BatchSource(
                self._collector,
                in_background=in_background,
                needs_batch=needs_batch,
                last=collected,
                on_dropped=self._log_dropped,
            )
            with contextlib.closing(source):
                while not (self.why_stopped or self._is_over(num_steps, target_reward)):
                    self._view.doing(waiting)
                    if (collected := self._take(source)) is None:
                        break
                    self.folder.save_batch(self._step + 1, collected)
                    self._view.doing(training)
                    yield self._begin(collected)
                    self._end()
        broadcast_from_rank0(None)
        self._wait_for_engines()
        self.console.print(f"trained for {time.perf_counter() - started:.0f} s; {self.why_stopped}", highlight=False)

    def _is_over(self, num_steps: int, target_reward: float | None) -> bool:
        """Return whether training has come to its end, in this process or before a kill, and say why."""
        reward = self._logged.get(self._step, {}).get("reward_mean", -math.inf)
        if target_reward is not None and reward >= target_reward:
            self.why_stopped = f"the mean reward reached train.target_reward={target_reward:g} at step {self._step}"
            self._ended_by = "train.target_reward"
        elif self._best is not None and self._best.is_over and self._step:
            self.why_stopped = f"{self._best.metric} was best at step {self._best.step}, and eval.patience is over"
            self._ended_by = "eval.patience"
        elif self._step >= num_steps:
            self.why_stopped = f"all {num_steps} steps are done"
        return bool(self.why_stopped)

    def _take(self, source: BatchSource) -> Collected | None:
        step = self._step + 1
        try:
            collected = source.take()
        except CollectionStalled as error:
            self._log_dropped(*played_by(cast(BatchMaker, self._collector)))
            if not isinstance(error, NoSignal):
                raise
            self.console.print(f"step {step} has nothing to learn from: {printable(str(error))}", style="bold red")
            self.why_stopped = f"nothing was left to learn from at step {step}"
            return None
        except KeyboardInterrupt:
            self.why_stopped = "interrupted; what was learned so far is kept"
            return None
        if collected is None:
            self.why_stopped = f"the data ended before step {step}"
        return collected

    def _log_dropped(self, metrics: Mapping[str, float], played: Sequence[Rollout]) -> None:
        """Record, judge and show what was played for the coming step so far, when nothing of it is trained on.

        It is logged once: the step has it not again when its batch comes.
        """
        step = self._step + 1
        new = [rollout for rollout in played if rollout.rollout_id not in self._dropped_ids]
        is_first = not self._dropped_ids and all(row.get("is_skipped", 1.0) for row in self._logged.values())
        rows = token_rows(played)  # of the whole step: its tokens are one file
        self.folder.log_rollouts(step, "train", [rollout.to_record() for rollout in new])
        if rows:
            self.folder.tokens.write(step, rows)
        self.folder.log_metrics(step, only_finite(metrics))
        self._dropped_ids.update(rollout.rollout_id for rollout in new)
        records = [rollout.to_record() for rollout in played]
        findings = self._health.judge(step, only_finite(metrics), records)
        if self._view is not None and is_first:
            self._view.show_dropped(step, findings, spread(records, _NUM_SHOWN))
        elif self._view is not None:
            self._view.show_health(step, findings, records)

    def _begin(self, collected: Collected, *, is_replay: bool = False) -> tuple[int, TensorDictBase]:
        self._writes.wait()  # the checkpoint being written must not see half an update
        self._step = self._step + 1
        self._collected = collected
        self._is_replay = is_replay
        if not is_replay:
            self._logged.pop(self._step, None)  # of a batch that was taken away
        self._metrics, self._meter = {}, StepMeter(self._tracked, self._engine)
        if self.cfg.train.num_ranks > 1:
            broadcast_from_rank0((self._step, collected["batch"], random_states()))
        return self._step, collected["batch"]

    def _end(self) -> None:
        """Do what follows a step: save a checkpoint when it is time."""
        collected = self._collected
        self._collected = None
        assert collected is not None
        self._dropped_ids = set()
        if self._step % self.cfg.run.checkpoint_every == 0:
            tracked = save_tracked(self._tracked, self.folder.path, self._step)
            state = {"collector": collected["collector"], "random": random_states(), **tracked}
            self._writes.start(self.folder.save_checkpoint, {"step": self._step, **state})
        if self.is_due(self._step, self.cfg.export.every):
            self._exports.start(self._step, self._tracked["model"], self._metrics, self.summary)
        if self._is_interrupted:
            self.why_stopped = "interrupted; what was learned so far is kept"

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure a part of a step, as its metric `NAME_seconds`; the rest of the step is `train_seconds`."""
        if self._view is not None:
            self._view.doing(name)
        with self._meter.part(name):
            yield

    def follow(self, update: Future[int]) -> int:
        """Take charge of an update of the weights, begun by `collector.start_update`; gives the coming version.

        Where batches are collected ahead, the next step trains while the engines load; otherwise this waits for them.
        Evaluations, the next update and `finish` wait in any case. What an update failed of is raised by what waits for
        it, the wait for a batch included.
        """
        self._wait_for_engines()
        self._update = update
        if self._collector is None or not self._is_ahead:
            return update.result()
        return self._collector.policy_version

    def _wait_for_engines(self) -> None:
        if self._update is not None:
            self._update.result()

    def log(self, step: int, learned: Learned, *, version: int, **metrics: float) -> dict[str, float]:
        """Record a step: metrics, conversations, tokens, live view; gives its metrics.

        A replayed step that was logged before the kill is not logged again.

        Args:
            step: as `steps` gave it.
            learned: the report of `train_step`, or those of a step's several, or metrics.
            version: version of the weights that the step's update brings to the engine.
            metrics: further ones.

        Raises:
            ValueError: for another step than the one being made.
        """
        if self._collected is None or step != self._step:
            raise ValueError(f"step {step} is not being made; run.steps is at {self._step}. Log within the loop.")
        collected = self._collected
        logged = {**collected["metrics"], **metrics_of(learned), **metrics, "policy_version": float(version)}
        self._metrics = logged = only_finite(logged)
        logged |= self._meter.metrics(logged)
        if not is_logged(self._logged, step, "train"):
            new = [one for one in collected["rollouts"] if one["rollout_id"] not in self._dropped_ids]
            self.folder.log_rollouts(step, "train", new)
            if collected["batch"].shape[0]:
                log_probs = log_probs_before(learned, collected["batch"])
                dropped = collected.get("dropped_rows", [])  # a batch saved by an earlier version has none
                self.folder.tokens.write(step, collected["batch"], log_probs, not_trained=dropped)
            self.folder.log_metrics(step, logged, spread(collected["rollouts"], self.cfg.run.traces))
            self._record(step, logged)
        findings = self._health.judge(step, logged, collected["rollouts"])
        if self._view is not None:
            is_sampled = step % self.cfg.run.sample_every == 0
            self._view.show_step(step, logged, collected["rollouts"] if is_sampled else ())
            self._view.show_health(step, findings, collected["rollouts"])
        return logged

    @staticmethod
    def is_due(step: int, every: int | None) -> bool:
        """Return whether something is to be done after this step; None is never.

        Example:
            >>> [step for step in range(1, 7) if Run.is_due(step, 3)], Run.is_due(5, None)
            ([3, 6], False)
        """
        return every is not None and step % every == 0

    # Evaluation

    def evaluate(self, step: int, evaluator: Evaluator, **measured: float) -> dict[str, float]:
        """Evaluate after a step (0: before training); record its metrics, and what is `measured`, as `eval/NAME`.

        It changes nothing of the training, random numbers included. What a step was evaluated on, before a kill or in
        the loop, it is not again. With `eval.metric` the best model is kept in `model-best`, and with `eval.patience`
        the loop ends where none is better for so many evaluations.
        """
        if not evaluator.num_rollouts and not measured:
            return {}
        self._wait_for_engines()
        own = (*(f"eval/{name}/" for name in evaluator.num_rollouts), *(f"eval/{name}" for name in measured))
        metrics = {name: value for name, value in self._logged.get(step, {}).items() if name.startswith(own)}
        if is_new := not metrics:
            states = random_states()
            if self._view is not None:
                self._view.doing("evaluate")
            reports = evaluator.evaluate()
            restore_random_states(states)
            metrics = metrics_of_evaluation(reports) | {f"eval/{name}": value for name, value in measured.items()}
        if is_new:
            for name, report in reports.items():
                self.folder.log_evaluation(step, f"eval/{name}", report.rollouts)
            self.summary["after" if step else "before"] = {name: one.to_summary() for name, one in reports.items()}
            self.folder.write_summary(self.summary)
            self.folder.log_metrics(step, metrics)
            self._record(step, metrics)
            findings = self._health.judge(step, metrics)
            if self._view is not None:
                self._view.show_health(step, findings)
        if self._best is not None:  # after it is recorded: a kill in between saves it when the step is replayed
            is_measured = is_new or self._best.metric in metrics  # one that a resumed run asks for first was not
            is_best = is_measured and self._best.see(step, metrics) and step > 0
            if broadcast_from_rank0(is_best and step != self._best_saved):
                self._exports.save(self.folder.path / "model-best", step, self._tracked["model"], self.summary)
                self._best_saved = step
        return metrics

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note what the table has of a step now, as it has it."""
        recorded = {name: as_recorded(value) for name, value in only_finite(metrics).items()}
        self._logged.setdefault(step, {}).update(recorded)

    # The end

    def finish(self, evaluator: Evaluator | None = None, **measured: float) -> None:
        """Evaluate, save the model in Hugging Face format, draw the curve, and say what there is and how to go on.

        Raises:
            NothingLearned: when no step changed the weights.
        """
        if self._collected is not None:  # the loop was left in the midst of a step
            self._end()
            self.why_stopped = self.why_stopped or f"the loop was left at step {self._step}"
        self._wait_for_engines()
        if evaluator is not None:
            self.evaluate(self._step, evaluator, **measured)
        self._writes.wait()
        self._exports.finish(self._step, self._tracked["model"], self._metrics, self.summary)
        metrics = self.folder.read_metrics()
        plot_curve(metrics, self.folder.curve_path)
        if self.summary.get("after"):
            self.console.print(before_after_table(self.summary.get("before", {}), self.summary["after"]))
        if self._num_steps and all(row.get("is_skipped", 1.0) for row in metrics):
            why = f"no step changed the weights; {self.why_stopped}"
            self.console.print(f"[bold red]nothing was learned: {why}[/bold red]")
            raise NothingLearned(f"{self.folder.path}: {why}.")
        if self.cfg.dry_run:
            self.console.print("dry run: two steps done")
        else:
            changes: dict[str, object] = {"train.num_steps": self._num_steps + 20}
            if self._ended_by is not None:  # else it would end at once
                changes[self._ended_by] = None
            print_next_steps(self.console, self.folder, self._continued_by(self.cfg.run.path, changes))

    def __enter__(self) -> Run:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, self._interrupt)
            self._exit.callback(signal.signal, signal.SIGINT, previous)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._exit.close()
        if self._is_replay and self._collected is not None and (said := self.folder.fail_replay(self._step, error)):
            self._warn(said)
        self.folder.close()
        if self.cfg.dry_run:
            self._writes.wait()
            self._exports.wait()
            shutil.rmtree(self.folder.path)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._collected is None or self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True  # half an update would be neither the old weights nor the new ones
        self.console.print("interrupted: this step is finished first; Ctrl-C again ends it now")
