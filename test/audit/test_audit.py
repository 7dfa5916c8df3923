"""What an audit finds: planted faults, each through the command, and nothing in the tasks of this project."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from llmrl.audit import audit
from llmrl.audit.answers import Kind
from llmrl.audit.checks import Splits, diagnose_played
from llmrl.audit.played import Played
from llmrl.cli.app import app
from llmrl.data import Rollout, RolloutStatus
from llmrl.envs import DatasetChatEnv
from llmrl.rewards import Rubric
from llmrl.transforms import RubricReward
from llmrl.watch.findings import Verdict

LIMIT = "4"
HEAD = """
import itertools, random, time
from llmrl.envs import DatasetChatEnv
from llmrl.transforms import RubricReward

NAMES = ["Oslo", "Rome", "Lima", "Bern", "Kiew", "Nice"]

def rows(split="train"):
    land = {"train": "Land", "test": "Isle"}[split]
    return [{"query": f"Capital of {land} {i}?", "answer": name} for i, name in enumerate(NAMES)]

def right(completion, answer):
    return float(completion.strip().rstrip(".") == answer)

def env(split="train", repeats=1):
    return DatasetChatEnv(rows(split), repeats=repeats).append_transform(RubricReward(right))
"""
FAULTS = {
    "nothing": ("def right(completion, answer):\n    return float(answer.startswith(completion))", "pays_for_nothing"),
    "anywhere": ("def right(completion, answer):\n    return float(answer in completion)", "pays_for_nothing"),
    "length": ("def right(completion, answer):\n    return min(1.0, len(completion) / 5)", "pays_for_nothing"),
    "echo": (
        "def right(completion, answer):\n    return float('Capital' in completion or completion == answer)",
        "pays_for_nothing",
    ),
    "another row": ("def right(completion, answer):\n    return float(completion in NAMES)", "pays_for_nothing"),
    "random": ("def right(completion, answer):\n    return random.random()", "not_the_same_twice"),
    "state": (
        "seen = itertools.count()\ndef right(completion, answer):\n    return float(next(seen) % 2)",
        "not_the_same_twice",
    ),
    "form": ("def right(completion, answer):\n    return float(completion == f'[{answer}]')", "constant"),
    "raises": ("def right(completion, answer):\n    return float(completion.split()[0] == answer)", "raises"),
    "not finite": (
        "def right(completion, answer):\n    return float('nan') if not completion else float(completion == answer)",
        "raises",
    ),
    "shared": (
        "def rows(split='train'):\n    return [{'query': f'Capital of {n}?', 'answer': n} for n in NAMES]",
        "splits_share_problems",
    ),
    "repeated": (
        "one = rows\ndef rows(split='train'):\n    return one(split) * 2",
        "problems_repeat",
    ),
    "in the prompt": (
        "def rows(split='train'):\n"
        "    return [{'query': f'{split}: name the town. Solution: {n}', 'answer': n} for n in NAMES]",
        "answer_in_prompt",
    ),
    "in a tool": (
        "from llmrl.envs import ToolEnv\nfrom llmrl.rewards import Rubric\n"
        "class Game:\n"
        "    def reset(self, answer, **row):\n        self.target = answer\n"
        "    def state(self, part: str) -> str:\n        'Return the state.'\n        return f'target={self.target}'\n"
        "def env(split='train', repeats=1):\n"
        "    return ToolEnv(Game, rows(split), rubric=Rubric(right), repeats=repeats)",
        "answer_in_tool",
    ),
    "in an entry": (
        "plain = rows\n"
        "def rows(split='train'):\n"
        "    return [{'query': row['query'], 'entry': {'answer': row['answer']}} for row in plain(split)]\n"
        "def right(completion, entry):\n    return float(entry['answer'] in completion)",
        "pays_for_nothing",
    ),
    "large": (
        "def right(completion, answer):\n    return 1e6 * (completion.strip() == answer)",
        "large",
    ),
}  # fmt: skip
runner = CliRunner()


def audited(name, *arguments):
    result = runner.invoke(app, ["audit", name, "--limit", LIMIT, "--json", *arguments])
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout)
    assert result.exit_code == (found["verdict"] == "broken")
    return found


def test_a_sound_environment_of_ones_own_has_no_finding(tmp_path):
    (tmp_path / "own.py").write_text(HEAD)
    found = audited(f"{tmp_path}/own.py:env")
    assert found["findings"] == [] and found["verdict"] == "fine"
    assert found["reference"] == "answer" and found["not_examined"] == []
    rewards = {answer["name"]: answer["reward"] for answer in found["answers"]}
    assert rewards["answer"] == 1.0 and rewards["another row's answer"] == rewards["many answers at once"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path, fault):
    source, name = FAULTS[fault]
    (tmp_path / "own.py").write_text(f"{HEAD}\n{source}\n")
    found = audited(f"{tmp_path}/own.py:env")
    assert name in {finding["name"] for finding in found["findings"]}, found["findings"]


@pytest.mark.parametrize(
    ("column", "answers"), [("correct answer", ("Oslo", "Rome", "Lima", "Bern")), ("answer", (0, 1, 0, 1))]
)
def test_a_solution_in_the_prompt_is_found_in_any_column_and_if_it_is_0(renderer, column, answers):
    def right(completion, row):
        return float(completion == str(row[column]))

    def make_env(split):
        problems = [{"query": f"{i}? Solution: {n}", column: n, "row": {column: n}} for i, n in enumerate(answers)]
        return DatasetChatEnv(problems).append_transform(RubricReward(right))

    result = audit(make_env, renderer, splits=["train"])
    assert result.reference == column
    assert "answer_in_prompt" in {finding.name for finding in result.findings}


@pytest.mark.slow
def test_an_environment_that_hangs_is_found(renderer):
    async def right(completion, answer):
        await asyncio.sleep(600 * (len(completion) > 1000))
        return float(completion == answer)

    def make_env(split):
        problems = [{"query": f"Capital of {n}?", "answer": n} for n in ("Oslo", "Rome")]
        return DatasetChatEnv(problems).append_transform(RubricReward(Rubric(right, timeout_seconds=1.0)))

    result = audit(make_env, renderer, splits=["train"])
    finding = result.findings[0]
    assert finding.name == "raises" and "TimeoutError" in finding.says
    assert any("plays each problem once" in reason for reason in result.not_examined)


OWN_TASKS = {
    "addition": (),
    "sum-of-digits": (),
    "countdown": (),
    "guess": (),
    "search": (),
    "code": (),
    "reasoning-gym": (),
    "gsm8k": [
        {"question": f"Tom has {n} boxes of 6 eggs. How many eggs?", "answer": f"{n} * 6 = {6 * n} #### {6 * n}"}
        for n in (2, 3, 5, 7)
    ],
    "math": [
        {"problem": f"What is {n} squared?", "solution": f"It is $\\boxed{{{n * n}}}$.", "answer": str(n * n)}
        for n in (12, 13, 15, 17)
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_TASKS)
def test_the_tasks_of_this_project_raise_no_false_alarm(tmp_path, name):
    rows = OWN_TASKS[name]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = audited(name, *(("--data", str(data)) if rows else ()))
    # The search task asks for the answer's word anywhere in the last message, so a list of all towns earns it, too.
    known = ["pays_for_nothing"] if name == "search" else []
    assert [finding["name"] for finding in found["findings"]] == known, found["findings"]


def test_the_page_and_the_terminal_say_the_same(tmp_path):
    (tmp_path / "own.py").write_text(HEAD + FAULTS["anywhere"][0])
    page = tmp_path / "new/page.html"
    result = runner.invoke(app, ["audit", f"{tmp_path}/own.py:env", "--limit", LIMIT, "--out", str(page)])
    assert result.exit_code == 1
    for text in ("verdict: broken", "Many answers at once earns 1.00", "compare only the last"):
        assert text in " ".join(result.output.split()) and text.split(":")[-1] in page.read_text()


def test_a_page_that_cannot_be_written_loses_no_result(tmp_path):
    (tmp_path / "own.py").write_text(HEAD)
    result = runner.invoke(app, ["audit", f"{tmp_path}/own.py:env", "--limit", "2", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "Is a directory" in result.stderr
    assert json.loads(result.stdout)["verdict"] == "fine"


def test_what_cannot_be_audited_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(
        "from llmrl.envs import ChatEnv, DatasetChatEnv\n"
        "def env():\n    return ChatEnv()\n"
        "def unscored():\n    return DatasetChatEnv(['Hello'])\n"
    )
    for name, message in (
        (f"{tmp_path}/own.py:env", "has no dataset"),
        (f"{tmp_path}/own.py:unscored", "writes a reward"),
        ("additio", "Did you mean 'addition'?"),
    ):
        result = runner.invoke(app, ["audit", name])
        assert result.exit_code == 2 and message in result.output


def played(name, kind, *rewards, status=RolloutStatus.COMPLETED):
    return Played(
        name,
        kind,
        [
            Rollout(rollout_id=str(i), group_id=f"g/{i}", sample_index=0, group_size=1, reward=one, is_scored=True,
                    status=status)
            for i, one in enumerate(rewards)
        ],
    )  # fmt: skip


def test_half_of_a_right_answers_reward_is_too_much_and_less_is_not():
    right = played("answer", Kind.REFERENCE, 1.0, 1.0)
    for rewards, names in (((0.4, 0.5), []), ((0.5, 0.5), ["pays_for_nothing"])):
        assert [one.name for one in diagnose_played([right, played("nothing", Kind.WORTHLESS, *rewards)])] == names


def test_a_tenth_of_a_percent_of_shared_problems_is_to_look_at_and_a_tenth_is_broken():
    problems = [str(number) for number in range(2000)]
    for num_shared, verdict in ((0, None), (1, Verdict.LOOK), (100, Verdict.BROKEN)):
        findings = diagnose_played([], splits=Splits(problems[:1000], problems[1000 - num_shared : 2000 - num_shared]))
        assert [finding.verdict for finding in findings] == [verdict] * (verdict is not None)
