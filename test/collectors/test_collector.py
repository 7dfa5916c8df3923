"""The collector: every rollout settles, every batch keeps the data contract."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading

import pytest
import torch
from torchrl.envs import EnvBase, Transform
from waiting import wait_until

from llmrl.collectors import CollectionStalled, LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus, StopReason
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep, stepper
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric, Score
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

DATASET = [{"query": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]


def exact(completion, answer):
    return float(completion == answer)


@pytest.fixture
def make_policy(renderer):
    def make(script=("1<|im_end|>",), generate_kwargs=None, **engine_kwargs):
        engine = ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode, **engine_kwargs)
        return LLMWrapperBase(engine, renderer=renderer, generate_kwargs=generate_kwargs)

    return make


def collect_groups(policy, env=None, **kwargs):
    env = env or DatasetChatEnv(DATASET, repeats=2).append_transform(RubricReward(exact))
    return LLMCollector(env, policy=policy, groups_per_batch=2, **kwargs)


def test_a_batch_of_groups_keeps_the_data_contract(make_policy, renderer):
    with collect_groups(make_policy()) as collector:
        batch = next(iter(collector))
    assert batch.batch_size == torch.Size([4])
    for row in batch.unbind(0):
        num_tokens = row["tokens", "full"].shape[0]
        for key in (("masks", "all_assistant_mask"), ("log_probs", "full"), ("policy_versions", "full")):
            assert row[key].shape == (num_tokens,)
        mask = row["masks", "all_assistant_mask"]
        assert renderer.decode(row["tokens", "full"][mask].tolist()) == "1<|im_end|>"
        assert row["log_probs", "full"][mask].tolist() == [-1.0] * int(mask.sum())
        assert not row["log_probs", "full"][~mask].any()
        assert set(row["policy_versions", "full"][~mask].tolist()) == {-1}
        assert row["next", "reward"].shape == (1, 1)
        assert int(row["rollout", "status"]) == RolloutStatus.COMPLETED
    assert list(batch["rollout", "group_id"]) == ["train/0/0"] * 2 + ["train/0/1"] * 2
    assert len(set(batch["rollout", "rollout_id"])) == 4
    assert batch["next", "reward"].flatten().tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch["reward_breakdown", "exact"].flatten().tolist() == [1.0, 1.0, 0.0, 0.0]


def test_an_answer_cut_by_its_budget_is_truncated_and_scored_as_such(make_policy):
    env = DatasetChatEnv(DATASET, repeats=2).append_transform(RubricReward(Rubric(exact, truncation_reward=-1.0)))
    with collect_groups(make_policy(["1 2 3 4 5 6"], {"max_new_tokens": 1}), env) as collector:
        rollouts = collector.play(2)
    assert {r.status for r in rollouts} == {RolloutStatus.TRUNCATED}
    assert {r.reason for r in rollouts} == {StopReason.LENGTH}
    assert [r.reward for r in rollouts] == [-1.0, -1.0]
    assert [r.messages[-1]["content"] for r in rollouts] == ["1", "1"]


def test_a_prompt_too_long_settles_with_zero_turns(make_policy):
    with collect_groups(make_policy(max_model_len=16)) as collector:
        rollouts = collector.play(1)
    assert rollouts[0].status is RolloutStatus.TRUNCATED
    assert rollouts[0].reason == StopReason.PROMPT_TOO_LONG
    assert rollouts[0].num_turns == 0 and rollouts[0].messages[-1]["content"] == "0 + 1 ="


def test_the_completion_budget_is_clipped_to_the_context_that_remains(make_policy, renderer):
    prompt = renderer.render([{"role": "user", "content": "0 + 1 ="}], add_generation_prompt=True)
    with collect_groups(make_policy(["1 2 3 4 5 6"], max_model_len=len(prompt) + 3)) as collector:
        rollout = collector.play(1)[0]
    assert rollout.num_completion_tokens == 3
    assert rollout.reason == StopReason.LENGTH


class Asking(MessageEnv):
    """Asks again until it was answered `num_turns` times."""

    def __init__(self, item):
        self.num_turns, self.fails_at = item.get("num_turns", 3), item.get("fails_at")
        self.turn = 0

    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        self.turn += 1
        if self.turn == self.fails_at:
            raise RuntimeError("broken tool")
        return MessageStep([{"role": "user", "content": "again"}], reward=1.0, is_done=self.turn == self.num_turns)


def test_turns_go_on_without_a_barrier_and_rows_hold_the_whole_conversation(make_policy, renderer):
    env = MessageChatEnv(Asking, [{"num_turns": 3}])
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        row = next(iter(collector))[0]
        rollout = collector.rollouts[0]
    assert rollout.num_turns == 3 and rollout.reward == 3.0
    text = renderer.decode(row["tokens", "full"].tolist())
    assert text.count("<|im_start|>assistant\n1<|im_end|>") == 3
    # The row ends where the model ended: the last environment message is in the record, not in the row.
    assert text.endswith("1<|im_end|>")
    trained = row["tokens", "full"][row["masks", "all_assistant_mask"]]
    assert renderer.decode(trained.tolist()) == "1<|im_end|>" * 3


def test_max_turns_truncates_unless_the_environment_ends_by_itself(make_policy):
    env = MessageChatEnv(Asking, [{"num_turns": 2}, {"num_turns": 5}])
    limits = RolloutLimits(max_turns=2)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1, limits=limits) as collector:
        ended, cut = collector.play(2)
    assert (ended.status, ended.reason) == (RolloutStatus.COMPLETED, "")
    assert (cut.status, cut.reason, cut.num_turns) == (RolloutStatus.TRUNCATED, StopReason.MAX_TURNS, 2)


def test_an_environment_error_keeps_what_there_was_and_spares_the_others(make_policy):
    env = MessageChatEnv(Asking, [{"num_turns": 3, "fails_at": 2}, {"num_turns": 3}])
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        failed, fine = collector.play(2)
    assert (failed.status, failed.reason) == (RolloutStatus.ERROR, StopReason.ENVIRONMENT_ERROR)
    assert "broken tool" in failed.error
    assert failed.num_turns == 2 and len(failed.messages) == 4
    assert fine.status is RolloutStatus.COMPLETED


def test_an_observation_that_overflows_the_context_truncates_and_keeps_the_turns_before(make_policy):
    class Flooding(Asking):
        async def step(self, message):
            return MessageStep([{"role": "user", "content": "word " * 400}], reward=1.0)

    env = MessageChatEnv(Flooding, [{}])
    with LLMCollector(env, policy=make_policy(max_model_len=256), groups_per_batch=1) as collector:
        row = next(iter(collector))[0]
        rollout = collector.rollouts[0]
    assert (rollout.status, rollout.reason) == (RolloutStatus.TRUNCATED, StopReason.PROMPT_TOO_LONG)
    assert rollout.num_turns == 1 and rollout.reward == 1.0 and rollout.is_scored
    # The observation that did not fit is in the record and not in the row, which ends where the model ended.
    assert len(rollout.messages) == 3 and row["tokens", "full"].shape[0] < 64


def test_a_step_that_hangs_times_out_and_others_go_on(make_policy, clock):
    class Hanging(Asking):
        async def step(self, message):
            if self.turn == 1:
                while not collector.num_played:  # the other conversation
                    await asyncio.sleep(0.001)
                clock.pass_limit(600)
                await asyncio.Event().wait()
            return await super().step(message)

    env = MessageChatEnv(Hanging, [{"num_turns": 1}, {"num_turns": 2}])
    with LLMCollector(
        env, policy=make_policy(), groups_per_batch=1, limits=RolloutLimits(step_timeout_seconds=600)
    ) as collector:
        fine, hung = collector.play(2)
        again = collector.play(1)[0]
    assert fine.status is RolloutStatus.COMPLETED
    assert (hung.status, hung.reason) == (RolloutStatus.ERROR, StopReason.ENVIRONMENT_ERROR)
    assert "TimeoutError" in hung.error and hung.num_turns == 2
    assert again.status is RolloutStatus.COMPLETED


def test_a_rollout_past_its_time_is_truncated_with_what_it_had(make_policy, clock):
    env = MessageChatEnv(Asking, [{"num_turns": 100}])
    limits, num_requests = RolloutLimits(rollout_timeout_seconds=600), itertools.count()

    def latency_s(prompt_ids, token_ids):
        if next(num_requests) < 2:
            return 0.0
        clock.pass_limit(600)
        return math.inf

    with LLMCollector(env, policy=make_policy(latency_s=latency_s), groups_per_batch=1, limits=limits) as collector:
        rollout = collector.play(1)[0]
    assert (rollout.status, rollout.reason) == (RolloutStatus.TRUNCATED, StopReason.TIMEOUT)
    assert rollout.num_turns == 2 and rollout.conversation.num_turns == rollout.num_turns


def test_engine_faults_are_retried_and_then_settle_as_errors(make_policy):
    policy = make_policy()
    with collect_groups(policy, limits=RolloutLimits(num_engine_retries=1)) as collector:
        policy.engine.fail_next(1)
        assert collector.play(1)[0].status is RolloutStatus.COMPLETED
        policy.engine.fail_next(2)
        rollout = collector.play(1)[0]
    assert (rollout.status, rollout.reason) == (RolloutStatus.ERROR, StopReason.ENGINE_ERROR)
    assert not rollout.is_scored


def test_rollouts_that_failed_or_sampled_nothing_leave_batch_and_baseline(make_policy):
    policy = make_policy()
    with collect_groups(policy, limits=RolloutLimits(num_engine_retries=0)) as collector:
        policy.engine.fail_next(1)
        batch = next(iter(collector))
        assert len(batch) == 3
        assert collector.report.num_dropped_by_reason == {StopReason.ENGINE_ERROR: 1}
        assert len(collector.rollouts) == 4


def test_batches_without_anything_to_train_on_warn_then_raise(make_policy, caplog):
    with collect_groups(make_policy(max_model_len=16)) as collector, pytest.raises(CollectionStalled, match="too_long"):
        next(iter(collector))
    assert "nothing to train on" in caplog.text


def test_whatever_an_engine_raises_settles_the_rollout(make_policy):
    policy = make_policy()
    policy.engine.fail_next(1, ValueError("refused"))
    with collect_groups(policy) as collector:
        refused, fine = collector.play(2)
    assert (refused.status, refused.reason) == (RolloutStatus.ERROR, StopReason.ENGINE_ERROR)
    assert "refused" in refused.error
    assert fine.status is RolloutStatus.COMPLETED


def test_conversations_do_not_wait_for_each_other(make_policy, clock):
    delays = iter([3600.0] + [0.0] * 100)
    policy = make_policy(latency_s=lambda prompt, answer: next(delays))
    env = MessageChatEnv(Asking, [{"num_turns": 8}])

    def answer_at_last():
        # A lock-step collector would wait for the first answer; here the other conversation is over before it.
        wait_until(lambda: collector.num_played == 1)
        clock.move(3600)

    with LLMCollector(env, policy=policy, groups_per_batch=1) as collector:
        thread = threading.Thread(target=answer_at_last)
        thread.start()
        rollouts = collector.play(2)
        thread.join()
    assert all(r.num_turns == 8 for r in rollouts)
    assert min(r.seconds for r in rollouts) < 3600 <= max(r.seconds for r in rollouts)


def test_concurrency_is_bounded(make_policy):
    highest = 0

    def latency(prompt, answer):
        nonlocal highest
        highest = max(highest, policy.engine.num_in_flight)
        return 0.01

    policy = make_policy(latency_s=latency)
    with collect_groups(policy, max_concurrent_rollouts=3) as collector:
        assert len(collector.play(12)) == 12
    assert highest <= 3


def test_turns_come_in_the_asked_number_with_their_next(make_policy):
    env = MessageChatEnv(Asking, [{"num_turns": 3}])
    with LLMCollector(env, policy=make_policy(), dialog_turns_per_batch=4, total_dialog_turns=8) as collector:
        batches = list(collector)
    assert [b.batch_size for b in batches] == [torch.Size([4])] * 2
    assert batches[0]["next", "reward"].flatten().tolist() == [1.0] * 4
    assert batches[0]["next", "done"].flatten().tolist() == [False, False, True, False]


def test_trajectories_and_last_steps(make_policy):
    env = MessageChatEnv(Asking, [{"num_turns": 3}])
    with LLMCollector(env, policy=make_policy(), yield_completed_trajectories=True) as collector:
        trajectory = next(iter(collector))
    assert trajectory.batch_size == torch.Size([3])
    assert trajectory["next", "done"].flatten().tolist() == [False, False, True]
    with LLMCollector(env, policy=make_policy(), yield_only_last_steps=True) as collector:
        last = next(iter(collector))
    assert last.batch_size == torch.Size([1]) and last["next", "done"].all()


def test_a_group_can_be_scored_together(make_policy):
    class First(Rubric):
        async def score_group(self, rollouts):
            return [Score(float(index == 0), {"first": float(index == 0)}) for index in range(len(rollouts))]

    env = DatasetChatEnv(DATASET, repeats=2).append_transform(RubricReward(First(exact)))
    with collect_groups(make_policy(), env) as collector:
        batch = next(iter(collector))
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0, 1.0, 0.0]


def test_saved_state_continues_with_the_next_prompt(make_policy):
    with collect_groups(make_policy()) as first:
        next(iter(first))
        state = first.state_dict()
    with collect_groups(make_policy()) as second:
        second.load_state_dict(state)
        assert list(next(iter(second))["rollout", "group_id"]) == ["train/0/2"] * 2 + ["train/0/3"] * 2


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"groups_per_batch": 1, "dialog_turns_per_batch": 1}, {"groups_per_batch": 0}],
)
def test_unclear_batches_are_refused(make_policy, kwargs):
    with pytest.raises(ValueError, match="batch"):
        LLMCollector(DatasetChatEnv(DATASET), policy=make_policy(), **kwargs)


def test_a_locked_environment_without_conversations_is_refused(make_policy):
    class Locked(EnvBase):
        def _reset(self, tensordict):
            return tensordict

        def _step(self, tensordict):
            return tensordict

        def _set_seed(self, seed):
            pass

    with pytest.raises(ValueError, match=r"batch size \(2,\)"):
        LLMCollector(Locked(batch_size=(2,)), policy=make_policy(), groups_per_batch=1)


def test_conversations_that_are_ready_at_once_are_stepped_in_batches_of_bounded_size(make_policy, monkeypatch):
    monkeypatch.setattr(stepper, "_MAX_BATCH", 3)
    sizes = []

    class Sizes(Transform):
        def _step(self, tensordict, next_tensordict):
            sizes.append(next_tensordict.numel())
            return next_tensordict

    env = DatasetChatEnv(DATASET, repeats=4).append_transform(RubricReward(exact)).append_transform(Sizes())
    with collect_groups(make_policy(), env) as collector:
        assert len(collector.next()) == 8
    assert max(sizes) == 3 and sum(sizes) == 8
