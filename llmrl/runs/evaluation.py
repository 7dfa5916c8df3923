"""`Evaluator`: measures a policy on held-out problems, during training or on its own."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torchrl.envs import EnvBase

from llmrl._utils.arguments import check_least, did_you_mean
from llmrl._utils.types import JSON, StateDict
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.config.entries import EntryError
from llmrl.data import Rollout
from llmrl.envs.primer import dataset_env_of
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric
from llmrl.runs.estimates import Estimate, estimate_of_mean, pass_at_k
from llmrl.transforms import RubricReward, environment_parts
from llmrl.watch.rollout_metrics import right_answers, rollout_metrics
from llmrl.watch.tracking import as_recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Results in one environment. `right_answers` decides which answers are right."""

    policy_version: int
    """Version of the weights that were measured."""
    num_problems: int
    num_samples: int
    """Number of answers per problem."""
    pass_at: dict[int, Estimate]
    """pass@k for `k` = 1 (the share of right answers) and `k` = `num_samples`. Empty if right answers are unknown."""
    reward: float | None
    """Mean over scored answers; None if no answer is scored."""
    reward_breakdown: dict[str, float]
    """Mean of each reward function over scored answers."""
    completion_tokens: float
    """Mean number of tokens per answer."""
    num_by_status: dict[str, int]
    """Number of answers by status and reason."""
    seconds: float
    rollouts: list[Rollout] = field(repr=False)

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], *, policy_version: int = 0, seconds: float = 0.0) -> EvaluationReport:
        """Return the report of rollouts; the answers to one problem share a `group_id`.

        Raises ValueError if there are no rollouts.

        Example:
            >>> def answer(group_id, reward):
            ...     return Rollout(rollout_id="", group_id=group_id, sample_index=0, group_size=2, reward=reward,
            ...                    is_scored=True)
            >>> report = EvaluationReport.of([answer("a", 1.0), answer("a", 0.0), answer("b", 0.0), answer("b", 0.0)])
            >>> report.pass_at[1].mean, report.pass_at[2].mean
            (0.25, 0.5)
        """
        if not rollouts:
            raise ValueError("rollouts is empty; there is nothing to evaluate.")
        rights = right_answers(rollouts)
        problems: dict[str, list[bool]] = defaultdict(list)
        for rollout, is_right in zip(rollouts, rights or [False] * len(rollouts), strict=True):
            problems[rollout.group_id].append(is_right)
        num_samples = min(map(len, problems.values()))
        num_right = [sum(group[:num_samples]) for group in problems.values()]
        ks = [] if rights is None else sorted({1, num_samples})
        scored = [rollout for rollout in rollouts if rollout.is_scored]
        names = sorted({name for rollout in scored for name in rollout.breakdown})
        return cls(
            policy_version=policy_version,
            num_problems=len(problems),
            num_samples=num_samples,
            pass_at={k: estimate_of_mean([pass_at_k(num_samples, right, k) for right in num_right]) for k in ks},
            reward=sum(rollout.reward for rollout in scored) / len(scored) if scored else None,
            reward_breakdown={
                name: sum(rollout.breakdown.get(name, 0.0) for rollout in scored) / len(scored) for name in names
            },
            completion_tokens=sum(rollout.num_completion_tokens for rollout in rollouts) / len(rollouts),
            num_by_status=dict(Counter(f"{one.status.name.lower()} {one.reason}".strip() for one in rollouts)),
            seconds=seconds,
            rollouts=list(rollouts),
        )

    @property
    def groups_all_equal(self) -> float | None:
        """Share of problems where all answers have the same reward; None if each problem has one answer."""
        return rollout_metrics(self.rollouts).get("groups_all_equal")

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics to plot, among them pass@k with its 95 % interval and `reward`."""
        metrics = rollout_metrics(self.rollouts)
        metrics |= {"completion_tokens": self.completion_tokens, "seconds": self.seconds}
        for k, estimate in self.pass_at.items():
            metrics |= {f"pass@{k}": estimate.mean, f"pass@{k}_low": estimate.low, f"pass@{k}_high": estimate.high}
        if self.reward is not None:
            metrics["reward"] = self.reward
        return metrics

    def to_summary(self) -> dict[str, JSON]:
        """Return the results without the rollouts, as JSON."""
        return {
            "num_problems": self.num_problems,
            "num_samples": self.num_samples,
            **{
                f"pass@{k}": {"mean": estimate.mean, "interval": [estimate.low, estimate.high]}
                for k, estimate in self.pass_at.items()
            },
            "reward": self.reward,
            "reward_breakdown": self.reward_breakdown,
            "groups_all_equal": self.groups_all_equal,
            "num_by_status": self.num_by_status,
            "completion_tokens": self.completion_tokens,
        }


class Evaluator:
    """Plays all problems of named environments on the engine of the policy. A context manager.

    Collection on the same engine continues during an evaluation. If the weights are updated during
    an evaluation, a warning says that the results mix several versions.

    Args:
        envs: environments by name. Each is a `DatasetChatEnv`, usually transformed; its `repeats`
            is the number of answers per problem.
        num_problems: evaluate the first `num_problems` of each environment; all by default.
        max_concurrent_rollouts: number of rollouts in flight per environment; all by default.

    Raises ValueError if an environment has no dataset, or `num_problems` is below 1.

    Example:
        >>> with Evaluator({"sums": env}, policy) as evaluator:                      # doctest: +SKIP
        ...     evaluator.evaluate()["sums"].pass_at[1]
        Estimate(mean=0.5, low=0.3, high=0.7)
    """

    def __init__(
        self,
        envs: Mapping[str, EnvBase],
        policy: LLMWrapperBase,
        *,
        limits: RolloutLimits | None = None,
        num_problems: int | None = None,
        max_concurrent_rollouts: int | None = None,
    ) -> None:
        if envs and num_problems is not None and num_problems < 1:
            raise ValueError(f"num_problems must be at least 1, got {num_problems}.")
        self.policy = policy
        self.num_rollouts: dict[str, int] = {}
        """Number of answers in an evaluation, by environment."""
        for name, env in envs.items():
            dataset_env = dataset_env_of(env)
            if dataset_env is None:
                raise ValueError(f"the environment {name!r} has no dataset; an evaluation needs a DatasetChatEnv.")
            prompts = dataset_env.prompts
            if num_problems is not None and num_problems < len(prompts.items):
                prompts.items = [prompts.items[index] for index in range(num_problems)]
            self.num_rollouts[name] = len(prompts.items) * prompts.num_samples
        self._collectors = {
            name: LLMCollector(
                env,
                policy=policy,
                yield_completed_trajectories=True,
                limits=limits,
                max_concurrent_rollouts=max_concurrent_rollouts,
            )
            for name, env in envs.items()
        }

    def evaluate(self) -> dict[str, EvaluationReport]:
        """Play all environments at once and return reports by name. Ctrl-C shuts the evaluator down.

        Raises EndOfData if an environment has no epoch left.
        """
        with ThreadPoolExecutor(max(1, len(self._collectors)), thread_name_prefix="llmrl-evaluation") as pool:
            try:
                return dict(zip(self._collectors, pool.map(self._play, self._collectors), strict=True))
            except Exception:
                raise
            except BaseException:  # such as KeyboardInterrupt
                self.shutdown()  # otherwise the pool waits until all answers are played
                raise

    def _play(self, name: str) -> EvaluationReport:
        started = time.perf_counter()
        version = self.policy.engine.policy_version
        rollouts = self._collectors[name].play(self.num_rollouts[name])
        if (now := self.policy.engine.policy_version) != version:
            warnings.warn(
                f"The weights were updated from version {version} to {now} while {name!r} was evaluated: its results "
                "mix several versions. Update the weights after the evaluation.",
                stacklevel=2,
            )
        return EvaluationReport.of(rollouts, policy_version=version, seconds=time.perf_counter() - started)

    @property
    def num_played(self) -> int:
        """Number of finished answers in the current evaluation."""
        return sum(collector.num_played for collector in self._collectors.values())

    def shutdown(self) -> None:
        """End the threads. The environments and the engine stay open."""
        for collector in self._collectors.values():
            collector.shutdown()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def metrics_of_evaluation(reports: Mapping[str, EvaluationReport]) -> dict[str, float]:
    """Return the metrics of all environments as `eval/NAME/METRIC`."""
    named = ((name, report.to_metrics()) for name, report in reports.items())
    return {f"eval/{name}/{metric}": value for name, metrics in named for metric, value in metrics.items()}


def check_metric(metric: str | None, envs: Mapping[str, EnvBase], *, measured: Sequence[str] = ()) -> None:
    """Raise EntryError if no evaluation reports the metric; `measured` names further metrics, without `eval/`."""
    known = [f"eval/{name}" for name in measured]
    for name, env in envs.items():
        metrics = EvaluationReport.of(_example_rollouts(env)).to_metrics()
        known += [f"eval/{name}/{one}" for one in metrics]
        open_groups = ["tool_calls"]
        if _reward_names(env) is None:
            open_groups.append("reward")
        known += [metric for group in open_groups if metric and metric.startswith(f"eval/{name}/{group}/")]
    if metric is None or metric in known:
        return
    meant = did_you_mean(metric, known)
    there = f"the metrics are {', '.join(known)}." if known else "nothing is evaluated (eval.num_problems=0)."
    raise EntryError("eval.metric", f"must be a metric of the evaluation, got {metric!r}.{meant} In this run, {there}")


def _reward_names(env: EnvBase) -> list[str] | None:
    """Return the names of an environment's reward functions, or None if a subclass of `Rubric` may report others."""
    rubrics = [part.rubric for part in environment_parts(env) if isinstance(part, RubricReward)]
    if any((type(one).score, type(one).score_group) != (Rubric.score, Rubric.score_group) for one in rubrics):
        return None
    return [name for rubric in rubrics for name in rubric.names]


