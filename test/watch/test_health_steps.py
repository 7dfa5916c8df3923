"""A finding says over which steps it looked, by the numbers that the run gave them."""

from __future__ import annotations

import json

import pytest

from llmrl.watch.findings import HealthLog
from llmrl.watch.health import HealthJudge, diagnose

FAILING = {"tool_failure_share": 0.75, "num_tool_calls": 100.0}


@pytest.mark.parametrize(("num_steps", "looked_at"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (7, (5, 7))])
def test_a_share_is_of_the_last_three_steps(num_steps, looked_at):
    (finding,) = diagnose([FAILING] * num_steps)
    assert (finding.name, finding.steps) == ("broken_tools", looked_at)


def test_what_is_compared_with_the_beginning_is_over_all_steps():
    lengths = [100.0] * 5 + [900.0] * 3
    (finding,) = diagnose([{"completion_tokens_mean": length} for length in lengths])
    assert (finding.name, finding.steps) == ("length_explosion", (1, 8))


def test_two_findings_of_a_step_have_their_own_steps():
    steps = [{**FAILING, "completion_tokens_mean": 100.0}] * 5 + [{**FAILING, "completion_tokens_mean": 900.0}] * 3
    found = {finding.name: finding.steps for finding in diagnose([*steps, {**steps[-1], "staleness_max": 9.0}])}
    assert found == {"staleness": (9, 9), "broken_tools": (7, 9), "length_explosion": (1, 9)}


@pytest.mark.parametrize("name", ["held-out", "task.py:env", "my-package/held-out", "harbor:/tasks/held-out"])
def test_an_evaluation_that_fell_is_compared_with_its_best_one(name):
    steps = [{"reward_mean": 0.1 * step} for step in range(1, 11)]
    for place, reward in ((1, 0.2), (4, 0.9), (9, 0.1)):
        steps[place] |= {f"eval/{name}/reward": reward, f"eval/{name}/reward_low": reward - 0.02}
        steps[place] |= {f"eval/{name}/reward_high": reward + 0.02, f"eval/{name}/tool_calls/search": 1.0}
    found = {finding.name: finding for finding in diagnose(steps)}
    assert found["reward_hacking"].steps == (3, 10)  # the three steps up to the fifth, to the last


def test_the_record_of_a_run_has_the_run_s_numbers(tmp_path):
    log = HealthLog(tmp_path / "health.jsonl")
    judge = HealthJudge(log, dict.fromkeys((4, 6, 9), FAILING))  # steps 5, 7 and 8 left no metrics
    (finding,) = judge.judge(11, FAILING)
    assert finding.steps == (6, 11) and finding.over == "steps 6 to 11"
    line = json.loads((tmp_path / "health.jsonl").read_text())
    assert line["findings"][0]["steps"] == [6, 11]
