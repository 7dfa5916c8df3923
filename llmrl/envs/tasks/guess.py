"""Number guessing with hints: a minimal multi-turn task."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Unpack

from tensordict import TensorDictBase

from llmrl._utils.arguments import check_choice
from llmrl.data import ChatHistory, History, Message, text_of
from llmrl.data.tensordicts import container_of, plain
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.tasks.task import Split, TaskEnv, TaskOptions, check_split, named_task
from llmrl.rewards import RewardFn, Rubric
from llmrl.transforms import RubricReward

MAX_GUESSES = 5
_NUMBER = re.compile(r"\d{1,9}")


def guess_problems(highest: int = 10, *, seed: int = 0) -> list[dict[str, object]]:
    """Return one game for each number from 1 to `highest` (at least 2), in random order.

    Example:
        >>> guess_problems(2)[0].keys()
        dict_keys(['query', 'answer', 'highest'])
    """
    if highest < 2:
        raise ValueError(f"highest must be at least 2, or there is nothing to guess; got {highest}.")
    query = _range(1, highest)
    problems = [{"query": query, "answer": number, "highest": highest} for number in range(1, highest + 1)]
    random.Random(seed).shuffle(problems)
    return problems


def guesses(messages: Sequence[Message]) -> list[int | None]:
    """Return the guess of each assistant message; None unless it contains exactly one number.

    Example:
        >>> guesses([{"role": "assistant", "content": "Is it 5?"}, {"role": "assistant", "content": "5 or 6"}])
        [5, None]
    """
    texts = (text_of(message.get("content")) for message in messages if message["role"] == "assistant")
    return [int(found[0]) if len(found := _NUMBER.findall(text)) == 1 else None for text in texts]


def hint(guessed: Sequence[int | None], answer: int, highest: int) -> str | None:
    """Return the response to the last guess, or None if the game is over.

    Example:
        >>> hint([5], 7, 10), hint([5, 7], 7, 10)
        ('Higher. Guess a number from 6 to 10.', None)
    """
    if guessed[-1] == answer or len(guessed) >= MAX_GUESSES:
        return None
    wrong = [number for number in guessed if number is not None]
    low = max([1, *(number + 1 for number in wrong if number < answer)])
    high = min([highest, *(number - 1 for number in wrong if number > answer)])
    last = guessed[-1]
    if last is None:
        return f"That is not one number. {_range(low, high)}"
    return f"{'Higher' if last < answer else 'Lower'}. {_range(low, high)}"


def few_guesses(messages: Sequence[Message], answer: int) -> float:
    """Return 1 minus 0.1 per wrong guess if the number was found, else 0.

    Example:
        >>> few_guesses([{"role": "assistant", "content": text} for text in ("5", "8", "7")], 7)
        0.8
    """
    guessed = guesses(messages)
    return (11 - len(guessed)) / 10 if guessed and guessed[-1] == answer else 0.0


def _range(low: int, high: int) -> str:
    return f"Guess a number from {low} to {high}."


class _HintingEnv(DatasetChatEnv):
    def _stepped(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._stepped(tensordict)
        if tensordict.batch_size or self.input_mode != "history":
            return step
        messages = tensordict.get(("history", "full")).chats
        guessed = guesses(messages)
        answer, highest = (plain(tensordict.get(name)) for name in ("answer", "highest"))
        if guessed and (said := hint(guessed, answer, highest)) is not None:
            prompt = History.from_chats((*messages, {"role": self.user_role, "content": said}), check=False)
            step.set("history", container_of(ChatHistory, {"prompt": prompt}))
        return step


class GuessEnv(TaskEnv):
    """A number-guessing game of five turns; a wrong guess is answered with "higher" or "lower" and the remaining range.

    The reward is 1 minus 0.1 per wrong guess, or 0 if the number is not found. Both splits contain the same games.
    For `highest=10`, bisection gets 0.81 on average and five distinct guesses that ignore the hints get 0.4.

    Args:
        split: `train`, which is shuffled by default, or `test`; also the prefix of the group ids.
        highest: largest possible number; the smallest is 1. ValueError is raised if it is less than 2.
        **options: see `TaskOptions`.

    Example:
        >>> GuessEnv(repeats=4).reset()[0]["history"].prompt.content[-1]
        'Guess a number from 1 to 10.'
    """

    def __init__(self, *, split: Split = "train", highest: int = 10, **options: Unpack[TaskOptions]) -> None:
        check_split(split)
        check_choice(("history",), input_mode=options.get("input_mode", "history"))  # a hint is a message
        super().__init__(
            guess_problems(highest, seed=options.get("seed", 0)),
            system_prompt="Guess the number. Answer with the number only, like this: 4",
            reward=RubricReward(Rubric(RewardFn(few_guesses), truncation_reward=0.0)),
            options={"name": split, "shuffle": split == "train", **options},
            chat_env=_HintingEnv,
        )


class GuessOptions(TaskOptions, total=False):
    """Options of `make_guess_env`; see `GuessEnv`."""

    highest: int


@named_task("guess", "a number in five guesses from hints, the smallest task of several turns")
def make_guess_env(split: Split = "train", **options: Unpack[GuessOptions]) -> GuessEnv:
    """Make a `GuessEnv`.

    Example:
        >>> make_guess_env("test").reset()[0]["rollout", "group_id"].split("/")[0]
        'test'
    """
    return GuessEnv(split=split, **options)
