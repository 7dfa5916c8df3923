"""Every entry of every configuration says what it may be, and nothing is started with what it may not."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
from omegaconf import OmegaConf

from llmrl.collectors import LLMCollector
from llmrl.config.entries import EntryError
from llmrl.config.imitation import DistillationConfig
from llmrl.config.launch import CONFIGS, launch, typed
from llmrl.config.sections import EvalEnvConfig, GRPOConfig
from llmrl.trainer import TransformersWrapper, make_optimizer
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme

COUNT, SIZE, SHARE, RATE = (0, -1), (-1,), (0.0, -0.5, 1.5, math.nan), (0.0, -1.0, math.nan, math.inf)
NAME = ("", "  ", "\0")
# What no entry may be, by what it means, not by what is declared.
ODD = {
    "run.path": NAME,
    "run.trackers": (["foo"], [""], "wandb"),
    "run.traces": SIZE,
    "run.checkpoint_every": COUNT,
    "run.sample_every": COUNT,
    "model.path": NAME,
    "model.chat_template": NAME,
    "model.max_model_len": (0, -1, 1),
    "model.dtype": ("float8", ""),
    "model.lora.rank": COUNT,
    "model.lora.alpha": COUNT,
    "model.lora.target_modules": ([], [""]),
    "env.name": NAME,
    "env.train_split": NAME,
    "env.eval_split": NAME,
    "collect.groups_per_batch": COUNT,
    "collect.group_size": COUNT,
    "collect.max_new_tokens": COUNT,
    "collect.max_turns": COUNT,
    "collect.temperature": (0.0, -1.0, 0.001, math.nan, math.inf),
    "collect.top_p": SHARE,
    "collect.top_k": SIZE,
    "collect.min_p": (-0.1, 1.0, 1.5, math.nan),
    "collect.max_staleness": SIZE,
    "collect.max_concurrent_rollouts": (0, -1, "many", 1.5, True),
    "collect.num_collectors": COUNT,
    "collect.cpus_per_collector": COUNT,
    "collect.num_best": (0, -1, 5),
    "train.num_steps": COUNT,
    "train.learning_rate": RATE,
    "train.schedule": ("cosin",),
    "train.warmup_steps": SIZE,
    "train.weight_decay": (-0.1, math.nan, math.inf),
    "train.max_grad_norm": RATE,
    "train.target_reward": (math.nan, math.inf),
    "train.device": ("gpu", "", "cuda:x"),
    "train.num_ranks": COUNT,
    "train.context_ranks": (*COUNT, 2),
    "train.cpu_threads": COUNT,
    "train.token_budget": COUNT,
    "train.bin_length": COUNT,
    "train.head_kernel": ("lger",),
    "train.moments": ("4bit", 8),
    "train.clip_epsilon": (0.0, -0.1, 1.5, math.nan),
    "train.clip_epsilon_high": RATE,
    "train.importance_cap": RATE,
    "train.kl_to_ref_coeff": (-0.1, math.nan, math.inf),
    "train.dual_clip": (1.0, 0.0, math.nan),
    "train.aggregation": ("mean", "none", "fixed_length"),
    "train.fixed_length": COUNT,
    "train.max_divergence": RATE,
    "train.divergence": ("js",),
    "train.num_epochs": COUNT,
    "train.num_minibatches": COUNT,
    "train.num_updates": COUNT,
    "train.rows_per_update": COUNT,
    "train.max_reuse": COUNT,
    "train.buffer_size": COUNT,
    "eval.every": COUNT,
    "eval.num_problems": SIZE,
    "eval.num_samples": COUNT,
    "eval.metric": ("", "pass@1", "eval/"),
    "eval.patience": COUNT,
    "export.every": COUNT,
    "export.save_total_limit": COUNT,
    "export.max_shard_size": ("0GB", "5", "5 GB"),
    "export.push_to_hub": NAME,
    "engine.num_replicas": COUNT,
    "engine.speculative": ("ngrams", "", "draft_model"),
    "engine.tensor_parallel_size": COUNT,
    "engine.max_num_seqs": COUNT,
    "engine.gpu_memory_utilization": SHARE,
    "engine.cpu_threads": COUNT,
    "engine.quantization": ("int4",),
    "sync.transport": ("nccl",),
    "sync.folder": NAME,
    "sync.pause_mode": ("stop",),
    "sync.anchor_every": COUNT,
    "sync.lora": ("both",),
    "sync.max_adapters": (1, 0, -1),
    "ray.address": NAME,
    "seed": (-1, 2**64),
    "loss": ("ppo", ""),
    "conversations.path": NAME,
    "conversations.held_out": NAME,
    "teacher.path": NAME,
    "teacher.url": ("", "localhost:8000"),
    "teacher.hint": NAME,
    "teacher.coeff": RATE,
    "teacher.top_k": COUNT,
}
ANYTHING = {
    "env.data": "what `load_rows` reads, checked where it is read",
    "env.options": "arguments of the task",
    "eval.envs": "sections of their own",
    "engine.ray_options": "Ray's",
    "engine.engine_args": "vLLM's, some of them refused by name",
    "algorithm": "the script's own",
}


def small(config_type):
    """A configuration as a file says it."""
    entries = {
        "run": {"path": "runs/one"},
        "model": {"path": "embedded"},
        "env": {"name": "addition"},
        "collect": {"groups_per_batch": 2, "group_size": 4, "max_new_tokens": 8},
        "train": {"num_steps": 4, "learning_rate": 1e-5},
        "conversations": {"path": "rows.jsonl"},
        "teacher": {"path": "teacher"},
    }
    known = {entry.name for entry in dataclasses.fields(config_type)}
    return {name: section for name, section in entries.items() if name in known}


def entries_of(config_type, prefix=""):
    """All entries by their dotted names, each with its type."""
    hints = get_type_hints(config_type)
    for entry in dataclasses.fields(config_type):
        name, kind = f"{prefix}{entry.name}", hints[entry.name]
        if dataclasses.is_dataclass(kind):
            yield from entries_of(kind, f"{name}.")
        else:
            yield name, kind


def with_entry(config_type, name, value):
    entries = OmegaConf.create(small(config_type))
    OmegaConf.update(entries, name, value, merge=False)
    return OmegaConf.to_container(entries)


ENTRIES = {name: kind for config_type in CONFIGS.values() for name, kind in entries_of(config_type)}
OWNERS = {name: config_type for config_type in reversed(CONFIGS.values()) for name, _ in entries_of(config_type)}


def test_every_entry_is_known_here():
    flags = {name for name, kind in ENTRIES.items() if bool in (kind, *get_args(kind))}
    assert sorted({*ODD, *ANYTHING, *flags}) == sorted(ENTRIES) and not {*ODD} & {*ANYTHING, *flags}
    for config_type in CONFIGS.values():
        typed(small(config_type), config_type)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_is_answered_with_the_entry_what_was_given_and_what_it_may_be(name):
    for value in ODD[name]:
        with pytest.raises(ValueError) as refused:
            typed(with_entry(OWNERS[name], name, value), OWNERS[name])
        said = str(refused.value)
        assert name in said and (repr(value) in said or f"={value}" in said or isinstance(value, list | str)), said


def test_values_at_the_ends_of_ranges_are_taken():
    ends = {
        "collect.temperature": 0.01,
        "collect.max_staleness": 0,
        "engine.gpu_memory_utilization": 1.0,
        "eval.num_problems": 0,
        "train.clip_epsilon": 1.0,
        "train.kl_to_ref_coeff": 0.0,
        "train.max_grad_norm": None,
        "train.target_reward": -3.0,
        "train.device": "cuda:1",
        "run.trackers": [],
        "seed": 0,
    }
    for name, value in ends.items():
        entry = OmegaConf.select(OmegaConf.structured(typed(with_entry(GRPOConfig, name, value), GRPOConfig)), name)
        assert entry == value


def test_in_python_types_are_checked_and_numpys_numbers_become_pythons_own():
    from llmrl.config.sections import RunConfig, TrainConfig

    for odd, says in (("1e-5", "a number, above 0; got '1e-5', a str"), (None, "got None"), (True, "a bool")):
        with pytest.raises(EntryError, match=rf"train\.learning_rate must be .*{says}"):
            TrainConfig(num_steps=1, learning_rate=odd)
    with pytest.raises(EntryError, match=r"run\.trackers must be a list.*got 'wandb': write \['wandb'\]"):
        RunConfig(path="a", trackers="wandb")
    with pytest.raises(EntryError, match=r"trackers\[1\] must be one of .*got 'wnadb'. Did you mean 'wandb'"):
        RunConfig(path="a", trackers=["tensorboard", "wnadb"])
    cfg = TrainConfig(num_steps=np.int64(3), learning_rate=np.float32(0.5))
    assert type(cfg.num_steps) is int and type(cfg.learning_rate) is float
    with pytest.raises(EntryError, match=r"num_steps must be a whole number, at least 1; got 3.0, a float"):
        TrainConfig(num_steps=3.0, learning_rate=1)


def test_what_a_section_builds_is_given_its_entries_and_no_others():
    cfg = typed(small(GRPOConfig), GRPOConfig)
    for section, function, names in (
        ("train", make_optimizer, "learning_rate weight_decay schedule warmup_steps num_steps moments"),
        (
            "train",
            TransformersWrapper.__init__,
            "token_budget bin_length head_kernel compile_layers offload_activations",
        ),
        ("collect", LLMCollector.__init__, "groups_per_batch max_staleness max_concurrent_rollouts"),
        ("sync", VLLMWeightSyncScheme, "pause_mode reset_running_requests anchor_every lora"),
        ("sync", VLLMDoubleBufferSyncScheme, "pause_mode reset_running_requests anchor_every lora"),
    ):
        owner = getattr(cfg, section)
        assert owner.arguments_of(function) == {name: getattr(owner, name) for name in names.split()}


@pytest.mark.parametrize("name", ["kl_to_ref_coeff", "num_epochs", "num_minibatches", "max_divergence"])
def test_distillation_has_no_entry_that_its_loop_does_not_read(name):
    with pytest.raises(ValueError, match=f"no entry 'train.{name}'"):
        typed(with_entry(DistillationConfig, f"train.{name}", 2), DistillationConfig)


def test_what_is_evaluated_besides_is_checked_by_its_name():
    with pytest.raises(EntryError, match=r"eval\.envs\.more\.split must be"):
        typed(with_entry(GRPOConfig, "eval.envs", {"more": {"name": "addition", "split": ""}}), GRPOConfig)


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        ("train.warmup_steps", 4, {"train.schedule": "linear"}),
        ("collect.top_p", 0.9, {}),
        ("collect.min_p", 0.1, {}),
        ("run.traces", 2, {"run.trackers": []}),
        ("eval.patience", 2, {}),
        ("eval.patience", 2, {"eval.metric": "eval/addition/pass@1"}),
        ("model.lora.alpha", 64, {}),
        ("model.lora.target_modules", ["q_proj"], {}),
        ("eval.envs", {"addition": {"name": "guess"}}, {"env.name": "addition"}),
        ("sync.folder", "/shared", {}),
        ("ray.address", "auto", {}),
        ("collect.cpus_per_collector", 2, {"engine.use_ray": True}),
    ],
)
def test_entries_that_do_not_go_together_are_refused(name, value, beside):
    entries = OmegaConf.create(with_entry(GRPOConfig, name, value))
    for other, its_value in beside.items():
        OmegaConf.update(entries, other, its_value)
    with pytest.raises(ValueError, match=rf"{name}(={value}| needs| has| is for)"):
        typed(entries, GRPOConfig)


@pytest.mark.parametrize(
    "override", ["train.learning_rate=-1", "run.checkpoint_every=0", "collect.temperature=0", "run.trackers=[foo]"]
)
def test_a_script_is_not_begun_with_an_odd_value(monkeypatch, takes_long, override):
    called = []

    def main(cfg):
        called.append(cfg)

    monkeypatch.setattr("sys.argv", ["grpo.py", override])
    with pytest.raises(SystemExit) as ended:
        launch(main, GRPOConfig, "../../sota-implementations/config/grpo.yaml")
    assert str(ended.value).startswith(override.partition("=")[0]) and not called


def test_an_environment_to_evaluate_is_given_by_single_entries(monkeypatch, takes_long):
    called = []

    def main(cfg):
        called.append(cfg)

    entries = ("+eval.envs.a.split=train", "eval.envs.a.name=my.py:make", "+eval.envs.a.options.num_digits=3")
    monkeypatch.setattr("sys.argv", ["grpo.py", *entries, "eval.envs.b.name=guess"])
    launch(main, GRPOConfig, "../../sota-implementations/config/grpo.yaml")
    a, b = EvalEnvConfig(name="my.py:make", split="train", options={"num_digits": 3}), EvalEnvConfig(name="guess")
    assert called[0].eval.envs == {"a": a, "b": b}
