"""Functions and classes as tools: schemas, answers, failures, and what is kept for a conversation."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
from typing import Literal

import pytest
from tensordict import TensorDict, lazy_stack
from tool_conversations import Chat
from waiting import patient

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import ChatHistory, RolloutStatus
from llmrl.envs import ChatEnv, DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rendering.tool_calls import find_tool_call_parser, make_tool_call
from llmrl.rewards import RewardFn
from llmrl.testing import ScriptedEngine
from llmrl.tools import InstanceTools, ToolError, ToolSession, function_tool
from llmrl.transforms import PythonInterpreter, RubricReward, ToolTransform


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Both are whole.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def weather(city: str, unit: Literal["celsius", "kelvin"] = "celsius") -> dict[str, object]:
    """The weather in a city."""
    await asyncio.sleep(0)
    return {"city": city, "unit": unit, "degrees": 9}


def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


def fail(kind: str) -> str:
    """Fail."""
    if kind == "told":
        raise ToolError("the shop is closed until Monday")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "stop":
        raise StopIteration
    raise KeyError(kind)


def echo(text: str) -> str:
    """Say it again."""
    return text


class Notes:
    """Lines of one conversation."""

    closed: list = []  # noqa: RUF012

    def __init__(self):
        self.lines = []

    def note(self, line: str) -> int:
        """Write a line down."""
        self.lines.append(line)
        return len(self.lines)

    def close(self):
        """Not a tool."""
        Notes.closed.append(self.lines)


@pytest.fixture
def transform():
    transform = ToolTransform([add, weather, sleep, fail, echo], timeout=60.0, max_output_chars=200)
    yield transform
    transform.close()


# Schemas


def test_a_schema_comes_from_hints_and_docstring():
    schema = function_tool(add).schema["function"]
    assert schema["name"] == "add" and schema["description"] == "Add two numbers.\n\nBoth are whole."
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first."},
            "b": {"type": "integer", "description": "the second.", "default": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    unit = function_tool(weather).parameters["properties"]["unit"]
    assert unit["enum"] == ["celsius", "kelvin"]


def test_a_function_that_cannot_be_shown_is_refused():
    def undocumented(a: int) -> int:
        return a

    def untyped(a):
        """Documented."""

    def star(*values: int) -> None:
        """Documented."""

    for function, reason in (
        (undocumented, "no docstring"),
        (untyped, "'a'.*no type hint"),
        (star, "named parameters"),
    ):
        with pytest.raises(TypeError, match=reason):
            function_tool(function)
    with pytest.raises(TypeError, match="functions, classes or Tools"):
        ToolTransform(["add"])
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        ToolTransform([add, add])


@pytest.mark.parametrize("name", ["timeout", "max_parallel_calls", "max_output_chars"])
def test_arguments_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        ToolTransform([add], **{name: 0})


# Answers


def test_calls_are_answered_in_their_order(transform):
    chat = Chat(transform)
    assert chat.tool_names == ["add", "weather", "sleep", "fail", "echo"]
    messages = chat.say(calls=[("sleep", {"seconds": 0.1}), ("add", {"a": 7, "b": 8}), ("weather", {"city": "Oslo"})])
    assert [message["role"] for message in messages] == ["tool"] * 3
    assert [message["content"] for message in messages] == [
        "slept",
        "15",
        '{"city": "Oslo", "unit": "celsius", "degrees": 9}',
    ]
    assert chat.say("15") == ()
    assert chat.call("add", a="41") == "42"  # what JSON's numbers come as


def test_calls_of_one_message_run_in_parallel_up_to_the_cap():
    running, most, lock, three = 0, 0, threading.Lock(), threading.Barrier(3)

    def work(n: int) -> int:
        """Work."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(240)
        with lock:
            running -= 1
        return n

    transform = ToolTransform([work], max_parallel_calls=3)
    messages = Chat(transform).say(calls=[("work", {"n": n}) for n in range(9)])
    assert [message["content"] for message in messages] == [str(n) for n in range(9)]
    assert most == 3
    transform.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            ("ad", {}),
            "Error: there is no tool 'ad'. Did you mean 'add'? The tools are: add, echo, fail, sleep, weather.",
        ),
        (("add", {}), "Error: wrong arguments for add: argument 'a' is missing."),
        (("add", {"a": 1, "c": 2}), "there is no argument 'c'; the arguments are ['a', 'b']"),
        (("add", {"a": "seven"}), "argument 'a': input should be a valid integer"),
        (("weather", {"city": "Oslo", "unit": "rankine"}), "'celsius' or 'kelvin'"),
        (("add", [1, 2]), "the arguments must be an object, got [1, 2]"),
        (("fail", {"kind": "told"}), "Error: the shop is closed until Monday"),
        (("fail", {"kind": "x"}), "Error: fail failed with KeyError: 'x'"),
        (("fail", {"kind": "exit"}), "SystemExit"),
        (("fail", {"kind": "stop"}), "StopIteration"),
        (("sleep", {"seconds": 60}), "Error: sleep was stopped: it took more than 0.1 s."),
    ],
)
def test_the_model_gets_what_went_wrong_and_it_is_counted(transform, call, answer):
    name, arguments = call
    if name == "sleep":
        transform.timeout = 0.1
    message = {"role": "assistant", "content": "", "tool_calls": [make_tool_call(name, {})]}
    message["tool_calls"][0]["function"]["arguments"] = arguments
    session = ToolSession()
    (told,) = transform.loop.run(transform.answer(message, (), session, turn=1))
    assert answer in told["content"]
    assert transform.counts["failures"] == transform.counts["calls"] == 1


