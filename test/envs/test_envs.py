"""Environments keep TorchRL's contract in every mode and with every transform."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.envs import ParallelEnv, StepCounter, TransformedEnv, check_env_specs

from llmrl.collectors import LLMCollector
from llmrl.data import ChatHistory, RolloutStatus, StopReason, decide_status
from llmrl.data.tensordicts import RESERVED_ENTRIES, batch_elements
from llmrl.envs import (
    ChatEnv,
    DataLoadingPrimer,
    DatasetChatEnv,
    EndOfData,
    GymnasiumTextEnv,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    PromptSampler,
    addition_problems,
    make_addition_env,
)
from llmrl.envs.tasks.task import TaskEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine
from llmrl.transforms import PolicyVersion, RubricReward

DATASET = [{"query": "1 + 1 =", "answer": "2"}, {"query": "1 + 2 =", "answer": "3"}]


def answer_with(text):
    def policy(tensordict):
        elements = batch_elements(tensordict)
        for element in elements:
            prompt = element["history"].prompt
            full = prompt.append({"role": "assistant", "content": text})
            element["history"] = ChatHistory(prompt=prompt, full=full)
        return lazy_stack(elements, 0) if tensordict.batch_size else elements[0]

    return policy


def exact(completion, answer):
    return float(completion == answer)


@pytest.mark.parametrize("input_mode", ["history", "text"])
@pytest.mark.parametrize("batch_size", [None, (2,)])
def test_chat_env_passes_check_env_specs(input_mode, batch_size):
    env = ChatEnv(input_mode=input_mode, batch_size=batch_size)
    shape = batch_size or ()
    query = TensorDict({"query": "hi" if not shape else ["hi", "ho"]}, batch_size=shape)
    check_env_specs(env, tensordict=env.reset(query))


@pytest.mark.parametrize("batch_size", [None, (2,)])
def test_dataset_env_with_transforms_passes_check_env_specs(batch_size):
    env = DatasetChatEnv(DATASET, repeats=2, batch_size=batch_size)
    check_env_specs(env)
    check_env_specs(env.append_transform(RubricReward(exact)).append_transform(PolicyVersion()))


def test_tokens_mode_hands_ids_through():
    env = ChatEnv(input_mode="tokens")
    data = env.reset(TensorDict({"query": torch.tensor([1, 2])}))
    assert data["tokens", "prompt"].tolist() == [1, 2]
    data["tokens", "full"] = torch.tensor([1, 2, 3])
    assert env.step(data)["next", "tokens", "prompt"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("input_mode", "query", "wanted"),
    [
        ("tokens", "1 + 1 =", "token ids"),
        ("tokens", [{"role": "user", "content": "1 + 1 ="}], "token ids"),
        ("text", [{"role": "user", "content": "1 + 1 ="}], "text"),
    ],
)
def test_a_query_that_needs_a_tokenizer_is_refused_when_the_environment_is_built(input_mode, query, wanted):
    expected = f"input_mode='{input_mode}' needs tokenizer=, which renders 'query', or {wanted} there"
    with pytest.raises(ValueError, match=expected):
        DatasetChatEnv([{"query": query}], input_mode=input_mode)
    with pytest.raises(ValueError, match=expected):
        ChatEnv(input_mode=input_mode).reset(TensorDict(query=NonTensorData(query)))


def test_a_conversation_of_tokens_is_reset_beside_others():
    env = DatasetChatEnv([{"query": [1, 2]}, {"query": [3]}], input_mode="tokens", batch_size=2)
    data = env.reset()
    data["_reset"] = torch.tensor([[False], [True]])
    assert env.reset(data)[1]["tokens", "prompt"].tolist() == [1, 2]


@pytest.mark.parametrize("name", [1, ("a", "b"), None])
def test_a_column_whose_name_is_no_text_is_refused(name):
    rows = [{"query": "1 + 1 ="}, {"query": "2 + 2 =", name: "4"}]
    for make in (DatasetChatEnv, DataLoadingPrimer):
        with pytest.raises(TypeError, match=re.escape(f"a column named {name!r}; names must be texts")):
            make(rows)


@pytest.mark.parametrize("input_mode", ["text", "tokens"])
def test_rewards_of_text_and_tokens_read_the_prepared_query(tokenizer, input_mode):
    seen = []

    def reward(messages, query):
        seen.append((messages, query))
        return 1.0

    rows = [{"query": "7 + 8", "answer": "15"}]
    env = DatasetChatEnv(rows, prepare=lambda row: f"{row['query']} =", input_mode=input_mode, tokenizer=tokenizer)
    env = env.append_transform(RubricReward(reward))
    data = env.reset()
    response = "15<|im_end|>"
    data[input_mode, "response"] = torch.tensor(tokenizer.encode(response)) if input_mode == "tokens" else response
    assert env.step(data)["next", "reward"].item() == 1.0
    [(messages, query)] = seen
    assert [message["content"] for message in messages][-2:] == ["7 + 8 =", "15"]
    assert query == "7 + 8"  # the column as it is


def test_one_env_plays_batches_of_any_shape():
    env = ChatEnv(system_prompt="Be brief.")
    for shape in ((), (3,), (1,)):
        query = "hi" if not shape else ["hi"] * shape[0]
        data = answer_with("ho")(env.reset(TensorDict({"query": query}, batch_size=shape)))
        data = env.step(data)
        assert data["next", "reward"].shape == (*shape, 1, 1)
        assert data["next", "history"].prompt.batch_size == torch.Size(shape)


def test_a_parallel_env_plays_conversations(own_programs):
    def right(completion, answer):  # local, so that the processes get it by value
        return float(completion == answer)

    env = ParallelEnv(2, functools.partial(TransformedEnv, DatasetChatEnv(DATASET), RubricReward(right)))
    try:
        data = env.step(answer_with("2")(env.reset()))
        assert data["next", "history"].prompt.content == [["1 + 1 =", "2"]] * 2
        assert data["next", "reward"].flatten().tolist() == [1.0, 1.0] and data["next", "terminated"].all()
    finally:
        env.close()


def test_rollout_grows_the_conversation_by_one_answer_a_turn():
    env = ChatEnv()
    rollout = env.rollout(3, answer_with("ho"), auto_reset=False, tensordict=env.reset(TensorDict({"query": "hi"})))
    assert rollout[-1]["next", "history"].prompt.content == ["hi", "ho", "ho", "ho"]


def test_reset_without_a_query_says_what_is_missing():
    with pytest.raises(ValueError, match="'query'"):
        ChatEnv().reset()


def test_query_may_be_messages_with_few_shot_answers():
    messages = [
        {"role": "system", "content": "Own prompt."},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "1 + 2 ="},
    ]
    env = DatasetChatEnv([{"query": messages}], system_prompt="Not this one.")
    assert env.reset()["history"].prompt.to_chats() == messages


def test_groups_repeat_a_prompt_and_ids_differ_between_epochs():
    env = DatasetChatEnv(DATASET, repeats=2)
    data = env.reset(TensorDict(batch_size=[5]))
    assert list(data["rollout", "group_id"]) == ["train/0/0"] * 2 + ["train/0/1"] * 2 + ["train/1/0"]
    assert data["rollout", "sample_index"].tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repeats": 2.5}, r"repeats must be a whole number, got 2\.5"),
        ({"num_epochs": "2"}, "num_epochs must be a whole number, got '2'"),
        ({"name": None}, "name must be text, the prefix of group ids, got None"),
    ],
)
def test_groups_that_cannot_be_drawn_are_refused_when_the_environment_is_built(wrong, message):
    for make in (DatasetChatEnv, DataLoadingPrimer):
        with pytest.raises(ValueError, match=message):
            make(DATASET, **wrong)


def test_a_batch_without_a_conversation_is_refused():
    policy = LLMWrapperBase(ScriptedEngine(["a"]), input_mode="tokens", pad_output=True)
    for ask in (DatasetChatEnv(DATASET).reset, DatasetChatEnv(DATASET, num_envs=0).reset, policy):
        with pytest.raises(ValueError, match=r"a batch of shape \[0\] has no conversation; give at least one"):
            ask(TensorDict(batch_size=[0]))


def test_saved_position_continues_the_same_sequence():
    first = PromptSampler(DATASET, num_samples=2, shuffle=True, seed=3)
    for _ in range(7):
        first.draw()
    second = PromptSampler(DATASET, num_samples=2, shuffle=True, seed=3)
    second.load_state_dict(first.state_dict())
    assert [first.draw() for _ in range(9)] == [second.draw() for _ in range(9)]


def test_end_of_data_is_raised_after_the_last_epoch():
    env = DatasetChatEnv(DATASET, num_epochs=1)
    env.reset(TensorDict(batch_size=[2]))
    with pytest.raises(EndOfData):
        env.reset()


UNEVEN = [{"query": "a", "answer": "1"}, {"query": "b"}, {"query": "c", "level": 2, "answer": "3"}]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(
    "make",
    [
        DatasetChatEnv,
        lambda rows: ChatEnv().append_transform(DataLoadingPrimer(rows)),
    ],
)
def test_a_column_that_a_row_lacks_is_none_and_is_taken_from_no_other(make, order):
    rows, seen = [UNEVEN[place] for place in order], []

    def look(query, answer, level=0):
        seen.append((query, answer, level))
        return float(answer == "1")

    env = make(rows).append_transform(RubricReward(look))
    data = env.step(answer_with("1")(env.reset(TensorDict(batch_size=[3]))))
    expected = [(row["query"], row.get("answer"), row.get("level")) for row in rows]
    assert seen == expected
    assert data["next", "reward"].flatten().tolist() == [float(row.get("answer") == "1") for row in rows]


def test_rows_without_a_query_and_generated_rows_with_another_column_are_refused():
    with pytest.raises(ValueError, match="2 rows without 'query', the first is row 1"):
        DatasetChatEnv([{"query": "a"}, {"question": "b"}, {"query": None}])

    class Generated:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return UNEVEN[:2][::-1][index]

    env = DatasetChatEnv(Generated())
    with pytest.raises(ValueError, match=r"has the columns \['answer'\]"):
        env.reset(TensorDict(batch_size=[2]))


def test_columns_of_any_name_travel_to_the_reward_and_hurt_nothing(renderer):
    seen = []

    def look(conversation, text, tools, rollout, history, query):
        seen.append((conversation, text, tools, rollout, history))
        return 1.0

    rows = [{"query": f"q{n}", **{name: f"{name} {n}" for name in RESERVED_ENTRIES}} for n in range(2)]
    env = DatasetChatEnv(rows).append_transform(RubricReward(look))
    check_env_specs(env)
    policy = LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=renderer)
    with LLMCollector(env, policy=policy, groups_per_batch=2) as collector:
        assert [rollout.reward for rollout in collector.play(2)] == [1.0, 1.0]
    names = ("conversation", "text", "tools", "rollout", "history")
    assert sorted(seen) == [tuple(f"{name} {n}" for name in names) for n in range(2)]


@pytest.mark.parametrize("data_key", ["conversation", "text", "tools", "history", "prompt"])
def test_the_query_may_be_in_a_column_of_any_name(data_key):
    def same(**columns):
        return float(columns[data_key] == "a" and columns["query"] == "other")

    env = DatasetChatEnv([{data_key: "a", "query": "other"}], data_key=data_key).append_transform(RubricReward(same))
    data = env.step(answer_with("1")(env.reset()))
    assert data["history"].prompt.content == ["a"] and data["next", "reward"].item() == 1.0


def test_a_primer_refuses_columns_whose_names_mean_something_else():
    with pytest.raises(ValueError, match=r"\['conversation', 'tools'\] have names"):
        DataLoadingPrimer([{"query": "a", "tools": 1, "conversation": 2}])


def test_two_batch_shapes_are_refused_and_a_task_takes_either():
    with pytest.raises(ValueError, match=r"batch_size=\(2,\) and num_envs=3 both set the batch shape"):
        DatasetChatEnv(["a"], batch_size=(2,), num_envs=3)
    reward = {"reward": RubricReward(exact)}
    shapes = {(): {"num_envs": None}, (1,): {}, (2,): {"batch_size": 2}, (3,): {"num_envs": 3}}
    for shape, options in shapes.items():
        assert TaskEnv(DATASET, **reward, options=options).batch_size == shape
    with pytest.raises(ValueError, match="batch_size=2 and num_envs=3"):
        TaskEnv(DATASET, **reward, options={"batch_size": 2, "num_envs": 3})


def test_dataset_without_the_query_column_is_refused():
    with pytest.raises(ValueError, match="no column 'query'"):
        DatasetChatEnv([{"question": "?"}])
    with pytest.raises(ValueError, match="empty"):
        DatasetChatEnv([])


def test_reward_lands_with_its_breakdown_and_ends_an_answered_conversation():
    rubric = Rubric(RewardFn(exact, weight=3), RewardFn(lambda completion: len(completion), name="length"))
    env = DatasetChatEnv(DATASET).append_transform(RubricReward(rubric))
    data = env.step(answer_with("2")(env.reset(TensorDict(batch_size=[2]))))["next"]
    assert data["reward"].flatten().tolist() == [1.0, 0.25]
    assert data["reward_breakdown", "exact"].flatten().tolist() == [1.0, 0.0]
    assert data["terminated"].all() and data["done"].all()


def test_empty_tool_calls_are_an_answer_and_end_the_conversation():
    env = DatasetChatEnv(DATASET).append_transform(RubricReward(exact))
    data = env.reset()
    message = {"role": "assistant", "content": "2", "tool_calls": []}
    data["history"] = ChatHistory(full=data["history"].prompt.append(message))
    assert env.step(data)["next", "terminated"].item()


def test_reward_past_a_truncation_is_the_rubrics_fixed_one():
    env = DatasetChatEnv(DATASET).append_transform(RubricReward(Rubric(exact, truncation_reward=-0.5)))
    data = answer_with("2")(env.reset())
    data["rollout", "reason"] = StopReason.LENGTH
    data = env.step(data)["next"]
    assert data["reward"].item() == -0.5 and not data["terminated"].item()


def test_step_counter_truncates_and_the_reward_is_still_given():
    env = DatasetChatEnv(DATASET).append_transform(StepCounter(max_steps=1))
    env = env.append_transform(RubricReward(Rubric(exact, truncation_reward=-1.0), terminate_when_answered=False))
    data = env.step(answer_with("2")(env.reset()))["next"]
    assert data["truncated"].item() and not data["terminated"].item()
    assert data["reward"].item() == -1.0


def test_policy_version_follows_its_source():
    version = [4]
    env = TransformedEnv(ChatEnv(), PolicyVersion(source=lambda: version[0]))
    data = env.reset(TensorDict({"query": "hi"}))
    assert data["policy_version"].item() == 4
    version[0] = 5
    assert env.step(answer_with("ho")(data))["next", "policy_version"].item() == 5


@pytest.mark.parametrize("version_type", ["int", "uuid"])
def test_a_policy_version_beside_other_transforms_is_in_the_state_of_its_environment(version_type):
    def make_env():
        transform = PolicyVersion(version_type)
        return ChatEnv().append_transform(StepCounter()).append_transform(transform), transform

    (env, transform), (other_env, other) = make_env(), make_env()
    transform.increment_version()
    other_env.load_state_dict(env.state_dict())
    assert other.version == transform.version and other.count == 1
    state = transform.state_dict()
    assert dict(state) == {"_extra_state": {"count": 1, "run": state["_extra_state"]["run"]}}
    other.load_state_dict({"count": 3, "run": state["_extra_state"]["run"]})  # of an older version
    for _ in range(2):
        transform.increment_version()
    assert other.version == transform.version and other.count == 3


def test_policy_version_as_uuid_changes_with_each_update_and_is_restored():
    transform = PolicyVersion("uuid")
    check_env_specs(DatasetChatEnv(DATASET, batch_size=(2,)).append_transform(transform))
    first = transform.version
    restored = PolicyVersion(str)
    restored.load_state_dict(transform.state_dict())
    assert restored.version == first != PolicyVersion("uuid").version
    transform.increment_version()
    assert transform.version != first
    data = TransformedEnv(ChatEnv(), transform.clone()).reset(TensorDict({"query": ["a", "b"]}, batch_size=2))
    assert list(data["policy_version"]) == [transform.version] * 2
    with pytest.raises(ValueError, match="keyword source"):
        PolicyVersion(lambda: 3)


def test_addition_splits_share_no_problem():
    train, test = addition_problems("train"), addition_problems("test")
    assert len(train) + len(test) == 100
    assert not {p["query"] for p in train} & {p["query"] for p in test}
    data = make_addition_env("test").reset()[0]
    assert eval(data["query"].rstrip("=")) == int(data["answer"])


class Counting(MessageEnv):
    """Asks twice, then ends; fails when told to."""

    def __init__(self, item):
        self.item, self.turn, self.is_closed = item, 0, False

    async def init(self):
        return [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": self.item["query"]}]

    async def step(self, message):
        self.turn += 1
        if message["content"] == "fail":
            raise RuntimeError("broken")
        if message["content"] == "assistant":
            return MessageStep([{"role": "assistant", "content": "mine"}])
        return MessageStep([{"role": "user", "content": "again"}] * 2, reward=0.5, is_done=self.turn == 2)

    async def close(self):
        self.is_closed = True


class Counter:
    """A text game of gymnasium's kind, which a limit of steps cuts."""

    def __init__(self, ends_at):
        self.ends_at, self.steps = ends_at, 0

    def reset(self, seed=None):
        return "go", {}

    def step(self, action):
        self.steps += 1
        return (
            f"{self.steps}",
            0.5,
            self.steps == self.ends_at,
            self.steps == 2,
            {"steps": self.steps, "at": [1.5, {1}]},
        )

    def close(self):
        pass


