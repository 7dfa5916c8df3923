"""Several policies behind one endpoint: each role its rows, its reward and baseline, and its weights."""

from __future__ import annotations

import asyncio
import gc
import itertools

import openai
import pytest
import torch
from endpoint_agents import LoggingEngine
from tensordict import lazy_stack
from torchrl.envs import Transform
from transformers import AutoModelForCausalLM
from waiting import wait_until

from llmrl import GRPOLoss, MCAdvantage, train_step
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.collectors.agents import AgentPlay
from llmrl.data.tensordicts import plain
from llmrl.endpoint import Session
from llmrl.endpoint.agent import AgentModel
from llmrl.engines import TransformersEngine
from llmrl.envs import AgentEnv
from llmrl.policies import LLMWrapperBase, vLLMWrapper
from llmrl.testing.tiny_model import make_tiny_model
from llmrl.trainer import TransformersWrapper

ROWS = [{"query": "7 + 8 ="}, {"query": "1 + 1 ="}]


async def ask(model, text, **more):
    without_tls = openai.DefaultAsyncHttpxClient(verify=False)  # reads no certificates
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=without_tls)
    answer = await client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": text}], **more
    )
    return answer.id, answer.choices[0].message.content


def engine_of(renderer, answer):
    return LoggingEngine([f"{answer}<|im_end|>"], encode=renderer.encode, decode=renderer.decode)


def policy_of(renderer, answer):
    return LLMWrapperBase(engine_of(renderer, answer), renderer=renderer)


def trained_texts(renderer, batch):
    """Role, reward and sampled text of each row."""
    rows = batch.unbind(0)
    masks = [row["masks", "all_assistant_mask"] for row in rows]
    texts = [renderer.decode(row["tokens", "full"][mask].tolist()) for row, mask in zip(rows, masks, strict=True)]
    return [
        (plain(row["rollout", "role"]), row["next", "reward"].item(), text)
        for row, text in zip(rows, texts, strict=True)
    ]


def test_each_role_has_its_rows_and_reward_and_a_frozen_policy_has_none(renderer):
    async def play(row, model):
        _, question = await ask(model.role("user"), row["query"])
        reply_id, answer = await ask(model, question)
        verdict = await ask(model.role("judge"), answer)
        await ask(model.role("user").aside, "A title.")
        model.reward(reply_id, 0.25)
        assert verdict[1] == "right" and question == "What is it?" and answer == "15"
        return {"solver": {"right": 1.0, "short": 0.5}, "user": -1}

    others = {"user": policy_of(renderer, "What is it?"), "judge": policy_of(renderer, "right")}
    env = AgentEnv(play, ROWS, roles=("solver", "user"), policies=others, repeats=4)
    with LLMCollector(env, policy=policy_of(renderer, "15"), groups_per_batch=1) as collector:
        texts = trained_texts(renderer, next(iter(collector)))
        rollouts = collector.rollouts
    assert texts == [("solver", 1.75, "15<|im_end|>"), ("user", -1.0, "What is it?<|im_end|>")] * 2
    assert [one.num_turns for one in rollouts] == [1, 1, 1, 1]
    assert len(others["judge"].engine.log) == 2 and len(others["user"].engine.log) == 4


def test_a_role_of_a_model_that_is_not_recorded_is_not_recorded():
    model = AgentModel(base_url="http://localhost/v1", api_key="k", name="policy", infos={"user": {}})
    assert model.aside.role("user").name == model.role("user").aside.name != model.role("user").name


def test_a_reward_after_the_end_of_an_agents_run_is_refused(renderer):
    given = []

    async def play(row, model):
        reply_id, _ = await ask(model, "Hi.")
        given.append((model, reply_id))
        return 1.0

    with LLMCollector(AgentEnv(play, ROWS[:1]), policy=policy_of(renderer, "15"), groups_per_batch=1) as collector:
        collector.play(1)
        ((model, reply_id),) = given
        with pytest.raises(ValueError, match="the agent's run has ended"):
            model.reward(reply_id, 0.5)


def test_self_play_of_one_policy_is_compared_by_role(renderer):
    async def play(row, model):
        await asyncio.gather(ask(model.role("black"), "Move."), ask(model.role("white"), "Move."))
        play.number += 1
        return {"white": play.number, "black": 10 * play.number}

    play.number = 0
    env = AgentEnv(play, ROWS[:1], roles=("white", "black"), repeats=4)
    advantage = MCAdvantage(grpo_size=4, by="role", normalization="mean")
    with LLMCollector(env, policy=policy_of(renderer, "e4"), groups_per_batch=1, postproc=advantage) as collector:
        batch = next(iter(collector))
    by_role = {}
    for row in batch.unbind(0):
        by_role.setdefault(plain(row["rollout", "role"]), []).append(row["advantage"].item())
    assert {role: sorted(values) for role, values in by_role.items()} == {"white": [-0.5, 0.5], "black": [-5.0, 5.0]}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "hangs", "other roles"])
def test_an_agent_that_fails_fails_all_its_roles(renderer, fault):
    async def play(row, model):
        await ask(model, "Hi.")
        if fault == "raises":
            raise KeyError("no such thing")
        if fault == "hangs":
            await asyncio.sleep(60)
        return {"solver": 1.0, "crowd": 2.0}

    env = AgentEnv(play, ROWS, roles=("solver", "user"))
    limits = RolloutLimits(rollout_timeout_seconds=1.0 if fault == "hangs" else 60.0)
    with LLMCollector(env, policy=policy_of(renderer, "15"), groups_per_batch=1, limits=limits) as collector:
        rollouts = collector.play(2)
    expected = {"raises": "KeyError", "hangs": "", "other roles": "scores of ['crowd']"}[fault]
    assert [one.status.name for one in rollouts] == ["TRUNCATED" if fault == "hangs" else "ERROR"] * 2
    assert all(expected in one.error for one in rollouts)