def test_output_is_cut_on_the_side_that_is_asked_for():
    text = "a" * 150 + "b" * 150
    for side, beginning, end in (("start", "[…", "b"), ("middle", "a", "b"), ("end", "a", "…]")):
        transform = ToolTransform([echo], max_output_chars=100, truncate_side=side)
        answer = Chat(transform).call("echo", text=text)
        assert answer.startswith(beginning) and answer.endswith(end) and "200 characters left out" in answer
        transform.close()
    with pytest.raises(ValueError, match="truncate_side must be one of"):
        ToolTransform([echo], truncate_side="left")


def test_answers_can_be_encoded_whatever_a_tool_gives(transform):
    assert Chat(transform).call("echo", text="a\ud800b") == "a?b"


CALLS = {
    "hermes": ('<tool_call>{"name": "add", "arguments": {"a": 7, "b": 8}}</tool_call>', "<tool_call>{bad</tool_call>"),
    "llama3_json": ('{"name": "add", "parameters": {"a": 7, "b": 8}}', '{"name": "add", "parameters": {"a": '),
    "pythonic": ("[add(a=7, b=8)]", "[add(7, 8)]"),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 7, "b": 8}}]', "[TOOL_CALLS][{"),
    "xml": (
        "<tool_call><function=add><parameter=a>7</parameter><parameter=b>8</parameter></function></tool_call>",
        "<tool_call><function=add</tool_call>",
    ),
    "fenced": ('So:\n```tool_call\n{"name": "add", "arguments": {"a": 7, "b": 8}}\n```', "```tool_call\n{bad\n```"),
}


@pytest.mark.parametrize("tool_parser", sorted(CALLS))
def test_every_call_format_is_read_and_what_is_unreadable_is_reported(tool_parser):
    transform = ToolTransform([add], tool_parser=tool_parser)
    chat = Chat(transform)
    good, bad = CALLS[tool_parser]
    assert [message["content"] for message in chat.say(good)] == ["15"]
    (message,) = chat.say(bad)
    assert message["content"].startswith("Error: the tool call cannot be read: ")
    assert transform.counts["malformed"] == 1
    assert chat.say("I am done.") == ()
    transform.close()


def test_fenced_blocks_of_another_kind_are_no_calls():
    parsed = find_tool_call_parser("fenced")("```python\nprint(1)\n```\n```json\n[1, 2]\n```")
    assert not parsed.tool_calls and not parsed.malformed


# Several transforms


