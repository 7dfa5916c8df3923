"""Generated tasks of reasoning-gym, one or a weighted mix, with an optional curriculum."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Unpack

from llmrl._utils.arguments import check_least, near_or_all, refuse_unknown
from llmrl._utils.imports import require
from llmrl._utils.types import Row, StateDict
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.tasks.task import Split, TaskEnv, TaskOptions, check_split, named_task
from llmrl.rewards import RewardFn, RewardInput, Rubric, Score, score_reasoning_gym
from llmrl.transforms import RubricReward

_NUM_KEPT = 1024
"""Maximum number of cached problems; a group keeps its problem when the level rises."""
_MAX_DRAWS = 16
"""Maximum number of problems to draw until a question belongs to the split; half of them do."""


class ReasoningGymProblems:
    """Problems of a weighted mix of tasks, generated on demand.

    With a curriculum, each task starts at its easiest level, which rises by one when the mean of its last `window`
    scores reaches `raise_at`. Recent problems are cached, so all rollouts of a group get the same one.

    Args:
        tasks: a task's name, or weights by name.
        num_problems: number of problems per epoch.
        split: `train` or `test`, which use different seeds.
        config: arguments of reasoning-gym's configuration, by task.

    Raises:
        ValueError: if a task is unknown, lacks a curriculum or rejects its configuration, or weights are invalid.
        TypeError: if a task's configuration has an unknown argument.

    Example:
        >>> problems = ReasoningGymProblems({"chain_sum": 1.0}, num_problems=8)
        >>> problems[0]["task"], problems[0] == problems[0]
        ('chain_sum', True)
    """

    def __init__(
        self,
        tasks: str | Mapping[str, float],
        *,
        num_problems: int = 10_000,
        split: Split = "train",
        seed: int = 0,
        curriculum: bool = False,
        raise_at: float = 0.8,
        window: int = 64,
        config: Mapping[str, Row] | None = None,
    ) -> None:
        factory = require("reasoning_gym.factory", extra="envs")
        check_least(1, num_problems=num_problems, window=window)
        if isinstance(tasks, str):
            tasks = {tasks: 1.0}
        self.weights = dict(tasks)
        _check_names(factory.DATASETS, self.weights, config or {})
        if not self.weights or min(self.weights.values()) < 0 or not sum(self.weights.values()) > 0:
            raise ValueError(f"tasks must have non-negative weights with a positive sum, got {self.weights}.")
        without = sorted(task for task in self.weights if not factory.has_curriculum(task))
        if curriculum and without:
            raise ValueError(f"curriculum is set, but reasoning-gym has none for {without}.")
        self.num_problems = num_problems
        self.split = check_split(split)
        self.seed = seed
        self.has_curriculum = curriculum
        self.raise_at = raise_at
        self.window = window
        self.config = config or {}
        self.levels = dict.fromkeys(self.weights, 0)
        self._scores: dict[str, deque[float]] = {task: deque(maxlen=window) for task in self.weights}
        # Not all problems are cached, so that the next epoch generates them at the current level.
        self._num_kept = max(1, min(_NUM_KEPT, num_problems // 2))
        self._drawn: dict[int, Row] = {}
        self._drawn_levels: dict[int, int] = {}  # in the order of the draws, also of problems before a restoration
        for task in self.weights:
            try:
                self._dataset(task, 0, seed=0)
            except (AssertionError, TypeError, ValueError) as error:
                raise ValueError(
                    f"config of the task {task!r}, {dict(self.config.get(task, {}))}, is refused by reasoning-gym"
                    f"{' at the level 0 of its curriculum' * curriculum}: {error}"
                ) from error

    def __len__(self) -> int:
        return self.num_problems

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.num_problems:
            raise IndexError(index)
        if index not in self._drawn:
            self._drawn[index] = self._generate(index, self._drawn_levels.get(index))
            self._drawn_levels.setdefault(index, self._drawn[index]["level"])
            if len(self._drawn_levels) > self._num_kept:
                oldest = next(iter(self._drawn_levels))
                del self._drawn_levels[oldest]
                self._drawn.pop(oldest, None)
        return self._drawn[index]

    def _generate(self, index: int, level: int | None) -> Row:
        generator = random.Random(f"{self.seed}/{index}")
        task = generator.choices(list(self.weights), list(self.weights.values()))[0]
        if level is None:
            level = self.levels[task]
        for _ in range(_MAX_DRAWS):  # bounded, because all questions of a task may be equal
            # Training uses even seeds, the test split odd ones.
            entry = self._dataset(task, level, seed=2 * generator.randrange(2**30) + (self.split == "test"))[0]
            if zlib.crc32(entry["question"].encode()) % 2 == (self.split == "test"):
                break
        return {"query": entry["question"], "task": task, "entry": entry, "level": level}

    def _dataset(self, task: str, level: int, *, seed: int) -> Sequence[Row]:
        factory = require("reasoning_gym.factory", extra="envs")
        arguments = {**self.config.get(task, {}), "seed": seed, "size": 1}
        if not self.has_curriculum:
            return factory.create_dataset(task, **arguments)
        curriculum = factory.create_curriculum(task)
        curriculum.set_global_level(level)
        return factory.DATASETS[task][0](curriculum.generate_configuration(arguments))

    def record(self, task: str, level: int, score: float) -> None:
        """Record the score of an answer at a level; enough good scores at the current level raise it."""
        scores = self._scores[task]
        if not self.has_curriculum or level != self.levels[task]:
            return
        scores.append(score)
        if len(scores) == self.window and sum(scores) / self.window >= self.raise_at:
            factory = require("reasoning_gym.factory", extra="envs")
            attributes = factory.create_curriculum(task).attributes.values()
            highest = max((len(attribute.levels) - 1 for attribute in attributes), default=0)
            self.levels[task] = min(level + 1, highest)
            scores.clear()

    def state_dict(self) -> StateDict:
        """Return the levels, the scores since they rose, and the levels of the cached problems."""
        drawn = list(self._drawn_levels.items())  # pairs, because JSON turns numbers into texts as names
        return {"levels": dict(self.levels), "scores": {k: list(v) for k, v in self._scores.items()}, "drawn": drawn}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a saved curriculum."""
        self.levels = dict(state["levels"])
        self._scores = {task: deque(scores, maxlen=self.window) for task, scores in state["scores"].items()}
        self._drawn = {}
        self._drawn_levels = dict(state["drawn"])


