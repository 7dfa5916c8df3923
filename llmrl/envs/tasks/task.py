"""`TaskEnv`: problems and how answers to them are rewarded, which is what a task environment is."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import torch
from torchrl.envs import StepCounter, Transform, TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import InputMode, Row, StateDict, Tokenizer
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.sources import load_rows

Split = Literal["train", "test"]
Dataset = str | Path | Iterable[Row]
"""What `load_rows` reads."""

REASONING_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think></think> and <answer></answer> tags, respectively, i.e., "
    "<think>reasoning process here</think> <answer>answer here</answer>."
)
"""DeepSeek-R1's prompt (https://arxiv.org/abs/2501.12948, table 1)."""


class TaskOptions(TypedDict, total=False):
    """How a task's problems are drawn; see `DatasetChatEnv`.

    `num_envs` is 1 as in TorchRL, so that a reset gives a batch `[1]`; with None, batches have any shape.
    With `max_steps` a `StepCounter` limits the turns. Without `compute_reward` conversations are neither ended nor
    scored. Rewards read messages: with another `input_mode` than `history` the `tokenizer` makes one of the answer.
    """

    repeats: int
    shuffle: bool
    seed: int
    num_epochs: int | None
    name: str
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
        problems: rows with a column `query` and those that the reward reads.
        reward: the transform that ends and scores conversations; with others before it, a `Compose`.
        system_prompt: system prompt of the conversation.
        reasoning: whether the prompt also asks for `<think>` and `<answer>`.
        options: options of drawing problems.
        chat_env: class of the environment that draws them.

    Raises:
        TypeError: if an option is unknown; the message has the nearest name.

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
        options = {"num_envs": 1, **(options or {})}
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
        """Begin the problems anew; see `DatasetChatEnv`."""
        self.base_env.reset_dataloader()
        return self

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the position in the problems, and a curriculum where there is one."""
        return self.base_env.state_dict()

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Continue from a saved position."""
        self.base_env.load_state_dict(state_dict)


def task_rows(
    dataset: Dataset, *, split: str | None, query: str, columns: Sequence[str] = (), subset: str | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a task's dataset that have all columns, with the column `query` under that name.

    Raises:
        FileNotFoundError, ValueError: see `load_rows`.

    Example:
        >>> task_rows([{"problem": "1 + 1 ="}], split=None, query="problem")
        [{'problem': '1 + 1 =', 'query': '1 + 1 ='}]
    """
    rows = load_rows(dataset, split=split, subset=subset, columns=(query, *columns))
    return [{**row, "query": row[query]} for row in rows]


def is_in_split(problem: str, split: Split) -> bool:
    """Return whether a generated problem belongs to a split: a tenth of all, by their text, are for testing.

    Raises:
        ValueError: for an unknown split.

    Example:
        >>> is_in_split("1 + 1 =", "train") != is_in_split("1 + 1 =", "test")
        True
    """
    return (zlib.crc32(problem.encode()) % 10 == 0) == (check_split(split) == "test")


def check_split(split: str) -> str:
    """Return a split's name, or an error.

    Raises:
        ValueError: when it is neither `train` nor `test`.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    return split