def test_each_transform_answers_its_own_calls_and_one_of_them_the_rest():
    first, second = ToolTransform([add]), ToolTransform([echo])
    chat = Chat(first, second)
    assert chat.tool_names == ["add", "echo"]
    messages = chat.say(calls=[("echo", {"text": "x"}), ("nothing", {}), ("add", {"a": 1})])
    assert sorted(message["content"] for message in messages)[:2] == [
        "2",
        "Error: there is no tool 'nothing'. The tools are: add, echo.",
    ]
    assert len(messages) == 3
    first.close(), second.close()


# What is kept for a conversation


def test_each_conversation_has_its_own_instance_also_in_a_batch():
    Notes.closed.clear()
    transform = ToolTransform([Notes])
    env = ChatEnv().append_transform(transform)
    elements = list(env.reset(TensorDict({"query": ["a", "b"]}, batch_size=[2])).unbind(0))
    for turn in range(3):
        for count, element in enumerate(elements, 1):
            calls = [make_tool_call("note", {"line": "x"})] * count
            message = {"role": "assistant", "content": "", "tool_calls": calls}
            element["history"] = ChatHistory(full=element["history"].prompt.append(message), batch_size=())
        following = env.step(lazy_stack(elements, 0))["next"]
        lasts = [chat[-1]["content"] for chat in following["history"].prompt.chats]
        assert lasts == [str(turn + 1), str(2 * (turn + 1))]
        elements = list(following.unbind(0))
    for element in elements:
        transform.release(element)
    assert sorted(map(len, Notes.closed)) == [3, 6]
    transform.close()


def test_a_static_method_is_a_tool_with_all_its_parameters():
    class Shop:
        @staticmethod
        def price(item: str, count: int = 1) -> str:
            """Price of an item."""
            return f"{count} x {item}"

    transform = ToolTransform([Shop])
    parameters = transform.tools["price"].parameters
    assert list(parameters["properties"]) == ["item", "count"] and parameters["required"] == ["item"]
    assert Chat(transform).call("price", item="tea", count=2) == "2 x tea"
    transform.close()


def test_a_reset_begins_with_nothing():
    transform = ToolTransform(InstanceTools(Notes).tools)
    assert [Chat(transform).call("note", line="x") for _ in range(2)] == ["1", "1"]
    transform.close()


def test_what_a_conversation_kept_is_released_when_nothing_refers_to_it():
    Notes.closed.clear()
    transform = ToolTransform([Notes])
    chat = Chat(transform)
    chat.call("note", line="x")
    assert Notes.closed == []
    del chat
    transform.reset_parent()
    gc.collect()
    assert Notes.closed == [["x"]]
    transform.close()


def test_a_session_that_travels_begins_anew():
    session = ToolSession()
    assert pickle.loads(pickle.dumps(session)).id != session.id


# With a policy and a collector


CALL = '<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>'


def say(name, arguments):
    return CALL.format(name=name, arguments=arguments)


@pytest.fixture
def play(renderer):
    def play(transform, answers, *, num_rollouts=1, limits=None, **kwargs):
        engine = ScriptedEngine(answers, encode=renderer.encode, decode=renderer.decode)
        policy = LLMWrapperBase(engine, renderer=renderer)
        env = DatasetChatEnv([{"query": "Go."}]).append_transform(transform)
        env = env.append_transform(RubricReward(RewardFn(lambda completion: len(completion), name="length")))
        with LLMCollector(
            env, policy=policy, groups_per_batch=1, limits=limits or RolloutLimits(), **kwargs
        ) as collector:
            return engine, collector.play(num_rollouts)

    return play


def test_a_rollout_calls_reads_the_answer_and_answers(play, transform, renderer):
    engine, (rollout,) = play(transform, [say("add", '{"a": 7, "b": 8}'), "15<|im_end|>"])
    assert rollout.status is RolloutStatus.COMPLETED and rollout.num_turns == 2
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "15"
    first, second = (renderer.decode(prompt_ids) for prompt_ids, *_ in engine.requests[:2])
    assert '"name": "add"' in first and "Add two numbers." in first
    assert second.startswith(first) and "15" in second[len(first) :]
    assert rollout.reward == 2.0


