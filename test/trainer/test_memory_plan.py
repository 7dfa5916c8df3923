"""What training takes of a device: the table of the documentation, what is refused, and what would fit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from script_configs import config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

from llmrl.cli.app import app
from llmrl.config.fit import check_fit
from llmrl.trainer.memory_plan import ModelShape, TrainingShape, plan_memory, what_fits

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/memory.md"
MODELS = {
    "0.5B": (896, 4864, 24, 151_936, 896, 128, True),
    "1.5B": (1536, 8960, 28, 151_936, 1536, 256, True),
    "3B": (2048, 11_008, 36, 151_936, 2048, 256, True),
    "8B": (4096, 12_288, 36, 151_936, 4096, 1024, False),
    "32B": (5120, 27_648, 64, 152_064, 5120, 1024, False),
    "70B": (8192, 28_672, 80, 128_256, 8192, 1024, False),
}
NAMES = ("hidden_size", "intermediate_size", "num_layers", "vocab_size", "query_size", "key_size", "is_tied")
TRAINING = TrainingShape(token_budget=16_384, bin_length=4096, gradient_checkpointing=True)


def shape(name: str) -> ModelShape:
    return ModelShape(**dict(zip(NAMES, MODELS[name], strict=True)))


def rows() -> list[str]:
    """The table's, as the page has them."""
    lines = []
    for name in MODELS:
        for ranks in (1, 2, 8, 16):
            whole = plan_memory(shape(name), replace(TRAINING, num_ranks=ranks))
            adapted = plan_memory(shape(name), replace(TRAINING, num_ranks=ranks, lora_rank=16))
            full = plan_memory(shape(name), replace(TRAINING, num_ranks=ranks, gradient_checkpointing=False))
            parts = [*whole.lasting.values(), whole.passing["activations"], full.passing["activations"]]
            parts += [whole.passing["gathered"], whole.passing["head"], whole.lasting["weights"]]
            fits = ["80" if whole.total <= 0.92 * 80e9 else "141" if whole.total <= 0.92 * 141e9 else "none"]
            numbers = [f"{part / 2**30:.1f}" for part in (*parts, whole.total, adapted.total)]
            lines.append("| " + " | ".join([name, str(ranks), *numbers, *fits]) + " |")
    return lines


def test_the_table_of_the_documentation_is_what_is_computed() -> None:
    text = PAGE.read_text()
    assert [line for line in rows() if line not in text] == []


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("0.5B", 0.49e9), ("3B", 3.09e9), ("8B", 8.19e9), ("32B", 32.8e9), ("70B", 70.6e9)]
)
def test_parameters_are_those_that_models_are_published_with(name: str, num_parameters: float) -> None:
    assert shape(name).num_parameters == pytest.approx(num_parameters, rel=0.01)


def test_ranks_divide_what_lasts() -> None:
    one, eight = (plan_memory(shape("8B"), replace(TRAINING, num_ranks=ranks)) for ranks in (1, 8))
    assert sum(one.lasting.values()) == 16 * shape("8B").num_parameters
    assert sum(eight.lasting.values()) == pytest.approx(sum(one.lasting.values()) / 8)


def test_a_base_of_4_bits_leaves_the_ends_as_they_are() -> None:
    hidden, wide, layers, vocab, queries, keys, _ = MODELS["8B"]
    plan = plan_memory(shape("8B"), replace(TRAINING, lora_rank=16, quantize_base=True))
    in_layers = layers * hidden * (2 * queries + 2 * keys + 3 * wide)
    adapters = 16 * layers * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + wide))
    expected = in_layers / 2 + 4 * in_layers / 64 + 4 * 2 * vocab * hidden + 4 * adapters
    assert plan.lasting["weights"] == pytest.approx(expected, rel=1e-6)


def test_what_would_fit_fits_and_comes_least_change_first() -> None:
    training = replace(TRAINING, gradient_checkpointing=False, token_budget=65_536)
    found = what_fits(shape("1.5B"), training, int(70e9))
    assert found[0].startswith("train.token_budget=") and any("gradient_checkpointing" in one for one in found)
    budget = int(found[0].partition("=")[2])
    assert plan_memory(shape("1.5B"), replace(training, token_budget=budget)).total <= 70e9
    assert plan_memory(shape("1.5B"), replace(training, token_budget=2 * budget)).total > 70e9
    found = what_fits(shape("8B"), TRAINING, int(70e9))
    assert [one.partition(" ")[0] for one in found] == ["train.num_ranks=4", "model.lora.rank=16"]
    assert what_fits(shape("32B"), TRAINING, int(10e9)) == []


