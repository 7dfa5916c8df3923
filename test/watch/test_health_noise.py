"""Health knows noise: runs that are healthy are called so, however few prompts a batch has."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzzing import fuzz_seeds
from simulated_runs import simulated_run

from llmrl.watch.health import diagnose


def false_alarms(seed, *, is_rising, num_steps=60):
    """What is found at each step of a healthy run, save what is true of it."""
    steps, without_signal = simulated_run(seed, is_rising=is_rising, num_steps=num_steps)
    for number in range(1, num_steps + 1):
        is_dull = max(without_signal[max(0, number - 3) : number]) > 0.5
        yield {finding.name for finding in diagnose(steps[:number])} - ({"no_signal", "learned"} if is_dull else set())


@pytest.mark.slow
@pytest.mark.parametrize("is_rising", [False, True], ids=["stationary", "rising"])
def test_random_healthy_runs_are_called_healthy(is_rising):
    num_steps, found = 0, Counter()
    for seed in fuzz_seeds(8):
        for names in false_alarms(seed, is_rising=is_rising):
            num_steps += 1
            found.update([*names, *(["any"] if names else [])])
    assert found["any"] < 0.01 * num_steps, (num_steps, found)
    print(num_steps, dict(found))
