"""A recipe's band, and the judgement of runs against it, by functions and by the command."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from llmrl.cli import recipe as recipe_command
from llmrl.cli.app import app
from llmrl.envs.tasks.registry import load_function
from llmrl.recipes import Recipe, band_of, curves_of, judge, known_recipes, record, train_seed
from llmrl.recipes.run import RecipeRunError, is_finished

runner = CliRunner()
scores = st.floats(0, 1)
curves = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(scores, min_size=size, max_size=size).map(lambda values: dict(enumerate(values))),
        min_size=1,
        max_size=4,
    )
)


def differ(one, other, size):
    """Whether the pooled z-test of two shares, as textbooks have it, tells them apart at 5 %."""
    pooled = (one + other) / 2
    return abs(one - other) > 1.96 * math.sqrt(pooled * (1 - pooled) * 2 / size)


def reached(share, size):
    """The lowest and the highest share that the test does not tell from another, by trying thousands."""
    alike = [value / 20000 for value in range(20001) if not differ(share, value / 20000, size)]
    return pytest.approx((min(alike), max(alike)), abs=1e-4)


@pytest.mark.parametrize(("share", "size"), [(0.0, 16), (0.04, 25), (0.5, 16), (0.98, 100), (1.0, 3)])
def test_the_band_of_a_flat_seed_is_what_a_test_of_two_shares_does_not_tell_apart(share, size):
    band = band_of([{0: share, 1: share}], num_prompts=size)
    assert band[0] == band[1] == reached(share, size)


def test_a_band_reaches_from_the_lowest_value_one_step_before_to_the_highest_one_step_after():
    band = band_of([{0: 0.0, 1: 0.2, 2: 0.8}, {0: 0.0, 1: 0.1, 2: 0.9}], num_prompts=10**9)
    assert band[1] == pytest.approx((0.0, 0.9), abs=1e-3)
    sparse = band_of([{0: 0.0, 4: 0.8}], num_prompts=10**9)  # a step is a quarter of the way
    assert sparse[0] == pytest.approx((0.0, 0.2), abs=1e-3)
    assert sparse[4] == pytest.approx((0.6, 0.8), abs=1e-3)


@settings(max_examples=100, deadline=None)
@given(curves, st.integers(1, 200))
def test_every_seed_is_inside_its_band_which_further_seeds_only_widen(of_seeds, num_prompts):
    band = band_of(of_seeds, num_prompts=num_prompts)
    assert all(0 <= low <= high <= 1 for low, high in band.values())
    assert all(judge({"reward": curve}, {"reward": band}).is_inside for curve in of_seeds)
    assert band == band_of(of_seeds[::-1], num_prompts=num_prompts)  # in any order
    for step, (low, high) in band_of(of_seeds[:1], num_prompts=num_prompts).items():
        assert band[step][0] <= low + 1e-12 and high <= band[step][1] + 1e-12


@settings(max_examples=50, deadline=None)
@given(st.lists(scores, min_size=3, max_size=8).map(sorted), st.integers(1, 200))
def test_a_run_that_learns_the_same_one_step_later_or_earlier_is_inside(values, num_prompts):
    band = band_of([dict(enumerate(values))], num_prompts=num_prompts)
    later = dict(enumerate([values[0], *values[:-1]]))
    earlier = dict(enumerate([*values[1:], values[-1]]))
    for curve in (later, earlier):
        assert judge({"reward": curve}, {"reward": band}).is_inside


@settings(max_examples=50, deadline=None)
@given(curves, st.integers(1, 100), st.integers(1, 100))
def test_more_prompts_never_widen_a_band(of_seeds, few, more):
    wide = band_of(of_seeds, num_prompts=few)
    for step, (low, high) in band_of(of_seeds, num_prompts=few + more).items():
        assert wide[step][0] <= low + 1e-12 and high <= wide[step][1] + 1e-12


def test_what_leaves_first_is_named_with_its_step():
    bands = {"reward": {1: (0.1, 0.3), 2: (0.4, 0.6)}, "held out": {0: (0.0, 0.1), 2: (0.5, 0.9)}}
    inside = {"reward": {1: 0.1, 2: 0.6}, "held out": {0: 0.0, 2: 0.7}}
    assert judge(inside, bands).is_inside
    late = judge({**inside, "held out": {0: 0.0, 2: 0.95}}, bands)
    assert (late.measure, late.step, late.value, late.high) == ("held out", 2, 0.95, 0.9)
    missing = judge({**inside, "reward": {1: 0.2}}, bands)
    assert (missing.measure, missing.step, missing.value) == ("reward", 2, None)


def test_scores_that_are_no_shares_and_missing_curves_are_refused():
    with pytest.raises(ValueError, match=r"from 0 to 1"):
        band_of([{1: 1.5}], num_prompts=4)
    with pytest.raises(ValueError, match="at least one seed"):
        band_of([{}], num_prompts=4)


EVALUATED = {"before": {}, "after": {"addition": {"reward": 1.0}}}
"""The summary of a run that was evaluated in the midst of training and has not ended."""


def write_run(folder, rewards, held_out, difference=1e-5, staleness=0):
    """A finished run as the script leaves it, with these curves."""
    folder.mkdir(parents=True)
    names = ("step", "seconds", "reward_mean", "eval/addition/pass@1", "eval/addition/seconds")
    measured = ("staleness_max", "log_prob_difference_mean", "on_policy_difference_bound")
    names = (*names, *measured)
    rows = [
        (
            *(step, 6 if step else "", rewards.get(step, ""), held_out.get(step, ""), 3 if step in held_out else ""),
            *((staleness, difference, 0.001) if step > 1 else ("", "", "")),  # the first step has no bound yet
        )
        for step in range(max(rewards) + 1)
    ]
    (folder / "metrics.csv").write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)) + "\n")
    (folder / "summary.json").write_text(json.dumps({**EVALUATED, "ended": "all steps are done"}))
    return folder


def values_of(command):
    """The values of a script's command line, as hydra reads them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    return {entry.key_or_group: entry.value() for entry in parser.parse_overrides(command[2:])}


