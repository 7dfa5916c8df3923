"""An environment that answers: a game of several turns, with one reward at its end."""

from __future__ import annotations

import random

from llmrl import MessageChatEnv, MessageEnv, MessageStep


class Guess(MessageEnv):
    """The policy guesses a number. An instance plays one conversation and holds the state of that conversation."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def init(self):
        """Return the first messages."""
        return [{"role": "user", "content": "I think of a number from 1 to 9. Reply with your guess only."}]

    async def step(self, message):
        """Answer the model's message, or end the conversation with a reward."""
        guess = message["content"].strip()
        if not guess.isdigit():
            return MessageStep([{"role": "user", "content": "A number, please."}])
        if int(guess) == self.number:
            return MessageStep(reward=1.0, is_done=True)
        return MessageStep([{"role": "user", "content": "higher" if int(guess) < self.number else "lower"}])


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> MessageChatEnv:
    """Return the environment; each game is played `repeats` times, and the conversations are compared."""
    numbers = list(range(1, 10)) * 8
    random.Random(f"{split} {seed}").shuffle(numbers)
    items = [{"number": number} for number in numbers]
    return MessageChatEnv(lambda item: Guess(item["number"]), items, name=split, repeats=repeats, seed=seed)
