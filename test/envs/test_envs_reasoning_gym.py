"""Data sets of reasoning-gym: right and wrong answers of each, paid as its own scorer says, and saved curricula."""

from __future__ import annotations

import json

import pytest

from llmrl.data import ChatHistory
from llmrl.envs import DatasetChatEnv, MixedEnv, ReasoningGymEnv, ReasoningGymProblems, make_task_env

factory = pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym is not installed: no C compiler")

# Their problems have no reference answer, but most have one among the facts about the problem.
EXAMPLES = {
    "graph_color": lambda facts: json.dumps({str(node): color for node, color in facts["possible_answer"].items()}),
    "propositional_logic": lambda facts: facts["example_answer"],
    "rubiks_cube": lambda facts: facts["example_correct_answer"],
}
NO_ANSWER = {"boxnet", "rush_hour"}
# Its scorer compares the truth of two texts, and every text that is not empty is true.
PAYS_ANYTHING = {"game_of_life_halting"}
WRONG = "no such answer"
MIX = "composite"  # of others, which `tasks=` of llmrl names


def scored(scorer, text, entry):
    """The score of the library itself; some of its scorers raise at what they cannot read."""
    try:
        return scorer.score_answer(text, entry)
    except ValueError:
        return 0.0


def paid(env, text):
    """The reward of an answer to the first problem."""
    element = env.reset_dataloader().reset()[0]
    prompt = element["history"].prompt
    element["history"] = ChatHistory(prompt=prompt, full=prompt.append({"role": "assistant", "content": text}))
    return float(env.step(element.unsqueeze(0))["next", "reward"].sum())


def test_each_data_set_is_generated_and_pays_right_answers(takes_long):
    known, failed = sorted(factory.DATASETS), {}
    assert len(known) >= 106
    for name in known:
        if name == MIX:
            continue
        env = make_task_env(f"reasoning-gym:{name}", num_problems=2)
        entry = env.reset()[0]["entry"]
        right = EXAMPLES[name](entry["metadata"]) if name in EXAMPLES else entry["answer"]
        scorer = factory.create_dataset(name, size=1, seed=0)
        texts = (right or "", WRONG)
        rewards = [paid(env, text) for text in texts]
        assert rewards == pytest.approx([scored(scorer, text, entry) for text in texts]), name
        if (right is None) != (name in NO_ANSWER) or rewards[0] < (right is not None) or rewards[1] > 0.1:
            failed[name] = rewards
    assert set(failed) == PAYS_ANYTHING


@pytest.mark.parametrize("saved", [lambda state: state, lambda state: json.loads(json.dumps(state))])
def test_a_restored_curriculum_goes_on_at_the_same_levels(saved):
    def make():
        return ReasoningGymProblems("chain_sum", num_problems=8, curriculum=True, window=1)

    first, second = make(), make()
    assert [first[index]["level"] for index in range(6)] == [0] * 6
    first.record("chain_sum", 0, 1.0)
    assert first[6]["level"] == 1
    second.load_state_dict(saved(first.state_dict()))
    # Four problems are kept, 3 to 6: these in flight stay at their levels, and all later ones are new.
    order = [5, 6, 7, 0, 1, 2, 3, 4, 5]
    expected = [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [[one[index]["level"] for index in order] for one in (first, second)] == [expected] * 2
    assert [first[index] for index in (4, 5)] == [second[index] for index in (4, 5)]


def test_a_mix_is_saved_with_the_curricula_of_its_environments():
    def make():
        env = ReasoningGymEnv("chain_sum", num_problems=8, curriculum=True, window=1)
        return env.base_env.problems, MixedEnv({"sums": env, "other": DatasetChatEnv(["a", "b"])})

    (problems, mixed), (again, restored) = make(), make()
    problems.record("chain_sum", 0, 1.0)
    restored.load_state_dict(mixed.state_dict())
    assert again.levels == {"chain_sum": 1}