def _check_names(known: Row, tasks: Mapping[str, float], config: Mapping[str, Row]) -> None:
    for task in tasks:
        if task not in known:
            hint = near_or_all(task, known, f"it has {sorted(known)}.")
            raise ValueError(f"reasoning-gym has no task {task!r}; {hint}")
    for task, arguments in config.items():
        if task not in tasks:
            raise ValueError(f"config has {task!r}, which is not among the tasks {sorted(tasks)}.")
        own = {"seed": "the environment's seed draws problems", "size": "num_problems sets the number of problems"}
        names = {field.name for field in dataclasses.fields(known[task][1])} - set(own)
        refuse_unknown(f"config of the task {task!r}", arguments, names, own)


class ReasoningGymChatEnv(DatasetChatEnv):
    """A `DatasetChatEnv` that saves the curriculum with the position."""

    def __init__(self, problems: ReasoningGymProblems, **options: object) -> None:
        self.problems = problems
        super().__init__(problems, **options)  # type: ignore[arg-type]

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the position and the curriculum."""
        return {**super().state_dict(), "curriculum": self.problems.state_dict()}

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Restore a saved position and curriculum."""
        super().load_state_dict(state_dict)
        self.problems.load_state_dict(state_dict["curriculum"])


class _CurriculumRubric(Rubric):
    """Records every score in the curriculum, including those of truncated rollouts."""

    def __init__(self, problems: ReasoningGymProblems, *reward_fns: RewardFn, truncation_reward: float) -> None:
        super().__init__(*reward_fns, truncation_reward=truncation_reward)
        self._problems = problems

    async def score(self, rollout: RewardInput) -> Score:
        score = await super().score(rollout)
        if score.is_scored:
            self._problems.record(rollout.columns["task"], rollout.columns["level"], score.reward)
        return score


class ReasoningGymOptions(TaskOptions, total=False):
    """Options of `make_reasoning_gym_env`; see `ReasoningGymProblems`."""

    num_problems: int
    curriculum: bool
    raise_at: float
    window: int
    config: Mapping[str, Row] | None


class ReasoningGymEnv(TaskEnv):
    """One or several tasks of reasoning-gym, scored by its own scorers.

    See `ReasoningGymProblems` for the arguments and errors, and `DeclaredTaskEnv` for `reasoning` and `**options`.

    Example:
        >>> env = ReasoningGymEnv({"chain_sum": 2.0, "spell_backward": 1.0}, num_problems=8)
        >>> env.reset()[0]["task"] in ("chain_sum", "spell_backward")
        True
    """

    def __init__(
        self,
        tasks: str | Mapping[str, float],
        *,
        split: Split = "train",
        num_problems: int = 10_000,
        curriculum: bool = False,
        raise_at: float = 0.8,
        window: int = 64,
        config: Mapping[str, Row] | None = None,
        reasoning: bool = False,
        **options: Unpack[TaskOptions],
    ) -> None:
        problems = ReasoningGymProblems(
            tasks,
            num_problems=num_problems,
            split=split,
            seed=options.get("seed", 0),
            curriculum=curriculum,
            raise_at=raise_at,
            window=window,
            config=config,
        )

        def right(completion: str, task: str, entry: Row) -> float:
            return score_reasoning_gym(completion, task, entry, reasoning=reasoning)

        super().__init__(
            problems,  # type: ignore[arg-type]  # a sequence without slices
            system_prompt="Reply with the final answer only." if not reasoning else None,
            reward=RubricReward(_CurriculumRubric(problems, RewardFn(right), truncation_reward=0.0)),
            reasoning=reasoning,
            options={"name": split, **options},
            chat_env=ReasoningGymChatEnv,
        )


@named_task("reasoning-gym", "chained sums of reasoning-gym, which has many more tasks")
def make_reasoning_gym_env(
    split: Split = "train",
    *,
    tasks: str | Mapping[str, float] = "chain_sum",
    reasoning: bool = False,
    **options: Unpack[ReasoningGymOptions],
) -> ReasoningGymEnv:
    """Make a `ReasoningGymEnv` of a task or a weighted mix.

    Example:
        >>> make_reasoning_gym_env("test", tasks="spell_backward").reset()[0]["task"]
        'spell_backward'
    """
    return ReasoningGymEnv(tasks, split=split, reasoning=reasoning, **options)