def _example_rollouts(env: EnvBase) -> list[Rollout]:
    """Return example rollouts of an evaluation in `env`: one problem with wrong answers, and one with right answers."""
    dataset_env = dataset_env_of(env)
    num_samples = 1 if dataset_env is None else dataset_env.prompts.num_samples
    return [
        Rollout(
            rollout_id="",
            group_id=str(reward),
            sample_index=place,
            group_size=num_samples,
            messages=({"role": "assistant", "content": "a"},),
            reward=reward,
            breakdown=dict.fromkeys(_reward_names(env) or (), reward),
            is_scored=True,
            tool_calls={"answered": 1},
        )
        for reward in (0.0, 1.0)
        for place in range(num_samples)
    ]


@dataclass(slots=True)
class BestEvaluation:
    """The best evaluation so far by one metric, and whether training should stop.

    A step that is seen twice, such as after a resumption, counts once. Values are rounded as in
    `metrics.csv`, so a resumed run makes the same decisions.

    Args:
        metric: name, such as `eval/addition/pass@1`; higher is better, except for names that end in `loss`.
        patience: number of evaluations in a row without improvement after which training stops; None means never.

    Example:
        >>> best = BestEvaluation("eval/sums/pass@1", patience=2)
        >>> [best.see(step, {"eval/sums/pass@1": value}) for step, value in ((5, 0.2), (10, 0.6), (15, 0.5), (20, 0.6))]
        [True, True, False, False]
        >>> best.step, best.is_over
        (10, True)
    """

    metric: str
    patience: int | None = None
    values: dict[int, float] = field(default_factory=dict)
    """Value by step; losses are negated."""

    def __post_init__(self) -> None:
        check_least(1, patience=self.patience)

    def see(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add an evaluation, and return whether it is the best so far; a missing metric or NaN is the worst value.

        Evaluations before the first one that has the metric cause a warning and do not count.
        """
        if self.metric not in metrics and not self.values:
            warnings.warn(
                f"no evaluation until step {step} has {self.metric!r}, so none counts as the best; this one has "
                f"{', '.join(sorted(metrics))}.",
                stacklevel=2,
            )
            return False
        value = as_recorded(metrics.get(self.metric, math.nan))
        if math.isnan(value):
            value = -math.inf
        elif self.metric.endswith("loss"):  # a lower loss is better
            value = -value
        self.values[step] = value
        return self.step == step

    @property
    def step(self) -> int | None:
        """Step of the best evaluation, the first of several equal ones; None before any evaluation."""
        return min(self.values, key=lambda step: (-self.values[step], step), default=None)

    @property
    def is_over(self) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        num_since = sum(1 for step in self.values if self.step is not None and step > self.step)
        return self.patience is not None and num_since >= self.patience

    def recall(self, recorded: Mapping[int, Mapping[str, float]]) -> None:
        """Add the evaluations in `recorded`, which maps steps to their metrics."""
        for step in sorted(recorded):
            is_evaluated = any(name.startswith("eval/") for name in recorded[step])
            if is_evaluated and (self.values or self.metric in recorded[step]):
                self.see(step, recorded[step])

    def state_dict(self) -> StateDict:
        """Return the values seen so far."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the values seen so far."""
        self.values = dict(state_dict["values"])
