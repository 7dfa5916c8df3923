"""`replay_steps`: computes recorded steps again and compares every quantity."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

import torch

from llmrl._utils.numbers import is_same
from llmrl._utils.types import StateDict, Tokenizer
from llmrl.data.message import prompt_of
from llmrl.data.template_limit import written_in_time
from llmrl.objectives.advantages.normalization import Normalization
from llmrl.replay.loop import ComputedStep, OnStep, ReplayLoop, compute_on_ranks, pass_over, whole
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rewards import advantages_of, own_rubric, rubric_of, score_again
from llmrl.rewards import Rubric
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.tracked import Stateful, states_of
from llmrl.viewer.run_data import Record, recorded_tokenizer
from llmrl.watch.tracking import as_recorded, is_performance

Quantity = Literal["prompts", "rewards", "advantages", "log_probs", "metrics", "weights"]
"""Compared quantities in order of computation; the last three need the model."""
ROUNDING = 1e-3
"""Largest difference, relative above 1, that kernels, threads or machines explain."""
_MEANINGS: dict[Quantity, str] = {
    "prompts": "the model's chat template or tokenizer has another version than in the run",
    "rewards": "the reward function, its data or a library has changed, or the function is random or has state",
    "advantages": "another normalization or sign, or rollouts left out of the baseline",
    "log_probs": "another model before the step, or another computation: weights, template, dtype, kernel",
    "metrics": "the loss or its options have changed",
    "weights": "the optimizer, its state, the learning rate or the clipping of gradients has changed",
}
# Metrics that need the engine's weights at the time of sampling, which a replay does not have.
_OF_THE_ENGINE = ("on_policy",)


@dataclass(slots=True)
class Compared:
    """Comparison of a computed quantity of a step with the record."""

    quantity: Quantity
    num_values: int = 0
    """Number of compared numbers; 0 if there was nothing to compare."""
    max_difference: float = 0.0
    """Largest absolute difference; infinite if a number exists on one side only."""
    is_beyond_rounding: bool = False
    where: str = ""
    """Place of the first difference beyond rounding, else of the first difference."""
    recorded: float = math.nan
    """Recorded number at `where`."""
    computed: float = math.nan
    """Computed number at `where`."""
    note: str = ""
    """Reason why there was nothing to compare."""

    @property
    def is_equal(self) -> bool:
        """Whether all numbers are bitwise equal."""
        return not self.where

    @property
    def meaning(self) -> str:
        """Usual cause of a difference of this quantity."""
        return _MEANINGS[self.quantity]

    def add(self, where: str, recorded: float, computed: float) -> None:
        """Compare one number."""
        self.num_values += 1
        if is_same(recorded, computed):
            return
        difference = abs(recorded - computed)
        if math.isnan(difference):
            difference = math.inf
        self.max_difference = max(self.max_difference, difference)
        is_beyond = difference > ROUNDING * max(1.0, abs(recorded))
        if not self.where or (is_beyond and not self.is_beyond_rounding):
            self.where, self.recorded, self.computed = where, recorded, computed
        self.is_beyond_rounding = self.is_beyond_rounding or is_beyond


@dataclass(slots=True)
class ReplayedStep:
    """A step that was computed again."""

    step: int
    compared: list[Compared] = field(default_factory=list)
    changed_here: dict[str, tuple[object, object]] = field(default_factory=dict)
    """Facts that differ on this machine, such as `threads` or `train.num_ranks`, with recorded and own values; numbers
    may then differ by rounding. Empty if no model was needed."""

    @property
    def first_difference(self) -> Compared | None:
        """The first quantity that differs beyond rounding, else the first that is not equal."""
        differing = (one for one in self.compared if not one.is_equal)
        return max(differing, key=lambda one: one.is_beyond_rounding, default=None)  # of equal ones, the first


def replay_steps(
    run: RecordedRun,
    steps: Sequence[int],
    *,
    quantities: Sequence[Quantity] = get_args(Quantity),
    reward: str | None = None,
    on_step: OnStep = pass_over,
) -> list[ReplayedStep]:
    """Compute recorded steps again, and compare each with the record.

    Each quantity is computed from recorded inputs, so the first quantity that differs is the cause of later
    differences. Prompts are computed from messages, by the saved tokenizer and by the model's; rewards from answers;
    advantages from recorded rewards; all others from the recorded batches, in one pass over the steps.

    Args:
        steps: consecutive steps.
        quantities: quantities to compare; without log-probs, metrics and weights, no model is loaded.
        reward: `FILE.py:FUNCTION` of the reward, for runs in an environment of your own.
        on_step: callback that receives each step that the model is trained on.

    Raises:
        ValueError: if `steps` is empty, a step was not logged, a batch was not kept, or a quantity is unknown.
        FileNotFoundError, DamagedFileError: before any computation, if a step's rollouts or tokens are missing.
    """
    if unknown := sorted(set(quantities) - set(get_args(Quantity))):
        raise ValueError(f"quantities must be among {', '.join(get_args(Quantity))}, got {', '.join(unknown)}.")
    if not steps:
        raise ValueError("there is no step to compute: last_step must be at least the first step.")
    for step in steps:
        run.check_step(step)
    replayed = {step: ReplayedStep(step) for step in steps}
    found: list[Iterator[Compared]] = []
    if "prompts" in quantities:
        found.append(_compare_prompts(run, steps))
    if "rewards" in quantities:
        found.append(_compare_rewards(run, steps, reward))
    if "advantages" in quantities:
        found.append(_compare_advantages(run, step) for step in steps)
    for of_steps in found:
        for one, compared in zip(replayed.values(), of_steps, strict=True):
            one.compared.append(compared)
    of_model = [name for name in ("log_probs", "metrics", "weights") if name in quantities]
    if of_model:
        arguments = (run.path, list(steps), of_model)
        num_ranks = run.config().train.num_ranks
        for by_model in compute_on_ranks(num_ranks, _compare_by_model, *arguments, on_step=on_step):
            replayed[by_model.step].compared += by_model.compared
            replayed[by_model.step].changed_here = by_model.changed_here
    return list(replayed.values())


def _compare_by_model(
    path: Path, steps: Sequence[int], quantities: Sequence[Quantity], on_step: OnStep
) -> list[ReplayedStep]:
    """Return the comparisons that need the model, and the facts that differ on this machine."""
    run = RecordedRun(path)
    checkpoints = {step: run.checkpoint_of(step) for step in steps if "weights" in quantities}
    changed_here = run.changes_here()  # on the rank, which has fewer threads than the process that starts it
    replayed: list[ReplayedStep] = []

    def compare(computed: ComputedStep, tracked: Mapping[str, Stateful]) -> None:
        """Compare a step while the model has the weights after the step."""
        found: dict[str, Compared] = {
            "log_probs": _compare_log_probs(run, computed),
            "metrics": _compare_metrics(run, computed),
        }
        if "weights" in quantities:
            found["weights"] = _compare_weights(run, checkpoints[computed.step], tracked["model"])
        changes = changed_here | run.machine_changes(computed.step)
        replayed.append(ReplayedStep(computed.step, [found[name] for name in quantities], changes))

    ReplayLoop(run, run.config(), steps, start=run.start_of(steps[0]), on_step=on_step, after_step=compare).play()
    return replayed


def _compare_prompts(run: RecordedRun, steps: Sequence[int]) -> Iterator[Compared]:
    recorded = recorded_tokenizer(run.folder)
    model = run.config().model
    note = "the run saved no tokenizer"
    tokenizers = []
    if recorded is not None:
        try:
            tokenizers = [recorded, model.tokenizer_of(NullEngine(model.folder))]
        except (OSError, ValueError) as error:
            note = f"the tokenizer of {model.path} cannot be loaded: {error}"
    for step in steps:
        yield _compare_prompts_of(run, step, tokenizers) if tokenizers else Compared("prompts", note=note)


def _compare_prompts_of(run: RecordedRun, step: int, tokenizers: Sequence[Tokenizer]) -> Compared:
    compared = Compared("prompts")
    known: dict[str, list[list[int]]] = {}  # the prompts of a group are mostly equal
    for record in run.records(step):
        prompt = [dict(one) for one in prompt_of(record["messages"])]
        if (text := json.dumps(prompt)) not in known:
            try:
                known[text] = [_prompt_ids(tokenizer, prompt) for tokenizer in tokenizers]
            except Exception as error:  # a template may raise any error
                note = f"a template fails on the messages of rollout {record['rollout_id']}: {error}"
                return Compared("prompts", note=note)
        for place, (ours, theirs) in enumerate(zip_longest(*known[text], fillvalue=math.nan)):
            compared.add(f"token {place} of the prompt of rollout {record['rollout_id']}", ours, theirs)
    return compared


def _prompt_ids(tokenizer: Tokenizer, prompt: list[dict[str, object]]) -> list[int]:
    """Return the token ids of a prompt, without tools, because tools are not recorded."""
    text = written_in_time(lambda: tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
    return list(tokenizer.encode(text, add_special_tokens=False))


def _compare_rewards(run: RecordedRun, steps: Sequence[int], reward: str | None) -> Iterator[Compared]:
    note = "the environment is not a task of llmrl: name its reward with --reward FILE.py:FUNCTION"
    rubric: Rubric | None = None
    if reward is not None:
        rubric = own_rubric(reward)
    else:
        try:
            rubric = rubric_of(run)
        except (OSError, ImportError, ValueError) as error:  # its data or a package is not on this machine
            note = f"the environment cannot be built here ({error}): name its reward with --reward FILE.py:FUNCTION"
    for step in steps:
        if rubric is None:
            yield Compared("rewards", note=note)
        else:
            yield _compare_rewards_of(run.records(step), rubric, is_own=reward is not None)


def _compare_rewards_of(records: Sequence[Record], rubric: Rubric, *, is_own: bool) -> Compared:
    compared = Compared("rewards")
    first = score_again(rubric, records)
    has_parts = any(record.get("reward_breakdown") for record in records)
    for record, score in zip(records, first, strict=True):
        recorded, computed = record.get("reward_breakdown") or {}, score.breakdown
        if score.is_scored and record.get("is_scored", True):
            if is_own and has_parts and not recorded:
                continue  # its status, not the function, determines the reward
            if not recorded or (is_own and not computed.keys() <= recorded.keys()):
                # The status determines the reward, or the function has another name than in the run.
                recorded, computed = {"reward": record["reward"]}, {"reward": score.reward}
            for name in computed if is_own else {**recorded, **computed}:
                # Rewards of an environment's step pass through a float32 tensor; rewards of a judge do not.
                value, expected = computed.get(name, math.nan), recorded.get(name, math.nan)
                if expected == _float32(value):
                    value = expected
                compared.add(f"{name} of rollout {record['rollout_id']}", expected, value)
        if score.is_scored != record.get("is_scored", True):
            where = f"is_scored of rollout {record['rollout_id']} ({score.error or record.get('error', '')})"
            compared.add(where, float(record.get("is_scored", True)), float(score.is_scored))
    if not compared.is_equal and score_again(rubric, records) != first:
        compared.where += ", and the function returns another value each time"
    return compared


def _compare_advantages(run: RecordedRun, step: int) -> Compared:
    compared = Compared("advantages")
    by_role = run.entries.get("algorithm") == "grpo"  # distillation compares a group's roles together
    computed = advantages_of(run.records(step), normalization_of(run), by_role=by_role)
    rows = [row for row in run.rows(step) if not math.isnan(row.advantage)]
    if not rows:
        compared.note = "the tokens of the step were not stored"
    for row in rows:
        value = computed.get(row.rollout_id, math.nan)
        compared.add(f"rollout {row.rollout_id}", row.advantage, _float32(value))
    return compared


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def normalization_of(run: RecordedRun) -> Normalization:
    """Return the normalisation of a run's advantages."""
    if run.entries.get("algorithm") != "grpo":
        return "std"
    return run.config().normalization


