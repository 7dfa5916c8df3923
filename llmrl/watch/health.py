"""Health checks of a run: the bounds of `docs/metrics.md`, applied to its metrics."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from llmrl._utils.types import Row
from llmrl.watch.environment_health import check_agents, check_environment, check_tools
from llmrl.watch.findings import Finding, HealthLog, Selection, Verdict, graded, percent, severity, worst_first
from llmrl.watch.metric_history import NUM_SMOOTHED, SURE, MetricHistory, Metrics

_LEAST_CHANGE = 1e-6
"""Smallest relative change of the weights in a step; a learning rate of 1e-6 gives about 50 times as much."""


def diagnose(
    steps: Sequence[Metrics], *, numbers: Sequence[int] | None = None, max_staleness: int | None = None
) -> list[Finding]:
    """Return the findings about the last step, worst first; empty if there are none.

    Args:
        steps: metrics of all steps in order, named as in `docs/metrics.md`. Missing metrics are not judged.
        numbers: numbers of these steps; 1, 2, … by default.
        max_staleness: as given to the collector; None means on-policy.

    Example:
        >>> diagnose([{"cut_share": 0.0, "reward_mean": 0.5}])
        []
        >>> [finding] = diagnose([{"cut_share": 0.75, "reward_mean": 0.5}] * 3)
        >>> str(finding.verdict), finding.says
        ('broken', '75 % of the answers were cut off before their end.')
    """
    history = MetricHistory(steps, numbers)
    found = []
    for check in (functools.partial(_staleness, max_staleness=max_staleness), *_CHECKS):
        history.take_read()
        found += [dataclasses.replace(finding, steps=history.take_read()) for finding in check(history)]
    return worst_first(found)


class HealthJudge:
    """Judges a run step by step and logs the findings."""

    def __init__(self, log: HealthLog, steps: Mapping[int, Metrics], *, max_staleness: int | None = None) -> None:
        self._log = log
        self._steps = dict(steps)
        self._max_staleness = max_staleness
        self._records: tuple[int, Sequence[Row]] = (-1, ())

    def judge(self, step: int, metrics: Metrics, records: Sequence[Row] = ()) -> list[Finding]:
        """Return the findings about a step. Several calls may add metrics; `records` are those of its rollouts."""
        if records or self._records[0] != step:
            self._records = step, records
        self._steps[step] = {**self._steps.get(step, {}), **metrics}
        numbers = [number for number in sorted(self._steps) if number <= step]
        steps = [self._steps[number] for number in numbers]
        findings = diagnose(steps, numbers=numbers, max_staleness=self._max_staleness)
        self._log.write(step, findings, self._records[1])
        return findings


def _skipped(history: MetricHistory) -> Iterator[Finding]:
    if (overflows := history.now("num_overflows")) and overflows == history.now("num_skipped"):
        says = f"{overflows:g} of the step's updates overflowed in float16 and did not change the weights."
        cause = "the scale of the loss was too large, which is usual in the first steps: an overflow halves it"
        yield Finding("skipped", Verdict.LOOK, says, (cause,))
    elif history.now("is_skipped"):
        is_again = len(history.values("is_skipped")) > 1 and all(history.values("is_skipped")[-2:])
        yield Finding(
            "skipped",
            severity(is_again),
            "The step did not change the weights.",
            (
                "all rewards of each prompt were equal: there was nothing to train on",
                "a column, the loss or the gradient was not finite: a warning names it",
            ),
        )
    elif num_skipped := history.now("num_skipped"):
        yield Finding(
            "skipped",
            Verdict.LOOK,
            f"{num_skipped:g} of the step's updates did not change the weights.",
            (
                "a column, the loss or the gradient was not finite: a warning names it",
                "all answers to each prompt of a mini-batch had equal rewards: use fewer mini-batches",
            ),
        )


def _mismatch(history: MetricHistory) -> Iterator[Finding]:
    difference = history.now("on_policy_difference")
    bound = history.now("on_policy_difference_bound")
    if difference is None or bound is None or difference <= bound:
        return
    # Before the first update it is unknown which tokens are on-policy, so the difference of all tokens counts.
    known = [*history.values("on_policy_difference"), *history.values("log_prob_difference_mean")]
    has_agreed = any(earlier <= bound for earlier in known)
    causes = (
        "stale weights: an update did not reach the engine, or key-value blocks of old weights are in use",
        "engine and trainer compute in different dtypes",
        "an engine in int8, with rounding errors that have grown since the start (engine.quantization)",
        "the engine samples at another temperature, or with truncation that the trainer does not replay (replay=False)",
        "the engine was started from another checkpoint, or with other model options",
    )
    yield Finding(
        "mismatched_weights",
        severity(difference > 10 * bound),
        f"Engine and trainer differ by {difference:.2g} nats per token on tokens that the current weights sampled; "
        f"rounding explains {bound:g}.",
        causes if has_agreed else (*causes[1:], causes[0]),
    )


def _weights_of_tokens(history: MetricHistory) -> Iterator[Finding]:
    size = history.recent("ESS")
    if size is not None and (size < 0.1 or size < 0.5 - history.margin("ESS")):
        yield Finding(
            "small_sample",
            severity(size < 0.1),
            f"A few tokens carry the update: the effective sample size is {percent(size)} of the tokens.",
            (
                "samples are too old: lower max_staleness, or make fewer updates per batch",
                "engine and trainer disagree: see log_prob_difference_mean",
            ),
        )
    clipped = history.recent("clip_fraction") or 0.0
    margin = 0.0 if clipped > 0.5 else history.margin("clip_fraction")
    if (verdict := graded((clipped, clipped - margin), look=0.2, broken=0.5)) != Verdict.FINE:
        yield Finding(
            "clipping",
            verdict,
            f"{percent(clipped)} of the tokens' ratios lie outside the clip bounds.",
            ("the learning rate is too high", "too many updates per batch"),
        )


def _updates(history: MetricHistory) -> Iterator[Finding]:
    """Check for updates that change nothing, growing gradients, and a penalty larger than the reward."""
    changes = history.values("weight_change")
    rates = history.values("learning_rate")
    is_warming_up = len(rates) > 1 and rates[-1] > rates[-2]
    if len(changes) >= NUM_SMOOTHED and max(changes) < _LEAST_CHANGE and not is_warming_up:
        yield Finding(
            "idle_updates",
            Verdict.BROKEN,
            f"In {len(changes)} steps no update changed the weights by more than {max(changes):.1g} of their size.",
            (
                "the learning rate is too low: small models want 1e-5, large ones 1e-6",
                "the optimizer does not hold the model's parameters, or the model is trained in bfloat16",
            ),
        )
    change = history.now("weight_change") or 0.0
    if change > 0.03:
        yield Finding(
            "large_updates",
            severity(change > 0.3),
            f"The update changed the weights by {percent(change)} of their size.",
            ("the learning rate is too high: small models want 1e-5, large ones 1e-6, adapters ten times that",),
        )
    *earlier, before, now = [0.0, 0.0, *history.values("grad_norm")]
    usual = median([value for value in earlier if value > 0] or [math.inf])
    if history.now("grad_norm") is not None and now > 30 * usual and before > 3 * usual:
        yield Finding(
            "gradient_explosion",
            severity(now > 1000 * usual),
            f"The gradient's norm was {usual:.2g} until two steps ago, then {before:.2g}, and is {now:.2g}.",
            ("the learning rate is too high", "a few tokens to which the policy gives almost no probability: see ESS"),
        )
    kl = history.now("kl_to_ref")
    weighted = history.now("loss_kl_to_ref")
    if kl and weighted and abs(weighted / kl) > 0.5:
        weight = abs(weighted / kl)
        yield Finding(
            "kl_penalty",
            severity(weight > 5),
            f"The KL to the reference is weighted by {weight:.2g}, beside advantages of about 1.",
            ("kl_to_ref_coeff is too large: 0.001 to 0.1 is usual",),
        )


def _entropy(history: MetricHistory) -> Iterator[Finding]:
    # A mean over tokens has little noise, so it is not smoothed.
    now = history.now("entropy")
    began = history.began("entropy")
    if now is None or not began:
        return
    before = history.values("entropy")[-2]
    margin = history.margin("entropy")
    is_falling_fast = now < 0.5 * before - margin and before > 0.25 * began
    # Learning lowers the entropy, for two-digit sums to 1 % of the initial value. So does SFT.
    is_gone = now < 0.02 * began and not history.has_risen()
    is_low = is_gone or ((now < 0.1 * began or is_falling_fast) and not history.is_learning())
    if is_low and history.now("reward_mean") is not None and not history.is_learned():
        since = f"{before:.2g} in one step" if is_falling_fast else f"{began:.2g}"
        yield Finding(
            "entropy_collapse",
            severity(is_gone),
            f"The entropy fell from {since} to {now:.2g} nats per token, and the task is not learned.",
            (
                "the learning rate is too high",
                "the reward favours one kind of answer: read the best rollouts",
                "no exploration is left: raise clip_epsilon_high, or kl_to_ref_coeff",
            ),
            Selection.BEST,
        )
    if now > 3 * began + margin and now > 0.5:
        yield Finding(
            "entropy_explosion",
            severity(now > 6 * began),
            f"The entropy rose from {began:.2g} to {now:.2g} nats per token: the model is losing its language.",
            ("the learning rate is too high", "an entropy bonus that is too large", "a reward that is mostly noise"),
            Selection.WORST,
        )


def _lengths(history: MetricHistory) -> Iterator[Finding]:
    share = history.share("cut_share", "num_rollouts")
    verdict = graded(share, look=0.2, broken=0.5)
    # A model learns to end its answers along with the task: no finding while a run has just begun or is learning.
    is_clear = history.is_constant() and history.has_many_prompts()
    if share is not None and verdict != Verdict.FINE and (is_clear or history.has_settled("cut_share")):
        yield Finding(
            "answers_cut",
            verdict,
            f"{percent(share[0])} of the answers were cut off before their end.",
            (
                "max_new_tokens or max_model_len is too small for the task",
                "the model does not end its turns: a base model, or a chat template of another model",
                "the reward does not penalise cut answers: set truncation_reward=0.0",
            ),
            Selection.CUT,
        )
    now = history.recent("completion_tokens_mean")
    began = history.began("completion_tokens_mean")
    if now is None or not began:
        return
    if now > 3 * began + history.margin("completion_tokens_mean"):
        yield Finding(
            "length_explosion",
            severity(now > 10 * began),
            f"Answers grew from {began:.0f} to {now:.0f} tokens.",
            (
                "the reward favours long answers and does not penalise cut ones: set truncation_reward=0.0",
                "the learning rate is too high, and the model forgets how to end",
            ),
            Selection.LONGEST,
        )
    elif now < 2 <= began / 2:
        yield Finding(
            "silence",
            Verdict.LOOK,
            f"Answers shrank from {began:.0f} to {now:.1f} tokens.",
            ("the reward favours short answers", "a length penalty that is too large"),
            Selection.BEST,
        )


def _signal(history: MetricHistory) -> Iterator[Finding]:
    share = history.share("groups_all_equal", "num_groups")
    if history.now("groups_all_equal") == 1.0:
        share = 1.0, 1.0  # nothing to train on: no sampling error
    verdict = graded(share, look=0.5, broken=0.9)
    if share is None or verdict == Verdict.FINE or history.now("kl_to_teacher") is not None:
        return  # a teacher gives a signal for every token
    right = history.recent("groups_all_right") or 0.0
    wrong = history.recent("groups_all_wrong") or 0.0
    says = f"For {percent(share[0])} of the prompts, all answers have the same reward, which gives no signal"
    if history.is_learned():
        highest = "the rewards are the highest so far"
        learned = f"{percent(right)} of the prompts are all right" if right > 0.5 else highest
        yield Finding("learned", Verdict.FINE, f"The task is learned: {learned}.", ())
        return
    is_constant = history.is_constant()
    is_clear = (is_constant or share[0] == 1) and history.has_many_prompts()
    if not is_clear and not history.has_settled("groups_all_equal"):
        return
    if is_constant:
        says += f": all rewards are {history.now('reward_mean') or 0.0:g}"
    elif wrong > 0.5:
        says += f": {percent(wrong)} are all wrong"
    causes = [
        "the reward function does not read the answer: score one by hand",
        "the template or the prompt is not what the model was trained with",
        "the task is too hard for this model: use easier problems, larger groups, or supervised training first",
        "too few answers per prompt, or a temperature that is too low",
    ]
    if (history.now("cut_share") or 0.0) > 0.5:
        causes.insert(0, "the answers are cut before they say anything: raise max_new_tokens, or check the template")
    if is_constant and not history.now("reward_mean") and not any(name.startswith("reward/") for name in history.last):
        causes.insert(0, "no reward is given: train in the result of env.append_transform(RubricReward(...))")
    yield Finding("no_signal", verdict, f"{says}.", tuple(causes), Selection.WORST)


def _reward(history: MetricHistory) -> Iterator[Finding]:
    now = history.recent("reward_mean")
    best = history.best("reward_mean") or 0.0
    if now is not None and best > 0 and now < min(0.5 * best, best - history.margin("reward_mean")):
        yield Finding(
            "reward_fell",
            severity(now < 0.2 * best),
            f"The mean reward was {best:.2g} and is {now:.2g}.",
            (
                "the learning rate is too high",
                "the policy moved too far from the initial model: set kl_to_ref_coeff, or resume an earlier checkpoint",
                "the problems became harder, as with a curriculum",
            ),
            Selection.WORST,
        )
    share = history.recent("common_answer_share")
    began = history.began("common_answer_share")
    least = max(0.5, 2 * (began or 0.0), (began or 0.0) + history.margin("common_answer_share"))
    if share is not None and began is not None and share > least:
        yield Finding(
            "one_answer",
            severity(share > 0.9),
            f"One answer is given to {percent(share)} of the prompts; it was {percent(began)}.",
            (
                "the reward can be earned without reading the prompt",
                "the entropy collapsed: the learning rate is too high",
            ),
            Selection.BEST,
        )


def _held_out(history: MetricHistory) -> Iterator[Finding]:
    """Check whether the training reward rises while results on held-out problems fall."""
    names = {name for step in history.steps for name in step if name.startswith("eval/")}
    for held_out in sorted({name.rpartition("/")[0] for name in names if name.endswith(("/pass@1", "/reward"))}):
        found = (_fell(history, f"{held_out}/{metric}") for metric in ("pass@1", "reward"))
        yield from [finding for finding in found if finding is not None][:1]


def _fell(history: MetricHistory, name: str) -> Finding | None:
    """Return a finding if an evaluation metric is below its best although the training reward has risen."""
    *earlier, last = [place for place, step in enumerate(history.steps) if name in step] or [0]
    if not earlier:
        return None
    best = max(earlier, key=lambda place: history.steps[place][name])
    before = history.around(best, "reward_mean")
    after = history.around(last, "reward_mean")
    history.note(best, last)
    was = history.steps[best][name]
    now = history.steps[last][name]
    if before is None or after is None or after < before + max(0.02, history.margin("reward_mean")):
        return None
    fall = was - now
    errors = _standard_errors(history, name, (best, last))
    if fall <= 0.05 * max(abs(was), 1e-9) or fall < SURE * errors:
        return None
    is_certain = errors > 0 and fall > 1.5 * SURE * errors
    return Finding(
        "reward_hacking",
        severity(is_certain),
        f"{name} fell from {was:.2g} to {now:.2g} while the training reward rose from {before:.2g} to {after:.2g}.",
        (
            "the reward can be earned without solving the task: read the best rollouts",
            "the model memorises the training problems: use more problems, or fewer epochs",
            "the two environments differ: prompt, reward, limits, temperature",
        ),
        Selection.BEST,
    )


def _standard_errors(history: MetricHistory, name: str, places: tuple[int, int]) -> float:
    """Return the standard error of the difference of two evaluations, from intervals or earlier evaluations."""
    ends = [(history.steps[place].get(f"{name}_low"), history.steps[place].get(f"{name}_high")) for place in places]
    widths = [high - low for low, high in ends if low is not None and high is not None]
    if len(widths) == len(places):
        return math.hypot(*widths) / (2 * 1.96)
    *earlier, _ = history.values(name)
    squares = [(later - before) ** 2 for before, later in itertools.pairwise(earlier)]
    return math.sqrt(fmean(squares)) if squares else 0.0


def _staleness(history: MetricHistory, max_staleness: int | None) -> Iterator[Finding]:
    oldest = history.now("staleness_max")
    allowed = max_staleness or 0
    if oldest is not None and oldest > allowed:
        yield Finding(
            "staleness",
            Verdict.BROKEN,
            f"The batch has tokens from {oldest:.0f} versions ago, and max_staleness is {allowed}.",
            (
                "the weights are updated more often than once per step",
                "the loop draws several batches before it updates the weights",
            ),
        )


_CHECKS = (
    _skipped,
    _mismatch,
    _weights_of_tokens,
    _updates,
    _entropy,
    _lengths,
    _signal,
    _reward,
    _held_out,
    check_environment,
    check_tools,
    check_agents,
)
