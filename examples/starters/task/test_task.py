import re

from task import env, problems


def test_only_the_larger_number_is_right(played):
    def larger(prompt):
        return max(re.findall(r"\d", prompt.rpartition("user")[2]))

    assert all(rollout.reward == 1 for rollout in played(env(repeats=1), larger, 8))
    (wrong,) = played(env(repeats=1), lambda prompt: "one of them")
    assert wrong.reward == 0


def test_no_problem_of_the_test_is_trained_on():
    asked = [{row["query"] for row in problems(split)} for split in ("train", "test")]
    assert asked[0] and asked[1] and not asked[0] & asked[1]
