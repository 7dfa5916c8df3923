"""`TaskEnv`: problems with a reward; `Task` declares a named task."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torchrl.envs import StepCounter, Transform, TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import InputMode, Row, StateDict, Tokenizer
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.sampler import DrawOptions
from llmrl.envs.sources import load_rows

Split = Literal["train", "test"]
Dataset = str | Path | Iterable[Row]
"""A source of `load_rows`."""
Rows = list[dict[str, Any]]
_FIRST_TEST_SEED = 1_000_000

REASONING_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think></think> and <answer></answer> tags, respectively, i.e., "
    "<think>reasoning process here</think> <answer>answer here</answer>."
)
"""DeepSeek-R1's prompt (https://arxiv.org/abs/2501.12948, table 1)."""


class TaskOptions(DrawOptions, total=False):
    """Options that all task environments share; see `DatasetChatEnv`.

    `num_envs` is 1 by default, as in TorchRL, so a reset returns a batch `[1]`; with None, batches
    have any shape. `max_steps` limits the turns. Without `compute_reward`, conversations are
    neither ended nor scored. Rewards need a `tokenizer` if `input_mode` is not `history`.
    """

    batch_size: Sequence[int] | int | None
    num_envs: int | None
    device: torch.device | None
    tokenizer: Tokenizer | None
    template_kwargs: Mapping[str, object] | None
    input_mode: InputMode
    max_steps: int | None
    compute_reward: bool


