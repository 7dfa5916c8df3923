"""Measures llmrl on this machine's GPU, stage by stage: `python tools/gpu/run.py`; see README.md beside it.

Each stage runs in its own process, with a time limit, and prints one line of JSON, which is also appended to `--out`. A
stage that already has a line without an error there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]


def done(path: Path) -> set[str]:
    """Return the stages that have a line without an error; the incomplete line of a killed run does not count."""
    names = set()
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            held = json.loads(line)
        except ValueError:
            continue
        if "error" not in held:
            names.add(held["stage"])
    return names


def run_stage(name: str, *, is_small: bool) -> dict[str, object]:
    """Run one stage in this process."""
    import torch
    from older_torch import adapt
    from sizes import TINY, Sizes
    from stages import STAGES

    adapted = adapt()

    device = "cpu" if is_small or not torch.cuda.is_available() else "cuda"
    if device == "cpu" and not is_small:
        raise RuntimeError("this machine has no GPU; use --small to try the kit on a CPU")
    started = time.perf_counter()
    result = STAGES[name][0](TINY if is_small else Sizes(), device)
    seconds = round(time.perf_counter() - started, 1)
    return {"stage": name, "device": device, "torch": torch.__version__, "adapted": adapted, "seconds": seconds,
            "result": result}  # fmt: skip


def main() -> None:
    from stages import STAGES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"stages to run: {', '.join(STAGES)}; all by default"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file for the results")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to try the kit itself")
    parser.add_argument("--here", action="store_true", help="run in this process, and only print the results")
    given = parser.parse_args()
    unknown = [name for name in given.stages if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {', '.join(unknown)}; the stages are {', '.join(STAGES)}")
    if given.here:
        for name in given.stages or STAGES:
            print(json.dumps(run_stage(name, is_small=given.small)), flush=True)
        return
    skipped = done(given.out)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    is_complete = True
    for name in given.stages or STAGES:
        if name in skipped:
            continue
        command = [sys.executable, __file__, name, "--here", *(["--small"] if given.small else [])]
        line = _line_of(name, command, STAGES[name][1])
        is_complete &= "error" not in line
        print(json.dumps(line), flush=True)
        with given.out.open("a") as file:
            file.write("\n" * (_ends_in_half_a_line(given.out)) + json.dumps(line) + "\n")
            os.fsync(file.fileno())
    sys.exit(0 if is_complete else 1)


def _ends_in_half_a_line(path: Path) -> bool:
    text = path.read_text()
    return bool(text) and not text.endswith("\n")


def _line_of(name: str, command: list[str], limit: int) -> dict[str, object]:
    started = time.perf_counter()
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        if process.returncode == 0:
            return json.loads(process.stdout.splitlines()[-1])
        error = (process.stderr or process.stdout)[-2000:]
    except subprocess.TimeoutExpired:
        error = f"the stage exceeded its limit of {limit} seconds"
    return {"stage": name, "error": error, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    main()
