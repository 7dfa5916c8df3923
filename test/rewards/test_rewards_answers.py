"""Answers as numbers and expressions: their signs, and what happens where the comparison itself fails."""

from __future__ import annotations

import pytest

from llmrl._utils.asynchronous import run_sync
from llmrl.envs.tasks.addition import is_last_number_right
from llmrl.rewards import RewardInput, Rubric, is_gsm8k_right, last_number, math


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-7", -7), ("\u22127", -7), ("\uff0d7", -7), ("a loss of \u22121,200.50 euros", -1200.5),
        ("-$5", -5), ("\u2212$5.25", -5.25), (r"-\$5", -5), ("(-€3)", -3), ("$-5", -5), ("$5", 5), ("£1,000", 1000),
        ("9-7", 7), ("9\u22127", 7), ("9-$7", 7), ("(2)-7", 7), ("9 - 7", 7), ("$9-$7 = $2", 2),
        ("-.5", -0.5), ("$.50", 0.5),
    ],
)  # fmt: skip
def test_a_number_keeps_its_sign(text, number):
    assert float(last_number(text)) == number


@pytest.mark.parametrize("completion", ["So \u22127.", "-$7", "\u2212$7.00"])
def test_a_negative_answer_is_no_positive_one(completion):
    assert is_gsm8k_right(completion, "#### -7") and is_gsm8k_right(completion, "#### \u22127")
    assert not is_gsm8k_right(completion, "#### 7")


WORKER = """
import json, os, sys
print("ready", flush=True)
for line in sys.stdin:
    reference, given = json.loads(line)
    if given == "kill" or (given == "kill once" and not os.path.exists(reference)):
        open(reference, "w").close()
        os._exit(1)
    print("false" if given == "wrong" else "true", flush=True)
"""


@pytest.fixture
def verifier(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(math, "_WORKER", tmp_path / "worker.py")
    verifier = math.MathVerifier()
    yield verifier
    verifier._stop()


def test_a_process_that_ends_under_a_question_is_asked_again(verifier, tmp_path):
    reference = str(tmp_path / "was-killed")
    assert verifier.is_equal(reference, "kill once") and (tmp_path / "was-killed").exists()


def test_a_question_that_ends_the_process_each_time_is_unscored_and_not_remembered_as_wrong(verifier, tmp_path):
    def right(completion):
        return verifier.is_equal(str(tmp_path / "killed"), completion)

    rubric = Rubric(right)
    scores = [
        run_sync(rubric.score(RewardInput(({"role": "assistant", "content": answer},))))
        for answer in ("kill", "kill", "other")
    ]
    assert [score.is_scored for score in scores] == [False, False, True] and scores[2].reward == 1.0
    assert "ended twice while it compared 'kill'" in scores[1].error


@pytest.mark.parametrize("is_started", [False, True])
def test_an_answer_that_was_interrupted_is_not_read_for_the_next_question(verifier, monkeypatch, is_started):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    if is_started:
        assert verifier.is_equal("a", "right")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(math.select, "select", interrupt)
        verifier.is_equal("b", "wrong")
    verdicts = [verifier.is_equal(name, given) for name, given in (("c", "right"), ("d", "wrong"), ("b", "wrong"))]
    assert verdicts == [True, False, False]


def test_a_process_that_does_not_start_is_no_wrong_answer(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("import no_such_module")
    monkeypatch.setattr(math, "_WORKER", tmp_path / "worker.py")
    with pytest.raises(RuntimeError, match="did not start"):
        math.MathVerifier().is_equal("1", "2")


def test_a_sum_with_the_wrong_sign_is_wrong():
    assert is_last_number_right("7 + 8 = 15", "15") and is_last_number_right("15.", "15")
    assert not is_last_number_right("7 + 8 = -15", "15") and not is_last_number_right("It is \u221215", "15")
