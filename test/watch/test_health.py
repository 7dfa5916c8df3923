"""Health: each bound from both sides, what is noise or absent is not judged, and what a run says of it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llmrl.data import Rollout, RolloutStatus
from llmrl.watch.findings import Finding, HealthLog, failing_rollouts, verdict_of
from llmrl.watch.health import HealthJudge, diagnose
from llmrl.watch.live_view import LiveView

DOCUMENTATION = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
BEGAN, LATER = 3, 3  # steps that are averaged


def series(began, now, num_began=BEGAN, num_now=LATER):
    """Steps as a run begins, and as it is now."""
    return [dict(began)] * num_began + [dict(now)] * num_now


def verdicts(steps, **options):
    return {finding.name: finding.verdict for finding in diagnose(steps, **options)}


# name, steps that are fine, steps to look at, broken ones
BOUNDS = {
    "mismatched_weights": [
        [{"on_policy_difference": value, "on_policy_difference_bound": 0.001}] for value in (0.0009, 0.002, 0.02)
    ],
    "small_sample": [[{"ESS": value}] for value in (0.51, 0.49, 0.09)],
    "clipping": [[{"clip_fraction": value}] for value in (0.19, 0.21, 0.51)],
    "gradient_explosion": [[{"grad_norm": a} for a in (1.0, 1.2, 1.0, 9.0, last)] for last in (25.0, 90.0, 2000.0)],
    "large_updates": [[{"weight_change": value}] for value in (0.02, 0.1, 0.5)],
    "kl_penalty": [[{"kl_to_ref": 0.01, "loss_kl_to_ref": 0.01 * weight}] for weight in (0.1, 0.9, 50.0)],
    "skipped": [[{"is_skipped": a}, {"is_skipped": b}] for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))],
    "no_signal": [[{"groups_all_equal": value, "groups_all_wrong": value}] * 3 for value in (0.49, 0.51, 0.91)],
    "entropy_collapse": [
        [{"entropy": value, "reward_mean": 0.5} for value in (1.0, 1.0, 1.0, 0.6, 0.4, 0.2, last)]
        for last in (0.11, 0.09, 0.019)
    ],
    "entropy_explosion": [series({"entropy": 1.0}, {"entropy": value}) for value in (2.9, 3.1, 6.1)],
    "answers_cut": [[{"cut_share": value}] * 3 for value in (0.19, 0.21, 0.51)],
    "length_explosion": [
        series({"completion_tokens_mean": 10.0}, {"completion_tokens_mean": value}) for value in (29.0, 31.0, 101.0)
    ],
    "reward_fell": [series({"reward_mean": 0.8}, {"reward_mean": value}) for value in (0.41, 0.39, 0.15)],
    "one_answer": [
        series({"common_answer_share": 0.2}, {"common_answer_share": value}) for value in (0.49, 0.51, 0.91)
    ],
    "errors": [[{"num_rollouts": 100.0, "num_error": value}] for value in (6.0, 15.0, 51.0)],
    "unscored": [[{"num_rollouts": 100.0, "num_unscored": value}] for value in (6.0, 15.0, 51.0)],
    "refused_agents": [[{"agent/refused": value}] for value in (0.49, 0.51, 0.91)],
    "broken_tools": [[{"tool_failure_share": value, "tool_calls/failed": 3.0}] for value in (0.49, 0.51, 0.91)],
    "reward_hacking": [
        [
            {"reward_mean": 0.3, "eval/a/pass@1": 0.5, "eval/a/pass@1_low": 0.4, "eval/a/pass@1_high": 0.6},
            *[{"reward_mean": 0.9}] * 3,
            {"reward_mean": 0.9, "eval/a/pass@1": now, "eval/a/pass@1_low": now - 0.1, "eval/a/pass@1_high": now + 0.1},
        ]
        for now in (0.30, 0.22, 0.10)
    ],
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_between_what_is_fine_and_what_is_not(name):
    fine, look, broken = BOUNDS[name]
    assert name not in verdicts(fine)
    assert verdicts(look)[name] == "look"
    assert verdicts(broken)[name] == "broken"
    for steps in (look, broken):
        finding = next(one for one in diagnose(steps) if one.name == name)
        assert finding.says.endswith(".") and finding.causes and all(finding.causes)


def test_staleness_is_bounded_by_what_the_collector_was_given():
    for bound, oldest, expected in ((None, 0.0, {}), (None, 1.0, "broken"), (2, 2.0, {}), (2, 3.0, "broken")):
        assert verdicts([{"staleness_max": oldest}], max_staleness=bound).get("staleness", {}) == expected


def test_every_finding_is_documented_and_every_one_documented_is_found():
    found = {finding.name for _, *cases in BOUNDS.values() for steps in cases for finding in diagnose(steps)}
    found |= set(verdicts([{"staleness_max": 1.0}]))
    found |= set(verdicts([{"weight_change": 1e-9, "learning_rate": 1e-12}] * 3))
    found |= set(verdicts([{"groups_all_equal": 1.0, "groups_all_right": 1.0}]))
    found |= set(verdicts(series({"completion_tokens_mean": 9.0}, {"completion_tokens_mean": 1.0})))
    table = DOCUMENTATION.split("| finding | look | broken |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE)
    assert found == {name for cell in cells for name in re.findall("`(.*?)`", cell)}


def test_a_task_that_is_learned_is_no_failure():
    """At the end of a good run all answers are right, alike in their group, short and certain."""
    began = {"reward_mean": 0.1, "groups_all_equal": 0.2, "groups_all_right": 0.0, "entropy": 1.0}
    learned = {"reward_mean": 1.0, "groups_all_equal": 0.95, "groups_all_right": 0.95, "entropy": 0.005}
    (finding,) = diagnose(series(began, learned))
    assert (finding.name, finding.verdict) == ("learned", "fine") and finding.causes == ()
    assert finding.says == "The task is learned: 95 % of the prompts are all right."


DEMO = [  # the first steps of a healthy run of the demo, in which the model learns to end its answers, too
    {"reward_mean": reward, "reward_std": 0.3, "cut_share": cut, "num_rollouts": 128.0, "groups_all_equal": equal}
    for reward, cut, equal in ((0.023, 0.84, 0.81), (0.133, 0.54, 0.44), (0.289, 0.23, 0.19), (0.7, 0.02, 0.1))
]


def test_a_run_that_learns_gets_no_advice_about_answers_that_are_cut_or_wrong_at_first():
    assert [verdicts(DEMO[:number]) for number in range(1, 5)] == [{}] * 4


def test_answers_that_stay_cut_are_found_once_the_reward_does_not_rise():
    stuck = [{**DEMO[0], "reward_mean": reward} for reward in (0.023, 0.02, 0.022, 0.021)]
    assert [verdicts(stuck[:number]).get("answers_cut") for number in range(1, 5)] == [None, None, "broken", "broken"]
    alike = [{**DEMO[0], "reward_mean": 0.0, "reward_std": 0.0, "groups_all_equal": 1.0}]
    assert verdicts(alike) == {"answers_cut": "broken", "no_signal": "broken"}  # no need to wait


def test_a_hard_task_has_no_finding_before_its_first_right_answer_is_late():
    """Of a healthy run in which the first of 384 answers was right in the third batch of 16 prompts."""
    alike = {**DEMO[0], "reward_mean": 0.0, "reward_std": 0.0, "groups_all_equal": 1.0}
    assert verdicts([{**alike, "num_groups": 16.0}]) == verdicts([{**alike, "num_groups": 48.0}]) == {}
    assert verdicts([{**alike, "num_groups": 64.0}]) == {"answers_cut": "broken", "no_signal": "broken"}


def test_equal_rewards_are_no_finding_where_a_teacher_teaches():
    step = {"groups_all_equal": 1.0, "groups_all_wrong": 1.0}
    assert verdicts([step] * 3) == {"no_signal": "broken"}
    assert verdicts([step | {"kl_to_teacher": 0.3}] * 3) == {}


def test_one_noisy_step_is_none_and_a_run_that_began_so_has_not_changed():
    steps = series({"reward_mean": 0.8, "cut_share": 0.0}, {"reward_mean": 0.8, "cut_share": 0.0})
    assert verdicts([*steps, {"reward_mean": 0.3, "cut_share": 0.3}]) == {}
    always = {"common_answer_share": 0.95, "entropy": 0.01, "completion_tokens_mean": 1.0}
    assert verdicts(series(always, always)) == {}  # yes or no, answered by one token


def test_an_entropy_that_halves_in_one_step_is_looked_at_before_it_is_gone():
    entropies = (10.79, 10.77, 10.67, 4.29, 1.81, 0.5)  # of a learning rate of 0.1
    steps = [{"entropy": value, "reward_mean": 0.0} for value in entropies]
    assert [verdicts(steps[:end]).get("entropy_collapse") for end in range(1, 7)] == [None] * 3 + [
        "look",
        "look",
        "look",
    ]
    assert "in one step" in diagnose(steps[:4])[0].says
    assert verdicts([{"entropy": value, "reward_mean": 0.0} for value in (1.0, 0.4, 0.2)]) == {}  # too early to say


def test_an_entropy_may_fall_to_that_of_the_data_where_nothing_is_rewarded():
    """SFT of 24 steps on conversations with calls."""
    entropies = (0.87, 0.6, 0.4, 0.25, 0.15, 0.1, 0.08, 0.05, 0.03, 0.02)
    assert verdicts([{"entropy": value, "loss": value} for value in entropies]) == {}


def test_a_model_that_learns_fast_may_become_sure_fast():
    """The demo's own steps 1 to 6."""
    rewards, entropies = (0.008, 0.117, 0.211, 0.562, 0.758, 0.859), (3.14, 2.30, 1.65, 0.95, 0.37, 0.19)
    steps = [{"reward_mean": r, "entropy": e} for r, e in zip(rewards, entropies, strict=True)]
    assert not any(diagnose(steps[:number]) for number in range(1, 7))
    without_gain = [{**step, "reward_mean": 0.5} for step in steps]
    assert [finding.name for finding in diagnose(without_gain[:5])] == ["entropy_collapse"]


