"""The collector on real vLLM: an update that aborts what runs, and partial rollouts that go on."""

from __future__ import annotations

import threading
import time

import pytest

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.envs import DatasetChatEnv
from llmrl.policies import vLLMWrapper
from llmrl.weight_sync import VLLMWeightSyncScheme

NUM_TOKENS = 96


def test_partial_rollouts_go_on_after_an_update_that_aborted_them(vllm_engine, reference_model, tokenizer):
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    policy = vLLMWrapper(vllm_engine, tokenizer=tokenizer, generate_kwargs=sampling)
    policy.sampling = policy.sampling.with_changes(stop_token_ids=())
    before = vllm_engine.policy_version
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
        deadline = time.monotonic() + 240
        while vllm_engine.num_in_flight < 8:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        # The weights are those that the engine has: what changes is their version.
        version = collector.update_policy_weights_(reference_model)
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