@pytest.mark.parametrize("has_rubric", [False, True])
@pytest.mark.parametrize(("ends_at", "status"), [(1, "COMPLETED"), (2, "COMPLETED"), (9, "TRUNCATED")])
def test_a_time_limit_of_gymnasium_truncates_and_its_info_is_kept(renderer, ends_at, status, has_rubric):
    env = MessageChatEnv(lambda item: GymnasiumTextEnv(Counter(ends_at)))
    if has_rubric:
        env = env.append_transform(RubricReward(RewardFn(lambda completion: 0.0, name="none")))
    policy = LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=renderer)
    with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
        turns, [rollout] = collector.next(), collector.rollouts
    last, num_turns = turns[-1]["next"], min(ends_at, 2)
    assert rollout.status.name == status and rollout.num_turns == num_turns and rollout.reward == 0.5 * num_turns
    assert bool(last["terminated"]) == (status == "COMPLETED") and bool(last["truncated"]) == (ends_at == 9)
    assert rollout.reason == ("environment_truncated" if ends_at == 9 else "")
    assert last["env_info"] == {"steps": num_turns, "at": [1.5, {1}]}
    assert json.loads(json.dumps(rollout.to_record()["info"])) == {"steps": num_turns, "at": [1.5, "{1}"]}


def test_message_env_is_a_chat_env():
    env = MessageChatEnv(Counting, DATASET)
    check_env_specs(env)
    rollout = MessageChatEnv(Counting, DATASET).rollout(5, answer_with("ok"))
    assert rollout.shape == (2,)
    assert rollout[-1]["next", "history"].prompt.role == ["assistant", "user", *["assistant", "user", "user"] * 2]
    assert rollout["next", "reward"].sum().item() == 1.0


