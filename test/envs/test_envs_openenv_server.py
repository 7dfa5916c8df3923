"""An environment behind OpenEnv's protocol gives other clients what a collector here gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from rendering_families import family_renderer
from tool_classes import Increment
from waiting import patient

from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.envs import (
    AgentEnv,
    ChatEnv,
    DatasetChatEnv,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    OpenEnvChatEnv,
    OpenEnvServer,
    ToolEnv,
    make_task_env,
)
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


class Rooms(MessageEnv):
    """Rewards each turn, and ends at the third; some answers do harm."""

    closed = 0

    def __init__(self, row):
        self.row, self.turns = row, 0

    async def init(self):
        if self.row["room"] == "shut":
            raise ValueError("the door is shut")
        return [{"role": "system", "content": "Go."}, {"role": "user", "content": f"You are in {self.row['room']}."}]

    async def step(self, message):
        self.turns += 1
        if message["content"] == "raise":
            raise KeyError("no such door")
        if message["content"] == "nan":
            return MessageStep(reward=float("nan"))
        if message["content"] == "sleep":
            await asyncio.sleep(600)
        if message["content"] == "cut":
            return MessageStep(reward=0.5, is_truncated=True)
        said = [{"role": "user", "content": f"Turn {self.turns}, after {message['content']}."}]
        return MessageStep(said, reward=0.25 * self.turns, is_done=self.turns == 3, info={"secret": "key"})

    async def close(self):
        type(self).closed += 1


@pytest.fixture(scope="module")
def renderer(model_path):
    return family_renderer(str(model_path), "qwen25")  # has tools


def rooms():
    return MessageChatEnv(Rooms, [{"room": "hall"}, {"room": "shut"}, {"room": "attic"}])


async def late(answer, completion):
    await asyncio.sleep(0)
    return float(answer in completion)


ENVIRONMENTS = {
    "one answer": (lambda: make_task_env("addition"), ["The answer is 7."]),
    "turns": (lambda: make_task_env("guess"), ["<guess>3</guess>", "<guess>5</guess>", "6", "7", "8", "9", "10"]),
    "search": (
        lambda: make_task_env("search"),
        [CALL % ("search", '{"query": "pet"}'), "It is a goat."],
    ),
    "an object's tools": (
        lambda: ToolEnv(Increment),
        [CALL % ("guess", '{"number": 3}'), CALL % ("guess", '{"number": 1}'), "Done."],
    ),
    "messages": (rooms, ["one", "two", "three"]),
    "an async rubric": (
        lambda: DatasetChatEnv([{"query": "7 + 8 =", "answer": "15"}]).append_transform(
            RubricReward(Rubric(RewardFn(late, name="late", weight=2.0)))
        ),
        ["It is 15."],
    ),
}


def play_here(renderer, env, answers):
    """One rollout of a collector."""

    left = iter(answers)
    engine = ScriptedEngine(lambda prompt_ids: f"{next(left)}<|im_end|>", encode=renderer.encode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
        [rollout] = collector.play(1)
    return rollout


@contextlib.asynccontextmanager
async def serving(env, **options):
    server = OpenEnvServer(env, **options)
    await server.start()
    try:
        yield server.url
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def client(url, **options):
    """A function that sends a message and returns the answer."""
    async with aiohttp.ClientSession(**options) as http, http.ws_connect(f"{url}/ws") as socket:

        async def ask(kind, **data):
            await socket.send_str(json.dumps({"type": kind, "data": data}))
            return json.loads((await socket.receive()).data)

        ask.socket = socket
        yield ask


def served(env, act, **options):
    """What a client makes of an environment."""

    async def main():
        async with serving(env, **options) as url, client(url) as ask:
            return await act(ask)

    return asyncio.run(main())


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_rewards_and_messages_are_those_of_a_collector(renderer, name):
    make, answers = ENVIRONMENTS[name]
    expected = play_here(renderer, make(), answers)
    assert expected.status is RolloutStatus.COMPLETED and expected.is_scored, expected.error

    async def act(ask):
        observed = (await ask("reset"))["data"]
        messages, reward = observed["observation"]["messages"], 0.0
        said = [message for message in expected.messages[len(messages) :] if message["role"] == "assistant"]
        assert (observed["reward"], observed["done"]) == (None, False)
        for message in said:
            assert not observed["done"]
            observed = (await ask("step", **{name: message[name] for name in message if name != "role"}))["data"]
            messages += [message, *observed["observation"]["messages"]]
            reward += observed["reward"]
        return messages, reward, observed

    messages, reward, last = served(make(), act)
    assert messages == [dict(message) for message in expected.messages]
    assert reward == pytest.approx(expected.reward) and last["done"]
    assert last["metadata"] == {"is_truncated": False, "rewards": pytest.approx(expected.breakdown)}


def test_a_seed_is_a_place_in_the_order_and_sessions_do_not_meet():
    async def main():
        env = make_task_env("addition", num_digits=2)
        async with serving(env) as url, client(url) as first, client(url) as second:
            opened = [await first("reset", seed=4, episode_id="mine"), await second("reset", seed=5)]
            again = [await second("reset", seed=4), await first("reset", seed=5)]
            assert opened == again and opened[0] != opened[1]
            assert (await first("state"))["data"]["step_count"] == 0
            fresh = [await first("reset"), await second("reset")]
            assert fresh[0] != fresh[1]
            await first("reset", seed=4, episode_id="mine")
            state = (await first("state"))["data"]
            assert state["episode_id"] == "mine" and state["num_problems"] > 5

    asyncio.run(main())


def test_many_sessions_play_side_by_side():
    async def play(url, place):
        async with client(url) as ask:
            await ask("reset", seed=0)
            return [(await ask("step", content=f"{place}.{turn}"))["data"]["reward"] for turn in range(3)]

    async def main():
        async with serving(rooms()) as url:
            return await asyncio.gather(*(play(url, place) for place in range(40)))

    before = Rooms.closed
    assert asyncio.run(main()) == [[0.25, 0.5, 0.75]] * 40
    assert Rooms.closed == before + 40


def test_tools_are_shown_once_and_secrets_not_at_all():
    async def act(ask):
        call = {"function": {"name": "guess", "arguments": '{"number": 3}'}}  # arguments as text, as OpenAI has them
        return await ask("reset"), await ask("step", content="", tool_calls=[call])

    opened, stepped = served(ToolEnv(Increment), act)
    [tool] = opened["data"]["observation"]["tools"]
    assert tool["function"]["name"] == "guess"
    assert stepped["data"]["observation"]["messages"][0]["content"] == "3"
    opened, stepped = served(rooms(), act)
    assert "tools" not in opened["data"]["observation"] and "secret" not in json.dumps(stepped)


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        ({"text": "x"}, "VALIDATION_ERROR", "content"),
        ({}, "VALIDATION_ERROR", "needs content"),
        ({"content": 3}, "VALIDATION_ERROR", "content"),
        ({"content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "VALIDATION_ERROR", "JSON"),
        ({"content": "x", "tool_calls": {}}, "VALIDATION_ERROR", "tool_calls"),
    ],
)
def test_an_action_of_another_form_is_refused_and_the_conversation_goes_on(data, code, reason):
    async def act(ask):
        await ask("reset", seed=0)
        refused = await ask("step", **data)
        return refused, await ask("step", content="one")

    refused, after = served(rooms(), act)
    assert refused["type"] == "error" and refused["data"]["code"] == code and reason in refused["data"]["message"]
    assert after["data"]["reward"] == 0.25


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("[1]", "VALIDATION_ERROR"),
        ('{"type": 3}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": []}', "VALIDATION_ERROR"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"index": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"content": "x"}}', "EXECUTION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1}}', "EXECUTION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1' + "0" * 400 + "}}", "EXECUTION_ERROR"),
    ],
)
def test_messages_of_another_form_are_refused_and_the_session_goes_on(text, code):
    async def act(ask):
        await ask.socket.send_str(text)
        refused = json.loads((await ask.socket.receive()).data)
        await ask("reset", seed=0)
        return refused, await ask("step", content="one")

    refused, after = served(rooms(), act)
    assert refused["type"] == "error" and refused["data"]["code"] == code, refused
    assert after["data"]["reward"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reason"), [("raise", "no such door"), ("nan", "finite"), ("sleep", "TimeoutError")]
)
def test_a_step_that_fails_ends_its_conversation_with_the_reason(answer, reason):
    async def act(ask):
        await ask("reset", seed=0)
        failed = await ask("step", content=answer)
        return failed, await ask("step", content="one"), await ask("reset", seed=0), await ask("step", content="one")

    def attempt(limit):
        *others, after = served(rooms(), act, step_timeout_seconds=limit)
        return others if after["data"].get("reward") == 0.25 and reason in others[0]["data"]["message"] else None

    failed, ended, _ = patient(attempt)
    assert failed["data"]["code"] == "EXECUTION_ERROR" and "send a reset" in ended["data"]["message"]


def test_a_cut_conversation_says_so():
    async def act(ask):
        await ask("reset", seed=0)
        return await ask("step", content="cut")

    last = served(rooms(), act)["data"]
    assert (last["reward"], last["done"], last["metadata"]["is_truncated"]) == (0.5, True, True)


def test_a_reward_that_fails_is_an_error():
    def fail(completion):
        raise OSError("the judge is gone")

    async def act(ask):
        await ask("reset")
        return await ask("step", content="x")

    failed = served(DatasetChatEnv([{"query": "?"}]).append_transform(RubricReward(fail)), act)
    assert failed["data"]["code"] == "EXECUTION_ERROR" and "the judge is gone" in failed["data"]["message"]


def test_clients_that_leave_release_their_conversations():
    async def main():
        async with serving(rooms()) as url:
            async with client(url) as ask:
                await ask("reset", seed=0)
                ask.socket.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            async with client(url) as ask:
                await ask("reset", seed=2)
                await ask.socket.send_str('{"type": "close"}')
                assert (await ask.socket.receive()).type is aiohttp.WSMsgType.CLOSE
            while Rooms.closed < before + 2:
                await asyncio.sleep(0.01)

    before = Rooms.closed
    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_key_is_asked_for_at_every_door():
    async def main():
        async with serving(rooms(), api_key="geheim") as url:
            async with aiohttp.ClientSession() as http:
                for path in ("health", "schema", "metadata", "ws"):
                    async with http.get(f"{url}/{path}") as response:
                        assert response.status == 401
            async with client(url, headers={"Authorization": "Bearer geheim"}) as ask:
                assert (await ask("reset", seed=0))["type"] == "observation"

    asyncio.run(main())


def test_the_pages_describe_the_environment():
    async def main():
        async with serving(rooms(), name="rooms") as url, aiohttp.ClientSession() as http:
            pages = {}
            for path in ("health", "schema", "metadata"):
                async with http.get(f"{url}/{path}") as response:
                    pages[path] = await response.json()
            return pages

    pages = asyncio.run(main())
    assert pages["health"] == {"status": "healthy"} and pages["schema"]["action"]["required"] == ["content"]
    assert pages["metadata"] == {"name": "rooms", "description": "MessageChatEnv of llmrl, 3 problems."}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (ChatEnv, "no dataset"),
        (lambda: AgentEnv(lambda row, model: 1.0, [{"a": 1}]), "its own agent"),
        (lambda: DatasetChatEnv([{"query": "?"}]), "writes no reward"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_port_is_taken(make, reason):
    with pytest.raises(ValueError, match=reason):
        OpenEnvServer(make())


def test_an_empty_key_is_refused():
    with pytest.raises(ValueError, match=r"api_key must be a key .* or None for no key, got ''"):
        OpenEnvServer(rooms(), api_key="")


def test_an_environment_over_there_is_trained_in_here(renderer):
    """The client of this library reads what the server says."""

    async def main():
        async with serving(rooms()) as url:
            env = OpenEnvChatEnv(
                url,
                [{"seed": 0}],
                history_content_adapter=lambda observation: observation["messages"][-1]["content"],
            )
            return await asyncio.to_thread(play_here, renderer, env, ["one", "two", "three"])

    rollout = asyncio.run(main())
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.5)
    assert [message["content"] for message in rollout.messages] == [
        "You are in hall.", "one", "Turn 1, after one.", "two", "Turn 2, after two.", "three"
    ]  # fmt: skip
