"""Task environments by name: one calling convention for all."""

from __future__ import annotations

import importlib.util
import inspect
import pickle

import pytest

from llmrl.envs import make_task_env, task_environments
from llmrl.envs.tasks.registry import load_function

ROWS = {
    "addition": {"query": "1 + 1 =", "answer": "2"},
    "sum-of-digits": {"query": "The sum of the digits of 12 =", "answer": "3"},
    "code": {"query": "Write solve(numbers).", "hidden": [[1], [2]], "expected": ["1", "2"]},
    "countdown": {"query": "Make 3 of 1 and 2.", "numbers": [1, 2], "target": 3},
    "gsm8k": {"question": "Two eggs and two?", "answer": "2 + 2 #### 4"},
    "math": {"problem": "1 + 1?", "answer": "2"},
    "ifeval": {"prompt": "A colour?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "search": {"query": "Where does Ada live?", "answer": "Oslo", "documents": ["Ada lives in Oslo."]},
}
is_without_reasoning_gym = importlib.util.find_spec("reasoning_gym") is None


def test_every_environment_has_its_line():
    assert set(task_environments()) == {*ROWS, "guess", "reasoning-gym"}
    assert all(line and not line.endswith(".") for line in task_environments().values())


@pytest.mark.parametrize("name", ROWS)
def test_every_environment_takes_data_of_ones_own_and_the_options_of_all(name):
    options = {"shuffle": False, "seed": 3, "num_epochs": 2, "name": "mine"}
    env = make_task_env(name, "test", data=[ROWS[name]], repeats=2, **options)
    groups = [env.reset()[0]["rollout", "group_id"] for _ in range(4)]
    assert groups == ["mine/0/0", "mine/0/0", "mine/1/0", "mine/1/0"]


@pytest.mark.parametrize("name", ROWS)
def test_data_without_rows_or_columns_is_refused_by_name(name):
    with pytest.raises(ValueError, match="empty"):
        make_task_env(name, data=[])
    with pytest.raises(FileNotFoundError, match=r"no-such-file\.jsonl"):
        make_task_env(name, data="no-such-file.jsonl")
    read = [column for column in ROWS[name] if (name, column) != ("math", "answer")]  # the solution may have it
    for column in read:
        row = {key: value for key, value in ROWS[name].items() if key != column}
        with pytest.raises(ValueError, match=f"'{column}'"):
            make_task_env(name, data=[ROWS[name], row])


@pytest.mark.parametrize("name", ROWS)
def test_a_question_that_is_no_message_is_refused(name):
    column = next(iter(ROWS[name]))
    for question, named in (
        ([{"rôle": "user", "content": "?"}], "role|a text"),
        (7, "query|messages"),
        (None, "query|messages"),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            make_task_env(name, data=[{**ROWS[name], column: question}]).reset()


@pytest.mark.skipif(is_without_reasoning_gym, reason="reasoning-gym is not installed: no C compiler")
@pytest.mark.parametrize(("name", "options"), [("search", {"num_people": 0}), ("sum-of-digits", {"num_digits": 0})])
def test_numbers_that_leave_no_problem_are_refused(name, options):
    [(option, _)] = options.items()
    with pytest.raises(ValueError, match=f"{option} must be .*got 0"):
        make_task_env(name, **options)


def test_data_is_refused_where_problems_are_generated():
    assert make_task_env("reasoning-gym", "test", tasks="spell_backward").reset()[0]["task"] == "spell_backward"
    with pytest.raises(ValueError, match="makes its own problems"):
        make_task_env("reasoning-gym", data=[ROWS["addition"]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option"), [("addition", "num_digits"), ("countdown", "num_count"), ("search", "num_people")]
)
def test_options_of_generated_problems_are_refused_with_problems_of_ones_own(name, option):
    assert make_task_env(name, **{option: 3}).reset() is not None
    with pytest.raises(ValueError, match=f"{option}=3 is for generated problems, .*: leave one out"):
        make_task_env(name, data=[ROWS[name]], **{option: 3})


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'gsm8k'"):
        make_task_env("gsm8")
    for name in task_environments():
        with pytest.raises(TypeError, match="did you mean 'num_epochs'"):
            make_task_env(name, num_epoch=1)


def test_every_public_environment_has_an_example_that_runs():
    import llmrl.envs

    plain = {
        "CommandResult",
        "EndOfData",
        "EnvProgress",
        "IFEvalScoreData",
        "MessageStep",
        "TaskOptions",
    }
    missing = {name for name in llmrl.envs.__all__ if ">>> " not in (getattr(llmrl.envs, name).__doc__ or "")}
    assert missing == plain
    skipped = {name for name in llmrl.envs.__all__ if "doctest: +SKIP" in (getattr(llmrl.envs, name).__doc__ or "")}
    assert skipped == {"RayDataLoadingPrimer"}  # it needs a cluster


def test_makers_are_alike():
    import llmrl.envs

    for name in task_environments():
        parameters = inspect.signature(getattr(llmrl.envs, f"make_{name.replace('-', '_')}_env")).parameters
        assert next(iter(parameters)) == "split" and parameters["split"].default == "train"
        assert {p.kind for p in list(parameters.values())[1:-1]} <= {inspect.Parameter.KEYWORD_ONLY}
        assert ("data" in parameters) == (name in ROWS)


def test_an_unknown_option_of_a_verifiers_environment_is_refused_before_anything_is_installed():
    with pytest.raises(TypeError, match="'requirement'; did you mean 'requirements'"):
        make_task_env("verifiers:mine", requirement=["mine"])
    with pytest.raises(ValueError, match="takes no data"):
        make_task_env("verifiers:mine", data="rows.jsonl")


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    made = []
    for name in ("one", "two"):
        path = tmp_path / name / "task.py"
        path.parent.mkdir()
        path.write_text(f"class Reward:\n    name = {name!r}\n\ndef make():\n    return Reward()\n")
        made.append(load_function(path, "make")())
    assert [pickle.loads(pickle.dumps(one)).name for one in made] == ["one", "two"]
