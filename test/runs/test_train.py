"""`train`: ten lines, and the script's own loop."""

from __future__ import annotations

import contextlib
import io
import json
import operator
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from script_configs import config

from llmrl import DatasetChatEnv, RubricReward, TransformersEngine, train
from llmrl.config.sections import GRPOConfig
from llmrl.envs import ChatEnv
from llmrl.runs.run_folder import RunFolder
from llmrl.scripts import train as module

ROOT = Path(__file__).resolve().parents[2]


def number_of_digits(completion):
    """Something that a random model's answers differ in."""
    return float(len(completion) % 7) / 7


def make_env(repeats=4, name="train"):
    env = DatasetChatEnv([f"{a} + 1 =" for a in range(6)], repeats=repeats, name=name, shuffle=True)
    return env.append_transform(RubricReward(number_of_digits))


@pytest.fixture
def train_tiny(tiny_model_path, tmp_path):
    """Trains a tiny random model, generating with transformers; gives the folder and what was printed."""

    def train_it(env=None, **options):
        out = io.StringIO()
        engine = TransformersEngine(tiny_model_path)
        settings = {"path": tmp_path / "run", "num_steps": 2, "groups_per_batch": 2, "max_new_tokens": 6}
        settings |= {"learning_rate": 1e-2, "engine": engine, "console": Console(file=out, width=100)}
        try:
            return train(tiny_model_path, make_env() if env is None else env, **{**settings, **options}), out.getvalue()
        finally:
            engine.shutdown()

    return train_it


def test_a_call_trains_evaluates_and_leaves_a_run_that_goes_on(train_tiny, tiny_model_path, takes_long):
    from transformers import AutoModelForCausalLM

    held_out = {"sums": make_env(2, "sums"), "more": make_env(1, "more")}
    options = {"eval_envs": held_out, "eval_every": 2, "best_by": "eval/sums/reward", "num_epochs": 2}
    options |= {"schedule": "cosine", "warmup_steps": 1, "kl_to_ref_coeff": 0.1, "max_model_len": 128}
    options |= {"export_every": 1, "save_total_limit": 1}
    path, printed = train_tiny(**options)
    assert "all 2 steps are done" in printed and "sums pass@1" in printed and "before training: " in printed
    metrics = {int(row["step"]): row for row in RunFolder(path, read_only=True).read_metrics()}
    assert set(metrics) == {0, 1, 2} and {"eval/sums/pass@2", "eval/more/reward"} <= metrics[0].keys()
    assert "eval/sums/pass@1" not in metrics[1] and metrics[2]["eval/sums/reward"] >= 0
    records = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
    num_evaluated = Counter(record["step"] for record in records if record["split"] == "eval/sums")
    assert num_evaluated[2] == num_evaluated[0] > 0  # the last step, which was due, was evaluated once
    assert metrics[2]["kl_to_ref"] > 0 and metrics[2]["log_prob_difference_mean"] < 1e-3
    assert [export.name for export in (path / "exports").iterdir()] == ["step-000002"]
    first = AutoModelForCausalLM.from_pretrained(path / "model").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(path / "exports/step-000002").state_dict().items():
        assert torch.equal(tensor, first[name])
    assert f"| reward_mean | {metrics[2]['reward_mean']:.6g} |" in (path / "model/README.md").read_text()
    before = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).state_dict()
    assert not torch.equal(first["lm_head.weight"], before["lm_head.weight"])
    # The same call goes on, with one entry changed; another task's data is refused.
    resumed, printed = train_tiny(resume=True, **{**options, "eval_envs": {"sums": make_env(2, "sums")}}, num_steps=3)
    assert resumed == path and "resumed with train.num_steps=3 in place of 2" in printed
    assert "resumed after step 2" in printed
    steps = {int(row["step"]) for row in RunFolder(path, read_only=True).read_metrics()}
    assert steps == {0, 1, 2, 3}
    assert OmegaConf.load(path / "config.yaml").train.num_epochs == 2
    with pytest.raises(ValueError, match=r"env\.name"):
        train_tiny(make_env(name="other"), resume=True, num_steps=4)


def test_adapters_are_trained_and_the_model_is_saved_whole(takes_long, train_tiny, tiny_model_path):
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    path, _ = train_tiny(lora_rank=2, num_steps=1)
    saved = AutoModelForCausalLM.from_pretrained(path / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).state_dict()
    assert saved.keys() == before.keys()
    changed = {name.split(".")[-2] for name in saved if not torch.equal(saved[name], before[name])}
    assert changed and changed <= {f"{layer}_proj" for layer in ("q", "k", "v", "o", "gate", "up", "down")}
    assert "eval/" not in json.dumps(RunFolder(path, read_only=True).read_metrics())


