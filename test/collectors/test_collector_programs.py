"""Random programs of a collector: environments, agents, scorers, tools, games, failures, limits, time-outs."""

from __future__ import annotations

import asyncio
import copy
import random
import zlib

import httpx
import pytest
from fuzzing import fuzz_seeds
from tensordict import TensorDictBase

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.collectors.groups import CollectionStalled
from llmrl.envs import (
    AgentEnv,
    DatasetChatEnv,
    Game,
    GameEnv,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    MixedEnv,
    ToolEnv,
)
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform
from llmrl.transforms import RubricReward, environment_parts

EXAMPLES = [{"role": "user", "content": "9?"}, {"role": "assistant", "content": "good"}]
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"data": [1]}}\n</tool_call>'
ANSWERS = ["good", "bad", "good and long, so long that it is cut", CALL.replace("NAME", "look")]
ANSWERS.append("\n".join(CALL.replace("NAME", name) for name in ("see", "look", "see")))


def value_of(name, messages, *, is_answered, row):
    """What a scorer of this name gives, from the record: None where it fails."""
    said = [message["content"] for message in messages if message["role"] == "assistant"] if is_answered else [""]
    if "fails" in name and row["number"] % 5 == 4:
        return None
    return (len(name) + row["number"]) * float("good" in said[-1])


def make_scorer(name):
    def score(completion, messages, number, things):
        assert things == [number]
        things.append("changed")
        for message in messages:
            message["content"] = "changed"
        if "fails" in name and number % 5 == 4:
            raise ValueError("fails")
        return (len(name) + number) * float("good" in completion)

    async def judge(completion, messages, number, things):
        return score(completion, messages, number, things)

    return RewardFn(judge if "slow" in name else score, name=name)


def look(data: list) -> str:
    """Look."""
    data.append("changed")
    return f"look {len(data)}"


def see(data: list) -> str:
    """See."""
    data.clear()
    return "see"


class Steps(MessageEnv):
    """Edits what it is given, says one dict again and again, and fails or hangs for some rows."""

    def __init__(self, row, does_hang):
        self.does_hang = does_hang
        self.number, self.num_turns = row["number"], 0
        row["things"].append("changed")
        self.told = {"role": "user", "content": "Go on."}

    async def init(self):
        if self.number % 7 == 6:
            raise ValueError("cannot begin")
        return [*EXAMPLES, {"role": "user", "content": f"number {self.number}"}]

    async def step(self, message):
        message["content"] = "changed"
        self.num_turns += 1
        self.told["content"] = f"turn {self.num_turns}"
        if self.number % 7 == 5 and self.num_turns == 2:
            raise ValueError("cannot go on")
        if self.does_hang and self.number % 7 == 4 and self.num_turns == 2:
            await asyncio.sleep(3600)
        return MessageStep([self.told], reward=0.25, is_done=self.num_turns > self.number % 3)


class Alternate(Game):
    roles = ("first", "second")

    def __init__(self, row):
        row["things"].append("changed")
        self.said, self.number = [], row["number"]

    def observe(self):
        return self.roles[len(self.said) % 2], f"{self.number}: {len(self.said)}"

    def act(self, text):
        self.said.append(text)

    def rewards(self):
        return {"first": 0.25, "second": 0.5} if len(self.said) > self.number % 3 else None

    def leave(self, role):
        return {"first": 0.0, "second": 0.0}


async def ask(row, model):
    """Ask as often as the row says, in one conversation or in new ones; fail, or return no score, for some rows."""
    number = row["number"]
    row["things"].append("changed")
    messages = [{"role": "user", "content": f"{number}?"}]
    async with httpx.AsyncClient(base_url=model.base_url, timeout=600) as client:
        for turn in range(number % 4):
            asked = {"model": model.name, "messages": messages}
            answer = await client.post(
                "/chat/completions", json=asked, headers={"Authorization": f"Bearer {model.api_key}"}
            )
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
            if number % 2:
                messages = []
            messages.append({"role": "user", "content": f"{number}, {turn}?"})
    if number % 6 == 5:
        raise ValueError("the agent fails")
    return AGENT_RESULTS[number % 6]


