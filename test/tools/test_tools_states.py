"""Tools with a memory: made for each conversation with its row, read by rewards, closed when it is scored."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import pytest
from tensordict import TensorDict

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import ChatHistory, RolloutStatus
from llmrl.envs import ChatEnv, DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric, UnknownRewardInput
from llmrl.testing import ScriptedEngine
from llmrl.tools import (
    ExecuteToolsInOrder,
    JSONCallParser,
    SimpleToolTransform,
    ToolRegistry,
    ToolTransform,
    XMLBlockParser,
)
from llmrl.tools.output import as_text
from llmrl.transforms import RubricReward
from llmrl.watch.rollout_metrics import rollout_metrics


class ShoppingBasket:
    """What one customer has taken."""

    events: list = []  # noqa: RUF012

    def __init__(self):
        self.items = []

    def reset(self, budget, owner="unset"):
        """Begin with the row's budget."""
        self.budget, self.owner = budget, owner

    def take(self, item: str) -> str:
        """Put something into the basket."""
        self.items.append(item)
        self.budget -= 1
        return f"{self.budget} left"

    async def close(self):
        """Take a moment."""
        await asyncio.sleep(0.05)
        ShoppingBasket.events.append("closed")


ROWS = [{"query": "Buy.", "budget": 5}, {"query": "Buy!", "budget": 7}]


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'


@pytest.fixture
def played(renderer):
    collectors = []

    def play(env, answers, num_rollouts=2, **limits):
        engine = ScriptedEngine(answers, encode=renderer.encode)
        policy = LLMWrapperBase(engine, renderer=renderer)
        limits = RolloutLimits(max_turns=3, **limits)
        collectors.append(LLMCollector(env, policy=policy, yield_completed_trajectories=True, limits=limits))
        return collectors[-1].play(num_rollouts)

    yield play
    for collector in collectors:
        collector.shutdown()


def shopping_env(reward, **options):
    env = DatasetChatEnv(ROWS, shuffle=False)
    return env.append_transform(ToolTransform([ShoppingBasket], **options)).append_transform(RubricReward(reward))


def buys_once(renderer):
    def answer(prompt_ids):
        return "Done<|im_end|>" if "<|im_start|>tool" in renderer.decode(prompt_ids) else call("take", item="tea")

    return answer


def test_a_reward_reads_by_name_what_a_tool_keeps_which_began_with_the_row(renderer, played):
    ShoppingBasket.events.clear()

    def spent(shopping_basket, budget):
        ShoppingBasket.events.append("scored")
        assert shopping_basket.items == ["tea"] and shopping_basket.owner == "unset"
        return float(budget - shopping_basket.budget) + shopping_basket.budget / 100

    rollouts = played(shopping_env(spent), buys_once(renderer))
    assert sorted(rollout.reward for rollout in rollouts) == pytest.approx([1.04, 1.06])
    # Closed when scored, and waited for: both are closed when the rollouts are there.
    assert sorted(ShoppingBasket.events) == ["closed", "closed", "scored", "scored"]
    assert rollouts[0].tool_calls == {"answered": 1} and rollout_metrics(rollouts)["num_tool_calls"] == 2
    assert "tool_states" not in rollouts[0].to_record()


def test_a_judge_reads_it_too_before_it_is_closed(renderer, played):
    ShoppingBasket.events.clear()

    async def judge(shopping_basket):
        await asyncio.sleep(0.02)
        ShoppingBasket.events.append("scored")
        return float(len(shopping_basket.items))

    rollouts = played(shopping_env(judge), buys_once(renderer), num_rollouts=1)
    assert [rollout.reward for rollout in rollouts] == [1.0]
    assert ShoppingBasket.events == ["scored", "closed"]


def test_what_is_never_called_is_there_all_the_same(played):
    def untouched(shopping_basket):
        return float(shopping_basket.items == [] and shopping_basket.budget > 0)

    assert [rollout.reward for rollout in played(shopping_env(untouched), ["No.<|im_end|>"])] == [1.0, 1.0]


def test_a_reset_that_fails_or_hangs_ends_its_rollout_with_the_traceback(renderer, played):
    class Needy(ShoppingBasket):
        """Wants a column that there is not."""

        def reset(self, purse):
            """Begin."""

    class Slow(ShoppingBasket):
        """Never begins."""

        async def reset(self):
            """Wait."""
            await asyncio.sleep(300)

    slow = "TimeoutError: slow did not begin within 0.2 s"
    for tool, timeout, words in ((Needy, 60.0, "purse"), (Slow, 0.2, slow)):
        env = DatasetChatEnv(ROWS).append_transform(ToolTransform([tool], timeout=timeout))
        env = env.append_transform(RubricReward(length_of))
        [rollout] = played(env, ["No.<|im_end|>"], num_rollouts=1)
        assert rollout.status is RolloutStatus.ERROR and words in rollout.error and "Traceback" in rollout.traceback


def length_of(completion):
    return float(len(completion))


def test_an_order_that_never_answers_is_refused_where_the_environment_is_taken(renderer):
    late = DatasetChatEnv(ROWS).append_transform(RubricReward(length_of))
    late = late.append_transform(ToolTransform([ShoppingBasket]))
    policy = LLMWrapperBase(ScriptedEngine(["a"], encode=renderer.encode), renderer=renderer)
    with pytest.raises(ValueError, match=r"the tools \['take'\] are appended after RubricReward"):
        LLMCollector(late, policy=policy, yield_completed_trajectories=True)

    def reads(basket):
        return 0.0

    with pytest.raises(UnknownRewardInput, match="shopping_basket"):  # among what there is
        shopping_env(Rubric(reads))


