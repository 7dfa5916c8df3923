"""`audit`: plays prepared answers in an environment and judges their rewards."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torchrl.envs import EnvBase

from llmrl._utils.types import JSON, Row
from llmrl.audit.answers import Answer, Kind, answers_for, reference_answers
from llmrl.audit.checks import Splits, diagnose_played, known_reference
from llmrl.audit.played import Played
from llmrl.audit.tool_answers import tool_answers
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import Rollout
from llmrl.engines import Completion, SamplingConfig
from llmrl.engines.token_stream import TokenStream
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.primer import DataLoadingPrimer, dataset_env_of
from llmrl.envs.sampler import index_of
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import Renderer
from llmrl.testing import ScriptedEngine
from llmrl.transforms.parts import writes_reward
from llmrl.watch.findings import Finding, Verdict, verdict_of

MAX_TURNS = 8
MAX_COMPARED = 20_000
"""Maximum number of rows per split in the comparison of splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit."""

    num_problems: int
    played: Sequence[Played]
    findings: Sequence[Finding]
    """Worst first."""
    reference: str | None
    """Name of the answer that is assumed to be right; None if no column earns a reward."""
    not_examined: Sequence[str] = field(default_factory=tuple)
    """Questions that could not be examined, and why, as sentences."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the findings."""
        return verdict_of(self.findings)

    def to_json(self) -> dict[str, JSON]:
        """Return the result as JSON."""
        return {
            "verdict": self.verdict,
            "num_problems": self.num_problems,
            "reference": self.reference,
            "answers": [
                {"name": one.name, "kind": one.kind, "reward": one.mean, "num_errors": len(one.errors)}
                for one in self.played
            ],
            "findings": [finding.to_record() for finding in self.findings],
            "not_examined": list(self.not_examined),
        }


class AnsweringEngine(ScriptedEngine):
    """Engine that gives the same answer to each problem, as a function of its row's index.

    Args:
        answer: the answer.
        renderer: renderer of the prompts.
    """

    def __init__(self, answer: Answer, renderer: Renderer) -> None:
        super().__init__(lambda prompt_ids: self._said, max_model_len=1 << 21, record_requests=False)
        self._said: list[int] = []
        self._renderer = renderer
        self._encode_once = functools.lru_cache(maxsize=4)(renderer.encode)
        self.given = answer
        """Answer for the following requests."""

    def collector(self, env: EnvBase, limits: RolloutLimits, max_new_tokens: int) -> LLMCollector:
        """Return a collector that plays an environment with this engine."""
        policy = LLMWrapperBase(self, renderer=self._renderer, generate_kwargs={"max_new_tokens": max_new_tokens})
        return LLMCollector(env, policy=policy, yield_completed_trajectories=True, limits=limits)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Return the answer to the row of the group `routing_key`."""
        said = self.given.of(index_of(routing_key or "0")) or ""
        # `super().generate` reads `_said` before its first await, so concurrent requests do not interfere.
        token_ids = self._encode_once(said) if isinstance(said, str) else said
        self._said = [*token_ids, *self._renderer.stop_token_ids[:1]]
        return await super().generate(prompt_ids, sampling, request_id=request_id, routing_key=routing_key)


def audit(
    make_env: Callable[[str], EnvBase],
    renderer: Renderer,
    *,
    num_problems: int = 32,
    splits: Sequence[str] = ("train", "test"),
    max_new_tokens: int = 1024,
    timeout_s: float = 30.0,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Audit:
    """Play prepared answers in an environment and return the faults that they reveal.

    Args:
        make_env: function from a split's name to a new environment; with `repeats=2`, each answer is given twice.
        renderer: renderer of the model that is to be trained.
        num_problems: maximum number of problems of the first split to answer.
        splits: names of the splits; the first two are compared.
        max_new_tokens: maximum length of an answer, in tokens.
        timeout_s: maximum time of one environment step.
        on_answer: function that is called with each answer before it is played.

    Raises:
        ValueError: if the environment has no dataset, or if no part of it writes a reward.

    Example:
        >>> result = audit(make_env, renderer)                                       # doctest: +SKIP
        >>> result.verdict, [finding.says for finding in result.findings]            # doctest: +SKIP
        ('fine', [])
    """
    first = make_env(splits[0])
    drawing = drawing_of(first)
    if not writes_reward(first):
        raise ValueError("no part of the environment writes a reward: append a RubricReward or a similar transform.")
    query = drawing.data_key
    rows = list(islice(drawing.prompts.items, num_problems))
    limits = RolloutLimits(max_turns=MAX_TURNS, step_timeout_seconds=timeout_s)

    def play(answer: Answer) -> Played:
        on_answer(answer)
        return _play(make_env(splits[0]), answer, renderer, rows, limits, max_new_tokens)

    references = {answer.name: answer for answer in reference_answers(rows, query)}
    played = [play(answer) for answer in references.values()]
    known = known_reference(played)
    reference = None if known is None else known.name
    chosen = None if reference is None else references[reference]
    played += [play(answer) for answer in answers_for(rows, query, reference=chosen)]
    others = {split: _rows_of(make_env(split)) for split in splits} if len(splits) > 1 else {}
    compared = Splits.of(others, query)
    tools = tool_answers(make_env(splits[0]), len(rows), timeout_s=timeout_s)
    findings = diagnose_played(played, splits=compared, tools=tools)
    return Audit(
        num_problems=len(rows),
        played=played,
        findings=findings,
        reference=reference,
        not_examined=_not_examined(played, compared),
    )


def drawing_of(env: EnvBase) -> DatasetChatEnv | DataLoadingPrimer:
    """Return the part of an environment that draws problems; raise ValueError if the environment has no dataset."""
    drawing = dataset_env_of(env)
    if drawing is None:
        raise ValueError("the environment has no dataset, and therefore no problems to answer.")
    return drawing


def _rows_of(env: EnvBase) -> list[Row]:
    drawing = dataset_env_of(env)
    if drawing is None:
        return []
    return list(islice(drawing.prompts.items, MAX_COMPARED))


def _play(
    env: EnvBase, answer: Answer, renderer: Renderer, rows: Sequence[Row], limits: RolloutLimits, max_new_tokens: int
) -> Played:
    drawing = drawing_of(env)
    drawing.prompts.items = rows
    drawing.prompts.shuffle = False
    engine = AnsweringEngine(answer, renderer)
    started = time.perf_counter()
    with engine.collector(env, limits, max_new_tokens) as collector:
        rollouts: list[Rollout] = collector.play(len(rows) * drawing.prompts.num_samples)
    said = [rollout for rollout in rollouts if answer.of(index_of(rollout.group_id)) is not None]
    return Played(answer.name, answer.kind, said, time.perf_counter() - started)


def _not_examined(played: Sequence[Played], splits: Splits | None) -> list[str]:
    reasons = []
    if not any(one.num_pairs for one in played):
        reasons.append(
            "Whether equal answers have equal rewards: the environment plays each problem once (it has no repeats)."
        )
    if known_reference(played) is None:
        reasons.append("What a right answer earns: no column of the data earns a reward as an answer.")
    if splits is None:
        reasons.append("Whether the splits share problems: there is only one split, or all problems are the same.")
    if not any(one.kind is Kind.OTHER and one.rewards for one in played):
        reasons.append("Whether rewards depend on the problem: no two rows have different known answers.")
    return reasons
