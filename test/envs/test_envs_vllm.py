"""Other families' environments on the real engine, in one run: each plays a conversation, and is given bad input."""

from __future__ import annotations

import gymnasium
import openenv_server
import textarena_stand_in
import tool_classes
import torch

from llmrl.collectors import LLMCollector, RolloutLimits, batch_rows
from llmrl.data import RolloutStatus
from llmrl.envs import GymnasiumTextEnv, MessageChatEnv, MixedEnv, OpenEnvChatEnv, ToolEnv
from llmrl.envs.hubs.textarena import make_textarena_env
from llmrl.policies import vLLMWrapper
from llmrl.trainer import TransformersWrapper

stand_in = textarena_stand_in.stand_in


class Echo(gymnasium.Env):
    """Says how many letters it was told, twice."""

    def reset(self, *, seed=None, options=None):
        if seed == 13:
            raise ValueError("no thirteen")
        self.num_told = 0
        return "Say something.", {}

    def step(self, action):
        self.num_told += 1
        return f"{len(action)} letters.", 0.5, self.num_told == 2, False, {}


class Task(tool_classes.Increment):
    """Its tool is called with what the row says."""

    def reset(self, amount):
        self.amount = amount
        return super().reset()


def with_calls(env):
    """So small a model seldom calls a tool that it was not taught: whatever it says first is a call."""
    tools = env.base_env.transform

    async def answer(message, malformed, session, *, turn):
        if turn > 2:
            return []
        arguments = {"number": session.states["task"].amount}
        return [tools.tool_message(await tools.call("guess", arguments, session), name="guess")]

    tools.answer = answer
    return env


def test_each_is_played_as_exactly_as_any_other_and_stands_bad_input(
    shallow_engine, renderer, shallow_model_path, stand_in
):
    server = openenv_server.GuessingServer()
    tasks = [{"prompt": [], "amount": amount} for amount in (4, "many")]
    envs = {
        "openenv": OpenEnvChatEnv(server.url, repeats=2),
        "openenv_bad": OpenEnvChatEnv(server.url, repeats=2, action_adapter=lambda text: {"text": text}),
        "textarena": make_textarena_env("Heap-v0", repeats=2),  # what the model says is no move
        "tool": with_calls(ToolEnv(Task, tasks[:1], repeats=2)),
        "tool_bad": with_calls(ToolEnv(Task, tasks[1:], repeats=2)),
        "gymnasium": MessageChatEnv(lambda row: GymnasiumTextEnv(Echo()), repeats=2),
        "gymnasium_bad": MessageChatEnv(lambda row: GymnasiumTextEnv(Echo(), seed=13), repeats=2),
    }
    policy = vLLMWrapper(shallow_engine, renderer=renderer, generate_kwargs={"max_new_tokens": 8})
    limits = RolloutLimits(max_turns=3, end_at_length=False)
    with LLMCollector(MixedEnv(envs), policy=policy, groups_per_batch=1, limits=limits) as collector:
        played = collector.play(2 * len(envs))
    server.close()
    rollouts = {name: [one for one in played if one.env == name] for name in envs}
    assert all(len(pair) == 2 and pair[0].group_id == pair[1].group_id for pair in rollouts.values())
    assert all(one.is_scored and one.num_turns > 0 for one in rollouts["openenv"])
    # The model reads what its action lacks, and has the turns that are left.
    assert all("Field required" in str(one.messages) and not one.error for one in rollouts["openenv_bad"])
    assert min(one.reward for one in rollouts["textarena"]) == -1.0
    assert [(one.reward, one.tool_calls) for one in rollouts["tool"]] == [(1.0, {"answered": 1})] * 2
    for one in rollouts["tool_bad"]:
        assert one.status is RolloutStatus.COMPLETED and one.reward == 0.0 and not one.tool_calls.get("answered")
    assert [(one.reward, one.num_turns) for one in rollouts["gymnasium"]] == [(1.0, 2)] * 2
    assert all("no thirteen" in one.error and one.num_turns == 0 for one in rollouts["gymnasium_bad"])

    scored = [one for one in played if one.num_turns and one.is_scored]
    sampled = {one.rollout_id: [t for turn in one.conversation.turns for t in turn.completion_ids] for one in scored}
    batch = batch_rows([scored])
    with torch.no_grad():
        recomputed = TransformersWrapper(shallow_model_path, generate=False)(batch.copy())
    for row, expected in zip(batch.unbind(0), recomputed.unbind(0), strict=True):
        mask = row["masks", "all_assistant_mask"]
        assert row["tokens", "full"][mask].tolist() == sampled[row["rollout", "rollout_id"]]
        difference = (row["log_probs", "full"] - expected["log_probs", "full"])[mask].abs()
        assert difference.mean() < 0.001 and difference.max() < 0.02  # both compute in float32
