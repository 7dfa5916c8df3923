"""Nim with one pile: take one or two stones; the last one wins. Trained by self-play, measured as the first player."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llmrl.data import Message
from llmrl.envs import Game, GameEnv

ROLES = ("first", "second")
RULES = "Take 1 or 2 stones. Who takes the last stone wins. Reply with 1 or 2 only."
STONES = (4, 5, 7, 8)
"""Numbers of stones at the beginning. Multiples of three are left out, because then the first player would lose."""


class Nim(Game):
    """A pile of stones; the players take one or two stones in turn."""

    roles = ROLES

    def __init__(self, stones: int) -> None:
        self.stones, self.turn, self.winner = stones, 0, ""

    def observe(self) -> tuple[str, str]:
        return ROLES[self.turn], f"There are {self.stones} stones."

    def act(self, text: str) -> None:
        taken = int(text) if text.strip() in ("1", "2") else 0
        self.stones -= taken
        if not 0 < taken <= self.stones + taken:  # no valid move, or more stones than there are: the other player wins
            self.winner = ROLES[1 - self.turn]
        elif self.stones == 0:
            self.winner = ROLES[self.turn]
        self.turn = 1 - self.turn

    def rewards(self) -> dict[str, float] | None:
        return {role: float(role == self.winner) for role in ROLES} if self.winner else None

    def leave(self, role: str) -> dict[str, float]:
        return {one: float(one != role) for one in ROLES}


def move_perfectly(messages: Sequence[Message]) -> str:
    """Return the move that leaves a multiple of three if there is one, else take one stone."""
    stones = int("".join(filter(str.isdecimal, str(messages[-1]["content"]))))
    return str(stones % 3 or 1)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> GameEnv:
    """Return the game: in `train`, the policy plays both roles; in `test`, it plays against perfect moves.

    In `test`, the policy begins and can always win, but only if all of its moves are right.
    """
    opponents = {} if split == "train" else {"second": move_perfectly}
    rows = [{"stones": stones} for stones in STONES]
    return GameEnv(
        lambda row: Nim(row["stones"]),
        rows,
        roles=ROLES,
        opponents=opponents,
        system_prompt=RULES,
        repeats=repeats,
        seed=seed,
        name=split,
        shuffle=split == "train",
    )


def conversations(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Return the content of `sft.jsonl`: random moves in equal numbers, which teach the format and not the strategy."""
    generator = random.Random(seed)
    moves = ["1", "2"] * (count // 2)
    generator.shuffle(moves)
    return [
        {
            "messages": [
                {"role": "system", "content": RULES},
                {"role": "user", "content": f"There are {generator.randint(2, 8)} stones."},
                {"role": "assistant", "content": move},
            ]
        }
        for move in moves
    ]


def share_won(seed: int = 0, num_games: int = 20_000) -> float:
    """Return the share of games that random moves win against perfect moves, which is the baseline."""
    generator = random.Random(seed)
    won = 0
    for number in range(num_games):
        game = Nim(STONES[number % len(STONES)])
        while game.rewards() is None:
            content = game.observe()[1]
            move = generator.choice("12") if game.turn == 0 else move_perfectly([{"role": "user", "content": content}])
            game.act(move)
        won += game.winner == "first"
    return won / num_games