def test_what_cannot_be_trained_on_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "start_engine", lambda cfg: pytest.fail("an engine was started"))
    for env, options, named in (
        (ChatEnv(), {}, "no dataset"),
        (make_env(repeats=1), {}, "repeats=1"),
        (make_env(), {"eval_envs": make_env()}, "name='eval'"),
        (make_env(), {"eval_every": 5}, "need eval_envs"),
        (make_env(), {"schedule": "cosin"}, "schedule"),
        (make_env(), {"patience": 2}, "eval.metric"),
        (DatasetChatEnv(["1 + 1 ="], repeats=2), {}, "'train' gives no reward.*append_transform"),
        (make_env(), {"eval_envs": {"sums": DatasetChatEnv(["1 ="], name="sums")}}, "'sums' gives no reward"),
        (make_env(), {"learning_rate": "1e-5"}, "^learning_rate must be a number, above 0; got '1e-5', a str"),
        (make_env(), {"learning_rate": -1.0}, "^learning_rate must be above 0, got -1.0"),
        (make_env(), {"trackers": "wandb"}, r"^trackers must be a list.* write \['wandb'\]"),
        (make_env(), {"trackers": ["wnadb"]}, r"^trackers\[0\] must be one of .*Did you mean 'wandb'"),
        (make_env(), {"lora_rank": 0}, "^lora_rank must be at least 1, got 0"),
        (make_env(), {"best_by": "pass@1", "eval_envs": make_env(1, "eval")}, "^best_by must be a metric"),
        (
            make_env(),
            {"best_by": "eval/sums/pass@2", "eval_envs": {"sums": make_env(3, "sums")}},
            "^best_by must be a metric of the evaluation, got 'eval/sums/pass@2'. Did you mean 'eval/sums/pass@[13]",
        ),
        (
            make_env(),
            {"best_by": "eval/sums/reward/digits_mean", "eval_envs": {"sums": make_env(3, "sums")}},
            "reward/number_of_digits_mean",
        ),
        (make_env(), {"num_epochs": 0}, "^num_epochs must be at least 1, got 0"),
        (make_env(), {"temperature": 0}, "^temperature must be at least 0.01, got 0"),
        (
            make_env(),
            {"chat_template": "no-such.jinja"},
            "chat_template='no-such.jinja' is neither an existing file nor Jinja text",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            train("no-such-model", env, path=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_generations", "repeats=8"),
        ("beta", "did you mean 'kl_to_ref_coeff'"),
        ("reward_funcs", "RubricReward"),
        ("max_completion_length", "did you mean 'max_new_tokens'"),
        ("learning_rat", "did you mean 'learning_rate'"),
    ],
)
def test_arguments_of_other_libraries_are_answered_with_where_they_are(name, words):
    with pytest.raises(TypeError, match=words):
        train("embedded", make_env(), **{name: 1})


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """The configuration that a call of `train` would train with."""
    seen = []

    def enter(cfg, **options):
        seen.append(cfg)
        return contextlib.nullcontext(SimpleNamespace(enter=lambda part: part))

    monkeypatch.setattr(module, "Run", enter)
    for part in ("TrainerDevice", "start_engine", "grpo"):
        monkeypatch.setattr(module, part, lambda *arguments: None)

    def call(**options):
        train("a-model", make_env(), path=tmp_path / "run", **options)
        return seen[-1]

    return call


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_on_a_gpu_it_is_configured_as_the_file_for_one_gpu(monkeypatch, configured, has_bfloat16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    cfg = configured()
    if not has_bfloat16:
        assert cfg.model.dtype == "float16" and cfg.model.autocast_dtype == torch.float16
        return
    file = OmegaConf.load(ROOT / "sota-implementations/config/hardware/gpu1.yaml")
    for section in ("model", "engine", "sync", "train"):
        for entry, value in file[section].items():
            assert getattr(getattr(cfg, section), entry) == value, f"{section}.{entry}"


@pytest.mark.slow
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_group_of_equal_rewards_is_left_out_or_replaced_by_another_prompt(train_tiny, is_replaced):
    def of_even_sums(completion, query):
        return number_of_digits(completion) if int(query.split()[0]) % 2 == 0 else 0.0

    env = DatasetChatEnv([f"{a} + 1 =" for a in range(6)], repeats=4, name="train", shuffle=True)
    env = env.append_transform(RubricReward(of_even_sums))
    path, _ = train_tiny(env, groups_per_batch=3, max_new_tokens=12, replace_constant_groups=is_replaced)
    metrics = [row for row in RunFolder(path, read_only=True).read_metrics() if int(row["step"])]
    num_trained = [row["num_rows"] for row in metrics]
    assert num_trained == [12, 12] if is_replaced else max(num_trained) < 12
    assert all(row["num_rollouts"] - row["num_dropped"] == row["num_rows"] and row["num_dropped"] for row in metrics)


def test_a_conversation_may_have_as_many_turns_as_on_the_command_line(configured):
    assert configured().collect.max_turns == config("grpo", "task=own").collect.max_turns == 8


def test_every_keyword_is_an_entry_of_the_configuration_and_has_its_type(configured):
    given = {
        "loss": "cispo",
        "seed": 3,
        "trackers": ["wandb"],
        "num_steps": 7,
        "groups_per_batch": 2,
        "max_new_tokens": 9,
        "max_turns": 2,
        "temperature": 0.5,
        "max_staleness": 1,
        "replace_constant_groups": True,
        "max_model_len": 64,
        "chat_template": "{{ a }}",
        "lora_rank": 2,
        "learning_rate": 0.1,
        "schedule": "linear",
        "warmup_steps": 1,
        "num_epochs": 2,
        "num_minibatches": 3,
        "kl_to_ref_coeff": 0.1,
        "clip_epsilon": 0.1,
        "clip_epsilon_high": 0.3,
        "aggregation": "group_mean",
        "save_total_limit": 4,
        "push_to_hub": "me/it",
        "export_every": 5,
        "resume": True,
    }
    cfg = configured(**given)
    for name, value in given.items():
        assert operator.attrgetter(module.ENTRIES[name])(cfg) == value, name
    own = {"chat_template": str | Path | None, "trackers": Sequence[str]}
    for name, kind in get_type_hints(module.TrainOptions).items():
        section, _, entry = module.ENTRIES[name].rpartition(".")
        owner = type(operator.attrgetter(section)(cfg)) if section else GRPOConfig
        assert kind == own.get(name, get_type_hints(owner)[entry]), name


def test_what_the_page_says_of_keywords_and_entries_is_so():
    page = (ROOT / "docs/how-to/change-the-loop.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", page, re.MULTILINE)
    assert dict(rows) == {name: module.ENTRIES[name] for name in module.TrainOptions.__annotations__}


@pytest.fixture
def base_model_path(tiny_model_path, tmp_path):
    """A model without a chat template, and the template that it lacks."""
    from transformers import AutoTokenizer

    path = shutil.copytree(tiny_model_path, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(path)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    (path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(path)
    return path, template


def test_a_base_model_is_trained_with_a_chat_template_that_is_given(base_model_path, tmp_path, takes_long):
    from transformers import AutoTokenizer

    path, template = base_model_path
    with pytest.raises(ValueError, match=r"base has no chat template.*chat_template of train"):
        train(path, make_env(), path=tmp_path / "run")
    (tmp_path / "own.jinja").write_text(template)
    engine = TransformersEngine(path)
    options = {"engine": engine, "num_steps": 1, "groups_per_batch": 2, "max_new_tokens": 6, "learning_rate": 1e-2}
    run = train(path, make_env(), path=tmp_path / "run", chat_template=tmp_path / "own.jinja", **options)
    engine.shutdown()
    assert AutoTokenizer.from_pretrained(run / "model").chat_template == template


def test_an_engine_that_trained_before_begins_with_the_models_weights_and_its_run_is_continued(
    tiny_model_path, tmp_path, takes_long
):
    engine, options = TransformersEngine(tiny_model_path), {"groups_per_batch": 2, "max_new_tokens": 6, "num_steps": 1}
    options |= {
        "learning_rate": 1e-1,
        "engine": engine,
        "eval_envs": make_env(2, "eval"),
        "best_by": "eval/eval/reward",
    }
    rows = []
    for name in ("first", "second"):
        out = io.StringIO()
        options |= {"path": tmp_path / name, "console": Console(file=out, width=100)}
        train(tiny_model_path, make_env(), **options)
        rows.append({int(row["step"]): row for row in RunFolder(tmp_path / name, read_only=True).read_metrics()})
    assert rows[1][1]["log_prob_difference_mean"] < 1e-3 and rows[1][1]["policy_version"] == 1
    (line,) = re.findall("the same call with (.*)", out.getvalue())
    changed = eval(f"dict({line})")
    assert changed == {"path": str(tmp_path / "second"), "resume": True, "num_steps": 21}
    train(tiny_model_path, make_env(), **{**options, **changed, "num_steps": 2})
    assert {row["step"] for row in RunFolder(tmp_path / "second", read_only=True).read_metrics()} == {0, 1, 2}
    engine.shutdown()
