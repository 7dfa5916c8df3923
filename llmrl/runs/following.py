"""`open_run`: the run of a training loop on whichever rank of a trainer this is."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from tensordict import TensorDictBase

from llmrl._utils.spans import trace_spans
from llmrl._utils.types import Tokenizer
from llmrl.config.ranks import broadcast_from_rank0, join_ranks
from llmrl.config.sections import ScriptConfig
from llmrl.engines import Completion, Engine, EngineError, SamplingConfig
from llmrl.runs.batch_source import BatchMaker
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.exports import take_part
from llmrl.runs.report import ContinuedBy, resume_command
from llmrl.runs.run import Run
from llmrl.runs.run_folder import RunFolder, restore_random_states, seed_all
from llmrl.runs.tracked import Stateful, restore_tracked, save_tracked
from llmrl.watch.step_metrics import Learned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Entered = TypeVar("Entered")


def open_run(
    cfg: ScriptConfig, *, console: Console | None = None, continued_by: ContinuedBy = resume_command
) -> Run | WorkerRun:
    """Return a `Run`; in a trainer of several ranks, on all but the first, what follows it.

    Every rank goes through the same loop. The first has engines, collector and folder; the others are handed its
    batches, and take part in what all do to the model: training on them, sending and saving it.

    Args:
        cfg, console, continued_by: see `Run`.
    """
    if join_ranks(cfg):
        return WorkerRun(cfg)
    if cfg.run.spans:
        trace_spans()
    return Run(cfg, console=console, continued_by=continued_by)


class WorkerRun:
    """A training loop's run on the ranks above 0: it does what concerns all ranks, when the first one does it.

    Args:
        cfg: configuration of the script; `run.path` is the first rank's.
    """

    def __init__(self, cfg: ScriptConfig) -> None:
        # What they would say the first rank says.
        warnings.simplefilter("ignore")
        logging.getLogger("llmrl").setLevel(logging.ERROR)
        self.cfg = cfg
        self._exit = contextlib.ExitStack()
        self._tracked: dict[str, Any] = {}
        self._lent: Engine | None = None
        self._step = 0
        self._is_in_step = False
        seed_all(cfg.seed)

    def enter(self, part: contextlib.AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager that is left at the end of the run."""
        return self._exit.enter_context(part)

    def lend(self, engine: Engine) -> Engine:
        """Take an engine of the caller's: `track` takes part in giving it the weights."""
        self._lent = engine
        return engine

    def track(self, collector: BatchMaker, engine: Engine, *, tokenizer: Tokenizer, **objects: Stateful) -> None:
        """Name what a checkpoint holds; of a resumed run, restore it, and take part in sending the weights."""
        self._tracked = dict(objects)
        checkpoint = None
        if self.cfg.resume:
            folder = RunFolder(self.cfg.run.path, read_only=True)
            checkpoint = folder.load_checkpoint()
        if checkpoint is not None:
            restore_tracked(self._tracked, checkpoint, folder.checkpoint_path)
            self._step = checkpoint["step"]
        if checkpoint is not None or engine is self._lent:  # as the first rank does: all gather sharded weights
            collector.update_policy_weights_(self._tracked["model"])

    def steps(
        self,
        num_steps: int,
        *,
        target_reward: float | None = None,
        in_background: bool = False,
        needs_batch: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[int, TensorDictBase]]:
        """Return the steps that the first rank makes, with its batches and its random numbers."""
        while (given := broadcast_from_rank0(None)) is not None:
            self._step, batch, states = given
            restore_random_states(states)
            self._is_in_step = True
            yield self._step, batch
            self._end()

    def _end(self) -> None:
        self._is_in_step = False
        if self._step % self.cfg.run.checkpoint_every == 0:
            save_tracked(self._tracked, Path(self.cfg.run.path), self._step)
        if self.is_due(self._step, self.cfg.export.every):
            take_part(self._tracked["model"])

    def timer(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure nothing here."""
        return contextlib.nullcontext()

    def follow(self, update: Future[int]) -> int:
        """Wait for an update of the weights."""
        return update.result()

    def log(self, step: int, learned: Learned, *, version: int, **metrics: float) -> dict[str, float]:
        """Record nothing here."""
        return {}

    is_due = staticmethod(Run.is_due)

    def evaluate(self, step: int, evaluator: Evaluator, **measured: float) -> dict[str, float]:
        """Take part in saving the best model, where the first rank finds that it is one."""
        if (evaluator.num_rollouts or measured) and self.cfg.eval.metric is not None and broadcast_from_rank0(False):
            take_part(self._tracked["model"])
        return {}

    def finish(self, evaluator: Evaluator | None = None, **measured: float) -> None:
        """Take part in saving the model."""
        if self._is_in_step:  # the loop was left in the midst of a step
            self._end()
        if evaluator is not None:
            self.evaluate(self._step, evaluator, **measured)
        take_part(self._tracked["model"])

    def __enter__(self) -> WorkerRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()


class NullEngine:
    """Stands for the engine on a rank that has none: it knows the tokenizer.

    Args:
        model: name or folder of the model.
    """

    vocab_size: int | None = None
    max_model_len: int = sys.maxsize
    is_alive: bool = False
    policy_version: int = 0

    def __init__(self, model: str) -> None:
        self._model = model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Refuse: the engine is not here.

        Raises:
            EngineError: always.
        """
        raise EngineError("only the first rank of a trainer has engines.")

    async def abort(self, request_id: str) -> None:
        """Do nothing: nothing runs here."""

    def shutdown(self) -> None:
        """Do nothing: nothing is held here."""
