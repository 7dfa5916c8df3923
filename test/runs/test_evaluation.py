"""Evaluation: the arithmetic against brute force, several environments on one engine, beside a collector."""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs import TransformedEnv
from waiting import wait_until

from llmrl.collectors import LLMCollector
from llmrl.data import Rollout, RolloutStatus
from llmrl.envs import ChatEnv, DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.runs.estimates import interval_of_mean, pass_at_k
from llmrl.runs.evaluation import BestEvaluation, EvaluationReport, Evaluator, metrics_of_evaluation
from llmrl.runs.run_folder import RunFolder
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward


@given(num_samples=st.integers(1, 12), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_samples, data):
    num_right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    subsets = list(combinations([True] * num_right + [False] * (num_samples - num_right), k))
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_an_interval_holds_its_mean_and_stays_in_bounds(means):
    low, high = interval_of_mean(means)
    assert 0 <= low <= sum(means) / len(means) + 1e-9 and sum(means) / len(means) - 1e-9 <= high <= 1
    assert high > low


@pytest.mark.parametrize("mean", [0.1, 1 / 3, 0.7, 0.9])
def test_problems_with_the_same_mean_have_an_interval_of_their_number_whatever_its_rounding(mean):
    low, high = interval_of_mean([mean] * 50)
    assert high - low > 0.15  # 2 x 1.96 x sqrt(0.09 / 50) = 0.166 at 0.1 and 0.9, more between


def test_an_interval_covers_what_it_should():
    # Problems with a difficulty of their own, several answers each: the case in which counting answers is too sure.
    import random

    rng, num_covered = random.Random(0), 0
    for _ in range(400):
        difficulties = [rng.random() for _ in range(40)]
        means = [sum(rng.random() < p for _ in range(8)) / 8 for p in difficulties]
        low, high = interval_of_mean(means)
        num_covered += low <= 0.5 <= high
    assert 0.92 <= num_covered / 400 <= 0.98


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="k must be between"):
        pass_at_k(4, 2, 5)
    with pytest.raises(ValueError, match="num_right"):
        pass_at_k(4, 5, 1)
    with pytest.raises(ValueError, match="empty"):
        interval_of_mean([])
    with pytest.raises(ValueError, match=r"scores in \[0, 1\]"):
        interval_of_mean([1.5])


def rollout(group, reward, is_scored=True, status=RolloutStatus.COMPLETED, tokens=3):
    return Rollout(
        rollout_id=f"{group}{reward}", group_id=group, sample_index=0, group_size=2, reward=reward,
        breakdown={"right": reward}, is_scored=is_scored, status=status, num_completion_tokens=tokens,
    )  # fmt: skip


def test_an_unscored_rollout_counts_as_wrong_and_keeps_its_status():
    failed = rollout("b", 0.0, is_scored=False, status=RolloutStatus.ERROR)
    report = EvaluationReport.of([rollout("a", 1.0), rollout("a", 0.0), rollout("b", 1.0, tokens=7), failed])
    assert report.pass_at[1].mean == 0.5 and report.pass_at[2].mean == 1.0
    assert report.reward == pytest.approx(2 / 3) and report.num_by_status == {"completed": 3, "error": 1}
    assert report.completion_tokens == 4.0 and report.to_summary()["pass@1"]["mean"] == 0.5


def test_right_answers_are_distinguished_from_the_mean_reward():
    rollouts = [rollout("g", 1.0), rollout("g", 0.2), rollout("g", 0.6), rollout("g", 1.0, is_scored=False)]
    report = EvaluationReport.of(rollouts)
    assert report.pass_at[1].mean == 0.25 and report.reward == pytest.approx(0.6)
    assert "reward" not in EvaluationReport.of(rollouts[3:]).to_metrics()  # none was scored: no NaN
    with pytest.raises(ValueError, match="rollouts is empty"):
        EvaluationReport.of([])


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_pass_at_k_of_an_evaluation_is_that_of_all_choices_of_k_answers(table):
    rollouts = [rollout(str(group), float(is_right)) for group, row in enumerate(table) for is_right in row]
    report = EvaluationReport.of(rollouts)
    for k in (1, 3):
        chosen = [[any(choice) for choice in combinations(row, k)] for row in table]
        means = [sum(choices) / len(choices) for choices in chosen]
        assert report.pass_at[k].mean == pytest.approx(sum(means) / len(means))


def is_answer(completion, answer):
    return float(completion == answer)


def sums(numbers, repeats, name):
    data = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a, b in product(numbers, numbers)]
    return TransformedEnv(DatasetChatEnv(data, repeats=repeats, name=name), RubricReward(is_answer))


@pytest.fixture
def make_policy(renderer):
    """A policy that knows sums below 10, and answers "9" to all others, at once or when it is let."""

    def make(on_request=lambda engine, total: None, **options):
        def script(token_ids):
            a, _, b, _ = renderer.decode(token_ids).split("user\n")[1].split("<")[0].split()
            total = int(a) + int(b)
            on_request(policy.engine, total)
            return renderer.encode(f"{total if total < 10 else 9}<|im_end|>")

        policy = LLMWrapperBase(ScriptedEngine(script, **options), renderer=renderer)
        return policy

    return make


