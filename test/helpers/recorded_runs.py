"""A short run of a tiny model, recorded, and the command line that is asked about it."""

from __future__ import annotations

import io
import json
import zlib
from collections import Counter

import httpx
from rich.console import Console
from typer.testing import CliRunner

from llmrl import AgentEnv, DatasetChatEnv, RubricReward, TransformersEngine, train
from llmrl.cli.app import app

NUM_STEPS = 4
REWARDS = """
import random

def length(completion):
    return float(len(completion) % 7) / 7

def grade(completion):
    return length(completion)

def other_length(completion):
    return float(len(completion) % 7 + (len(completion) % 11 == 3)) / 7

def negative(completion):
    return -length(completion)

def noise(completion):
    return random.random()
"""


def length(completion):
    return float(len(completion) % 7) / 7


def make_env():
    env = DatasetChatEnv([f"{a} + 1 =" for a in range(6)], repeats=4, name="train", shuffle=True)
    return env.append_transform(RubricReward(length))


def ask_twice(row, model):
    """An agent that asks on in its conversation, then in a new one; the rollout has two training rows."""
    client = httpx.Client(base_url=model.base_url, headers={"Authorization": f"Bearer {model.api_key}"}, timeout=600)

    def answer(messages):
        asked = client.post("/chat/completions", json={"model": model.name, "messages": messages}).raise_for_status()
        return asked.json()["choices"][0]["message"]

    with client:
        messages = [{"role": "user", "content": row["query"]}]
        messages += [answer(messages), {"role": "user", "content": "And then?"}]
        said = [answer(messages)["content"], answer([{"role": "user", "content": "Well?"}])["content"]]
    return length("".join(said))


def make_agent():
    return AgentEnv(ask_twice, [{"query": f"{a} + 1 ="} for a in range(6)], repeats=4, name="train")


class SeededEngine(TransformersEngine):
    """Samples the same answers whichever requests happen to be decoded together, so that runs are alike."""

    def __init__(self, model):
        super().__init__(model)
        self._asked = Counter()

    async def generate(self, prompt_ids, sampling, **names):
        prompt = str(list(prompt_ids))
        self._asked[prompt] += 1
        seed = zlib.crc32(f"{prompt} {self._asked[prompt]}".encode())
        return await super().generate(prompt_ids, sampling.with_changes(seed=seed), **names)


def train_run(model, path, make_env=make_env, **options):
    """Train a tiny random model for some steps, and keep all batches."""
    engine = SeededEngine(model)
    settings = {"num_steps": NUM_STEPS, "groups_per_batch": 2, "max_new_tokens": 6, "learning_rate": 1e-2}
    settings |= {"keep_batches": True, "checkpoint_every": 3, "console": Console(file=io.StringIO())}
    try:
        return train(model, make_env(), path=path, **{"engine": engine, **settings, **options})
    finally:
        engine.shutdown()


def call(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def edit_jsonl(path, edit):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(edit(record)) + "\n" for record in records))
