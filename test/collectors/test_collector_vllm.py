"""The collector on real vLLM: partial rollouts that go on after an update, and three environments in one run."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.envs import DatasetChatEnv, Game, GameEnv, MixedEnv, make_addition_env, make_guess_env
from llmrl.policies import vLLMWrapper
from llmrl.watch.rollout_metrics import metrics_by_env
from llmrl.weight_sync import VLLMWeightSyncScheme

NUM_TOKENS = 96


def test_partial_rollouts_go_on_after_an_update_that_aborted_them(shallow_engine, shallow_model, tokenizer):
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    policy = vLLMWrapper(shallow_engine, tokenizer=tokenizer, generate_kwargs=sampling)
    policy.sampling = policy.sampling.with_changes(stop_token_ids=())
    before = shallow_engine.policy_version
    batches = []
    with LLMCollector(
        DatasetChatEnv([{"query": "Tell me a story."}] * 4, repeats=4),
        policy=policy,
        groups_per_batch=2,
        limits=RolloutLimits(max_turns=1),
        weight_sync_schemes={"policy": VLLMWeightSyncScheme(pause_mode="abort")},
    ) as collector:
        with pytest.raises(ValueError, match="trainer's model"):
            collector.update_policy_weights_()
        thread = threading.Thread(target=lambda: batches.append(collector.next()))
        thread.start()
        deadline, num_tokens = time.monotonic() + 240, []
        while len(set(num_tokens)) < 8:  # tokens have come when it has changed so often
            assert time.monotonic() < deadline
            time.sleep(0.01)
            if shallow_engine.num_in_flight == 8:
                num_tokens.append(asyncio.run(shallow_engine.progress()))
        # The weights are those that the engine has: what changes is their version.
        version = collector.update_policy_weights_(shallow_model)
        thread.join()
        assert version == before + 1 == collector.policy_version
        assert collector.report.num_dropped_by_reason == {}
    rows = batches[0].unbind(0)
    assert len(rows) == 8
    seen = set()
    for row in rows:
        versions = row["policy_versions", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert len(versions) == NUM_TOKENS and versions == sorted(versions)
        seen |= set(versions)
    assert seen == {before, before + 1}


class Higher(Game):
    """Each says a number once; the higher one wins."""

    roles = ("first", "second")

    def __init__(self):
        self.said = []

    def observe(self):
        return self.roles[len(self.said)], "Say a number."

    def act(self, text):
        self.said.append(len(text))

    def rewards(self):
        return dict(zip(self.roles, map(float, self.said), strict=True)) if len(self.said) == 2 else None


def test_three_environments_in_one_run_have_exact_rows_metrics_by_name_and_resume(
    shallow_engine, shallow_model, tokenizer
):
    def collector():
        envs = {
            "addition": make_addition_env("train", repeats=2),
            "guess": make_guess_env("train", repeats=2),
            "higher": GameEnv(lambda row: Higher(), [{"place": place} for place in range(9)], roles=Higher.roles),
        }
        policy = vLLMWrapper(shallow_engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6})
        limits = RolloutLimits(max_turns=3, end_at_length=False)
        return LLMCollector(MixedEnv(envs, weights={"addition": 1, "guess": 2, "higher": 1}), policy=policy,
                            groups_per_batch=4, limits=limits)  # fmt: skip

    def groups_of(batch):
        return sorted(set(batch["rollout", "group_id"]))

    with collector() as collecting:
        batch, rollouts, state = collecting.next(), collecting.rollouts, collecting.state_dict()
        following = groups_of(collecting.next())
    assert [one.split("/")[0] for one in groups_of(batch)] == ["addition", "guess", "guess", "higher"]
    with collector() as collecting:
        collecting.load_state_dict(state)
        assert groups_of(collecting.next()) == following
    metrics = metrics_by_env(rollouts)
    for name, num_rollouts in (("addition", 2), ("guess", 4), ("higher", 2)):
        rewards = [one.reward for one in rollouts if one.group_id.startswith(name)]
        assert metrics[f"env/{name}/num_rollouts"] == num_rollouts == len(rewards)
        assert metrics[f"env/{name}/reward_mean"] == pytest.approx(sum(rewards) / num_rollouts)
    roles = {one["rollout", "group_id"].split("/")[0]: set() for one in batch.unbind(0)}
    for row in batch.unbind(0):
        name, ids = row["rollout", "group_id"].split("/")[0], row["tokens", "full"]
        roles[name].add(row["rollout", "role"])
        messages = [dict(message) for message in row["history", "full"].chats]
        opening = messages[: next(i for i, one in enumerate(messages) if one["role"] == "assistant")]
        prompt = tokenizer.apply_chat_template(opening, add_generation_prompt=True, return_dict=False)
        assert ids[: len(prompt)].tolist() == prompt
        mask = row["masks", "all_assistant_mask"]
        with torch.no_grad():
            expected = shallow_model(ids[None]).logits[0].double().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(
            row["log_probs", "full"][1:][mask[1:]].double(), expected[mask[1:]], atol=1e-3, rtol=0
        )
    assert roles == {"addition": {""}, "guess": {""}, "higher": {"first", "second"}}
    assert max(one.num_turns for one in rollouts if one.env == "guess") > 1
