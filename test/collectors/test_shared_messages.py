"""Other people's functions are given messages and rows of their own: whatever they change there stays theirs."""

from __future__ import annotations

import copy
import json

import pytest
from tensordict import NonTensorData, TensorDict

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import History
from llmrl.envs import (
    AgentEnv,
    ChatEnv,
    DatasetChatEnv,
    Game,
    GameEnv,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    ToolEnv,
)
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric, Score
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform
from llmrl.transforms import RubricReward


def spoil(value):
    """Change whatever can be changed within a value."""
    if isinstance(value, dict):
        for entry in list(value.values()):
            spoil(entry)
        value["content"] = "spoiled"
    elif isinstance(value, list):
        for entry in value:
            spoil(entry)
        value.append({"role": "user", "content": "spoiled"})
    elif isinstance(value, tuple | set):
        for entry in value:
            spoil(entry)
        if isinstance(value, set):
            value.add("spoiled")


def make_rows():
    query = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
        ]},
        {"role": "tool", "content": "1"},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    return [{"query": query, "answer": ["2", {"of": {"a", "b"}}], "pair": ([1], 2)}]


def play(renderer, env, num_rollouts=2, script=("1<|im_end|>",), **options):
    policy = LLMWrapperBase(ScriptedEngine(script, encode=renderer.encode), renderer=renderer)
    with LLMCollector(env, policy=policy, groups_per_batch=1, **options) as collector:
        rollouts = collector.play(num_rollouts)
    return rollouts, [renderer.decode(ids) for ids, _, _ in policy.engine.requests]


def changing_reward(messages, answer, pair, query):
    was_new = float(messages[0]["content"] != "spoiled" and len(answer) == 2 and len(pair[0]) == 1 and len(query) == 4)
    for value in (messages, answer, pair, query):
        spoil(value)
    return was_new


async def changing_judge(messages, answer, pair, query):
    return changing_reward(messages, answer, pair, query)


class ChangingRubric(Rubric):
    """Is given the inputs themselves."""

    async def score(self, rollout):
        spoil(rollout.messages)
        spoil(rollout.columns)
        return Score(1.0, {"changing_reward": 1.0})


class ChangingGroupRubric(ChangingRubric):
    async def score_group(self, rollouts):
        return [await self.score(rollout) for rollout in rollouts]


@pytest.mark.parametrize(
    "rubric",
    [
        Rubric(changing_reward, changing_judge),
        Rubric(changing_reward),
        ChangingRubric(changing_reward),
        ChangingGroupRubric(changing_reward),
    ],
    ids=["judge", "function", "rubric", "group rubric"],
)
def test_a_reward_changes_neither_data_set_nor_record_nor_what_others_are_given(renderer, rubric):
    rows = make_rows()
    env = DatasetChatEnv(rows, repeats=2).append_transform(RubricReward(rubric))
    rollouts, prompts = play(renderer, env, 4)
    assert rows == make_rows()
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4 and len(set(prompts)) == 1
    for rollout in rollouts:
        assert list(rollout.messages[:4]) == make_rows()[0]["query"] and rollout.messages[4]["content"] == "1"
        assert rollout.columns["answer"] == make_rows()[0]["answer"]


class Changing(MessageEnv):
    """Edits what it is given and what it has returned, and says one and the same dict each time."""

    def __init__(self, item):
        spoil(item)
        self.opening = [{"role": "user", "content": "Begin."}]
        self.told = {"role": "user", "content": "0"}
        self.info = {"list": []}
        self.num_turns = 0

    async def init(self):
        return self.opening

    async def step(self, message):
        spoil(message)
        spoil(self.opening)
        self.num_turns += 1
        self.told["content"] = f"turn {self.num_turns}"
        self.info["list"].append(self.num_turns)
        name = f"info{self.num_turns}"
        return MessageStep([self.told], info={name: self.info["list"]}, is_done=self.num_turns == 3)