def test_an_entropy_is_not_gone_while_most_of_a_hard_task_is_learned():
    """Means of ten steps of a run on sums of two digits."""
    rewards = (0.007, 0.361, 0.638, 0.728, 0.659, 0.802, 0.748, 0.767, 0.755, 0.789)
    entropies = (2.246, 0.606, 0.085, 0.049, 0.067, 0.058, 0.049, 0.060, 0.062, 0.042)
    steps = [
        {"reward_mean": r, "entropy": e, "reward_max": 1.0}
        for r, e in zip(rewards, entropies, strict=True)
        for _ in "123"
    ]
    assert {name for end in range(1, len(steps)) for name in verdicts(steps[:end])} <= {"learned"}
    without_gain = [{**step, "reward_mean": 0.007} for step in steps]
    assert verdicts(without_gain) == {"entropy_collapse": "broken"}


def test_held_out_may_fall_with_the_reward_and_noise_is_no_fall():
    def run(rewards, passes):
        return [{"reward_mean": a, "eval/a/pass@1": b} for a, b in zip(rewards, passes, strict=True)]

    assert "reward_hacking" not in verdicts(run((0.9, 0.2), (0.5, 0.1)))
    assert "reward_hacking" not in verdicts(run((0.2, 0.9), (0.1, 0.5)))
    assert "reward_hacking" not in verdicts(run((0.2,), (0.5,)))
    assert verdicts(run((0.2, 0.9), (0.5, 0.1)))["reward_hacking"] == "look"  # no interval, so not certain
    # Before training there is no reward: the first steps' stands for it. It stays until the next evaluation.
    trained = [{"reward_mean": reward} for reward in (0.2, 0.2, 0.2, 0.9, 0.9, 0.9)]
    assert "reward_hacking" in verdicts(
        [{"eval/a/reward": 1.0}, *trained, {"eval/a/reward": 0.2}, {"reward_mean": 0.9}]
    )


