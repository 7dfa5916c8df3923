"""`Run`: the bookkeeping of a training loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from rich.console import Console
from tensordict import TensorDictBase

from llmrl._utils.failure import NothingLearned, describe
from llmrl._utils.model_parts import has_quantized_base
from llmrl._utils.spans import trace_spans
from llmrl._utils.terminal import printable
from llmrl._utils.types import StateDict, Tokenizer
from llmrl.collectors import CollectionStalled, NoSignal
from llmrl.config.ranks import broadcast_from_rank0, join_ranks
from llmrl.config.resumed import resumed_config, save_config
from llmrl.config.sections import ScriptConfig
from llmrl.data import Rollout
from llmrl.engines import Engine
from llmrl.runs.batch_source import BatchMaker, BatchSource, SavedBatch, played_by, restore
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.exports import Exports, open_repository
from llmrl.runs.machine import machine_of
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.recorder import RunRecorder
from llmrl.runs.report import ContinuedBy, RunResults, print_next_steps, resume_command
from llmrl.runs.run_folder import BackgroundWrites, RunFolder, random_states, restore_random_states, seed_all
from llmrl.runs.tracked import Stateful, check_free_space, restore_tracked, save_split, split_tracked, with_scaler
from llmrl.trainer.trained_model import trained_model
from llmrl.watch.live_view import LiveView
from llmrl.watch.step_metrics import Learned
from llmrl.weight_sync.in_process import LoadsWeights

Entered = TypeVar("Entered")
_INTERRUPTED = "interrupted; what was learned so far is kept"


class _TaskLearnedError(Exception):
    """Every answer is right, so no further batch would have anything to learn from."""


class Run:
    """Folder, resumption, live view, trackers, checkpoints and report of a training loop. A context manager.

    The caller writes the loop:

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

    The same loop resumes a killed run: `track` restores the last checkpoint, and `steps` first yields the batches saved
    since then. If engine and loop are deterministic, the weights are bitwise those of an uninterrupted run.

    With several ranks, each rank runs the same loop. Rank 0 has the engines, the collector and the
    folder, and sends its batches and random states to the others. Code under
    `if self._recorder is not None` runs on rank 0 only and must not call a collective.

    The first Ctrl-C ends the loop after the current step, or at once while it waits for a batch;
    the code after the loop still runs. The second one raises KeyboardInterrupt.

    Args:
        cfg: configuration, saved as `config.yaml`.
        continued_by: callable that returns how to continue the run, from its path and the entries
            to change; a shell command by default.

    Raises:
        FileExistsError: if the folder holds a run and `cfg.resume` is false.
        FileNotFoundError: if `cfg.resume` is true and the folder holds no run.
        FolderInUseError: if another process uses the folder.
        ValueError: if the run to resume has another configuration (`resumed_config`), or a damaged file.
        OSError: if the hub cannot be reached, or does not allow pushes to `export.push_to_hub`.
    """

    def __init__(
        self, cfg: ScriptConfig, *, console: Console | None = None, continued_by: ContinuedBy = resume_command
    ) -> None:
        from transformers.utils.logging import disable_progress_bar

        is_rank0 = join_ranks(cfg) == 0
        self.cfg = cfg
        self.console = console or Console()
        if not is_rank0:  # rank 0 reports the same warnings
            self.console = Console(quiet=True)
            warnings.simplefilter("ignore")
            logging.getLogger("llmrl").setLevel(logging.ERROR)
        self.why_stopped = ""
        """Reason why the loop ended; empty until then."""
        self._continued_by = continued_by
        self._warn = functools.partial(self.console.print, style="bold red", highlight=False, markup=False)
        self._recorder = self._open_recorder() if is_rank0 else None
        self._exports = Exports(cfg, self._warn)
        self._exit = contextlib.ExitStack()
        self._writes = BackgroundWrites()
        self._tracked: dict[str, Any] = {}
        self._collector: BatchMaker | None = None
        self._engine: Engine | None = None
        self._lent: Engine | None = None
        self._ended_by: str | None = None  # configuration entry that ended the loop early
        self._num_steps = 0
        self._step = 0  # the last step that began
        self._is_in_step = self._is_replay = False
        self._collected: SavedBatch | None = None  # batch of the current step, on rank 0
        self._is_ahead = self._is_interrupted = False
        self._update: Future[int] | None = None  # the pending weight update
        seed_all(cfg.seed)
        disable_progress_bar()  # the live view owns the terminal

    def _open_recorder(self) -> RunRecorder:
        cfg = self.cfg
        if cfg.run.spans:
            trace_spans()
        if cfg.export.push_to_hub is not None:  # before training, because the hub may refuse
            open_repository(cfg.export.push_to_hub)
        if cfg.resume:
            for name, (old, new) in resumed_config(cfg)[1].items():
                self.console.print(f"resumed with {name}={new} in place of {old}", highlight=False, markup=False)
        return RunRecorder(cfg, self.console)

    # The parts of the loop

    def enter(self, part: contextlib.AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager, and exit it at the end of the run, in reverse order."""
        return self._exit.enter_context(part)

    def lend(self, engine: Engine) -> Engine:
        """Register an engine of the caller, which the run does not close; `track` sends the model's weights to it."""
        self._lent = engine
        return engine

    def track(self, collector: BatchMaker, engine: Engine, *, tokenizer: Tokenizer, **objects: Stateful) -> None:
        """Register what a checkpoint contains. Restore it if the run is resumed.

        A resumed run, or one with a lent engine or a quantized model, then sends the model's weights to the engine.

        Args:
            collector: an `LLMCollector` or `Demonstrations`; its position in the data is saved with every batch.
            engine: engine that receives the weights; a resumed run continues its version numbers.
            tokenizer: saved with the run and with its model.
            objects: `model`, and everything else in the loop with a `state_dict`: optimizer, schedule, buffer.

        Raises ValueError if the checkpoint lacks one of the objects, and OSError if the disk has no
        room for the checkpoints.
        """
        self._collector = collector
        self._engine = engine
        self._tracked = with_scaler(objects)
        if self._recorder is not None:
            self._recorder.folder.save_tokenizer(tokenizer)
        checkpoint = self._load_checkpoint() if self.cfg.resume else None
        if checkpoint is not None:
            restore_tracked(self._tracked, checkpoint, Path(self.cfg.run.path, "checkpoint.safetensors"))
            self._step = checkpoint["step"]
        if self._recorder is not None:
            every = self.cfg.run.checkpoint_every
            coming = self.cfg.train.num_steps // every - self._step // every
            check_free_space(self._tracked, self._recorder.folder.checkpoint_path, num_checkpoints=coming)
        if checkpoint is not None and self._recorder is not None:
            restore(collector, checkpoint)
        model = self._tracked["model"]
        # The first step, too, must use the rotary frequencies of the engine, which depend on its length.
        length = None if isinstance(engine, LoadsWeights | NullEngine) else engine.max_model_len
        length = trained_model(model).engine_length = broadcast_from_rank0(length)
        if checkpoint is not None or engine is self._lent or has_quantized_base(model):
            engine.policy_version = self._step - 1  # the update below adds one
            collector.update_policy_weights_(model)
        if self._recorder is not None:  # a failed resumption keeps the old configuration
            save_config(self.cfg, self._recorder.folder.path)
            machine = machine_of(self.cfg.train.device)
            self._recorder.folder.machines.write(self._step + 1, {**machine, "engine_length": length})

    def _load_checkpoint(self) -> StateDict | None:
        """Return the last checkpoint, or None; each rank reads it from the folder."""
        folder = self._recorder.folder if self._recorder is not None else RunFolder(self.cfg.run.path, read_only=True)
        is_saved = broadcast_from_rank0(folder.checkpoint_path.exists())
        checkpoint = folder.load_checkpoint() if is_saved else None
        if is_saved and checkpoint is None:
            raise FileNotFoundError(
                f"{folder.checkpoint_path} is not on this host. All ranks must see the same run folder: "
                "set run.path to a shared file system."
            )
        if self._recorder is not None:
            self._recorder.recall(0 if checkpoint is None else checkpoint["step"])
        return checkpoint

    # The loop

    def steps(
        self,
        num_steps: int,
        *,
        target_reward: float | None = None,
        in_background: bool = False,
        needs_batch: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield the steps, from 1, each with its batch, which is saved first.

        A resumed run begins with the saved batches since the checkpoint. `why_stopped` explains an early end.

        Args:
            target_reward: end after a step with at least this mean reward.
            in_background: draw batches in the background; if none is ready, a step has an empty batch.
            needs_batch: callable that returns whether a step must wait for a batch; used only with `in_background`.

        Raises RuntimeError if `track` was not called.
        """
        if self._collector is None:
            raise RuntimeError("run.steps needs run.track(collector, engine, model=..., ...) before it.")
        self._is_ahead = in_background or self.cfg.collect.max_staleness is not None
        self._num_steps = num_steps
        started = time.perf_counter()
        drawn = self._draw(self._collector, target_reward, in_background, needs_batch)
        with contextlib.closing(drawn):
            while (begun := self._begin(next(drawn, None))) is not None:
                yield begun
                self._end()
        self._wait_for_engines()
        self.console.print(f"trained for {time.perf_counter() - started:.0f} s; {self.why_stopped}", highlight=False)

    def _draw(
        self, collector: BatchMaker, target_reward: float | None, in_background: bool, needs_batch: Callable[[], bool]
    ) -> Generator[SavedBatch, None, None]:
        """Yield the batch of each step, saved batches first; yield nothing on ranks above 0."""
        if self._recorder is None:
            return
        recorder = self._recorder
        folder = recorder.folder
        waiting, training = ("wait for a batch", "train, and generate") if self._is_ahead else ("generate", "train")
        first_step = self._step
        collected: SavedBatch | None = None
        with LiveView(self._num_steps, first_step=first_step, console=self.console) as recorder.view:
            self._is_replay = True
            for saved in folder.saved_batches(self._step + 1, self._warn):
                recorder.view.doing("train again on saved batches")
                collected = cast(SavedBatch, saved)
                restore(collector, collected)
                yield collected
                if self.why_stopped:  # interrupted
                    return
            self._is_replay = False
            if (aside := folder.load_set_aside(self._step + 1)) is not None:
                collected = cast(SavedBatch, aside)
                restore(collector, collected)  # continue with the data after the batch that was set aside
            if self.cfg.resume:
                self.console.print(f"resumed after step {self._step}, {self._step - first_step} of them replayed")
            source = BatchSource(
                collector,
                in_background=in_background,
                needs_batch=needs_batch,
                last=collected,
                on_dropped=lambda metrics, played: self._log_dropped(recorder, metrics, played),
            )
            with contextlib.closing(source):
                while not self._is_over(recorder, target_reward):
                    recorder.view.doing(waiting)
                    if (collected := self._take(source, recorder)) is None:
                        break
                    folder.save_batch(self._step + 1, collected)
                    recorder.view.doing(training)
                    yield collected

    def _log_dropped(self, recorder: RunRecorder, metrics: dict[str, float], played: Sequence[Rollout]) -> None:
        if recorder.log_dropped(self._step + 1, metrics, played):
            raise _TaskLearnedError

    def _is_over(self, recorder: RunRecorder, target_reward: float | None) -> bool:
        if not self.why_stopped:
            self.why_stopped, self._ended_by = recorder.why_over(self._step, self._num_steps, target_reward)
        return bool(self.why_stopped)

    def _take(self, source: BatchSource, recorder: RunRecorder) -> SavedBatch | None:
        step = self._step + 1
        try:
            collected = source.take()
        except _TaskLearnedError:
            self.why_stopped = f"the task is learned: at step {step} every answer is right"
            return None
        except CollectionStalled as error:
            recorder.log_dropped(step, *played_by(source.collector))
            if not isinstance(error, NoSignal):
                raise
            self.console.print(f"step {step} has nothing to learn from: {printable(str(error))}", style="bold red")
            self.why_stopped = f"nothing was left to learn from at step {step}"
            return None
        except KeyboardInterrupt:
            self.why_stopped = _INTERRUPTED
            return None
        if collected is None:
            self.why_stopped = f"the data ended before step {step}"
        return collected

    def _begin(self, collected: SavedBatch | None) -> tuple[int, TensorDictBase] | None:
        """Return the next step and its batch from rank 0, or None at the end of the loop."""
        self._writes.wait()  # the next update must not change weights that are still being written
        given = None if collected is None else (self._step + 1, collected["batch"], random_states())
        self._is_in_step = given is not None
        given = broadcast_from_rank0(given)
        if given is None:
            return None
        self._step, batch, states = given
        self._is_in_step = True
        self._collected = collected
        if self._recorder is not None:
            self._recorder.begin_step(self._step, self._tracked, self._engine, is_replay=self._is_replay)
        else:
            restore_random_states(states)
        return self._step, batch

    def _end(self) -> None:
        """Save a checkpoint and export the model, if they are due after this step."""
        collected = self._collected
        self._is_in_step = False
        self._collected = None
        if self.is_due(self._step, self.cfg.run.checkpoint_every):
            state, shards = split_tracked(self._tracked, Path(self.cfg.run.path), self._step)
            save = None
            if self._recorder is not None:
                assert collected is not None, "rank 0 collects"
                state |= {"step": self._step, "collector": collected["collector"], "random": random_states()}
                save = functools.partial(self._recorder.folder.save_checkpoint, keep_batches=self.cfg.run.keep_batches)
            self._writes.start(save_split, state, shards, save)
        if self.is_due(self._step, self.cfg.export.every):
            self._exports.start(self._step, self._tracked["model"], *self._results())
        if self._recorder is not None:
            self._recorder.end_step()
        if self._is_interrupted:
            self.why_stopped = _INTERRUPTED

    def timer(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure a part of a step as the metric `NAME_seconds`; the rest of the step is `train_seconds`."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.timer(name)

    def follow(self, update: Future[int]) -> int:
        """Register a weight update begun by `collector.start_update`, and return the coming version.

        If batches are collected ahead, the engines load the weights while the next step trains; otherwise this waits.
        Evaluations, the next update and `finish` always wait. The next call that waits raises errors of the update.
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
        """Record a step, and return its metrics (empty on ranks above 0); a replayed step is not logged again.

        `learned` is the report of `train_step`, several reports, or metrics; `version` is the
        version of the weights after the update.
        Raises ValueError if `step` is not the current step.
        """
        if not self._is_in_step or step != self._step:
            raise ValueError(f"step {step} is not the current step; run.steps is at {self._step}. Log within the loop.")
        if self._recorder is None or self._collected is None:
            return {}
        self._recorder.log_step(step, self._collected, learned, {**metrics, "policy_version": float(version)})
        return self._recorder.metrics

    @staticmethod
    def is_due(step: int, every: int | None) -> bool:
        """Return whether a periodic action is due after this step; None means never."""
        return every is not None and step % every == 0

    # Evaluation

    def evaluate(self, step: int, evaluator: Evaluator, **measured: float) -> dict[str, float]:
        """Evaluate after a step (0: before training), and return the metrics and `measured` as `eval/NAME`.

        The random states of the training are not changed. A recorded evaluation is not repeated.
        With `eval.metric`, the best model is saved in `model-best`; with `eval.patience`, the loop
        ends after that number of evaluations without improvement.
        """
        if not evaluator.num_rollouts and not measured:
            return {}
        self._wait_for_engines()
        metrics: dict[str, float] = {}
        is_best = False
        if self._recorder is not None:
            metrics, is_best = self._recorder.evaluate(step, evaluator, measured)
        if broadcast_from_rank0(is_best):
            best = Path(self.cfg.run.path, "model-best")
            self._exports.save(best, step, self._tracked["model"], *self._results())
        return metrics

    def _results(self) -> tuple[Mapping[str, float], RunResults]:
        """Return the contents of a model card: the last step's metrics, and the evaluations."""
        return ({}, {}) if self._recorder is None else (self._recorder.metrics, self._recorder.summary)

    # The end

    def finish(self, evaluator: Evaluator | None = None, **measured: float) -> None:
        """Evaluate, save the model in Hugging Face format, draw the curve, and print the report.

        Raises NothingLearned if no step changed the weights.
        """
        if self._is_in_step:  # the caller left the loop within a step
            self._end()
            self.why_stopped = self.why_stopped or f"the loop was left at step {self._step}"
        self._wait_for_engines()
        if evaluator is not None:
            self.evaluate(self._step, evaluator, **measured)
        self._writes.wait()
        self._exports.finish(self._step, self._tracked["model"], *self._results())
        if self._recorder is not None:
            self._report(self._recorder)

    def _report(self, recorder: RunRecorder) -> None:
        if not recorder.report(self._num_steps):
            why = f"no step changed the weights; {self.why_stopped}"
            self.console.print(f"[bold red]nothing was learned: {why}[/bold red]")
            raise NothingLearned(f"{recorder.folder.path}: {why}.")
        if self.why_stopped != _INTERRUPTED:
            recorder.record_end(self.why_stopped)
        if self.cfg.dry_run:
            self.console.print("dry run: two steps done")
            return
        changes: dict[str, object] = {"train.num_steps": self._num_steps + 20}
        if self._ended_by is not None:  # otherwise a resumed run would end at once
            changes[self._ended_by] = None
        print_next_steps(self.console, recorder.folder, self._continued_by(self.cfg.run.path, changes), self.cfg.env)

    def __enter__(self) -> Run:
        words = f"{self.cfg.run.path}: engine and trainer load {self.cfg.model.path}"
        self.console.print(words, highlight=False, markup=False, soft_wrap=True)
        if self._recorder is not None and threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, self._interrupt)
            self._exit.callback(signal.signal, signal.SIGINT, previous)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._exit.close()
        finally:
            if self._recorder is not None:
                self._close_folder(self._recorder.folder, error)

    def _close_folder(self, folder: RunFolder, error: BaseException | None) -> None:
        """Close the folder when nothing is written into it any more: another run may then begin in it."""
        with contextlib.closing(folder):
            try:
                try:
                    self._writes.wait()
                finally:
                    self._exports.wait()
            except Exception as failed:
                if error is None:
                    raise
                self._warn(f"not everything was written: {describe(failed)}")
            if self._is_replay and self._is_in_step and (said := folder.fail_replay(self._step, error)):
                self._warn(said)
        if self.cfg.dry_run:
            shutil.rmtree(folder.path)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._is_in_step or self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True  # ending now could leave a mixture of old and new weights
        self.console.print("interrupted: this step is finished first; press Ctrl-C again to stop now")
