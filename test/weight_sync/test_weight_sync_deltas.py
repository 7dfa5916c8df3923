"""Deltas of the double buffer: bit by bit the file that would have been written, or refused."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from llmrl.weight_sync import VLLMDoubleBufferSyncScheme
from llmrl.weight_sync.deltas import Delta, decode, encode
from llmrl.weight_sync.double_buffer import DoubleBuffer

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8]


@given(st.lists(st.tuples(st.integers(0, 2000) | st.sampled_from([254, 255, 256, 510]), st.integers(1, 65535))))
def test_positions_and_differences_come_back(changes):
    positions, place = [], -1
    for gap, _ in changes:
        place += 1 + gap
        positions.append(place)
    added = [difference for _, difference in changes]
    data, num_gap_bytes = encode(np.array(positions, dtype=np.int64), np.array(added, dtype=np.uint16))
    back = decode(data, num_gap_bytes)
    assert [column.tolist() for column in back] == [positions, added]


@given(st.binary(max_size=64), st.integers(-2, 70))
def test_bytes_of_any_kind_are_a_delta_or_refused(data, num_gap_bytes):
    try:
        positions, differences = decode(data, num_gap_bytes)
    except ValueError:
        positions, differences = np.empty(0), np.empty(0)
    assert len(positions) == len(differences)
    assert (np.diff(positions) > 0).all()
    with pytest.raises(ValueError):
        Delta.from_bytes(data).apply(torch.zeros(8, dtype=torch.uint8))


def test_a_delta_that_would_grow_without_bound_is_refused_before_it_does():
    bomb = zlib.compress(bytes(1 << 26))
    for num_gap_bytes in (-1, 0, 4, 1 << 26):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="a damaged delta"):
                Delta(2, 0, 0, num_gap_bytes, bomb).apply(torch.zeros(64, dtype=torch.uint8))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_the_largest_delta_is_within_the_bound():
    """Every word changes; and one word beyond the longest gap."""
    every, last = np.arange(2000), np.array([1999])
    for positions in (every, last):
        data, num_gap_bytes = encode(positions, np.full(len(positions), 7, dtype=np.uint16))
        image = torch.zeros(4000, dtype=torch.uint8)
        Delta(2, 0, 0, num_gap_bytes, zlib.compress(data)).apply(image)
        assert np.flatnonzero(image.view(torch.int16).numpy() == 7).tolist() == positions.tolist()


def random_weights(rng, shapes):
    weights = {f"w{index}": torch.empty(size, dtype=dtype) for index, (dtype, size) in enumerate(shapes)}
    change(rng, weights, 1.0)
    return weights


def change(rng, weights, share):
    """Other bytes in a share of the elements."""
    for tensor in weights.values():
        data = tensor.view(torch.uint8).view(len(tensor), tensor.dtype.itemsize).numpy()
        rows = np.flatnonzero(rng.random(len(tensor)) < share)
        data[rows] ^= rng.integers(0, 256, data[rows].shape, dtype=np.uint8)


def is_same(read, weights):
    bits = {name: tensor.view(torch.uint8) for name, tensor in weights.items()}
    return read.keys() == bits.keys() and all(torch.equal(read[n].view(torch.uint8), bits[n]) for n in bits)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 700)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=8),
    st.integers(0, 99),
)
def test_every_reader_gets_the_bits_whatever_it_has_and_misses(tmp_path_factory, shapes, anchor_every, shares, seed):
    """One reads all versions, one every third, one comes new each time; a whole writer is the reference."""
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("deltas")
    buffer, weights = DoubleBuffer(folder, anchor_every=anchor_every), random_weights(rng, shapes)
    every = third = None
    for version, share in enumerate(shares, start=1):
        change(rng, weights, share)
        pointer = buffer.write(weights)
        assert pointer.version == version
        assert pointer.serial - pointer.anchor_serial < anchor_every
        every = DoubleBuffer(folder).read(pointer, since=every)
        assert is_same(every.tensors(), weights)
        assert is_same(DoubleBuffer(folder).read(pointer).tensors(), weights)
        if version % 3 == 0:
            third = DoubleBuffer(folder).read(pointer, since=third)
            assert is_same(third.tensors(), weights)
    whole = DoubleBuffer(folder / "whole")
    expected = whole.path(whole.write(weights).slot).read_bytes()
    assert bytes(every.buffer.numpy()) == expected, "the very file"


def test_a_small_change_is_a_small_file_and_an_anchor_comes_every_so_often(tmp_path):
    buffer, weights = DoubleBuffer(tmp_path, anchor_every=4), {"w": torch.randn(1 << 16).to(torch.bfloat16)}
    anchors = []
    for step in range(9):
        weights["w"][step * 100 : step * 100 + 50] = float(step)
        pointer = buffer.write(weights)
        anchors.append(pointer.anchor_serial)
    assert anchors == [1, 1, 1, 1, 5, 5, 5, 5, 9]
    sizes = [path.stat().st_size for path in (tmp_path / "deltas").iterdir()]
    assert len(sizes) <= 8
    assert max(sizes) < pointer.num_bytes / 100
    assert torch.equal(load_file(buffer.path(pointer.slot))["w"], weights["w"]), "an anchor is a safetensors file"


def test_what_was_taken_back_is_no_base_and_another_writer_starts_with_a_file(tmp_path):
    buffer, weights = DoubleBuffer(tmp_path, anchor_every=8), {"w": torch.zeros(1 << 12)}
    first = buffer.write(weights)
    reader = buffer.read(first)
    weights["w"][3] = 1
    reader = buffer.read(buffer.write(weights), since=reader)
    buffer.point_to(first)  # no engine took it
    weights["w"][3], weights["w"][4] = 0, 2
    pointer = buffer.write(weights)
    assert (pointer.serial, pointer.anchor_serial) == (2, 2)
    assert torch.equal(buffer.read(pointer, since=reader).tensors()["w"], weights["w"])
    weights["w"][5] = 3
    pointer = DoubleBuffer(tmp_path, anchor_every=8).write(weights)
    assert (pointer.serial, pointer.anchor_serial) == (3, 3)
    other = {"w": torch.ones(1 << 12), "b": torch.ones(2)}
    assert is_same(buffer.read(buffer.write(other)).tensors(), other)


def test_a_first_write_that_was_taken_back_is_no_base_of_deltas_either(tmp_path):
    buffer, weights = DoubleBuffer(tmp_path, anchor_every=8), {"w": torch.zeros(1 << 12)}
    buffer.write(weights)
    buffer.point_to(None)  # no engine took it, and nothing was written before
    weights["w"][3] = 1
    buffer.write(weights)
    weights["w"][4] = 2
    pointer = buffer.write(weights)
    assert (pointer.serial, pointer.anchor_serial) == (2, 1)
    assert is_same(buffer.read(pointer).tensors(), weights)


def test_a_damaged_delta_is_refused_and_the_next_anchor_read(tmp_path):
    buffer, weights = DoubleBuffer(tmp_path, anchor_every=3), {"w": torch.zeros(1 << 12)}
    reader = buffer.read(buffer.write(weights))
    weights["w"][1] = 1
    pointer = buffer.write(weights)
    path = buffer.delta_path(2)
    data = path.read_bytes()
    for damaged in (data[:-3], data[:-1] + bytes([data[-1] ^ 1]), b"", data[: len(data) // 2], b"{}\n", b"[]\n", b"7"):
        path.write_bytes(damaged)
        copy = buffer.read(reader.pointer) if pointer.anchor_serial == 2 else None
        with pytest.raises(ValueError, match="does not hold"):
            buffer.read(pointer, since=copy)
    path.unlink()
    with pytest.raises(ValueError, match="does not hold"):
        buffer.read(pointer)
    buffer.write(weights)
    weights["w"][2] = 2
    pointer = buffer.write(weights)
    assert pointer.anchor_serial == 4
    assert torch.equal(buffer.read(pointer, since=reader).tensors()["w"], weights["w"])


def test_an_anchor_needs_a_number_from_1_on(tmp_path):
    with pytest.raises(ValueError, match="anchor_every"):
        VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), anchor_every=0)
    with pytest.raises(ValueError, match="anchor_every"):
        DoubleBuffer(tmp_path, anchor_every=0)


KILLS = """
import itertools, os, random, signal, sys, time
import torch
from llmrl.weight_sync.double_buffer import DoubleBuffer