@pytest.mark.parametrize(("content", "named"), [("fail", "RuntimeError: broken"), ("assistant", "only the policy")])
def test_message_env_failure_stays_with_its_conversation(content, named):
    env = MessageChatEnv(Counting, DATASET)
    data = env.reset(TensorDict(batch_size=[2]))
    first, second = data.unbind(0)
    data = env.step(lazy_stack([answer_with(content)(first), answer_with("ok")(second)], 0))["next"]
    assert named in data[0]["env_error"]
    assert data[1]["env_error"] == "" and data[1]["reward"].item() == 0.5


@pytest.mark.parametrize(
    ("is_terminated", "reason", "status"),
    [
        (True, StopReason.NONE, RolloutStatus.COMPLETED),
        (False, StopReason.NONE, RolloutStatus.ONGOING),
        (True, StopReason.MAX_TURNS, RolloutStatus.COMPLETED),
        (False, StopReason.MAX_TURNS, RolloutStatus.TRUNCATED),
        (False, StopReason.PROMPT_TOO_LONG, RolloutStatus.TRUNCATED),
        (True, StopReason.ENVIRONMENT_ERROR, RolloutStatus.ERROR),
        (True, StopReason.ABORTED, RolloutStatus.ABORTED),
    ],
)
def test_status_is_decided_by_termination_and_reason(is_terminated, reason, status):
    assert decide_status(is_terminated=is_terminated, reason=reason) is status


def test_unknown_reason_is_refused():
    with pytest.raises(ValueError, match="reason must be one of"):
        decide_status(is_terminated=False, reason="bored")