class TaskEnv(KnownArguments, TransformedEnv):
    """A `DatasetChatEnv` over the problems of a task, with its reward appended.

    Args:
        problems: rows with a column `query` and the columns that the reward reads.
        reward: transform that ends and scores conversations.
        reasoning: whether the prompt also asks for `<think>` and `<answer>` tags.
        chat_env: class of the inner environment.

    Example:
        >>> from llmrl.transforms import RubricReward
        >>> def right(completion, answer):
        ...     return float(completion == answer)
        >>> problems = [{"query": "1 + 1 =", "answer": "2"}]
        >>> TaskEnv(problems, reward=RubricReward(right), options={"repeats": 2}).reset()[0]["answer"]
        '2'
    """

    def __init__(
        self,
        problems: Sequence[Row],
        *,
        reward: Transform,
        system_prompt: str | None = None,
        reasoning: bool = False,
        options: TaskOptions | None = None,
        chat_env: type[DatasetChatEnv] = DatasetChatEnv,
    ) -> None:
        prompts = [REASONING_PROMPT] * reasoning + [system_prompt] * (system_prompt is not None)
        options = {**(options or {})}
        if options.get("batch_size") is None:
            options.setdefault("num_envs", 1)
        drawn = {name: value for name, value in options.items() if name not in ("max_steps", "compute_reward")}
        input_mode = options.get("input_mode", "history")
        is_scored = options.get("compute_reward", True)
        if is_scored and input_mode != "history" and options.get("tokenizer") is None:
            raise ValueError(f"rewards of input_mode={input_mode!r} need tokenizer=, which reads the answer.")
        prompt = " ".join(map(str, prompts)) or None
        env = chat_env(problems, system_prompt=prompt, **drawn)  # type: ignore[arg-type]
        super().__init__(env, reward if is_scored else None)
        if options.get("max_steps") is not None:
            self.append_transform(StepCounter(options["max_steps"]))

    def reset_dataloader(self) -> Self:
        """Restart the problems; return the environment."""
        self.base_env.reset_dataloader()
        return self

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the position in the problems, and the curriculum if there is one."""
        return self.base_env.state_dict()

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Restore a saved position."""
        self.base_env.load_state_dict(state_dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Problems, prompt and reward of a task; the class attribute `task` of a `DeclaredTaskEnv`."""

    source: str | Callable[..., Sequence[Row]]
    """Hub name, or a function that generates the problems from `split`, optionally `seed`, and keyword arguments,
    which become options of the environment."""
    reward: Callable[..., Transform]
    """Function of `reasoning` that returns the transform which ends and scores conversations."""
    query: str = "query"
    """Column with the question."""
    columns: tuple[str, ...] = ("answer",)
    """Other columns that every row needs."""
    system_prompt: str | None = None
    reasoning: bool = True
    """Whether the prompt asks for `<think>` and `<answer>` tags, by default."""
    subset: str | None = None
    """Configuration of the hub's dataset."""
    complete_rows: Callable[[Rows], None] | None = None
    """Function that checks the rows and adds missing values in place."""
    shuffle: bool = False

    def own_options(self) -> dict[str, inspect.Parameter]:
        """Return the options of the task's problem generator."""
        if isinstance(self.source, str):
            return {}
        parameters = inspect.signature(self.source).parameters.items()
        return {name: each for name, each in parameters if name not in ("split", "seed")}

    def rows(self, dataset: Dataset | None, split: str, options: dict[str, object]) -> Rows:
        """Return the rows of a dataset, or the task's own; the generator's options are removed from `options`."""
        own = {name: options.pop(name) for name in self.own_options() if name in options}
        if dataset is not None:
            refuse_generator_options(own)
        elif isinstance(self.source, str):
            dataset = self.source
        else:
            if "seed" in inspect.signature(self.source).parameters:
                own["seed"] = options.get("seed", 0)
            dataset = self.source(split=split, **own)
        subset = self.subset if isinstance(dataset, str) and dataset == self.source else None
        rows = task_rows(dataset, split=split, subset=subset, query=self.query, columns=self.columns)
        if self.complete_rows is not None:
            self.complete_rows(rows)
        return rows


class DeclaredTaskEnv(TaskEnv):
    """A `TaskEnv` defined by its class attribute `task`.

    Args:
        dataset: hub name, local file or folder, or rows; by default the task's own problems.
        split: split of the problems, also the prefix of the group ids.
        reasoning: whether the prompt asks for `<think>` and `<answer>` tags; by default as the task declares.
        **options: `TaskOptions` and the options of the task's generator.

    Raises:
        FileNotFoundError: if the dataset does not exist.
        TypeError: if an option is unknown.
        ValueError: if the dataset is empty or lacks a column, or is given with an option of the generator.

    Example:
        >>> from llmrl.transforms import RubricReward
        >>> def right(completion, answer):
        ...     return float(completion == answer)
        >>> class Doubles(DeclaredTaskEnv):
        ...     task = Task(source="my/doubles", reward=lambda reasoning: RubricReward(right))
        >>> Doubles([{"query": "Double 2.", "answer": "4"}], repeats=4).reset()[0]["rollout", "group_id"]
        'train/0/0'
    """

    task: ClassVar[Task]

    def __init__(
        self,
        dataset: Dataset | None = None,
        *,
        split: Split = "train",
        reasoning: bool | None = None,
        **options: Any,
    ) -> None:
        task = self.task
        reasoning = task.reasoning if reasoning is None else reasoning
        super().__init__(
            task.rows(dataset, split, options),
            reward=task.reward(reasoning=reasoning),
            system_prompt=task.system_prompt,
            reasoning=reasoning,
            options={"name": split, "shuffle": task.shuffle, **options},  # type: ignore[arg-type]
        )

    def __init_subclass__(cls) -> None:
        # help() shows every option, and unknown ones are refused before anything is loaded.
        super().__init_subclass__()
        _, dataset, split, reasoning, _ = inspect.signature(DeclaredTaskEnv.__init__).parameters.values()
        own = [each.replace(kind=reasoning.kind) for each in cls.task.own_options().values()]
        shared = [
            inspect.Parameter(name, reasoning.kind, default=..., annotation=annotation)
            for name, annotation in TaskOptions.__annotations__.items()
        ]
        if isinstance(cls.task.source, str):
            dataset = dataset.replace(default=cls.task.source)
        reasoning = reasoning.replace(default=cls.task.reasoning)
        cls.__signature__ = inspect.Signature([dataset, split, *own, reasoning, *shared])

    @classmethod
    def make(cls, split: Split = "train", *, data: Dataset | None = None, **options: Any) -> Self:
        """Make the environment over a split of the task's own problems, or over `data`.

        Example:
            >>> from llmrl.envs import AdditionEnv
            >>> AdditionEnv.make("test", data=[{"query": "1 + 1 =", "answer": "2"}]).reset()[0]["rollout", "group_id"]
            'test/0/0'
        """
        return cls(data, split=split, **options)


Problem = TypeVar("Problem")
Maker = TypeVar("Maker", bound=Callable[..., TaskEnv])
TASKS: dict[str, tuple[Callable[..., TaskEnv], str]] = {}
"""Factory and one-line description of each named task environment."""


def named_task(name: str, about: str) -> Callable[[Maker], Maker]:
    """Return a decorator that registers a factory for `make_task_env`."""

    def enter(make: Maker) -> Maker:
        TASKS[name] = (make, about)
        return make

    return enter


def task_rows(
    dataset: Dataset, *, split: str | None, query: str, columns: Sequence[str] = (), subset: str | None = None
) -> Rows:
    """Return the rows of a dataset (see `load_rows`), with the column `query` copied from the question's column."""
    rows = load_rows(dataset, split=split, subset=subset, columns=(query, *columns))
    return [{**row, "query": row[query]} for row in rows]


def refuse_generator_options(given: Mapping[str, object]) -> None:
    """Raise ValueError if options of a generator are given together with a dataset, on which they have no effect."""
    if given:
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{options} is for generated problems, but the problems are given as data: leave one out.")


def is_in_split(problem: str, split: Split) -> bool:
    """Return whether a generated problem belongs to a split; a hash assigns a tenth of the problems to `test`."""
    return (zlib.crc32(problem.encode()) % 10 == 0) == (check_split(split) == "test")


def part_of(problems: list[Problem], split: str) -> list[Problem]:
    """Return the problems of a split: a quarter of them for `test`, the others for `train`."""
    num_test = len(problems) // 4
    return problems[:num_test] if check_split(split) == "test" else problems[num_test:]


def first_seed(split: str) -> int:
    """Return the first seed of a split, for problems that are seeds."""
    return _FIRST_TEST_SEED if check_split(split) == "test" else 0


def check_split(split: str) -> str:
    """Return the split; raise ValueError if it is neither `train` nor `test`."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    return split
