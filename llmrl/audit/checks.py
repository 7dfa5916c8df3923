"""Findings of an audit, derived from the rollouts that were played, without I/O."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from llmrl._utils.types import Row
from llmrl.audit.answers import FORMS, Kind, value_of
from llmrl.audit.played import Played
from llmrl.audit.tool_answers import ToolAnswer
from llmrl.data import Rollout, text_of
from llmrl.data.message import prompt_of
from llmrl.envs.sampler import index_of
from llmrl.watch.findings import Finding, Verdict, worst_first

LARGE_REWARD = 1e3
SLOW_S = 1.0
"""Seconds per answer above which an environment is reported as slow."""
MUCH = 0.5
"""Share of a right answer's reward from which a worthless answer is reported."""


_NAMES_OF_ANSWERS = {"answer", "answers", "solution", "ground_truth", "label", "completion"}
_BROKEN_IF = {True: Verdict.BROKEN, False: Verdict.LOOK}


@dataclass(frozen=True, slots=True)
class Splits:
    """Problems of two splits, as texts that are equal if the problems are equal."""

    train: Sequence[str]
    test: Sequence[str]

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[Row]], query: str) -> Splits | None:
        """Return the problems of the first two splits; None for one split, or if all problems of a split are equal."""
        texts = [[_words(row.get(query)) for row in split] for split in rows.values()]
        if len(texts) < 2 or any(len(set(split)) < 2 for split in texts):
            return None
        return cls(*texts[:2])