@pytest.mark.parametrize(
    ("changes", "num_ranks"),
    [({}, ["2"]), ({"moments": "8bit"}, []), ({"lora_rank": 16, "quantize_base": True}, []),
     ({"num_ranks": 3, "context_ranks": 3}, [])],
)  # fmt: skip
def test_no_number_of_ranks_is_proposed_that_the_configuration_refuses(
    changes: dict[str, Any], num_ranks: list[str]
) -> None:
    training = replace(TRAINING, **changes)
    found = what_fits(shape("8B"), training, int(0.5 * plan_memory(shape("8B"), training).total))
    assert [one.split()[0].partition("=")[2] for one in found if one.startswith("train.num_ranks=")] == num_ranks


def test_no_micro_batch_is_proposed_that_a_row_does_not_fit_in() -> None:
    training = replace(TRAINING, gradient_checkpointing=False, token_budget=65_536, longest_row=40_000)
    found = what_fits(shape("1.5B"), training, int(75e9))
    assert found and all("token_budget=65536" in one for one in found)
    rows = replace(TRAINING, token_budget=2048, longest_row=32_768)
    assert plan_memory(shape("3B"), rows) == plan_memory(shape("3B"), replace(rows, token_budget=32_768))


def test_offloading_keeps_two_layers_inputs_on_the_device() -> None:
    plans = [plan_memory(shape("8B"), replace(TRAINING, offload_activations=offload)) for offload in (False, True)]
    kept = plans[0].passing["activations"] - plans[1].passing["activations"]
    assert kept == 4 * TRAINING.token_budget * 4096 * (36 - 2)


