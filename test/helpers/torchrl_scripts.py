"""Train with TorchRL's scripts for GRPO and expert iteration over llmrl, on a CPU; print the lines that are replaced.

    python test/helpers/torchrl_scripts.py CHECKOUT [--only grpo-sync.py …] [--keep FOLDER]

A script runs in a process of its own, over vLLM and TorchRL's `RayReplayBuffer`, with its own configuration but for
sizes. `torchrl_script_edits.py` has the lines that a machine without GPUs replaces, and those that llmrl replaces.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
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

from llmrl.testing.embedded_model import ensure_embedded_model

FOLDERS = {"grpo": GRPO, "expert-iteration": EXPERT}
_SIZES = """
env.num_envs=4 env.repeats=8 train.total_dialog_turns=96 train.dialog_turns_per_batch=32
train.optim_batch_size=16 train.gradient_accumulation_steps=2 train.logging_frequency=1
inference_model.max_tokens=12 inference_model.enforce_eager=true inference_model.gpu_memory_utilization=0.2
ray.init_config.num_cpus=4 ray.init_config.num_gpus=0 ~ray.init_config.runtime_env
ray.collector_config.num_cpus=0 ray.train_handler_config.num_cpus=0 ray.replay_buffer_config.num_cpus=0
"""
_ASYNC = ["mode=async", "train.weight_update_frequency=2"]
_OF = {
    "grpo-sync.py": ["mode=sync"],
    # Its collectors have to be at work until the last of eight steps.
    "grpo-async.py": [*_ASYNC, "train.total_dialog_turns=1280", "train.optim_batch_size=160"],
    "expert-iteration-sync.py": ["mode=sync"],
    # The compiled extension that samples by priority does not load beside this version of torch.
    "expert-iteration-async.py": [*_ASYNC, "train.total_dialog_turns=128", "train.prioritized_sampling=false"],
}

_PRINTED = re.compile("loss|ESS|kl|grad_norm|reward|policy_version|write_count|seq_length|optim_step")


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
                file.write_text(with_edits(file.name, file.read_text()))
            for script in scripts:
                if options.only is None or script in options.only:
                    code, last = run(place, script, folder)
                    print(f"{script}: exit {code}; {last}", flush=True)


def with_edits(name: str, text: str) -> str:
    """Return a script for this machine and for llmrl; print the lines that llmrl replaces and how many change."""
    for files, old, _, reason in LLMRL:
        if name in files:
            found = [text[: one.start()].count("\n") + 1 for one in re.finditer(re.escape(old), text)]
            if not found:
                raise ValueError(f"{name} does not contain {old!r}; correct torchrl_script_edits.py.")
            print(*(f"{name}:{line}: {reason}" for line in found), sep="\n")
    stages = [text]
    for files, old, new in MACHINE:
        if name in files and old not in text:
            raise ValueError(f"{name} does not contain {old!r}; correct torchrl_script_edits.py.")
        text = text.replace(old, new) if name in files else text
    stages.append(text)
    for files, old, new, _ in LLMRL:
        text = text.replace(old, new) if name in files else text
    stages += [text, LLM_NAME.sub(r"llmrl.torchrl.\1.llm", text)]
    machine, ours, imports = (num_changed(*pair) for pair in itertools.pairwise(stages))
    print(f"{name}: {imports} imports and {ours} lines for llmrl, {machine} for this machine", flush=True)
    return stages[-1]


def num_changed(old: str, new: str) -> int:
    """Return how many lines differ."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def run(place: Path, script: str, folder: Path) -> tuple[int, str]:
    """Run a script, print what it logged, and return its exit status and its last line."""
    model = ensure_embedded_model()
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
    logged = [json.loads(one) for one in re.findall(r"metrics (\{.*\})", text)]
    print_steps([one for one in logged if not any(name.startswith("timeit") for name in one)])
    return ended.returncode, text.strip().splitlines()[-1]


def print_steps(logged: list[dict[str, float]]) -> None:
    """Print what a script logged that tells whether it trains."""
    for name in sorted({name for one in logged for name in one if _PRINTED.search(name)}):
        print(f"  {name}:", *(f"{one[name]:.4g}" for one in logged if name in one))


if __name__ == "__main__":
    main()
