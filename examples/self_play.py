"""Self-play: a tiny model that makes random moves learns to win at Nim by playing both sides."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmrl import GRPOLoss, LLMCollector, MCAdvantage, TransformersEngine, TransformersWrapper, train_step
from llmrl.data import Message
from llmrl.envs import Game, GameEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import make_tiny_model

RULES = "You take 1 or 2."  # only tokens in the vocabulary of the player
ROLES = ("first", "second")
ROWS = [{"stones": stones} for stones in (4, 5, 7, 8)]  # with 3, 6, ... stones the first player loses


class Nim(Game):
    """A move is the number of stones and then the number to take, 1 or 2, as in "52". Taking the last stone wins."""

    roles = ROLES

    def __init__(self, stones: int) -> None:
        self.stones, self.turn, self.winner = stones, 0, ""

    def observe(self) -> tuple[str, str]:
        return ROLES[self.turn], str(self.stones)

    def act(self, text: str) -> None:
        is_move = text[1:] in ("1", "2")
        self.stones -= int(text[1:]) if is_move else 0  # taking two of one stone takes one
        if not is_move or self.stones <= 0:  # an invalid move loses
            self.winner = ROLES[self.turn if is_move else 1 - self.turn]
        self.turn = 1 - self.turn

    def rewards(self) -> dict[str, float] | None:
        return {role: float(role == self.winner) for role in ROLES} if self.winner else None

    def leave(self, role: str) -> dict[str, float]:
        return {one: float(one != role) for one in ROLES}


def move_at_random(messages: Sequence[Message]) -> str:
    """Take one or two with equal probability."""
    return f"{messages[-1]['content']}{random.choice('12')}"


def move_perfectly(messages: Sequence[Message]) -> str:
    """Leave a multiple of three if possible."""
    stones = int(messages[-1]["content"])
    return f"{stones}{stones % 3 or 1}"


def make_player(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a random one-layer model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder))
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "initializer_range": 0.1}
    config = AutoConfig.from_pretrained(folder, vocab_size=10_240, **shape)  # the game uses no token ids above
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def teach_to_move(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_steps: int) -> None:
    """Teach a random model to repeat the number in its prompt, and then say 1 or 2 with equal probability.

    A model that did not read the number would learn the move that is better on average, and always make it.
    """
    texts = []
    for stones in [*"12345678"] * 32:
        chat: list[Message] = [{"role": "system", "content": RULES}]
        for content in (stones, random.choice("12345678")):
            chat.append({"role": "user", "content": content})
            chat.append({"role": "assistant", "content": move_at_random(chat)})
        texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
    ids = tokenizer(texts, return_tensors="pt").input_ids
    opening = torch.tensor(tokenizer.encode("<|im_start|>assistant\n"))
    starts = (ids[0].unfold(0, len(opening), 1) == opening).all(-1).nonzero()
    places = (starts + len(opening) - 1 + torch.arange(3)).flatten()  # before the number, the move, the end of the turn
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        rows = ids[torch.randint(len(ids), (16,))]
        optimizer.zero_grad()
        logits = model.lm_head(model.model(input_ids=rows).last_hidden_state[:, places])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, places + 1].flatten()).backward()
        optimizer.step()


def share_won(
    policy: LLMWrapperBase, opponent: Callable[[Sequence[Message]], str], roles: Sequence[str], num_games: int
) -> float:
    """Return the share of games that the policy wins, with equally many games in each role."""
    rewards: list[float] = []
    for role in roles:
        opponents = {other: opponent for other in ROLES if other != role}
        env = make_env(opponents=opponents)
        with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
            rewards += [rollout.reward for rollout in collector.play(num_games // len(roles))]
    return sum(rewards) / len(rewards)


def make_env(**options: Any) -> GameEnv:
    """Return the environment; the policy plays both sides unless opponents are given."""
    return GameEnv(lambda row: Nim(row["stones"]), ROWS, roles=ROLES, system_prompt=RULES, **options)


def main(
    engine: object = None, *, num_steps: int = 1, num_games: int = 8, num_lessons: int = 60, seed: int = 0
) -> list[tuple[float, float]]:
    """Train; return the shares of games won against random moves and, as first player, perfect moves, over time."""
    torch.manual_seed(seed)
    random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = make_player(folder)
    teach_to_move(model, tokenizer, num_lessons)
    playing = TransformersEngine(model, tokenizer=tokenizer, max_num_seqs=256, seed=seed)
    policy = LLMWrapperBase(playing, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})
    loss = GRPOLoss(TransformersWrapper(model, generate=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve: list[tuple[float, float]] = []

    def measure(step: int) -> None:
        against_random = share_won(policy, move_at_random, ROLES, num_games)
        curve.append((against_random, share_won(policy, move_perfectly, ROLES[:1], num_games)))
        print("step {}: {:.2f} of the games won, {:.2f} against perfect moves".format(step, *curve[-1]), flush=True)

    measure(0)
    env = make_env(repeats=32, seed=seed)
    with LLMCollector(env, policy=policy, groups_per_batch=4, postproc=MCAdvantage(by="role")) as collector:
        for step, batch in zip(range(1, num_steps + 1), collector, strict=False):
            train_step(loss, batch, optimizer)
            if step % 10 == 0 or step == num_steps:
                measure(step)
    return curve


if __name__ == "__main__":
    main(num_steps=40, num_games=100, num_lessons=150)