class Place:
    """An object without a text."""


def test_two_states_of_one_name_are_refused():
    """The second would begin without its row, and rewards would read only the first."""

    class Other:
        def put(self, item: str) -> str:
            """Put something back."""
            return item

    Other.__name__ = "ShoppingBasket"
    with pytest.raises(ValueError, match=r"under the name 'shopping_basket'.* rename one of them"):
        ToolTransform([ShoppingBasket, Other])


@pytest.mark.parametrize("value", [Place(), [Place()], {"a": Place()}, (n for n in ()), threading.Lock()])
def test_an_object_is_no_answer(value, renderer, played):
    def look() -> object:
        """Look."""
        return value

    with pytest.raises(TypeError, match="a model cannot read"):
        as_text(value)
    env = DatasetChatEnv(ROWS).append_transform(ToolTransform([look])).append_transform(RubricReward(length_of))
    answers = [call("look"), "Done<|im_end|>"]
    [rollout] = played(env, answers, num_rollouts=1)
    said = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert "a model cannot read" in said[0] and rollout.tool_calls == {"failed": 1}


def answers_in_order(transform, text):
    env = ChatEnv().append_transform(transform)
    data = env.reset(TensorDict(query="Count."))
    full = data["history"].prompt.append({"role": "assistant", "content": text})
    data["history"] = ChatHistory(full=full, batch_size=())
    return [m["content"] for m in env.step(data)["next", "history"].prompt.chats if m["role"] == "tool"]


def test_tools_in_order_answer_by_one_message_and_end_no_rollout():
    class Count:
        name = "count"

        def __call__(self, by, _state):
            _state["total"] = _state.get("total", 0) + by
            return {"total": _state["total"]}

    def contents(text, parser, **options):
        return answers_in_order(ExecuteToolsInOrder(ToolRegistry([Count()]), parser, **options), text)

    calls = [("count", 2), ("cuont", 1), ("count", 3)]
    blocks = "".join(f'<tool name="{name}">{{"by": {by}}}</tool>' for name, by in calls)
    [answer] = contents(blocks, XMLBlockParser())
    found = re.findall(r'\w+ succeeded: {"total": (\d)}|(\w+) failed: .*Unknown tool', answer)
    assert found == [("2", ""), ("", "cuont"), ("5", "")]
    assert contents(blocks, XMLBlockParser(), stop_on_error=True)[0].count("\n") == 1
    assert "failed" in contents(blocks, XMLBlockParser(), pass_state_to_tools=False)[0]
    assert contents("Nothing to call.", XMLBlockParser()) == contents("[1]", JSONCallParser()) == []
    one = '{"tools": [{"tool": "count", "args": {"by": 1}}]}'
    assert contents(one, JSONCallParser()) == ['count succeeded: {"total": 1}']
    assert "cannot be parsed" in contents('{"tools": [{"name": "count"}]}', JSONCallParser())[0]
    assert "failed" in contents('{"tools": [{"tool": "count", "args": [1]}]}', JSONCallParser())[0]


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, '{"message": null, "tools": null}'])
def test_a_message_of_json_that_is_no_call_is_read_as_one_without_calls(text):
    expected = "" if "null" in text else text
    assert JSONCallParser()(text) == {"text": expected, "calls": [], "meta": {"count": 0}}
    [call] = XMLBlockParser()(f'<tool name="add">{text[:5000]}</tool>')["calls"]
    assert call.tool == "add" and (call.args == {"raw": text[:5000]} or "null" in text)


@pytest.mark.parametrize("arguments", ["[]", '["ab"]', '[["a", 1]]', "null", "7", '"[]"'])
def test_arguments_that_are_no_object_are_not_passed_to_a_tool(arguments):
    called = []

    class Count:
        name = "count"

        def __call__(self, **arguments):
            called.append(arguments)

    calls = f'{{"tools": [{{"tool": "count", "args": {arguments}}}]}}'
    in_order = ExecuteToolsInOrder(ToolRegistry([Count()]), JSONCallParser(), pass_state_to_tools=False)
    [of_json] = answers_in_order(in_order, calls)
    [of_text] = answers_in_order(SimpleToolTransform({"count": Count()}), f"<tool>count\n{arguments}</tool>")
    assert "the arguments must be an object" in of_json and "the arguments must be an object" in of_text
    assert not called


def test_a_tool_that_gives_up_waiting_is_not_taken_for_one_that_was_stopped():
    def fetch():
        raise TimeoutError("the page did not answer")

    assert answers_in_order(SimpleToolTransform({"fetch": fetch}), "<tool>fetch\n</tool>") == [
        "fetch failed: TimeoutError: the page did not answer"
    ]


def test_answers_have_the_tags_of_their_calls():
    def count(by):
        return by

    blocks = '<tool name="count" tag="A">{"by": 1}</tool><tool name="count">{"by": 2}</tool>'
    answers = answers_in_order(SimpleToolTransform({"count": count}, parser=XMLBlockParser()), blocks)
    assert answers == ["count [tag: A] succeeded: 1", "count succeeded: 2"]


def test_a_pattern_of_calls_without_two_groups_and_a_limit_of_no_time_are_refused():
    with pytest.raises(ValueError, match=r"must have two groups.*has 1"):
        SimpleToolTransform({}, tool_call_pattern=r"<call>(.*?)</call>")
    with pytest.raises(ValueError, match="timeout must be positive, got 0"):
        SimpleToolTransform({}, timeout=0)
