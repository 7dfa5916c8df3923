"""Self-play: a tiny model that takes stones at random is trained at Nim, by playing both sides."""

from __future__ import annotations

import random
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmrl import GRPOLoss, LLMCollector, MCAdvantage, TransformersEngine, TransformersWrapper, train_step
from llmrl.envs import Game, GameEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import make_tiny_model

ROLES = ("first", "second")
ROWS = [{"stones": stones} for stones in (4, 5, 7, 8)]  # of 3, 6, ... whoever begins has lost


class Nim(Game):
    """Take one or two of the stones; who takes the last one wins."""

    roles = ROLES

    def __init__(self, stones: int) -> None:
        self.stones, self.turn, self.winner = stones, 0, ""

    def observe(self) -> tuple[str, str]:
        return ROLES[self.turn], str(self.stones)

    def act(self, text: str) -> None:
        taken = int(text) if text in ("1", "2") else self.stones + 1  # what is no move has lost
        self.stones -= taken
        if self.stones <= 0:
            self.winner = ROLES[self.turn if self.stones == 0 else 1 - self.turn]
        self.turn = 1 - self.turn

    def rewards(self) -> dict[str, float] | None:
        return {role: float(role == self.winner) for role in ROLES} if self.winner else None

    def leave(self, role: str) -> dict[str, float]:
        return {one: float(one != role) for one in ROLES}


def teach_the_moves(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_steps: int = 40) -> None:
    """Teach a random model to answer 1 or 2, each as often, whatever it is told."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moves = torch.tensor([tokenizer.encode(move)[0] for move in "12"])
    for _ in range(num_steps):
        texts = []
        for _ in range(8):
            chat = []
            for _ in range(2):
                chat += [{"role": "user", "content": random.choice("345678")}]
                chat += [{"role": "assistant", "content": random.choice("12")}]
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
        ids = tokenizer(texts, return_tensors="pt").input_ids
        is_move = torch.isin(ids, moves)
        is_learnt = is_move | is_move.roll(1, dims=1)  # moves, and the end of the turn after them
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids.where(is_learnt, -100)).loss.backward()
        optimizer.step()


def share_won(policy: LLMWrapperBase, num_games: int, seed: int) -> float:
    """Return the share of games that are won against random moves, half of them as the side that begins."""
    dice = random.Random(seed)
    won = []
    for role, other in zip(ROLES, reversed(ROLES), strict=True):
        env = GameEnv(
            lambda row: Nim(row["stones"]), ROWS, roles=ROLES, opponents={other: lambda messages: dice.choice("12")}
        )
        with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
            won += [rollout.reward for rollout in collector.play(num_games // 2) if rollout.role == role]
    return sum(won) / len(won)


def main(engine: object = None, *, num_steps: int = 3, num_games: int = 40, seed: int = 0) -> list[float]:
    """Train, and return the share of games won against random moves every ten steps."""
    torch.manual_seed(seed)
    random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    teach_the_moves(model, tokenizer)
    playing = TransformersEngine(model, tokenizer=tokenizer, max_num_seqs=256, seed=seed)
    policy = LLMWrapperBase(playing, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2})
    loss = GRPOLoss(TransformersWrapper(model, generate=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    env = GameEnv(lambda row: Nim(row["stones"]), ROWS, roles=ROLES, repeats=32, seed=seed)
    curve = [share_won(policy, num_games, seed)]
    with LLMCollector(env, policy=policy, groups_per_batch=4, postproc=MCAdvantage(by="role")) as collector:
        for step, batch in zip(range(1, num_steps + 1), collector, strict=False):
            train_step(loss, batch, optimizer)
            if step % 10 == 0 or step == num_steps:
                curve.append(share_won(policy, num_games, seed))
                print(f"step {step}: {curve[-1]:.2f} of the games against random moves are won, {curve[0]:.2f} before")
    return curve


if __name__ == "__main__":
    main(num_steps=60, num_games=200)