def _compare_log_probs(run: RecordedRun, computed: ComputedStep) -> Compared:
    compared = Compared("log_probs")
    rows = run.rows(computed.step)
    if computed.log_probs is None or not rows:
        compared.note = "the trainer's log-probs were not stored: the step made several updates or none"
        return compared
    for index, values in enumerate(computed.log_probs):
        row = rows[index]
        for place, (recorded, value) in enumerate(zip(row.trainer_log_probs, values.tolist(), strict=True)):
            if not (math.isnan(recorded) and math.isnan(value)):
                compared.add(f"row {index} ({row.rollout_id}), token {place}", recorded, value)
    return compared


def _compare_metrics(run: RecordedRun, computed: ComputedStep) -> Compared:
    compared = Compared("metrics")
    recorded = run.metrics(computed.step)
    for name, value in computed.metrics.items():
        if name in recorded and not name.startswith(_OF_THE_ENGINE) and not is_performance(name):
            compared.add(name, recorded[name], as_recorded(value))
    return compared


def _compare_weights(run: RecordedRun, checkpoint: StateDict | None, model: Stateful) -> Compared:
    compared = Compared("weights")
    if checkpoint is None:
        compared.note = "there is no checkpoint after this step"
        return compared
    states = states_of(checkpoint, run.folder.checkpoint_path, {"model": model})
    weights = model.state_dict()
    for name, tensor in states["model"].items():
        difference = (weights[name] - tensor).abs()
        compared.add(name, 0.0, float(whole(difference.max())) if tensor.numel() else 0.0)
    return compared


def as_json(one: ReplayedStep) -> dict[str, object]:
    """Return a replayed step as JSON."""
    first = one.first_difference
    return {
        "step": one.step,
        "changed_here": one.changed_here,
        "first_difference": None if first is None else first.quantity,
        "quantities": [
            {**asdict(compared), "is_equal": compared.is_equal if compared.num_values else None}
            for compared in one.compared
        ],
    }