torch.set_num_threads(1)
folder, num_kills = sys.argv[1], int(sys.argv[2])
rng, size = random.Random(0), 1 << 12
base = {name: torch.randn(size).to(torch.bfloat16) for name in "abc"}

def of(version):
    weights = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in weights.values():
        tensor[(torch.arange(64) * 101 + version * 13) % size] = float(version % 251)
    return weights

def check(read):
    expected = of(read.pointer.version)
    assert all(torch.equal(read.tensors()[name].view(torch.int16), expected[name].view(torch.int16)) for name in "abc")

def read_whole(since=None):
    buffer = DoubleBuffer(folder)
    while True:  # the writer may have come round to what is being read: that is an error, never a mixture
        try:
            read = buffer.read(buffer.pointer(), since=since)
        except ValueError:
            since = None
            continue
        check(read)
        return read

def write():
    buffer = DoubleBuffer(folder, anchor_every=4)
    while True:
        version = buffer.pointer().version + 1
        buffer.write(of(version), version)

def follow():
    read = None
    while True:
        read = read_whole(read)

def fork(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(3)
    return child

DoubleBuffer(folder).write(of(1), 1)
last, num_deltas, reader, held = 1, 0, fork(follow), None
for kill in itertools.count():
    # A busy machine writes less between two kills; some have to hit a chain of deltas.
    if kill >= num_kills and num_deltas > 5 and last > num_kills:
        break
    writer = fork(write)
    time.sleep(rng.uniform(0.0, 0.02))
    os.kill(reader, signal.SIGKILL)
    assert os.waitpid(reader, 0)[1] == signal.SIGKILL, "the reader saw a mixture"
    reader = fork(follow)
    time.sleep(rng.uniform(0.0, 0.005))
    os.kill(writer, signal.SIGKILL)
    assert os.waitpid(writer, 0)[1] == signal.SIGKILL, "the writer failed"
    held = read_whole(held if kill % 3 else None)
    assert held.pointer.version >= last
    last = held.pointer.version
    num_deltas += held.pointer.serial > held.pointer.anchor_serial
os.kill(reader, signal.SIGKILL)
num_files = sum(len(files) for _, _, files in os.walk(folder))
print(num_files)
"""


def test_writers_and_readers_killed_100_times_never_see_a_mixture_of_deltas(tmp_path, own_programs):
    command = [sys.executable, "-c", KILLS, str(tmp_path), "100"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) <= 4 + 3 * 4, "what killed writers leave does not grow"