def _words(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return " ".join(text.casefold().split())


def known_reference(played: Sequence[Played]) -> Played | None:
    """Return the reference answer with the highest mean reward; None if none has a positive reward."""
    scored = [one for one in played if one.kind is Kind.REFERENCE and one.mean is not None and one.mean > 0]
    return max(scored, key=lambda one: one.mean or 0.0, default=None)


def diagnose_played(
    played: Sequence[Played], *, splits: Splits | None = None, tools: Sequence[ToolAnswer] = ()
) -> list[Finding]:
    """Return the faults that rollouts, splits and tools' answers to empty calls reveal, worst first.

    Example:
        >>> diagnose_played([])
        []
        >>> [finding] = diagnose_played([], splits=Splits(["1 + 1 =", "1 + 2 ="], ["1 + 2 =", "2 + 2 ="]))
        >>> finding.says
        '1 of the 2 problems of the second split, 50 %, are in the first one.'
    """
    checks = (_errors, _late, _unscored, _unequal, _paid, _right_fails, _leak, _large, _slow)
    found = [finding for check in checks for finding in check(played)]
    found += _shared(splits) if splits is not None else ()
    found += _tool_leak(played, tools)
    return worst_first(found)


def _errors(played: Sequence[Played]) -> Iterator[Finding]:
    failed = [(one.name, rollout) for one in played for rollout in one.errors]
    if failed:
        name, first = failed[0]
        names = ", ".join(dict.fromkeys(name for name, _ in failed))
        yield Finding(
            "raises",
            Verdict.BROKEN,
            f"{len(failed)} answers ended as errors: {names}. The first: {first.error}",
            (
                f"a reward function or an environment does not handle the answer {name!r}: a model may write any text",
                "catch the exceptions that a wrong answer can cause, and return 0",
            ),
        )


def _late(played: Sequence[Played]) -> Iterator[Finding]:
    late = {one.name: len(one.late) for one in played if one.late}
    if late:
        yield Finding(
            "hangs",
            Verdict.BROKEN,
            f"{sum(late.values())} answers took longer than the time limit: {', '.join(late)}.",
            (
                "the time of a regular expression or a loop grows faster than the length of the answer",
                "a call has no timeout",
            ),
        )


def _unscored(played: Sequence[Played]) -> Iterator[Finding]:
    num_unscored = sum(len(one.unscored) for one in played)
    num_rollouts = sum(len(one.rollouts) for one in played)
    if num_unscored:
        yield Finding(
            "unscored",
            _BROKEN_IF[num_unscored == num_rollouts],
            f"{num_unscored} of {num_rollouts} answers have no reward.",
            (
                "a step of the environment returned no reward",
                "long or unfinished answers are cut, and the rubric has no truncation_reward",
            ),
        )


def _unequal(played: Sequence[Played]) -> Iterator[Finding]:
    num_pairs = sum(one.num_pairs for one in played)
    num_unequal = sum(one.num_unequal for one in played)
    if num_unequal:
        has_turns = any(rollout.num_turns > 1 for one in played for rollout in one.rollouts)
        yield Finding(
            "not_the_same_twice",
            _BROKEN_IF[not has_turns],
            f"The same answer to the same problem had two rewards in {num_unequal} of {num_pairs} cases.",
            (
                "a judge samples, or the reward function uses random numbers: derive their seed from the rollout",
                "one conversation leaves state behind that affects the next one",
                *(("an opponent or a simulated user plays at random, which is not a fault",) if has_turns else ()),
            ),
        )


def _paid(played: Sequence[Played]) -> Iterator[Finding]:
    known = known_reference(played)
    highest = max((reward for one in played for reward in one.rewards), default=0.0)
    right = highest if known is None or known.mean is None else known.mean
    for one in played:
        if one.kind in (Kind.WORTHLESS, Kind.OTHER) and one.mean is not None and right > 0 and one.mean >= MUCH * right:
            yield Finding(
                "pays_for_nothing",
                # Without a known right answer, an answer that looks worthless may solve some problems.
                _BROKEN_IF[known is not None],
                f"{one.name.capitalize()} earns {one.mean:.2f}"
                + (f"; a right answer earns {right:.2f}." if known else " on average."),
                (
                    _CAUSES.get(one.name, "the reward function depends on the form, the length or single words"),
                    "training will find this answer, because it is the easiest one with a reward",
                ),
            )


_CAUSES = {
    "another row's answer": "the reward does not depend on the problem: it compares with another row or not at all",
    "many answers at once": "the reward function searches the whole text: compare only the last or a marked answer",
    "nothing": "an empty answer passes: `in`, `startswith` or a regular expression accepts it",
    "the question": "the words of the question count as an answer",
    "a long text": "the reward grows with the length",
}


def _right_fails(played: Sequence[Played]) -> Iterator[Finding]:
    references = [one for one in played if one.kind is Kind.REFERENCE]
    rewards = {reward for one in played for reward in one.rewards}
    if references and len(rewards) == 1:
        is_named = any(_column(one).rpartition(".")[2] in _NAMES_OF_ANSWERS for one in references)
        yield Finding(
            "constant",
            _BROKEN_IF[is_named],
            f"Every answer that was tried earned {rewards.pop():g}, including the columns of the data.",
            (
                "the reward function expects another form of the answer than the data has, or another column",
                "none of the columns is the right answer, which is not a fault",
            ),
        )
        return
    known = known_reference(played)
    if known is not None and known.mean is not None:
        num_without = sum(reward <= 0 for reward in known.rewards)
        if num_without and num_without < len(known.rewards) and num_without >= 0.02 * len(known.rewards):
            yield Finding(
                "right_answers_fail",
                Verdict.LOOK,
                f"{num_without} of {len(known.rewards)} reference answers ({known.name}) earned nothing.",
                ("rows have a wrong reference, or one in a form that the reward function does not accept",),
            )


def _leak(played: Sequence[Played]) -> Iterator[Finding]:
    known = known_reference(played)
    if known is None:
        return
    column = _column(known)
    shown = [(_prompt(one), _answer_of(one, column)) for one in known.rollouts]
    own, by_chance = _shares_with_answer([(prompt, answer) for prompt, answer in shown if answer])
    if _is_more_than_chance(own, by_chance):
        yield Finding(
            "answer_in_prompt",
            Verdict.LOOK,
            f"{100 * own:.0f} % of the prompts contain their answer, and {100 * by_chance:.0f} % another row's answer.",
            (
                "the question, an example or the system prompt contains the solution",
                "the task is to find something in the prompt, which is not a fault",
            ),
        )


def _tool_leak(played: Sequence[Played], tools: Sequence[ToolAnswer]) -> Iterator[Finding]:
    known = known_reference(played)
    if known is None:
        return
    column = _column(known)
    answers = {index_of(one.group_id): _answer_of(one, column) for one in known.rollouts}
    own, by_chance = _shares_with_answer([(one.text, answers[one.index]) for one in tools if answers.get(one.index)])
    if _is_more_than_chance(own, by_chance):
        yield Finding(
            "answer_in_tool",
            Verdict.BROKEN,
            f"Calls with empty arguments return the answer in {100 * own:.0f} % of the problems, and the answer of "
            f"another row in {100 * by_chance:.0f} %.",
            (
                "a tool returns the row, or a state of the environment that contains the solution",
                "training will find this call, because it is easier than the task",
            ),
        )


def _column(known: Played) -> str:
    """Return the column of a reference answer from its name, the column followed by the form."""
    name = known.name
    for form in FORMS:
        name = name.removesuffix(f" {form}")
    return name


def _answer_of(rollout: Rollout, column: str) -> str:
    value = value_of(rollout.columns, column)
    return "" if value is None else str(value)


def _shares_with_answer(shown: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Return the shares of texts that contain their own and another row's answer; zeros if all answers are equal."""
    answers = [answer for _, answer in shown]
    if len(set(answers)) < 2:
        return 0.0, 0.0
    others = [
        _has(text, other) for place, (text, answer) in enumerate(shown) for other in _some(answers, place, answer)
    ]
    return fmean(_has(text, answer) for text, answer in shown), fmean(others)


def _is_more_than_chance(own: float, by_chance: float) -> bool:
    return own >= 0.5 and own >= 3 * by_chance + 0.2


def _some(answers: Sequence[str], place: int, own: str) -> list[str]:
    """Return up to five answers of the following rows that differ from a row's own one."""
    following = [*answers[place + 1 :], *answers[:place]]
    return [answer for answer in following if answer != own][:5]


def _prompt(rollout: Rollout) -> str:
    return "\n".join(text_of(message.get("content")) for message in prompt_of(rollout.messages))


def _has(prompt: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", prompt) is not None


def _large(played: Sequence[Played]) -> Iterator[Finding]:
    largest = max((abs(reward) for one in played for reward in one.rewards if math.isfinite(reward)), default=0.0)
    if largest > LARGE_REWARD:
        yield Finding(
            "large",
            Verdict.LOOK,
            f"Rewards reach {largest:.3g}.",
            ("the reward grows with the answer's length or with a number in the answer: bound it",),
        )


def _slow(played: Sequence[Played]) -> Iterator[Finding]:
    timed = [one.seconds / len(one.rollouts) for one in played if one.rollouts and not one.late]
    if timed and fmean(timed) > SLOW_S:
        yield Finding(
            "slow",
            Verdict.LOOK,
            f"The environment takes {fmean(timed):.1f} s for each answer: a step of 8 groups of 16 waits "
            f"{128 * fmean(timed) / 60:.0f} minutes, unless answers are scored concurrently.",
            ("a reward function blocks: make it asynchronous, or run it in processes of its own",),
        )


def _shared(splits: Splits) -> Iterator[Finding]:
    counts = Counter(splits.train)
    num_shared = sum(problem in counts for problem in splits.test)
    if num_shared:
        share = num_shared / len(splits.test)
        yield Finding(
            "splits_share_problems",
            _BROKEN_IF[share >= 0.05],
            f"{num_shared} of the {len(splits.test)} problems of the second split, {100 * share:.0f} %, are in the "
            "first one.",
            ("both splits were drawn from the same problems, so evaluations measure memorization",),
        )
    num_repeated = sum(counts.values()) - len(counts)
    if num_repeated >= 0.5 * len(splits.train):
        yield Finding(
            "problems_repeat",
            Verdict.LOOK,
            f"{num_repeated} of the {len(splits.train)} problems of the first split repeat an earlier one.",
            ("rows were included twice: an epoch has fewer different problems than rows",),
        )
