"""Train with TorchRL's scripts for GRPO and expert iteration over llmrl, on a CPU; print the lines that are replaced.

    python test/helpers/torchrl_scripts.py CHECKOUT [--only grpo-sync.py …] [--keep FOLDER]

A script runs in a process of its own, over vLLM and TorchRL's `RayReplayBuffer`, with its own configuration but for
sizes. `torchrl_script_edits.py` has the lines that a machine without GPUs replaces, and those that llmrl replaces.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torchrl_hub
from torchrl_files import LLM_NAME
from torchrl_script_edits import EXPERT, GRPO, LLMRL, MACHINE

from llmrl.testing import make_tiny_model

FOLDERS = {"grpo": GRPO, "expert-iteration": EXPERT}
_SIZES = """
env.num_envs=2 env.repeats=4 train.total_dialog_turns=16 train.dialog_turns_per_batch=8
train.optim_batch_size=4 train.gradient_accumulation_steps=2 train.logging_frequency=1
inference_model.max_tokens=8 inference_model.enforce_eager=true inference_model.gpu_memory_utilization=0.2
ray.init_config.num_cpus=4 ray.init_config.num_gpus=0 ~ray.init_config.runtime_env
ray.collector_config.num_cpus=0 ray.train_handler_config.num_cpus=0 ray.replay_buffer_config.num_cpus=0
"""
# Collectors have to be at work until the last of five steps.
_ASYNC = ["mode=async", "train.weight_update_frequency=1", "train.total_dialog_turns=400", "train.optim_batch_size=80"]
_OF = {
    "grpo-sync.py": ["mode=sync"],
    "grpo-async.py": [*_ASYNC],
    "expert-iteration-sync.py": ["mode=sync"],
    "expert-iteration-async.py": [*_ASYNC],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of TorchRL")
    parser.add_argument("--only", nargs="+", help="scripts to run")
    parser.add_argument("--keep", type=Path, help="keep the changed scripts and their output in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        for name, scripts in FOLDERS.items():
            place = folder / name
            shutil.copytree(options.checkout / "sota-implementations" / name, place, dirs_exist_ok=True)
            for file in sorted(place.glob("*.py")):
                text, replaced = with_edits(file.name, file.read_text())
                file.write_text(text)
                print(*(f"{file.name}:{line}: {reason}" for line, reason in replaced), sep="\n")
            for script in scripts:
                if options.only is None or script in options.only:
                    code, steps, last = run(place, script, folder)
                    print(f"{script}: exit {code}, {steps} steps; {last}", flush=True)


def with_edits(name: str, text: str) -> tuple[str, list[tuple[int, str]]]:
    """Return a script for this machine and for llmrl, and the lines of it that llmrl replaces, with what by."""
    lines = []
    for files, old, _, reason in LLMRL:
        if name in files:
            found = [text[: one.start()].count("\n") + 1 for one in re.finditer(re.escape(old), text)]
            if not found:
                raise ValueError(f"{name} does not contain {old!r}; correct torchrl_script_edits.py.")
            lines += [(line, reason) for line in found]
    for files, old, new in MACHINE:
        if name in files and old not in text:
            raise ValueError(f"{name} does not contain {old!r}; correct torchrl_script_edits.py.")
        text = text.replace(old, new) if name in files else text
    for files, old, new, _ in LLMRL:
        text = text.replace(old, new) if name in files else text
    return LLM_NAME.sub(r"llmrl.torchrl.\1.llm", text), sorted(lines)


def run(place: Path, script: str, folder: Path) -> tuple[int, int, str]:
    """Run a script, and return its exit status, the steps that it logged and its last line."""
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model)
    places = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | torchrl_hub.environment(folder / "hub") | {"PYTHONPATH": ":".join(places)}
    environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    log = place / f"{script}.log"
    with log.open("w") as output:
        command = [sys.executable, script, f"model.name={model}", *_SIZES.split(), *_OF[script]]
        ended = subprocess.run(
            command, cwd=place, env=environment, stdout=output, stderr=output, timeout=900, check=False
        )
    text = log.read_text()
    steps = [int(one) for one in re.findall(r"(?:Gradient step|Step) (\d+)", text)]
    return ended.returncode, max(steps, default=0), text.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
