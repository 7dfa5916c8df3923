"""`OpenEnvChatEnv` against a server that says, frame by frame, what one of openenv-core 0.3.0 said."""

from __future__ import annotations

import asyncio
import json
import socket

import openenv_server
import pytest
from openenv_server import GuessingServer
from waiting import patient

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import OpenEnvChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine


@pytest.fixture
def start():
    servers = []

    def start(*args, **options):
        servers.append(GuessingServer(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class PingedEngine(ScriptedEngine):
    """An engine that answers when the client has read all that the server said, and the ping that follows it."""

    server = None

    async def generate(self, *arguments, **options):
        if self.server is not None:
            async with asyncio.timeout(240):
                while self.server.num_pongs <= len(self.requests):
                    await asyncio.sleep(0.01)
        return await super().generate(*arguments, **options)


def play(renderer, env, num_rollouts, *answers, pinged_by=None, max_turns=6):
    def answer(prompt_ids):
        return f"{answers[renderer.decode(prompt_ids).count('<|im_start|>assistant') - 1]}<|im_end|>"

    engine = PingedEngine(answer, encode=renderer.encode)
    engine.server = pinged_by
    policy = LLMWrapperBase(engine, renderer=renderer)
    limits = RolloutLimits(max_turns=max_turns)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        rollouts = collector.play(num_rollouts)
    env.close()
    return rollouts


def test_each_conversation_is_a_session_that_is_reset_with_its_row_and_closed(start, renderer):
    server = start()
    env = OpenEnvChatEnv(
        server.url.replace("http", "ws"), [{"seed": 5}, {"seed": 6}], repeats=2, system_prompt="Be brief."
    )
    rollouts = play(renderer, env, 4, "3", "4")
    assert [one.status for one in rollouts] == [RolloutStatus.COMPLETED] * 4
    assert [one.reward for one in rollouts] == [0.75] * 4
    assert [message["content"] for message in rollouts[2].messages] == [
        "Be brief.", "Guess my number (seed 6).", "3", "higher", "4"
    ]  # fmt: skip
    assert sorted(row["seed"] for row in server.resets) == [5, 5, 6, 6]
    assert server.events == {"opened": 4, "closed": 4}


def test_a_session_lives_on_while_the_policy_thinks(start, renderer):
    server = start()
    [rollout] = play(renderer, OpenEnvChatEnv(server.url), 1, "3", "4", pinged_by=server)
    assert rollout.reward == 0.75 and server.events == {"opened": 1, "closed": 1}


def test_what_a_server_has_no_place_for_waits(start, renderer):
    server = start(max_sessions=1)
    rollouts = play(renderer, OpenEnvChatEnv(server.url, repeats=3), 3, "3", "4")
    assert [one.reward for one in rollouts] == [0.75] * 3
    assert server.events["full"] > 0 and server.events["opened"] == server.events["closed"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guess", "reason"),
    [
        ("many", "EXECUTION_ERROR, invalid literal"),
        ("leave", "ended the session: closed with code 1011"),
        ("crash", "ended the session: closed with code 1006"),
        ("broken", "which is not an OpenEnv message: JSONDecodeError"),
        ("empty", "which is not an OpenEnv message: KeyError: 'observation'"),
        ("list", "which is not an OpenEnv message"),
        ("nan", "finite"),
    ],
)
def test_a_server_that_misbehaves_ends_its_rollout_with_the_reason(start, renderer, guess, reason):
    server = start()
    [rollout] = play(renderer, OpenEnvChatEnv(server.url), 1, "3", guess, "4")
    assert rollout.status is RolloutStatus.ERROR and reason in rollout.error
    assert [one["content"] for one in rollout.messages[1:]] == ["3", "higher", guess]
    assert server.events["opened"] == 1


def test_a_server_that_is_silent_ends_its_rollout_with_the_reason(start, renderer):
    server = start()

    def attempt(limit):
        [rollout] = play(renderer, OpenEnvChatEnv(server.url, timeout=limit), 1, "3", "silence", "4")
        said = [one["content"] for one in rollout.messages[1:]]
        return (limit, rollout, said) if "silence" in said else None

    limit, rollout, said = patient(attempt)
    assert rollout.status is RolloutStatus.ERROR and f"did not answer within {limit:g} s" in rollout.error
    assert said == ["3", "higher", "silence"]


def test_an_unrequested_answer_is_not_taken_for_the_next_one(start, renderer):
    server = start()
    [rollout] = play(renderer, OpenEnvChatEnv(server.url), 1, "twice", "4", pinged_by=server)
    assert rollout.status is RolloutStatus.ERROR and "which was not requested" in rollout.error


@pytest.mark.slow
def test_a_server_that_is_gone_or_refuses_sessions_is_waited_for_and_named(start, renderer):
    with socket.socket() as taken:  # bound, without a listener
        taken.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        full = start(max_sessions=0).url
        for url, reason in ((gone, "Client"), (full, "it is full: Server at capacity")):

            def attempt(limit, url=url, reason=reason):
                [rollout] = play(renderer, OpenEnvChatEnv(url, timeout=limit), 1, "4")
                assert rollout.status is RolloutStatus.ERROR
                return f"{url} opened no session within {limit:g} s: {reason}" in rollout.error or None

            assert patient(attempt)
    [rollout] = play(renderer, OpenEnvChatEnv(f"{start().url}/elsewhere"), 1, "4")
    assert "is not an OpenEnv server" in rollout.error and "404" in rollout.error


def test_adapters_make_actions_and_texts(start, renderer):
    server = start()
    env = OpenEnvChatEnv(
        server.url,
        action_adapter=lambda text: {"message": text.split()[-1]},
        observation_adapter=lambda observation: {**observation, "length": len(observation["hint"])},
    )
    [rollout] = play(renderer, env, 1, "I say 3", "no, 4")
    assert rollout.reward == 0.75 and rollout.info == {"hint": "right", "length": 5}
    assert json.loads(rollout.messages[2]["content"]) == {"hint": "higher", "length": 6}


def test_the_model_is_told_which_action_was_invalid(start, renderer):
    def adapter(text):
        return {"message": str(int(text))} if text != "no field" else {"text": text}

    env = OpenEnvChatEnv(start().url, action_adapter=adapter)
    [rollout] = play(renderer, env, 1, "three", "no field", "4")
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    told = [message["content"] for message in rollout.messages[2::2]]
    assert [text.partition(": ")[0] for text in told[:2]] == ["The action was refused"] * 2
    assert "invalid literal for int" in told[0] and "Field required" in told[1]
    assert "Field required" in rollout.info["refused_action"]


def test_metadata_of_an_observation_is_not_shown_to_the_model(start, renderer, monkeypatch):
    with_metadata = openenv_server.OBSERVATION.replace('"hint":"%s"', '"hint":"%s","metadata":{"step":1}')
    monkeypatch.setattr(openenv_server, "OBSERVATION", with_metadata)
    [rollout] = play(renderer, OpenEnvChatEnv(start().url, [{"seed": 5}]), 1, "3", "4")
    assert [one["content"] for one in rollout.messages[:3]] == ["Guess my number (seed 5).", "3", "higher"]
    assert rollout.info["metadata"] == {"step": 1}


def test_actions_that_are_no_text_need_an_adapter(start, renderer):
    fields = {"metadata": {"type": "object"}, "row": {"type": "integer"}, "column": {"type": "integer"}}
    server = start(schema={"action": {"properties": fields, "required": ["row", "column"]}})
    [rollout] = play(renderer, OpenEnvChatEnv(server.url), 1, "4")
    assert "has the fields ['column', 'row']: pass action_adapter" in rollout.error
    with pytest.raises(ValueError, match="timeout must be positive"):
        OpenEnvChatEnv(server.url, timeout=0)


def test_what_is_over_before_it_begins_is_an_error(start, renderer):
    server = start()
    [rollout] = play(renderer, OpenEnvChatEnv(server.url, [{"secret": 0}]), 1, "4")
    assert "ended the conversation before its first answer" in rollout.error and server.events == {
        "opened": 1,
        "closed": 1,
    }