AGENT_RESULTS = [1.0, {"asked": 0.25, "told": 0.5}, None, "no score", 0.5]


class Box:
    def reset(self, things):
        things.append("changed")
        self.num_calls = 0

    def look(self, data: list) -> str:
        """Look."""
        self.num_calls += 1
        return f"look {self.num_calls}"

    def get_reward(self):
        return 0.125 * self.num_calls


def make_env(kind, random_, repeats, names, *, does_hang):
    rows = [{"number": number, "things": [number]} for number in range(random_.randint(2, 9))]
    options = {"repeats": repeats, "num_epochs": 1, "shuffle": random_.random() < 0.5}
    if kind == "steps":
        env = MessageChatEnv(lambda row: Steps(row, does_hang), rows, **options)
    elif kind == "agent":
        env = AgentEnv(ask, rows, **options)
    elif kind == "game":
        env = GameEnv(Alternate, rows, roles=Alternate.roles, **options)
    elif kind == "box":
        rows = [{**row, "prompt": [*EXAMPLES, {"role": "user", "content": f"{row['number']}"}]} for row in rows]
        env = ToolEnv(Box, rows, **options)
    else:
        rows = [{**row, "query": [*EXAMPLES, {"role": "user", "content": f"{row['number']}?"}]} for row in rows]
        env = DatasetChatEnv(rows, **options)
        for tools in random_.choice([[], [[look, see]], [[look], [see]], [[see], [look]]]):
            env = env.append_transform(ToolTransform(tools))
    while names:
        size = random_.randint(1, len(names))
        env = env.append_transform(RubricReward(Rubric(*map(make_scorer, names[:size]))))
        names = names[size:]
    return env, rows


@pytest.mark.usefixtures("takes_long")
def test_every_rollout_of_a_random_program_is_counted_once_and_rewarded_by_all_its_scorers(renderer):
    for seed in fuzz_seeds(6):
        play_program(seed, renderer)


def delivered(collector):
    """Yield every batch, and None where a program stalls, since its prompts are all too long; then it goes on."""
    while True:
        try:
            yield collector.next()
        except CollectionStalled:
            yield None
        except StopIteration:
            return