def test_a_message_environment_that_edits_and_reuses_dicts_changes_no_history(renderer):
    rows = [{"answer": ["2"]}]
    [rollout], prompts = play(
        renderer, MessageChatEnv(Changing, rows), 1, ("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    )
    assert rows == [{"answer": ["2"]}] and rollout.columns["answer"] == ["2"]
    said = [(message["role"], message["content"]) for message in rollout.messages]
    assert said == [
        ("user", "Begin."),
        ("assistant", "a"), ("user", "turn 1"), ("assistant", "b"), ("user", "turn 2"),
        ("assistant", "c"), ("user", "turn 3"),
    ]  # fmt: skip
    assert rollout.info == {"info1": [1], "info2": [1, 2], "info3": [1, 2, 3]}
    assert [prompts[-1].count(text) for text in ("Begin.", "turn 1", "turn 2", "spoiled")] == [1, 1, 1, 0]


CALL = '<tool_call>\n{"name": "change", "arguments": {"data": {"a": [1]}}}\n</tool_call><|im_end|>'


def test_a_tool_that_edits_its_arguments_changes_no_message(renderer):
    def change(data: dict) -> str:
        """Change what it is given."""
        spoil(data)
        return "done"

    env = DatasetChatEnv(["Hi"]).append_transform(ToolTransform([change]))
    [rollout], _ = play(renderer, env, 1, (CALL, "1<|im_end|>"), limits=RolloutLimits(max_turns=2))
    [call] = rollout.messages[-3]["tool_calls"]
    assert call["function"]["arguments"] == {"data": {"a": [1]}} and rollout.messages[-2]["content"] == "done"


class Opening:
    def reset(self, **row):
        spoil(row["answer"])
        spoil(row["prompt"])

    def change(self, data: dict) -> str:
        """Change what it is given."""
        spoil(data)
        return "done"


def test_an_instance_of_tools_that_edits_its_row_changes_neither_data_set_nor_prompt(renderer):
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "answer": ["2"]}]
    before = copy.deepcopy(rows)

    def seen(answer, messages):
        return float(answer == ["2"] and messages[0]["content"] == "Hi")

    rollouts, prompts = play(renderer, ToolEnv(Opening, rows, rubric=Rubric(seen), repeats=2), 2)
    assert rows == before and [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert "spoiled" not in "".join(prompts)


class Talk(Game):
    roles = ("policy", "other")

    def __init__(self, row):
        spoil(row)
        self.said = []

    def observe(self):
        return self.roles[len(self.said) % 2], f"said {len(self.said)}"

    def act(self, text):
        self.said.append(text)

    def rewards(self):
        return {"policy": 1.0, "other": 0.0} if len(self.said) == 4 else None


def test_an_opponent_that_edits_its_view_is_given_the_true_one_next_time(renderer):
    views, rows = [], [{"answer": ["2"]}]

    def opponent(messages):
        views.append([message["content"] for message in messages])
        spoil(messages)
        return "yes"

    env = GameEnv(Talk, rows, roles=Talk.roles, opponents={"other": opponent}, system_prompt="Talk.")
    play(renderer, env, 1)
    assert views == [["Talk.", "said 1"], ["Talk.", "said 1", "yes", "said 3"]] and rows == [{"answer": ["2"]}]


def test_an_agent_that_edits_its_row_changes_neither_data_set_nor_rewards(renderer):
    def agent(row, model):
        spoil(row)
        return 1.0

    def seen(answer):
        return float(answer == ["2"])

    rows = [{"query": "Hi", "answer": ["2"]}]
    env = AgentEnv(agent, rows).append_transform(RubricReward(Rubric(seen)))
    [rollout], _ = play(renderer, env, 1)
    assert rows == [{"query": "Hi", "answer": ["2"]}] and rollout.reward == 2.0
    assert rollout.columns == {"query": "Hi", "answer": ["2"]}


def test_a_query_is_read_once_by_an_environment_that_is_stepped_by_hand():
    query = make_rows()[0]["query"]
    data = ChatEnv().reset(TensorDict(query=NonTensorData(query)))
    spoil(query)
    assert json.dumps(data["history"].prompt.to_chats()) == json.dumps(make_rows()[0]["query"])


def test_a_history_has_copies_of_the_messages_that_it_is_given():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    history = History.from_chats([message])
    longer = history.append(message)
    spoil(message)
    assert longer.chats == ({"role": "user", "content": [{"type": "text", "text": "a"}]},) * 2