@pytest.fixture
def own_recipe(tmp_path):
    """The recipe of one-digit sums as a folder of one's own, for three steps, not recorded."""
    folder = tmp_path / "sums"
    folder.mkdir()
    text = (known_recipes()["one-digit-sums"].folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("num_steps=12", "num_steps=3"))
    return folder


def runs_of_seeds(folder):
    return {
        seed: write_run(folder / f"seed-{seed}", {1: 0.1, 2: 0.4 + seed / 100, 3: 0.9}, {0: 0.04, 3: 0.88})
        for seed in range(3)
    }


def test_a_recorded_recipe_judges_runs_by_the_command(own_recipe, tmp_path, takes_long):
    recipe = Recipe.read(own_recipe)
    recorded = record(recipe, runs_of_seeds(tmp_path / "runs"))
    assert recorded.minutes == {seed: pytest.approx((3 * 6 + 2 * 3) / 60, abs=0.05) for seed in "012"}
    assert recorded.after["eval/pass@1"] == {"0": 0.88, "1": 0.88, "2": 0.88}
    low, high = recipe.bands()["reward_mean"][3]  # of 16 prompts
    assert not differ(low + 1e-3, 0.4, 16) and differ(low - 1e-3, 0.4, 16)
    assert not differ(high - 1e-3, 0.9, 16) and high > 0.98
    assert (own_recipe / "curve.png").stat().st_size > 1000

    good = write_run(tmp_path / "good", {1: 0.12, 2: 0.35, 3: 0.95}, {0: 0.0, 3: 0.92})
    result = runner.invoke(app, ["recipe", "verify", str(own_recipe), "--run", str(good)])
    assert result.exit_code == 0 and "inside" in result.output, result.output
    flat = write_run(tmp_path / "flat", {1: 0.1, 2: 0.1, 3: 0.1}, {0: 0.04, 3: 0.04})
    result = runner.invoke(app, ["recipe", "verify", str(own_recipe), "--run", str(flat), "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (told["is_inside"], told["step"], told["measure"]) == (False, 3, "eval/pass@1")

    begun = write_run(tmp_path / "begun", {1: 0.1, 2: 0.2}, {0: 0.04, 2: 0.1})
    for entries, exit_code in ((["train.num_steps=2"], 0), ([], 1)):
        command = ["recipe", "verify", str(own_recipe), "--run", str(begun), *entries]
        assert runner.invoke(app, command).exit_code == exit_code

    other_problems = ["recipe", "verify", str(own_recipe), "--run", str(good), "env.options.num_digits=2"]
    result = runner.invoke(app, other_problems)
    assert result.exit_code == 2 and "the problems differ from those" in " ".join(result.output.split())


def test_a_run_whose_trainer_scores_other_tokens_than_were_sampled_is_outside(own_recipe, tmp_path, takes_long):
    record(Recipe.read(own_recipe), runs_of_seeds(tmp_path / "runs"))
    for name, differing, is_inside in (
        ("other", {"difference": 0.3}, False),
        ("rounded", {"difference": 0.0009}, True),
        ("behind", {"difference": 0.3, "staleness": 2}, True),  # of weights that are older by design
    ):
        run = write_run(tmp_path / name, {1: 0.1, 2: 0.4, 3: 0.9}, {0: 0.04, 3: 0.88}, **differing)
        result = runner.invoke(app, ["recipe", "verify", str(own_recipe), "--run", str(run), "--json"])
        verdict = json.loads(result.stdout)
        assert verdict["is_inside"] == is_inside, (name, verdict)
        if not is_inside:
            assert (verdict["measure"], verdict["step"]) == ("log_prob_difference_mean", 2)


@pytest.mark.parametrize(
    ("name", "modules", "given"),
    [
        ("reverse-text", ["sft", "grpo"], "model.path"),
        ("distillation", ["grpo", "distillation"], "teacher.path"),
        ("expert-iteration", ["expert_iteration"], None),
    ],
)
def test_a_stage_begins_with_the_model_of_the_one_before_or_has_it_as_its_teacher(
    tmp_path, monkeypatch, name, modules, given
):
    commands = []

    def run(command):
        commands.append(command)
        path = Path(values_of(command)["run.path"])
        (write_run(path, {1: 0.5}, {0: 0.1}) / "model").mkdir()
        (path / "config.yaml").touch()
        return 0

    monkeypatch.setattr("llmrl.recipes.run.run_script", run)
    folder = train_seed(known_recipes()[name], 7, tmp_path / "it's [a=b], seed-7")
    assert [command[1] for command in commands] == [f"llmrl.scripts.{module}" for module in modules]
    assert all("seed=7" in command for command in commands)
    models = {name: value for name, value in values_of(commands[-1]).items() if name in ("model.path", "teacher.path")}
    assert models == ({} if given is None else {given: str(tmp_path / "it's [a=b], seed-7-stage-0/model")})
    train_seed(known_recipes()[name], 7, folder)
    assert len(commands) == len(modules)  # what has ended is not run again


SLOW_TO_END = """
import json, signal, sys, time
from pathlib import Path

path = Path(next(word for word in sys.argv if word.startswith("run.path=")).partition("=")[2].strip("'"))
path.mkdir(exist_ok=True)
(path / "metrics.csv").write_text("step\\n1\\n")
summary = {"after": {}}
if "resume=true" in sys.argv:
    summary["ended"] = "all steps are done"
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    print("ready", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGINT])
    time.sleep(1)  # the model is saved
(path / "summary.json").write_text(json.dumps(summary))
"""


def test_an_interrupted_run_is_waited_for_and_later_resumed(own_recipe, tmp_path, own_programs):
    script = tmp_path / "script.py"
    script.write_text(SLOW_TO_END)
    program = (
        "import pathlib, sys\n"
        "from llmrl.recipes import Recipe, train_seed\n"
        "recipe, folder, script = map(pathlib.Path, sys.argv[1:])\n"
        "train_seed(Recipe.read(recipe), 0, folder, script=script)\n"
    )
    command = [sys.executable, "-c", program, str(own_recipe), str(tmp_path / "run"), str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert any(line == "ready\n" for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 1 and "the same command resumes the run" in said, said
    assert json.loads((tmp_path / "run/summary.json").read_text()) == {"after": {}}
    assert subprocess.run(command).returncode == 0
    assert is_finished(tmp_path / "run")


def test_a_recipe_that_is_run_with_entries_has_a_folder_of_its_own(own_recipe, monkeypatch):
    folders = []

    def train_none(recipe, seed, folder, *, entries):
        folders.append(folder)
        raise RecipeRunError("no run")

    monkeypatch.setattr("llmrl.recipes.train_seed", train_none)
    for entry in ("train.num_steps=3", "++engine.engine_args={a: 1}", "++engine.engine_args={a: -1, b: 'c/d'}"):
        result = runner.invoke(app, ["recipe", "run", str(own_recipe), "--seed", "0", entry])
        assert result.exit_code == 2 and "no run" in result.output
    assert len(set(folders)) == 3  # other entries are other runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "dry_run=true"], "a dry run leaves no curves"),
        (["run", "seed=5"], "give the seed as --seed"),
        (["run", "run.path=mine"], "leave out run.path"),
        (["verify", "++seed=5"], "give the seed as --seed"),
        (["verify", "--run", "RUN", "--seed", "5"], "leave out --seed and --script"),
        (["verify", "--run", "RUN", "--script", "RUN"], "leave out --seed and --script"),
    ],
)
def test_what_has_no_effect_on_a_recipe_s_run_is_refused(own_recipe, monkeypatch, words, message):
    monkeypatch.setattr("llmrl.recipes.train_seed", lambda *arguments, **options: pytest.fail("a run was begun"))
    command, *options = [word.replace("RUN", str(own_recipe)) for word in words]
    result = runner.invoke(app, ["recipe", command, str(own_recipe), *options])
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_a_recipe_composes_beside_torchrls_configurations():
    from hydra.core.config_store import ConfigStore
    from torchrl.trainers.algorithms import configs  # registers a group `loss`

    group = ConfigStore.instance().repo["loss"]
    assert configs and known_recipes()["dapo-1.7b"].config().loss == "dapo"
    assert ConfigStore.instance().repo["loss"] is group


def test_the_folder_of_a_recipe_may_have_any_name(own_recipe):
    folder = own_recipe.rename(own_recipe.with_name("it's [a=b], {c}"))
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(
        text.replace("task=addition", "task=own\n      - env.name={recipe}/task.py:env")
    )
    assert Recipe.read(folder).config().env.name == f"{folder}/task.py:env"


def test_a_run_that_ended_early_keeps_its_last_value(own_recipe, tmp_path, takes_long):
    run = write_run(tmp_path / "run", {1: 0.9, 2: 1.0}, {0: 0.04, 2: 0.98})  # evaluated at its end, then every 3 steps
    curves = curves_of(Recipe.read(own_recipe), run)
    assert curves["reward_mean"] == {1: 0.9, 2: 1.0, 3: 1.0}
    assert curves["eval/pass@1"] == {0: 0.04, 3: 0.98}
    gap = write_run(tmp_path / "gap", {1: 0.1, 3: 0.9}, {0: 0.04, 3: 0.88})
    assert curves_of(Recipe.read(own_recipe), gap)["reward_mean"] == {1: 0.1, 3: 0.9}
    (run / "summary.json").write_text(json.dumps(EVALUATED))  # as after an evaluation in the midst of training
    with pytest.raises(ValueError, match="has not ended"):
        curves_of(Recipe.read(own_recipe), run)


def test_a_recipe_that_was_not_recorded_judges_nothing_and_a_missing_seed_records_nothing(own_recipe, tmp_path):
    result = runner.invoke(app, ["recipe", "verify", str(own_recipe)])
    assert result.exit_code == 2 and "was not run yet" in " ".join(result.output.split())
    with pytest.raises(ValueError, match=r"\[2\] were not run"):
        record(Recipe.read(own_recipe), {0: tmp_path, 1: tmp_path})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: x\nmeasures: [a]", "stages"),
        ("about: x\nmeasures: [a]\nstages: [{ppo: []}]", "ppo"),
        ("about: x\nmeasures: [a]\nstages: [{grpo: []}]\nseed: 1", "seed"),
        ("- 1", "no recipe"),
        ("about: [", "no recipe"),
        ("about: !!int x", "no recipe"),
        ("about: x\nmeasures: reward_mean\nstages: [{grpo: []}]", "list of metrics"),
    ],
)
def test_what_is_no_recipe_is_refused_with_the_file(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Recipe.read(tmp_path)
    assert "recipe.yaml" in str(caught.value)


def test_the_list_has_whole_names_in_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setattr(recipe_command, "console", Console(width=80))
    result = runner.invoke(app, ["recipe", "list"])
    assert result.exit_code == 0 and all(name in result.output for name in known_recipes()), result.output
    assert "not run yet" in result.output and max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_a_known_recipe_composes_and_its_problems_are_those_of_its_record(name, takes_long):
    recipe = known_recipes()[name]
    cfg = recipe.config()
    assert (recipe.folder / "README.md").exists()
    recorded = recipe.record()
    if recorded is None:
        assert "not run yet" in (recipe.folder / "README.md").read_text()
        return
    assert recorded.data == recipe.data_hash()
    for measure, band in recipe.bands().items():
        assert max(band) == cfg.train.num_steps
        ends = recorded.after[measure].values()
        assert all(band[max(band)][0] <= value <= band[max(band)][1] for value in ends)


@pytest.mark.parametrize("name", [name for name, one in known_recipes().items() if (one.folder / "sft.jsonl").exists()])
def test_the_conversations_of_a_recipe_are_those_that_its_task_makes(name):
    folder = known_recipes()[name].folder
    held = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    made = load_function(folder / "task.py", "conversations")(len(held))
    assert held == json.loads(json.dumps(made))