class OpeningFails(Transform):
    """Opens some conversations of each group not at all."""

    failing = ()

    def _reset(self, tensordict, tensordict_reset):
        if int(tensordict_reset["rollout", "sample_index"]) in self.failing:
            raise KeyError("no opening")
        return tensordict_reset


def test_a_run_that_is_cancelled_while_its_sessions_end_leaves_no_open_key(renderer, clock, monkeypatch):
    models = []

    async def play(row, model):
        models.append(model)
        return {"a": 1.0, "b": 0.0}

    async def waits_for_answers(self):
        clock.pass_limit(600)
        await asyncio.Event().wait()

    monkeypatch.setattr(Session, "finish", waits_for_answers)
    env = AgentEnv(play, ROWS, roles=("a", "b"))
    limits = RolloutLimits(rollout_timeout_seconds=600)
    with LLMCollector(env, policy=policy_of(renderer, "1"), groups_per_batch=1, limits=limits) as collector:
        rollouts = collector.play(2)
        assert {rollout.reason for rollout in rollouts} <= {"timeout", "environment_error"}
        with pytest.raises(openai.AuthenticationError):
            asyncio.run(ask(models[0], "Who am I?"))


def test_a_run_of_which_roles_are_not_opened_is_forgotten_with_its_sessions(renderer):
    async def play(row, model):
        return dict.fromkeys(("a", "b", "c"), 1.0)

    def num_plays():
        gc.collect()
        return sum(isinstance(one, AgentPlay) for one in gc.get_objects())

    opening = OpeningFails()
    env = AgentEnv(play, ROWS[:1], roles=("a", "b", "c"), repeats=3).append_transform(opening)
    subsets = itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in range(4))
    before = num_plays()
    with LLMCollector(env, policy=policy_of(renderer, "15"), groups_per_batch=1) as collector:
        for opening.failing in subsets:
            rollouts = collector.play(3)
            assert [one.status.is_success for one in rollouts] == [role not in opening.failing for role in range(3)]
            del rollouts
        wait_until(lambda: num_plays() <= before)


def test_what_is_wrong_with_roles_is_said_before_anything_starts(renderer):
    async def play(row, model):
        await ask(model.role("nurse"), "Hi.")

    with pytest.raises(ValueError, match="repeats must be a multiple of the 2 roles"):
        AgentEnv(play, ROWS, roles=("a", "b"), repeats=3)
    for roles in ((), ("a", "a"), ("aside",), ("a", "")):
        with pytest.raises(ValueError, match="distinct, non-empty names"):
            AgentEnv(play, ROWS, roles=roles)
    with pytest.raises(TypeError, match=r"roles must be a list of names, got 'solver'; write roles=\['solver'\]"):
        AgentEnv(play, ROWS, roles="solver")
    env = AgentEnv(play, ROWS, policies={"judge": "gpt"})
    with pytest.raises(TypeError, match="policies such as a vLLMWrapper, got 'gpt' for 'judge'"):
        LLMCollector(env, policy=policy_of(renderer, "15"), groups_per_batch=1)
    with LLMCollector(AgentEnv(play, ROWS), policy=policy_of(renderer, "15"), groups_per_batch=1) as collector:
        (rollout,) = collector.play(1)
    assert "role must be one of [], got 'nurse'" in rollout.error


@pytest.mark.slow
def test_a_user_simulator_and_its_solver_are_both_trained(tokenizer, tmp_path):
    """Two models: each is updated by the rows of its role, which have the log-probs of its own engine."""
    path = make_tiny_model(tmp_path / "tiny")
    roles, policies, losses, optimizers = ("solver", "user"), {}, {}, {}
    numbers = itertools.count()
    for seed, role in enumerate(roles):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight))
        losses[role] = GRPOLoss(TransformersWrapper(model, generate=False))
        optimizers[role] = torch.optim.Adam(model.parameters(), lr=0.003)
        engine = TransformersEngine(model, tokenizer=tokenizer, seed=seed)
        policies[role] = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})

    async def play(row, model):
        number = next(numbers)  # by the order of starts, so that each group has both rewards
        _, question = await ask(model.role("user"), "Ask.")
        await ask(model.role("solver"), question)
        return dict.fromkeys(roles, float(number % 2))

    env = AgentEnv(play, [{"query": ""}], roles=roles, policies={"user": policies["user"]}, repeats=8)
    advantages = MCAdvantage(grpo_size=8, by="role")
    updated = dict.fromkeys(roles, 0)
    with LLMCollector(env, policy=policies["solver"], groups_per_batch=1, postproc=advantages) as collector:
        for _, batch in zip(range(2), collector, strict=False):
            by_role = {
                role: [row for row in batch.unbind(0) if plain(row["rollout", "role"]) == role] for role in roles
            }
            for role, rows in by_role.items():
                batch_of_role = lazy_stack(rows)
                with torch.no_grad():
                    mixed = losses[roles[1 - roles.index(role)]](batch_of_role.clone())
                report = train_step(losses[role], batch_of_role, optimizers[role])
                assert report.measurements["log_prob_difference_mean"] < 1e-4
                assert mixed.kl_approx.abs() > 1e-2  # the other model's log-probs are others
                updated[role] += 1
    assert updated == {"solver": 2, "user": 2}
