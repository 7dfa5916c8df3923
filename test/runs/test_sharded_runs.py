"""A trainer of several ranks ends as one rank does: losses, LoRA, killed and resumed on other numbers."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from script_configs import config
from sharded_runs import MEMORY, NUM_TOKENS

from llmrl.config.ranks import start_ranks
from llmrl.data.state_file import DamagedFileError
from llmrl.engines import EngineError, SamplingConfig
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.run_folder import RunFolder
from llmrl.runs.setup import start_engine, sync_scheme
from llmrl.runs.tracked import restore_tracked
from llmrl.trainer.memory_plan import ModelShape, TrainingShape, plan_memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, own_programs: None) -> Path:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "sharded_runs.py"), str(folder)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    codes = json.loads(result.stdout.splitlines()[-1])
    for name, ended in codes.items():
        # A rank may miss the killed one before it is killed, too.
        is_expected = -9 in ended and {-9, 1}.issuperset(ended) if "killed" in name else set(ended) == {0}
        assert is_expected, (name, ended, result.stderr)
    return folder


@pytest.mark.parametrize(("loss", "num_ranks"), [("gspo", 2), ("lora", 2), ("grpo", 4), ("sft", 4)])
def test_ten_steps_of_several_ranks_end_with_the_weights_of_one(folder: Path, loss: str, num_ranks: int) -> None:
    expected, actual = (torch.load(folder / f"losses-{count}.pt")[loss] for count in (1, num_ranks))
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, atol=1e-6, rtol=0)


def test_each_rank_reads_its_part_of_the_weights_and_the_model_is_the_whole_one(folder: Path) -> None:
    found = json.loads((folder / "loading.json").read_text())
    assert len(found) == 7
    assert [(name, key) for name, one in found.items() for key, value in one.items() if value] == []


def test_in_half_precision_two_ranks_end_as_near_to_float32_as_one(folder: Path) -> None:
    one, two = (torch.load(folder / f"losses-{count}.pt") for count in (1, 2))
    exact = one["float32"]

    def distance(weights: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float((weights[name] - exact[name]).square().sum()) for name in exact))

    assert 0 < distance(two["bfloat16"]) < 1.5 * distance(one["bfloat16"]) < distance(one["gspo"]) / 5
    # Autocast keeps the embedding in float32, a sharded model gathers it in float16, so that one rank is nearer. Both
    # are nearer than bfloat16, which has three bits fewer.
    assert 0 < distance(one["float16"]) < distance(two["float16"]) < distance(one["bfloat16"])


@pytest.mark.parametrize("name", ["reference", "lora"])
def test_a_run_that_is_killed_and_resumed_on_another_number_of_ranks_ends_with_the_weights_of_one(
    folder: Path, name: str
) -> None:
    expected, actual = (weights_in(folder / run / "model") for run in (name, f"{name}-resumed"))
    start = load_file(folder / "tiny/model.safetensors")
    assert actual.keys() == expected.keys()
    for key, weight in expected.items():
        # AdamW divides a gradient by its size, so that rounding of small ones shows: of three million weights in three.
        torch.testing.assert_close(actual[key], weight, atol=1e-5, rtol=0)
    assert max((weight - start[key]).abs().max() for key, weight in expected.items() if key in start) > 1e-4
    logged, resumed = (table(folder / run) for run in (name, f"{name}-resumed"))
    assert [row["step"] for row in resumed] == [row["step"] for row in logged]
    assert [row.get("num_rows") for row in resumed] == [row.get("num_rows") for row in logged]


def test_steps_of_two_ranks_are_computed_again_bit_by_bit_on_two_ranks(folder: Path) -> None:
    """Also one that begins with a sharded checkpoint; and with half the learning rate the weights go half as far."""
    found = json.loads((folder / "replayed.json").read_text())
    for step in (*"12345", "from checkpoint"):
        results = {one["quantity"]: one for one in found[step]["quantities"]}
        assert found[step]["first_difference"] is None, results
        assert results["metrics"]["num_values"] > 5 and bool(results["weights"]["num_values"]) == (step == "4")
    changed = found["what if"]
    assert changed["gradient_cosine"] == pytest.approx(1.0, abs=1e-6)
    assert changed["update_ratio"] == pytest.approx(0.5, abs=0.05)
    assert [path.name for path in (folder / "forked").glob("shards-*")] == ["shards-000003"]


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 1  # as large as the run was told
    return {name: weight for shard in shards for name, weight in load_file(shard).items()}


def test_an_export_of_several_ranks_is_that_of_one(folder: Path) -> None:
    exports = [folder / name / "exports/step-000004" for name in ("reference", "reference-resumed")]
    for export in exports:
        assert [path.name for path in export.parent.iterdir()] == [export.name]  # step 2 is gone
    expected, actual = map(weights_in, exports)
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, atol=1e-5, rtol=0)


def table(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for place, row in enumerate(rows) if row["step"] not in [later["step"] for later in rows[place + 1 :]]]


def test_the_checkpoint_of_several_ranks_lies_in_their_shards_and_the_one_before_is_gone(folder: Path) -> None:
    for name, num_ranks in (("reference-resumed", 4), ("lora-resumed", 2), ("reference", 0)):
        files = [path.parent.name for path in (folder / name).glob("shards-*/*")]
        assert files == ["shards-000004"] * num_ranks


def test_shards_that_are_not_what_was_written_are_refused(folder: Path) -> None:
    checkpoint = RunFolder(folder / "lora-resumed", read_only=True).load_checkpoint()
    shard = next((folder / "lora-resumed").glob("shards-*/*"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(DamagedFileError, match=shard.name):
        restore_tracked({"model": torch.nn.Linear(1, 1)}, checkpoint, folder / "lora-resumed/checkpoint.safetensors")


def test_a_command_for_several_ranks_becomes_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("RANK", raising=False)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(sys, "argv", ["grpo.py", "hardware=cpu-2ranks", "seed=1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of a script, also under `python -m pytest`
    try:
        start_ranks(config("grpo", "hardware=cpu-2ranks"))
        start_ranks(config("grpo"))
        monkeypatch.setenv("RANK", "1")  # torchrun has started it
        start_ranks(config("grpo", "hardware=cpu-2ranks"))
    finally:
        signal.signal(signal.SIGINT, handler)
    (command,) = started
    assert command[1:3] == ["-m", "torch.distributed.run"] and "--nproc-per-node=2" in command
    assert command[-3:] == sys.argv


@pytest.mark.slow
def test_a_rank_above_0_has_no_engine_and_sends_nothing(monkeypatch: pytest.MonkeyPatch, tiny_model_path: str) -> None:
    monkeypatch.setattr("llmrl.runs.setup.this_rank", lambda: 1)
    cfg = config("grpo", f"model.path={tiny_model_path}")
    assert sync_scheme(cfg, NullEngine("a-model")).rank == 1
    with start_engine(cfg) as engine:
        assert engine.get_tokenizer().encode("1") and not engine.is_alive
        with pytest.raises(EngineError, match="a rank above 0"):
            asyncio.run(engine.generate([1], SamplingConfig()))


def peak(folder: Path, name: str, num_ranks: int) -> int:
    return int((folder / f"memory-{name}-{num_ranks}").read_text())


def test_a_rank_holds_its_share_of_weights_gradients_and_moments(folder: Path) -> None:
    peaks = {num_ranks: peak(folder, "weights", num_ranks) for num_ranks in (1, 2, 4)}
    assert peaks[2] < 0.65 * peaks[1] and peaks[4] < 0.45 * peaks[1]


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("weights", 1), ("weights", 2), ("activations", 1), ("checkpointing", 1), ("head", 1)]
)
def test_the_memory_that_is_planned_is_what_a_step_takes(folder: Path, name: str, num_ranks: int) -> None:
    shape, length = MEMORY[name], NUM_TOKENS[name]
    model = ModelShape(
        **{key: value for key, value in shape.items() if key != "num_hidden_layers"},
        num_layers=shape["num_hidden_layers"],
        query_size=shape["hidden_size"],
        key_size=shape["hidden_size"],
        is_tied=False,
    )
    training = TrainingShape(
        num_ranks=num_ranks,
        token_budget=length,
        bin_length=length,
        gradient_checkpointing=name == "checkpointing",
        is_half=False,
        is_gpu=False,
    )
    planned = plan_memory(model, training)
    assert 0.6 < peak(folder, name, num_ranks) / planned.total < 1.15
