"""The kit that measures llmrl on a GPU, tried on a CPU with tiny sizes: so that no minute of a GPU goes into it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llmrl.recipes import known_recipes

pytestmark = pytest.mark.usefixtures("takes_long")

KIT = Path(__file__).resolve().parents[2] / "tools" / "gpu"


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Its modules, which are scripts' and not a package's."""
    import importlib

    monkeypatch.syspath_prepend(str(KIT))
    return {name: importlib.import_module(name) for name in ("sizes", "stages", "run", "pack", "older_torch")}


@pytest.fixture
def results(kit: dict[str, ModuleType], request: pytest.FixtureRequest) -> dict:
    return kit["stages"].STAGES[request.param][0](kit["sizes"].TINY, "cpu")


@pytest.mark.parametrize("results", ["exactness"], indirect=True)
def test_families_are_compared_with_eager(results: dict) -> None:
    for family in results.values():
        for rows in family.values():
            assert rows["float32"]["log_prob_error"] < 1e-5 and rows["float32"]["gradient_error"] < 1e-4
            assert 0 < rows["bfloat16"]["log_prob_error"] < 0.05


@pytest.mark.parametrize("results", ["head"], indirect=True)
def test_heads_of_any_chunk_agree(results: dict) -> None:
    assert list(results) == ["chunks of 16", "chunks of 64", "default"]
    assert all(way["difference"] < 1e-4 for way in results.values())


@pytest.mark.parametrize("results", ["recipes"], indirect=True)
def test_every_recipe_for_gpus_takes_steps_and_has_a_plan(results: dict) -> None:
    assert set(results) == {name for name, recipe in known_recipes().items() if recipe.target and not recipe.record()}
    assert all(part["seconds"] > 0 and part["planned_gib"] > 0 for part in results.values()), results


@pytest.mark.parametrize("results", ["attention", "train"], indirect=True)
def test_every_part_of_a_stage_is_timed_and_none_fails(results: dict) -> None:
    assert len(results) >= 4
    assert all(part["seconds"] > 0 for part in results.values()), results


@pytest.mark.parametrize("results", ["sharded"], indirect=True)
def test_a_sharded_step_is_the_whole_one(results: dict) -> None:
    assert results["sharded"]["grad_norm"] == pytest.approx(results["whole"]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("results", ["learning"], indirect=True)
def test_a_random_model_learns(results: dict) -> None:
    assert results["last_reward"] > results["first_reward"] + 0.15


def test_a_checkpoint_is_read(kit: dict[str, ModuleType]) -> None:
    assert kit["stages"].resume(kit["sizes"].TINY, "cpu")["model_and_optimizer_gib"] > 0


def test_operations_are_counted_for_distinct_tokens(kit: dict[str, ModuleType]) -> None:
    sizes = kit["sizes"]
    model = sizes.make_model("tiny", "cpu")
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    alone, shared = (sizes.flops_of("tiny", model, rows) for rows in ((2, 0, 100), (2, 90, 10)))
    assert 6 * 200 * linear < alone < 1.2 * (6 * 200 * linear + 12 * 100**2 * 32 * 2)
    assert 0.5 < shared / alone < 0.6  # 110 tokens of 200


def test_stages_have_lines_and_are_not_run_twice(
    kit: dict[str, ModuleType], tmp_path: Path, own_programs: None
) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text(json.dumps({"stage": "fork", "error": "ended"}) + '\n{"stage": "ipc", "resu')
    command = [sys.executable, str(KIT / "run.py"), "fork", "--small", "--out", str(out)]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr
    assert json.loads(first.stdout)["result"] == {"is_available": False, "forked_process_works": True}
    assert kit["run"].done(out) == {"fork"}


def test_a_stage_that_hangs_or_fails_has_a_line_that_says_so(kit: dict[str, ModuleType]) -> None:
    line = kit["run"]._line_of("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], 1)
    assert line["error"] == "the stage exceeded its limit of 1 seconds"
    line = kit["run"]._line_of("fails", [sys.executable, "-c", "raise ValueError('no room')"], 60)
    assert "no room" in line["error"]


def test_what_is_packed_is_what_the_kit_imports(kit: dict[str, ModuleType], tmp_path: Path) -> None:
    kit["pack"].copy_sources(tmp_path)
    assert (tmp_path / "tools/gpu/run.py").exists() and (tmp_path / "llmrl/trainer/packing/masks.py").exists()
    assert "tensordict" in kit["pack"].WHEELS and kit["pack"].liger().startswith("liger-kernel==")
    assert not list(tmp_path.rglob("*.pyc"))
    packed = json.loads((tmp_path / "tools/gpu/recipes.json").read_text())
    assert {each["model"] for each in packed.values()} == {"0.5B", "1.5B", "1.7B", "3B"} <= kit["sizes"].MODELS.keys()
    assert packed["dapo-1.7b"]["training"]["longest_row"] == 10_240


def test_long_files_are_carried_in_parts(kit: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    contents = {"long.whl": bytes(range(256)) * 9, "short.whl": b"short"}
    for name, content in contents.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    kit["pack"].split(tmp_path, 1000)
    assert max(path.stat().st_size for path in (tmp_path / "wheels").iterdir()) == 1000
    joining = kit["pack"].START.partition("python3")[0].replace('"$(dirname "$0")"', str(tmp_path))
    subprocess.run(["sh", "-c", joining], check=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "wheels").iterdir()} == contents


def test_weights_that_were_staged_are_those_of_after_the_step(kit: dict[str, ModuleType]) -> None:
    assert kit["stages"].stream(kit["sizes"].TINY, "cpu")["staged"] == {"stale_share": 0}


def test_arguments_that_an_older_torch_does_not_know_are_left_out(
    kit: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import varlen

    monkeypatch.setattr(torch, "compile", lambda function, dynamic=None: ("compiled", function, dynamic))
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, window_size=None: ("attended", query, window_size))
    with torch._dynamo.config.patch(recompile_limit=8):
        assert kit["older_torch"].adapt() == ["torch.compile(recompile_limit)", "varlen_attn(enable_gqa)"]
        assert torch._dynamo.config.recompile_limit == 64
    assert torch.compile(len, dynamic=True, recompile_limit=3) == ("compiled", len, True)
    assert varlen.varlen_attn(1, window_size=(2, 0), enable_gqa=True) == ("attended", 1, (2, 0))
