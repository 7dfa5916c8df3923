"""All ranks of a trainer take the same collectives in the same order, whatever a run has to do."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from warm_processes import run_warm

HELPER = Path(__file__).parents[1] / "helpers/lockstep_runs.py"
STEP = "c10d::broadcast_ in Run._begin"
COPY = "c10d::broadcast_ in Exports._read"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, own_programs: None) -> tuple[Path, dict[str, list[int]], str]:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("lockstep")
    result = run_warm([sys.executable, str(HELPER), str(folder)])
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.parametrize(
    ("name", "num_steps", "num_copies"),
    [
        ("plain", 2, 1),  # the model at the end
        ("replayed", 3, 1),
        ("everything", 2, 3),  # two exports, and the end
        ("resumed", 1, 2),
        ("adapters", 2, 2),
        ("interrupted", 1, 1),
        ("unlearnable", 0, 1),
    ],
)
def test_both_ranks_take_the_same_collectives(
    runs: tuple[Path, dict[str, list[int]], str], name: str, num_steps: int, num_copies: int
) -> None:
    folder, codes, errors = runs
    assert codes[name] == [0, 0], errors
    first, second = (json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    counts = Counter(first)
    # Objects take two broadcasts, their size first. The last of the loop ends it.
    assert counts[STEP] == 2 * (num_steps + 1)
    assert counts[COPY] >= 2 * num_copies


def test_a_collective_that_one_rank_alone_takes_fails_at_once(
    runs: tuple[Path, dict[str, list[int]], str],
) -> None:
    _, codes, errors = runs
    assert 0 not in codes["planted"]
    assert "this rank takes c10d::broadcast_ in Run.steps, the other one c10d::broadcast_ in Run._begin" in errors
