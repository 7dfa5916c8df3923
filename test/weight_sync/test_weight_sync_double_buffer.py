"""The double buffer's files: one of the two is always whole, whichever process dies when."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from weight_sync_tools import FakeEngine

from llmrl.engines import EngineError
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme
from llmrl.weight_sync.double_buffer import DoubleBuffer


def test_writes_alternate_and_the_last_one_is_read(tmp_path):
    buffer = DoubleBuffer(tmp_path)
    assert buffer.pointer() is None
    pointers = [buffer.write({"w": torch.full((3,), float(value))}) for value in range(3)]
    assert [pointer.slot for pointer in pointers] == [0, 1, 0]
    assert [pointer.serial for pointer in pointers] == [pointer.version for pointer in pointers] == [1, 2, 3]
    assert buffer.read(buffer.pointer()).tensors()["w"].tolist() == [2.0] * 3
    assert buffer.read(pointers[1]).tensors()["w"].tolist() == [1.0] * 3
    assert buffer.write({"w": torch.zeros(3)}, version=9).version == 9
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "current.json", "model.safetensors", "model.safetensors",
    ]  # fmt: skip


def test_what_is_read_stays_as_it_was_when_its_file_is_written_again(tmp_path):
    buffer = DoubleBuffer(tmp_path)
    weights = {
        "a": torch.randn(3, 5).t(),
        "b": torch.randn(3).to(torch.bfloat16),
        "c": torch.arange(3),
        "d": torch.ones(0),
    }
    pointer = buffer.write(weights)
    from_library = load_file(buffer.path(pointer.slot))
    assert all(torch.equal(from_library[name], tensor) for name, tensor in weights.items())
    read = buffer.read(pointer).tensors()
    buffer.write({"a": torch.zeros(1)})
    buffer.write({"a": torch.zeros(1)})
    assert {name: tensor.dtype for name, tensor in read.items()} == {n: t.dtype for n, t in weights.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_what_is_not_whole_is_refused(tmp_path):
    buffer = DoubleBuffer(tmp_path)
    with pytest.raises(ValueError, match="nothing was written"):
        buffer.read(None)
    pointer = buffer.write({"w": torch.ones(8)})
    path = buffer.path(pointer.slot)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        buffer.read(pointer)
    path.write_bytes(data[:-4])
    with pytest.raises(ValueError, match="size"):
        buffer.read(pointer)
    path.unlink()
    with pytest.raises(ValueError, match="size"):
        buffer.read(pointer)
    (tmp_path / "current.json").write_text('{"slot": 0')
    with pytest.raises(ValueError, match="damaged"):
        buffer.pointer()


KILLS = """
import itertools, os, random, signal, sys, time
import torch
from llmrl.weight_sync.double_buffer import DoubleBuffer, FileWeights

torch.set_num_threads(1)
folder, num_kills = sys.argv[1], int(sys.argv[2])
rng, buffer, size = random.Random(0), DoubleBuffer(folder), 1 << 16
buffer.write({name: torch.ones(size) for name in "abc"})
num_cut_short, last = 0, 1

def version_of(tensors):
    values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
    assert len(values) == 1 and set(tensors) == set("abc"), values
    return int(values.pop())

def read_whole():
    while True:  # the writer may have come round to the file that is being read: that is an error, never a mixture
        pointer = buffer.pointer()
        try:
            version = version_of(buffer.read(pointer).tensors())
        except ValueError:
            continue
        assert version == pointer.version
        return version

for kill in itertools.count():
    # A busy machine writes less between two kills; some have to hit a write.
    if kill >= num_kills and num_cut_short > num_kills / 10 and last > num_kills / 5:
        break
    child = os.fork()
    if child == 0:
        while True:
            next_version = buffer.pointer().version + 1
            buffer.write({name: torch.full((size,), float(next_version)) for name in "abc"}, next_version)
    deadline = time.monotonic() + rng.uniform(0.0, 0.02)
    seen = read_whole()
    while time.monotonic() < deadline:
        seen = read_whole()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    version = read_whole()
    assert version >= seen >= last, (version, seen, last)
    last = version
    try:  # what a reader that trusts the file would have got
        data = torch.frombuffer(bytearray(buffer.path(1 - buffer.pointer().slot).read_bytes()), dtype=torch.uint8)
        is_before = version_of(FileWeights.of(data).tensors()) < version
    except Exception:
        is_before = False
    num_cut_short += not is_before
num_files = sum(len(files) for _, _, files in os.walk(folder))
print(num_files)
"""


def test_a_writer_killed_100_times_never_shows_half_of_its_weights(tmp_path, own_programs):
    """Read beside the writer and after its death: always whole, never older than before."""
    command = [sys.executable, "-c", KILLS, str(tmp_path), "100"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) <= 4  # two files of weights, the pointer, and a pointer that was not finished


def test_a_sender_without_engines_only_writes(tmp_path, imports_vllm):
    sender = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path / "new")).create_sender()
    model = torch.nn.Linear(3, 2)
    sender.register_model(model)
    sender.init_all_workers_group()
    assert [sender.update_weights(), sender.update_weights()] == [1, 2]
    buffer = DoubleBuffer(tmp_path / "new")
    assert torch.equal(buffer.read(buffer.pointer()).tensors()["weight"], model.weight)
    sender.shutdown()


def test_a_damaged_pointer_is_an_engine_error_and_the_whole_one_after_it_is_read(tmp_path):
    engine = FakeEngine()
    engine.weight_transfer_backend = "llmrl"
    reader = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)).create_receiver(engine)
    (tmp_path / "current.json").write_text('{"slot": 0}')
    with pytest.raises(EngineError, match="damaged"):
        reader.poll_and_apply()
    assert engine.calls == []
    (tmp_path / "current.json").unlink()
    assert DoubleBuffer(tmp_path).write({"w": torch.ones(3)}).version == reader.poll_and_apply() == 1
    reader.shutdown()