def test_the_first_cause_is_the_likelier_one():
    bound = {"on_policy_difference_bound": 0.001}
    never = diagnose([{"on_policy_difference": 0.1, **bound}])
    no_more = diagnose([{"on_policy_difference": 0.0001, **bound}, {"on_policy_difference": 0.1, **bound}])
    assert "dtypes" in never[0].causes[0] and "stale" in no_more[0].causes[0]
    tools = {"tool_failure_share": 1.0, "tool_calls/timeouts": 5.0, "tool_calls/malformed": 7.0}
    assert ["cannot be read" in cause for cause in diagnose([tools])[0].causes] == [True, False]


NAMES = sorted({name for cases in BOUNDS.values() for steps in cases for step in steps for name in step})


@given(
    st.lists(
        st.dictionaries(st.sampled_from([*NAMES, "staleness_max"]), st.sampled_from((0.0, 0.04, 0.5, 1.0, 7.0, 300.0))),
        max_size=9,
    )
)
def test_whatever_a_run_lacks_it_is_judged_and_nothing_in_the_words_is_missing(steps):
    findings = diagnose(steps)
    assert len({finding.name for finding in findings}) == len({(one.name, one.says) for one in findings})
    order = ["broken", "look"]
    assert [one.verdict for one in findings] == sorted((one.verdict for one in findings), key=order.index)
    assert not any(word in one.says for one in findings for word in ("None", "nan", "inf"))
    assert verdict_of(findings) == (findings[0].verdict if findings else "fine")