def play_program(seed, renderer):
    random_ = random.Random(seed)
    repeats = random_.choice([2, 4])
    kinds = random_.sample(["steps", "game", "box", "chat", "agent"], random_.choice([1, 1, 2]))
    names = {kind: random_.sample(["one", "three", "slow", "slower", "fails"], random_.randint(0, 3)) for kind in kinds}
    names = {kind: chosen or ["one"] * (kind == "chat") for kind, chosen in names.items()}
    timeouts = random_.choice([{}, {}, {"step_timeout_seconds": 2.0}, {"rollout_timeout_seconds": 3.0}])
    made = {kind: make_env(kind, random_, repeats, names[kind], does_hang=bool(timeouts)) for kind in kinds}
    before = copy.deepcopy({kind: rows for kind, (_, rows) in made.items()})
    env = MixedEnv({kind: one for kind, (one, _) in made.items()}) if len(kinds) > 1 else made[kinds[0]][0]
    is_varied = random_.random() < 0.5

    def answer(prompt_ids):
        digest = zlib.crc32(f"{seed} {prompt_ids}".encode())
        return ANSWERS[digest % (len(ANSWERS) if is_varied else 2)] + "<|im_end|>"

    engine = ScriptedEngine(answer, encode=renderer.encode, decode=renderer.decode)
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": random_.choice([8, 200])})
    size = random_.randint(1, 3)
    shape = random_.choice(
        [
            {"groups_per_batch": size}, {"tokens_per_batch": 40 * size}, {"dialog_turns_per_batch": 4 * size},
            {"yield_completed_trajectories": True}, {"yield_only_last_steps": True, "dialog_turns_per_batch": size},
        ]
    )  # fmt: skip
    limits = RolloutLimits(
        max_turns=random_.choice([1, 2, 5]), max_prompt_tokens=random_.choice([None, 60, 110]), **timeouts
    )
    counted, num_rows_tokens, num_steps = [], 0, 0
    with LLMCollector(env, policy=policy, limits=limits, **shape) as collector:
        for batch in delivered(collector):
            counted += collector.rollouts
            assert sum(collector.report.num_by_status.values()) == len(collector.rollouts)
            if batch is None:
                continue
            assert isinstance(batch, TensorDictBase)
            if "groups_per_batch" in shape or "tokens_per_batch" in shape:
                num_rows_tokens += sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0))
            num_steps += batch.shape[0]
        known = set(map(id, counted))
        counted += [one for one in collector.rollouts if id(one) not in known]
    told = f"seed {seed}: {kinds} {names} {shape} {limits}"
    drawn = [f"{kind if len(kinds) > 1 else 'train'}/0/{row}/{sample}" for kind in kinds for row in
             range(len(before[kind])) for sample in range(repeats)]  # fmt: skip
    assert sorted(one.rollout_id for one in counted) == sorted(drawn), told
    assert {kind: rows for kind, (_, rows) in made.items()} == before, told
    num_trained = num_stepped = 0
    for one in counted:
        kind = one.env or kinds[0]
        assert one.status.is_settled, (told, one)
        assert one.columns["things"] == [one.columns["number"]], (told, one)
        if one.reason == "timeout" and not one.messages:
            continue  # It ended while it was opened, and has no score; or its agent had said nothing yet.
        expected = rewards_by_hand(one, kind, names[kind], made[kind][0])
        assert one.is_scored == bool(expected), (told, one.rollout_id, one.status, one.reason, one.error)
        if expected:
            rewards = [pytest.approx(reward) for reward in expected]
            assert one.reward in rewards, (told, one.rollout_id, one.messages, one.breakdown, expected)
            num_trained += one.num_completion_tokens
            num_stepped += len(one.steps) if one.num_completion_tokens else 0
        calls = [call["function"]["name"] for message in one.messages for call in message.get("tool_calls") or ()]
        results = [message["name"] for message in one.messages if message["role"] == "tool"]
        if kind == "chat" and results and {"look", "see"} <= set(results):
            assert results == calls[: len(results)], (told, one.messages)
    if "groups_per_batch" in shape or "tokens_per_batch" in shape:
        assert num_rows_tokens == num_trained, told
    elif "yield_only_last_steps" not in shape:
        assert num_steps == num_stepped, told


def rewards_by_hand(rollout, kind, names, env):
    """The rewards that a record allows; none if the rollout failed, or one of its scorers."""
    number = rollout.columns["number"]
    values = {
        name: value_of(name, rollout.messages, is_answered=rollout.num_turns > 0, row={"number": number})
        for name in names
    }
    if not rollout.status.is_success or None in values.values():
        return []
    rubrics = [part.rubric for part in environment_parts(env) if isinstance(part, RubricReward)] if names else []
    shares = [[values[name] for name in rubric.names if name in values] for rubric in rubrics]
    score = sum(sum(share) / len(share) for share in shares if share)
    num_looks = sum(str(one["content"]).startswith("look ") for one in rollout.messages)
    is_timed_out = rollout.reason == "timeout"  # perhaps while its last turn was stepped
    own = {"chat": [0.0]}
    own["box"] = [0.125 * count for count in range(0 if is_timed_out else num_looks, num_looks + 1)]
    own["steps"] = [0.25 * (rollout.num_turns - is_cut) for is_cut in range(1 + is_timed_out)]
    # One of the players may have met a limit, and left.
    own["game"] = [{"first": 0.25, "second": 0.5}[rollout.role or "first"], 0.0]
    if rollout.reason:  # an agent was refused an answer, or timed out, and returned nothing
        own["agent"] = [0.0] if names else []
    else:
        own["agent"] = [[1.0], [0.75], [0.0] if names else [], [], [0.5], []][number % 6]
    return [reward + score for reward in own[kind]]
