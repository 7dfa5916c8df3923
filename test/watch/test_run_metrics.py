"""What a run measures: rollouts against plain loops, steps, and what trackers receive."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmrl.data import Rollout, RolloutStatus
from llmrl.runs.run_folder import RunFolder
from llmrl.trainer import TrainStepReport
from llmrl.watch.health import diagnose
from llmrl.watch.rollout_metrics import rollout_metrics, rollout_records
from llmrl.watch.step_metrics import StepMeter, metrics_of


def rollout(group="a", reward=0.0, *, tokens=3, is_scored=True, reason="", parts=None, said="", calls=None):
    status = RolloutStatus.TRUNCATED if reason else RolloutStatus.COMPLETED
    return Rollout(
        rollout_id="", group_id=group, sample_index=0, group_size=2, reward=reward, is_scored=is_scored,
        breakdown=parts or {}, num_completion_tokens=tokens, status=status, reason=reason, tool_calls=calls or {},
        messages=({"role": "assistant", "content": said},),
    )  # fmt: skip


def test_a_step_of_several_updates_says_how_many_were_skipped():
    taken, skipped = TrainStepReport(loss=1.0, num_rows=2), TrainStepReport(is_skipped=True, num_rows=2)
    metrics = metrics_of([skipped] * 7 + [taken])
    assert (metrics["num_skipped"], metrics["is_skipped"]) == (7, 0)
    (finding,) = diagnose([metrics])
    assert (finding.name, finding.verdict) == ("skipped", "look") and "7 of the step's updates" in finding.says
    assert not diagnose([metrics_of([taken, taken])])
    metrics = metrics_of([skipped, skipped])
    assert (metrics["num_skipped"], metrics["is_skipped"]) == (2, 1)


def test_of_no_rollouts_there_is_no_number():
    assert rollout_metrics([]) == {}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from((0.0, 0.5, 1.0, 2.0)), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_numbers_of_rollouts_are_those_of_plain_loops(drawn):
    metrics = rollout_metrics(
        [rollout(group, reward, tokens=n, is_scored=scored, parts={"p": -reward}) for group, reward, n, scored in drawn]
    )
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    lengths = [n for _, _, n, _ in drawn]
    assert metrics["completion_tokens_max"] == max(lengths)
    assert metrics["completion_tokens_p95"] == np.percentile(lengths, 95, method="inverted_cdf")
    scored = [(group, reward, n) for group, reward, n, is_scored in drawn if is_scored]
    assert metrics["num_unscored"] == len(drawn) - len(scored)
    knows_right = all(reward <= 1 for _, reward, _ in scored)  # nothing here is named `success`
    for name, kept in (
        ("right", [n for _, reward, n in scored if reward == 1 and knows_right]),
        ("wrong", [n for _, reward, n in scored if reward < 1 and knows_right]),
    ):
        assert metrics.get(f"completion_tokens_{name}") == (pytest.approx(np.mean(kept)) if kept else None)
    if not scored:
        assert "reward_std" not in metrics and "reward/p_mean" not in metrics
        return
    rewards = [reward for _, reward, _ in scored]
    assert metrics["reward_std"] == metrics["reward/p_std"] == pytest.approx(np.std(rewards))
    assert metrics["reward/p_mean"] == pytest.approx(-np.mean(rewards))
    groups = [[reward for name, reward, _ in scored if name == group] for group in {name for name, _, _ in scored}]
    if all(len(group) == 1 for group in groups):
        assert "groups_all_equal" not in metrics  # nothing is compared
        return
    assert metrics["reward_group_std"] == pytest.approx(np.mean([np.std(group) for group in groups]))
    assert metrics["groups_all_equal"] == pytest.approx(np.mean([len(set(group)) == 1 for group in groups]))
    if not knows_right:
        assert "groups_all_right" not in metrics and "groups_all_wrong" not in metrics
        return
    assert metrics["groups_all_right"] == pytest.approx(np.mean([min(group) == 1 for group in groups]))
    assert metrics["groups_all_wrong"] == pytest.approx(np.mean([max(group) < 1 for group in groups]))


@pytest.mark.parametrize("parts", [(0.9, 0.1), (0.7, 0.2, 0.1)])
def test_an_answer_that_is_paid_in_parts_that_add_up_to_1_is_right(parts):
    paid = rollout("g")
    for part in parts:
        paid.add_reward(float(torch.tensor(part)))  # as environments pay: in 32 bits
    assert paid.reward < 1
    metrics = rollout_metrics([paid, paid])
    assert (metrics["groups_all_right"], metrics["groups_all_wrong"]) == (1, 0)


def test_each_role_of_a_game_is_a_group_of_its_own():
    """The first player always wins: between games of a role nothing differs, so that nothing is learned."""
    played = [replace(rollout("g", reward), role=role) for role, reward in (("first", 1.0), ("second", 0.0)) * 2]
    metrics = rollout_metrics(played)
    names = ("num_groups", "groups_all_equal", "reward_group_std", "groups_all_right", "groups_all_wrong")
    assert [metrics[name] for name in names] == [2.0, 1.0, 0.0, 0.5, 0.5]


def test_cut_answers_tool_calls_and_answers_that_are_alike_are_shares():
    metrics = rollout_metrics(
        [
            rollout("a", reason="length", said="7 ", calls={"answered": 1, "failed": 1}),
            rollout("a", reason="max_turns", said="7"),
            rollout("b", said="7", calls={"timeouts": 2}),
            rollout("c", said="8"),
        ]
    )
    assert metrics["cut_share"] == 0.25
    assert metrics["num_tool_calls"] == 4 and metrics["tool_failure_share"] == 0.75
    assert (metrics["tool_calls/answered"], metrics["tool_calls/timeouts"]) == (1, 2)
    assert metrics["common_answer_share"] == pytest.approx(2 / 3)  # "7" in a and b, not in c
    alone = rollout_metrics([rollout("a", said="7"), rollout("a", said="7")])
    assert not {"num_tool_calls", "common_answer_share"} & set(alone)  # of one prompt answers may be alike


def test_a_step_has_the_learning_rate_that_it_was_made_with_and_its_times_add_up():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.25)
    meter = StepMeter({"model": torch.nn.Linear(1, 1), "optimizer": optimizer})
    optimizer.param_groups[0]["lr"] = 0.125  # as a schedule does before the step is logged
    for _ in range(2):
        with meter.part("sync"):
            time.sleep(0.001)
    metrics = meter.metrics({"generate_seconds": 2.0, "num_trained_tokens": 10.0})
    assert metrics["learning_rate"] == 0.25 and metrics["sync_seconds"] >= 0.002
    parts = metrics["train_seconds"] + metrics["sync_seconds"] + 2.0
    assert metrics["seconds"] == pytest.approx(parts)
    assert metrics["trained_tokens_per_second"] == pytest.approx(10 / parts)
    assert 0.05 < metrics["peak_memory_gib"] < 1000
    assert "learning_rate" not in StepMeter({}).metrics({})


def test_what_is_not_a_number_is_absent_and_trackers_see_groups(tmp_path):
    told = []

    class Told:
        def log_metrics(self, metrics, step):
            told.append((step, metrics))

        def close(self):
            pass

    folder = RunFolder(tmp_path / "run", trackers=[])
    folder._trackers.append(Told())
    folder.log_metrics(
        1, {"reward_mean": 0.5, "kl": math.nan, "loss": math.inf, "sync_seconds": 1.0, "eval/a/seconds": 2.0}
    )
    folder.close()
    assert folder.read_metrics() == [{"step": 1, "reward_mean": 0.5, "sync_seconds": 1.0, "eval/a/seconds": 2.0}]
    assert told == [(1, {"train/reward_mean": 0.5, "perf/sync_seconds": 1.0, "eval/a/seconds": 2.0})]


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        ([rollout(reward=1.0), rollout(reward=0.5)], [True, False]),
        ([rollout(reward=1.0), rollout(reward=2.0)], [None, None]),
        # A truncated answer has a reward of its own and no breakdown.
        ([rollout(reward=9.0, parts={"success": 1.0}), rollout(reward=2.0, reason="length")], [True, False]),
        ([rollout(reward=1.0), rollout(is_scored=False)], [True, None]),  # such as a conversation to imitate
    ],
)
def test_a_record_says_whether_its_answer_is_right(rollouts, said):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [record["is_right"] for record in rollout_records(rollouts)] == said


def test_a_record_has_its_tool_calls():
    assert json.loads(json.dumps(rollout(calls={"failed": 2}).to_record()))["tool_calls"] == {"failed": 2}