def test_environments_are_evaluated_each_whole_and_always_on_the_same_problems(make_policy, tmp_path):
    envs = {"easy": sums(range(3), 2, "easy"), "hard": sums(range(4, 7), 3, "hard")}
    with Evaluator(envs, make_policy()) as evaluator:
        first, again = evaluator.evaluate(), evaluator.evaluate()
    for reports in (first, again):
        assert {name: len(report.rollouts) for name, report in reports.items()} == {"easy": 18, "hard": 27}
        assert reports["easy"].pass_at[1].mean == 1.0
        # Of 4 … 6 and 4 … 6 these sums are below 10 (or the 9 that is always said): 4 + 4, 4 + 5, 5 + 4.
        assert reports["hard"].pass_at[1].mean == reports["hard"].pass_at[3].mean == pytest.approx(3 / 9)
        asked = [one.messages[0]["content"] for one in reports["hard"].rollouts]
        assert sorted(asked) == sorted(f"{a} + {b} =" for a, b in product(range(4, 7), repeat=2) for _ in range(3))
    ids = [one.rollout_id for reports in (first, again) for report in reports.values() for one in report.rollouts]
    assert len(set(ids)) == len(ids)
    metrics = metrics_of_evaluation(first)
    assert metrics["eval/hard/reward"] == pytest.approx(1 / 3) and metrics["eval/easy/pass@2"] == 1.0
    assert metrics["eval/hard/pass@1_low"] < 1 / 3 < metrics["eval/hard/pass@1_high"]
    # A step's training and its evaluation are logged one after the other, and read as one.
    folder = RunFolder(tmp_path / "run", trackers=())
    folder.log_metrics(5, {"reward_mean": 0.5})
    folder.log_metrics(5, metrics)
    (row,) = folder.read_metrics()
    assert row["reward_mean"] == 0.5 and row["eval/hard/reward"] == pytest.approx(1 / 3, abs=1e-5)


def test_a_part_of_the_problems_is_always_the_same_part(make_policy):
    with Evaluator({"sums": sums(range(3), 2, "sums")}, make_policy(), num_problems=4) as evaluator:
        asked = [{one.messages[0]["content"] for one in evaluator.evaluate()["sums"].rollouts} for _ in range(3)]
    assert asked == [{"0 + 0 =", "0 + 1 =", "0 + 2 =", "1 + 0 ="}] * 3


def test_collection_goes_on_beside_an_evaluation(make_policy):
    is_taken, was_taken = threading.Event(), []

    def wait_for_a_batch(engine, total):
        if total >= 8:  # one of the evaluation's, which has an event loop of its own
            was_taken.append(is_taken.wait(60))

    policy = make_policy(on_request=wait_for_a_batch)
    with (
        LLMCollector(sums(range(3), 2, "train"), policy=policy, groups_per_batch=2, max_staleness=3) as collector,
        Evaluator({"sums": sums(range(4, 6), 1, "sums")}, policy) as evaluator,
    ):
        batches = iter(collector)
        next(batches)
        with ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(evaluator.evaluate)
            next(batches)
            is_taken.set()
            report = evaluation.result()["sums"]
    assert len(report.rollouts) == 4 and was_taken and all(was_taken)


def test_an_update_in_the_midst_of_an_evaluation_is_reported(make_policy):
    policy = make_policy(on_request=lambda engine, total: setattr(engine, "policy_version", 1))
    with Evaluator({"sums": sums(range(2), 1, "sums")}, policy) as evaluator:
        with pytest.warns(UserWarning, match="version 0 to 1 while 'sums'"):
            assert evaluator.evaluate()["sums"].policy_version == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert evaluator.evaluate()["sums"].policy_version == 1


def test_an_interrupted_evaluation_waits_for_no_answers(make_policy):
    def stop(number, frame):
        raise KeyboardInterrupt

    def interrupt():
        wait_until(lambda: policy.engine.num_in_flight == 16)  # all answers of both environments
        os.kill(os.getpid(), signal.SIGUSR1)

    policy = make_policy(latency_s=math.inf)
    previous = signal.signal(signal.SIGUSR1, stop)  # Ctrl-C would end the tests, and SIGALRM is their time limit
    envs = {name: sums(range(2), 2, name) for name in ("one", "other")}
    thread = threading.Thread(target=interrupt)
    try:
        with Evaluator(envs, policy) as evaluator, pytest.raises(KeyboardInterrupt):
            thread.start()
            evaluator.evaluate()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, previous)


def test_of_no_environment_there_is_nothing_to_evaluate(make_policy):
    with Evaluator({}, make_policy()) as evaluator:
        assert evaluator.evaluate() == {} == metrics_of_evaluation({})


def test_what_cannot_be_evaluated_is_refused(make_policy):
    with pytest.raises(ValueError, match="'chat' has no dataset"):
        Evaluator({"chat": ChatEnv()}, make_policy())
    with pytest.raises(ValueError, match="num_problems must be at least 1"):
        Evaluator({"sums": sums(range(2), 1, "sums")}, make_policy(), num_problems=0)


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_the_best_evaluation_and_when_to_stop(values, patience, data):
    best, is_over_at = BestEvaluation("m", patience), []
    for step, value in enumerate(values):
        is_best = best.see(step, {"m": value, "other": 9.0})
        assert is_best == all(value > earlier for earlier in values[:step])
        if data.draw(st.booleans()):  # killed and resumed: the last steps are seen again
            again = BestEvaluation("m", patience)
            again.load_state_dict(best.state_dict())
            for back in range(max(0, step - 2), step + 1):
                again.see(back, {"m": values[back]})
            best = again
        window = values[: step + 1]
        num_since = step - window.index(max(window))
        assert best.is_over == (num_since >= patience)
        is_over_at.append(best.is_over)
    assert best.step == values.index(max(values))
    assert not BestEvaluation("m", None, dict(enumerate(values))).is_over
    with pytest.warns(UserWarning, match="no evaluation until step 99 has 'm'.*this one has other"):
        assert not BestEvaluation("m").see(99, {"other": 1.0})
    assert not best.see(99, {"other": 1.0})  # nothing was scored then, say: it ends no run