def record(rollout_id, **values):
    rollout = Rollout(rollout_id=rollout_id, group_id="g", sample_index=0, group_size=9, is_scored=True)
    for name, value in values.items():
        setattr(rollout, name, value)
    return rollout.to_record()


def test_the_rollouts_that_show_it_are_named():
    records = [
        record("good", reward=1.0, num_completion_tokens=4, tool_calls={"answered": 3}),
        record("cut", reward=0.5, num_completion_tokens=9, reason="length", status=RolloutStatus.TRUNCATED),
        record("failed", status=RolloutStatus.ERROR, is_scored=False, reward=-1.0),
        record("tool", reward=0.2, tool_calls={"answered": 1, "invalid": 1}),
    ]
    for selection, expected in (
        ("error", ["failed"]),
        ("unscored", ["failed"]),
        ("cut", ["cut"]),
        ("tools", ["tool"]),
        ("longest", ["cut", "good", "failed", "tool"]),
        ("best", ["good", "cut", "tool", "failed"]),
        ("worst", ["failed", "tool", "cut", "good"]),
        ("", []),
    ):
        assert [one["rollout_id"] for one in failing_rollouts(selection, records)] == expected
    assert len(failing_rollouts("best", records * 5)) == 8


def test_a_judge_keeps_the_rollouts_of_its_step_and_knows_the_steps_before_a_kill(tmp_path):
    log = HealthLog(tmp_path / "health.jsonl")
    before = {step: {"reward_mean": 0.8, "cut_share": 1.0} for step in range(1, 7)}
    judge = HealthJudge(log, {**before, 9: {"reward_mean": 0.8}})  # 9 was logged, and is played again later
    cut = [record("cut", reason="length")]
    assert judge.judge(7, {"reward_mean": 0.8, "cut_share": 1.0}, cut)[0].name == "answers_cut"
    judge.judge(7, {"eval/a/reward": 0.3})  # its evaluation, without records
    with log.path.open("a") as file:
        file.write('{"step": 8, "verd')  # a kill
    written = log.read()
    assert list(written) == [7] and written[7]["verdict"] == "broken"
    assert written[7]["findings"][0]["rollouts"] == ["cut"]
    assert json.loads(json.dumps(written[7]))["findings"][0]["causes"]
    judge.judge(8, {"reward_mean": 0.8}, [])
    assert log.read()[7]["verdict"] == "broken"