def test_malformed_and_failing_calls_never_end_a_rollout(play, transform):
    answers = [
        "<tool_call>{bad</tool_call><|im_end|>",
        say("fail", '{"kind": "x"}'),
        say("nothing", "{}"),
        "Done<|im_end|>",
    ]
    _, (rollout,) = play(transform, answers)
    assert rollout.status is RolloutStatus.COMPLETED and rollout.num_turns == 4
    told = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert "cannot be read" in told[0] and "KeyError" in told[1] and "there is no tool" in told[2]
    assert transform.counts["failures"] == 3


def test_an_answer_cut_by_its_length_calls_nothing(transform):
    chat = Chat(transform)
    chat.data["rollout", "reason"] = "length"
    assert chat.say(calls=[("add", {"a": 7})]) == ()
    assert transform.counts["calls"] == 0


def test_the_last_turn_s_calls_are_still_made(play):
    Notes.closed.clear()
    transform = ToolTransform([Notes])
    _, (rollout,) = play(transform, [say("note", '{"line": "x"}')], limits=RolloutLimits(max_turns=1))
    assert rollout.status is RolloutStatus.TRUNCATED and Notes.closed == [["x"]]
    transform.close()


def test_slow_tools_of_many_rollouts_wait_together(play, renderer):
    sixteen = threading.Barrier(16)

    def meet() -> str:
        """Wait for the others."""
        sixteen.wait(240)
        return "met"

    transform = ToolTransform([meet], timeout=300.0)

    def answers(ids):
        return "Done<|im_end|>" if "<|im_start|>tool" in renderer.decode(ids) else say("meet", "{}")

    _, rollouts = play(transform, answers, num_rollouts=16)
    assert [rollout.messages[2]["content"] for rollout in rollouts] == ["met"] * 16
    assert all(rollout.num_turns == 2 for rollout in rollouts)
    transform.close()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["completed", "limit", "failure", "timeout"])
def test_what_a_rollout_kept_is_released_however_it_ends(play, ending):
    transform = ToolTransform([Notes, sleep])
    note = say("note", '{"line": "x"}')

    def fail_later(ids, count=iter(range(100))):  # noqa: B008
        if next(count):
            raise RuntimeError("the engine broke")
        return note

    answers = {
        "completed": [note, "Done<|im_end|>"],
        "limit": [note],
        "failure": fail_later,
        "timeout": [note, say("sleep", '{"seconds": 300}')],
    }[ending]

    def attempt(limit):
        Notes.closed.clear()
        limits = RolloutLimits(max_turns=3, rollout_timeout_seconds=limit if ending == "timeout" else None)
        _, (rollout,) = play(transform, answers, limits=limits)
        return rollout if Notes.closed and all(Notes.closed) else None  # else, the first call came too late

    rollout = patient(attempt)
    assert (rollout.status is RolloutStatus.COMPLETED) == (ending == "completed")
    assert Notes.closed and all(lines for lines in Notes.closed)
    transform.close()


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "clone"])
def test_an_environment_with_tools_is_copied_and_sent(way):
    env = DatasetChatEnv(["a"]).append_transform(ToolTransform([double, Notes], tool_name="answers"))
    Chat(env.transform).call("note", line="of the first")
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(env)).transform
    else:
        copied = copy.deepcopy(env).transform if way == "deepcopy" else env.transform.clone()
    chat = Chat(copied)
    assert chat.call("double", number=4) == "8" and chat.call("note", line="a") == "1"
    assert copied.tool_role == "answers"
    copied.close()
    assert Chat(env.transform).call("double", number=2) == "4"  # its own loop goes on
    env.transform.close()


@pytest.mark.parametrize("calls", ["fenced", "tool_call"])
def test_an_interpreter_is_copied_and_sent(calls):
    interpreter = PythonInterpreter(calls=calls, persistent=True)
    env = DatasetChatEnv(["a"]).append_transform(interpreter)
    copied = pickle.loads(pickle.dumps(env)).transform
    assert list(copied.tools) == (["python"] if calls == "tool_call" else [])
    if calls == "tool_call":
        assert "49" in Chat(copied).call("python", code="print(7 ** 2)")
    copied.close()
    interpreter.close()
