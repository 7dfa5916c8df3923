"""`RunRecorder`: records and shows a run, on rank 0."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from llmrl._utils.types import Row
from llmrl.collectors.groups import SIGNAL_PATIENCE
from llmrl.config.sections import ScriptConfig
from llmrl.data import Rollout
from llmrl.engines import Engine
from llmrl.runs.batch_source import SavedBatch, token_rows
from llmrl.runs.evaluation import BestEvaluation, Evaluator, metrics_of_evaluation
from llmrl.runs.report import Results, before_after_table, plot_curve
from llmrl.runs.run_folder import RunFolder, random_states, restore_random_states
from llmrl.watch.health import HealthJudge
from llmrl.watch.live_view import LiveView
from llmrl.watch.rollout_metrics import rollout_records
from llmrl.watch.step_metrics import Learned, StepMeter, is_logged, log_probs_before, metrics_of, only_finite
from llmrl.watch.tracking import as_recorded, spread

_NUM_SHOWN = 3
"""Number of answers shown if no rollout of a batch can be trained on."""


class RunRecorder:
    """Folder, metrics, health, best evaluation and live view of a run. No method calls a collective."""

    def __init__(self, cfg: ScriptConfig, console: Console) -> None:
        self._cfg = cfg
        self._console = console
        self.folder = RunFolder(cfg.run.path, resume=cfg.resume, trackers=cfg.run.trackers)
        self.summary: dict[str, Results] = self.folder.read_summary()
        """Evaluations `before` and `after` training, as in `summary.json`."""
        if self.summary.pop("ended", None) is not None:
            self.folder.write_summary(self.summary)  # the run continues
        self.metrics: dict[str, float] = {}
        """Metrics of the last logged step."""
        self.view = LiveView(0, console=Console(quiet=True))  # replaced when the loop begins
        self._logged = {int(row["step"]): row for row in self.folder.read_metrics()}
        self.folder.drop_rollouts(self._logged)
        self._health = HealthJudge(self.folder.health, self._logged, max_staleness=cfg.collect.max_staleness)
        self._best = None if cfg.eval.metric is None else BestEvaluation(cfg.eval.metric, patience=cfg.eval.patience)
        self._best_step: int | None = None  # step of the best model that this process saved last
        self._dropped_ids: set[str] = set()  # rollouts logged before the batch of the current step
        self._meter = StepMeter({})  # of the current step

    def recall(self, checkpoint: int) -> None:
        """Restore the recorded metrics and the best evaluation, without the steps that will be collected again."""
        num_logged = max((step for step in self._logged if is_logged(self._logged, step, "train")), default=0)
        last = self.folder.last_replayed(checkpoint, num_logged, self._cfg.run.checkpoint_every)
        for step in [step for step in self._logged if step > last]:
            del self._logged[step]
        if self._best is not None:
            self._best.recall(self._logged)

    def why_over(self, step: int, num_steps: int, target_reward: float | None) -> tuple[str, str | None]:
        """Return the reason to end after a step (empty if there is none), and the entry that ends training early."""
        reward = self._logged.get(step, {}).get("reward_mean", -math.inf)
        if target_reward is not None and reward >= target_reward:
            why = f"the mean reward reached train.target_reward={target_reward:g} at step {step}"
            return why, "train.target_reward"
        if self._best is not None and self._best.is_over and step:
            why = f"{self._best.metric} was best at step {self._best.step}, and eval.patience has run out"
            return why, "eval.patience"
        if step >= num_steps:
            return f"all {num_steps} steps are done", None
        return "", None

    # A step

    def begin_step(self, step: int, tracked: Mapping[str, Any], engine: Engine | None, *, is_replay: bool) -> None:
        """Start to measure a step."""
        if not is_replay:
            self._logged.pop(step, None)  # the step may have been logged with a batch that was set aside
        self.metrics = {}
        self._meter = StepMeter(tracked, engine)

    def end_step(self) -> None:
        """Forget the rollouts that were logged before the batch of the step."""
        self._dropped_ids = set()

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure a part of a step, and show the name of the part."""
        self.view.doing(name)
        with self._meter.part(name):
            yield

    def log_dropped(self, step: int, metrics: Mapping[str, float], played: Sequence[Rollout]) -> bool:
        """Record, judge and show rollouts that are not trained on; they are not logged again with the step's batch.

        Returns whether the task is learned, because all answers to many prompts in a row were right.
        """
        records = rollout_records(played)
        is_first = not self._dropped_ids and all(row.get("is_skipped", 1.0) for row in self._logged.values())
        rows = token_rows(played)  # from all calls in this step, because the tokens of a step are one file
        self._log_new_rollouts(step, records)
        if rows:
            self.folder.tokens.write(step, rows)
        self.folder.log_metrics(step, only_finite(metrics))
        self._dropped_ids.update(rollout.rollout_id for rollout in played)
        findings = self._health.judge(step, only_finite(metrics), records)
        is_learned = any(finding.name == "learned" for finding in findings)
        if is_first and not is_learned:
            self.view.show_dropped(step, findings, spread(records, _NUM_SHOWN))
        else:
            self.view.show_health(step, findings, records)
        num_prompts = len({rollout.group_id for rollout in played})
        return is_learned and num_prompts >= SIGNAL_PATIENCE and metrics.get("groups_all_right", 1.0) == 1

    def log_step(self, step: int, collected: SavedBatch, learned: Learned, metrics: Mapping[str, float]) -> None:
        """Record, judge and show a step. A step that was recorded before a kill is not recorded again."""
        logged = only_finite({**collected["metrics"], **metrics_of(learned), **metrics})
        self.metrics = logged | self._meter.metrics(logged)
        rollouts = collected["rollouts"]
        if not is_logged(self._logged, step, "train"):
            self._log_new_rollouts(step, rollouts)
            if collected["batch"].shape[0]:
                log_probs = log_probs_before(learned, collected["batch"])
                dropped = collected.get("dropped_rows", [])  # absent from batches of earlier versions
                self.folder.tokens.write(step, collected["batch"], log_probs, not_trained=dropped)
            self._log_metrics(step, self.metrics, spread(rollouts, self._cfg.run.traces))
        findings = self._health.judge(step, self.metrics, rollouts)
        is_sampled = step % self._cfg.run.sample_every == 0
        self.view.show_step(step, self.metrics, rollouts if is_sampled else ())
        self.view.show_health(step, findings, rollouts)

    def _log_new_rollouts(self, step: int, records: Sequence[Row]) -> None:
        new = [record for record in records if record["rollout_id"] not in self._dropped_ids]
        self.folder.log_rollouts(step, "train", new)

    def _log_metrics(self, step: int, metrics: Mapping[str, float], traces: Sequence[Row] = ()) -> None:
        """Record metrics, and keep them as `metrics.csv` rounds them."""
        self.folder.log_metrics(step, metrics, traces)
        recorded = {name: as_recorded(value) for name, value in only_finite(metrics).items()}
        self._logged.setdefault(step, {}).update(recorded)

    # Evaluation

    def evaluate(self, step: int, evaluator: Evaluator, measured: Mapping[str, float]) -> tuple[dict[str, float], bool]:
        """Return an evaluation's metrics, new or recorded, and whether the model is a new best and must be saved."""
        own = (*(f"eval/{name}/" for name in evaluator.num_rollouts), *(f"eval/{name}" for name in measured))
        metrics = {name: value for name, value in self._logged.get(step, {}).items() if name.startswith(own)}
        is_new = not metrics
        if is_new:
            states = random_states()
            self.view.doing("evaluate")
            if not step and evaluator.num_rollouts:
                num_answers = sum(evaluator.num_rollouts.values())
                self._console.print(f"before training: {num_answers} answers to held-out problems", highlight=False)
            reports = evaluator.evaluate()
            restore_random_states(states)
            metrics = metrics_of_evaluation(reports) | {f"eval/{name}": value for name, value in measured.items()}
            for name, report in reports.items():
                self.folder.log_evaluation(step, f"eval/{name}", report.rollouts)
            self.summary["after" if step else "before"] = {name: one.to_summary() for name, one in reports.items()}
            self.folder.write_summary(self.summary)
            self._log_metrics(step, metrics)
            self.view.show_health(step, self._health.judge(step, metrics))
        # This is also done for recorded evaluations, because a kill may have prevented saving the best model. A resumed
        # run may have a new `eval.metric`, which the recorded evaluations lack.
        if self._best is None or not (is_new or self._best.metric in metrics):
            return metrics, False
        is_best = self._best.see(step, metrics) and step > 0 and step != self._best_step
        if is_best:
            self._best_step = step
        return metrics, is_best

    # The end

    def report(self, num_steps: int) -> bool:
        """Draw the curve, print the results, and return whether a step changed the weights."""
        metrics = self.folder.read_metrics()
        plot_curve(metrics, self.folder.curve_path)
        if self.summary.get("after"):
            self._console.print(before_after_table(self.summary.get("before", {}), self.summary["after"]))
        return not num_steps or not all(row.get("is_skipped", 1.0) for row in metrics)

    def record_end(self, why: str) -> None:
        """Record in `summary.json` that the run has ended, and why."""
        self.folder.write_summary({**self.summary, "ended": why})