def test_the_live_view_says_it_once_and_shows_the_first_traceback():
    def shown(is_terminal):
        console = Console(file=io.StringIO(), width=160, force_terminal=is_terminal, color_system=None)
        with LiveView(9, console=console) as view:
            frames = '  File "/env/site-packages/client.py", line 1, in ask\n    send()\n' * 9
            frames = f'  File "mine.py", line 1, in play\n    ask()\n{frames}'
            failed = record("a", error="ValueError: no", traceback=f"Traceback\n{frames}ValueError: no [/bold]")
            later = record("b", error="KeyError", traceback="another one")
            for step, records in ((1, [record("fine")]), (2, [failed]), (3, [later])):
                view.show_step(step, {"reward_mean": 0.1, "reward/p_mean": 0.25, "reward/p_std": 0.5})
                view.show_health(step, [Finding("errors", "look", "1 failed.", ("it raises",))], records)
        return console.file.getvalue()

    text = shown(False)
    assert text.count("look errors: 1 failed. Likely: it raises.") == 1  # while it stays so
    assert "the first error: a at step 2" in text and "no [/bold]" in text and "another one" not in text
    assert "mine.py" in text and text.count("client.py") == 1 and "8 frames of installed packages" in text
    assert "look errors: 1 failed." in shown(True)


def test_dropped_rollouts_are_wrapped_and_what_is_learned_is_said_without_a_verdict():
    console = Console(file=io.StringIO(), width=40, color_system=None)
    asked = "Reply with the same two words in the opposite order"
    with LiveView(2, console=console) as view:
        view.show_dropped(1, [], [{**record("a"), "messages": [{"role": "user", "content": asked}]}])
        view.show_health(2, [Finding("learned", "fine", "The task is learned.", ())])
    printed = console.file.getvalue()
    assert all(re.search(rf"\b{word}\b", printed) for word in asked.split()), printed
    assert "step 2: learned: The task is learned." in printed


STEP = {
    "reward_mean": 0.128, "completion_tokens_mean": 11.34, "seconds": 104.6, "cut_share": 0.84, "trained_share": 0.19,
    "entropy": 2.74, "log_prob_difference_mean": 1e-5, "ESS": 1.0, "tokens_per_second": 1234.0,
    "generate_seconds": 63.82, "train_seconds": 21.38, "sync_seconds": 2.65, "num_error": 3.0, "num_forks": 17.0,
}  # fmt: skip


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_step_is_one_line_of_whole_words_in_a_terminal_of_80_columns(is_terminal):
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
    with LiveView(2, console=console) as view:
        for step in (1, 2):
            view.show_step(step, STEP)
    lines = console.file.getvalue().splitlines()
    shown = [line for line in lines if "0.128" in line]
    assert len(shown) >= 2 and all(len(line) <= 80 for line in lines if "\x1b" not in line)
    for value in ("11.3", "104.6", "3", "84%", "19%"):  # the most important, each whole
        assert all(value in re.split(r"\s+", line) for line in shown), shown
    if is_terminal:
        assert "step  reward  length  seconds  errors  cut  trained" in console.file.getvalue()


def test_parts_of_the_reward_and_rare_columns_are_shown_where_there_are_any():
    console = Console(file=io.StringIO(), width=250, force_terminal=True, color_system=None)
    with LiveView(2, console=console) as view:
        view.show_step(1, {"reward/a_mean": 0.25, "reward/a_std": 0.5, "reward/b_mean": 1.0, "reward/b_std": 0.0})
        assert "trained" not in console.file.getvalue()
        view.show_step(2, {"trained_share": 0.5, "reward/a_mean": 0.25, "reward/a_std": 0.5,
                           "reward/b_mean": 1.0, "reward/b_std": 0.0})  # fmt: skip
    assert "a 0.250 ± 0.500  b 1.000 ± 0.000" in console.file.getvalue()
    assert (
        "trained" in console.file.getvalue() and "50%" in console.file.getvalue() and "fine" in console.file.getvalue()
    )