def test_what_lasts_must_fit_beside_an_engine_that_sleeps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrl.config.fit._gpu_memory", lambda cfg: 141 * 10**9)
    entries = [f"model.path={folder}", "hardware=gpu1", "model.lora.rank=16", "train.token_budget=40960"]
    check_fit(config("grpo", *entries))  # 31 GiB last and 38 pass: of 131 while the engine sleeps, of 72 beside it
    with pytest.raises(ValueError, match=r"the trainer needs \d+"):
        check_fit(config("grpo", *entries, "engine.sleep_while_training=false"))
    with pytest.raises(ValueError, match=r"while the engine generates, 3\d\.\d GiB, does not fit into the 24"):
        check_fit(config("grpo", *entries, "engine.gpu_memory_utilization=0.8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "vocab_size": 151_936,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(made))
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "would"),
    [
        (["hardware=gpu8"], "train.num_ranks=2"),  # 61 of 68.5 GiB last, and a head and a layer pass
        (["hardware=gpu1", "model.lora.rank=16", "train.token_budget=65536"], "train.token_budget="),
        (["hardware=gpu8", "train.kl_to_ref_coeff=0.1", "train.num_ranks=2"], "model.lora.rank=16"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_what_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entries: list[str], would: str
) -> None:
    monkeypatch.setattr("llmrl.config.fit._gpu_memory", lambda cfg: 80 * 10**9)
    with pytest.raises(
        ValueError, match=r"the trainer needs \d+.* GiB on each GPU and has .*What would fit: "
    ) as refused:
        check_fit(config("grpo", f"model.path={folder}", *entries))
    assert would in str(refused.value)


@pytest.mark.parametrize(
    ("visible", "entries", "left"),
    [
        (None, [], "8.8 GiB"),
        ("1", [], None),
        ("GPU-b", [], None),
        ("1, 0", [], None),
        ("0,1", [], "8.8 GiB"),
        ("0,1", ["train.device=cuda:1"], None),
        ("2,0", [], "13.2 GiB"),
        ("2,0", ["engine.use_ray=true", "sync.transport=direct"], "14.7 GiB"),  # Ray may give the trainer any of them
        ("2,0,1", ["train.num_ranks=2"], "8.8 GiB"),
        ("", [], None),
        ("MIG-a", [], None),
    ],
)
def test_the_memory_is_that_of_the_gpus_that_the_trainer_gets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, entries: list[str], left: str | None
) -> None:
    sizes = "0, GPU-a1, 16384\n1, GPU-b2, 143771\n2, GPU-c3, 24576\n"
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{sizes}END\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    trained = config("grpo", f"model.path={folder}", "hardware=gpu1", "model.lora.rank=16", *entries)
    if left is None:  # the model fits into 140 GiB, and what is not known is not refused
        check_fit(trained)
        return
    with pytest.raises(ValueError, match=left):  # 0.92 of the memory, of which the engine has 0.4
        check_fit(trained)


def test_an_engine_that_is_not_started_or_on_another_gpu_takes_nothing_of_the_trainers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrl.config.fit._gpu_memory", lambda cfg: 80 * 10**9)
    entries = [f"model.path={folder}", "hardware=gpu1", "model.lora.rank=16", "engine.gpu_memory_utilization=0.8"]
    for algorithm, more in (("sft", "eval.num_problems=2"), ("grpo", "train.device=cuda")):
        with pytest.raises(ValueError, match="while the engine generates"):
            check_fit(config(algorithm, *entries, more))
    check_fit(config("sft", *entries, "eval.num_problems=0"))
    check_fit(config("grpo", *entries, "train.device=cuda:1", "sync.transport=direct"))


def test_a_teacher_that_is_loaded_beside_the_student_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrl.config.fit._gpu_memory", lambda cfg: 80 * 10**9)
    entries = ["hardware=gpu1", "model.lora.rank=16", "train.device=cuda:1", "sync.transport=direct"]
    check_fit(config("distillation", f"model.path={folder}", *entries, "teacher.url=http://localhost:8000"))
    with pytest.raises(ValueError, match=r"the trainer needs .*teacher 30\.5"):  # 8.19 billion numbers of 4 bytes
        check_fit(config("distillation", f"model.path={folder}", *entries, f"teacher.path={folder}"))


def test_torchruns_number_of_ranks_is_the_one_that_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrl.config.fit._gpu_memory", lambda cfg: 80 * 10**9)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config("grpo").train.num_ranks == 1, "the script starts its ranks itself"
    monkeypatch.setenv("RANK", "0")
    cfg = config("grpo", f"model.path={folder}", "hardware=gpu8", "train.context_ranks=2")
    assert cfg.train.num_ranks == 4
    check_fit(cfg)  # 61 GiB last on one rank
    with pytest.raises(ValueError, match=r"moments=8bit is for one rank, and train\.num_ranks=4"):
        config("grpo", "train.moments=8bit")


def test_what_is_not_known_is_not_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fit(config("grpo", "model.path=organisation/model"))
    monkeypatch.setattr("llmrl.config.fit._gpu_memory", lambda cfg: None)
    check_fit(config("grpo", f"model.path={folder}", "hardware=gpu8"))
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "num_experts": 8})
    )
    with pytest.raises(ValueError, match=r"dense transformers.*num_experts"):
        ModelShape.read(folder)


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("gemma3_text", {}),
        ("gemma3_text", {"tie_word_embeddings": False}),
        ("llama", {}),
        ("qwen3_vl", {"tie_word_embeddings": True}),
        ("qwen3_vl", {}),
        ("gemma3", {}),
    ],
)
def test_the_head_is_the_embedding_where_transformers_ties_them(
    tmp_path: Path, model_type: str, entries: dict[str, bool]
) -> None:
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    is_text = model_type in ("gemma3_text", "llama")
    text = sizes if is_text else {"text_config": {**sizes, "model_type": f"{model_type}_text"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **text, **entries}))
    kind = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.from_pretrained(tmp_path))
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert ModelShape.read(tmp_path).is_tied == is_tied


def test_a_plan_is_printed_for_a_folder_and_a_hardware(folder: Path) -> None:
    entries = ["hardware=gpu8-4ranks", "train.token_budget=8192", "model.max_model_len=4096"]
    text = CliRunner().invoke(app, ["doctor", "--plan", str(folder), *entries], env={"COLUMNS": "300"}).stdout
    assert "8.19 B parameters on 4 device(s)" in text and "optimizer 15.3" in text and "80 GB: fits" in text
    found = json.loads(CliRunner().invoke(app, ["doctor", "--plan", str(folder), "--json", *entries]).stdout)
    assert found["num_devices"] == 4 and found["parts"]["optimizer"] == pytest.approx(15.3, abs=0.05)
    assert found["devices"]["80 GB"] == {"fits": True, "would_fit": []}
    (folder / "mine.yaml").write_text("defaults: [gpu8-2ranks, _self_]\ntrain: {token_budget: 4096}\n")
    own = CliRunner().invoke(app, ["doctor", "--plan", str(folder), "--json", f"hardware={folder}/mine.yaml"])
    assert json.loads(own.stdout)["num_devices"] == 2
    refused = CliRunner().invoke(app, ["doctor", "--plan", str(folder), "hardware=no-such"])
    assert refused.exit_code == 2 and "no-such" in refused.stderr
