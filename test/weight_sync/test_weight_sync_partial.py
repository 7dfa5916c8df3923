"""A worker that has a part of the model holds what that is loaded from, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmrl.weight_sync.double_buffer import DoubleBuffer
from llmrl.weight_sync.partial import PAGE_SIZE, NeededPages


def test_the_pages_of_a_region_are_those_that_its_elements_lie_in():
    """Any view of a tensor in a buffer, compared with the addresses of its elements one by one."""
    choose = random.Random(0)
    for _ in range(60):
        shape = [choose.choice((1, 3, 8, 70, 300)) for _ in range(choose.randrange(1, 4))]
        dtype = choose.choice((torch.float32, torch.bfloat16))
        start = choose.randrange(0, 3 * PAGE_SIZE, 64)
        numel = torch.Size(shape).numel()
        buffer = torch.zeros(start // dtype.itemsize + numel + choose.randrange(9000), dtype=dtype)
        view = buffer[start // dtype.itemsize :][:numel].view(shape)
        for dim in range(view.ndim):
            first = choose.randrange(view.shape[dim])
            view = view.narrow(dim, first, choose.randrange(view.shape[dim] - first) + choose.choice((0, 1)))
        view = view.transpose(0, -1) if choose.random() < 0.3 else view
        pages = NeededPages(buffer.numel() * dtype.itemsize)
        offset = view.storage_offset() * dtype.itemsize
        pages.add(offset=offset, size=view.shape, stride=view.stride(), itemsize=dtype.itemsize)
        touched = torch.arange(buffer.numel()).as_strided(view.shape, view.stride(), view.storage_offset())
        expected = {0} | {
            byte // PAGE_SIZE
            for element in touched.flatten().tolist()
            for byte in (element * dtype.itemsize, element * dtype.itemsize + dtype.itemsize - 1)
        }
        kept = pages.new_buffer()
        pages.keep(kept, torch.ones(kept.numel(), dtype=torch.uint8), 0)
        assert {place for place, page in enumerate(kept.split(PAGE_SIZE)) if page.any()} == expected
        assert pages.num_bytes == len(expected) * PAGE_SIZE


def resident(tensor):
    """Bytes of a tensor's memory that are there, as the kernel says."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    for place, line in enumerate(lines):
        ends = line.split(" ", 1)[0].split("-")
        if len(ends) == 2 and int(ends[0], 16) <= tensor.data_ptr() < int(ends[1], 16):
            return next(int(later.split()[1]) * 1024 for later in lines[place:] if later.startswith("Rss:"))
    raise AssertionError("there is no such memory")


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_of_a_file_a_worker_holds_its_part_and_refuses_what_is_damaged_elsewhere(tmp_path, rank):
    torch.manual_seed(0)
    weights = {"columns": torch.rand(2000, 1024), "rows": torch.rand(128, 16384), "norm": torch.rand(1024)}
    buffer = DoubleBuffer(tmp_path)
    pointer = buffer.write(weights)
    seen = []

    def part_of(view, name):
        size = view.shape[0 if name == "columns" else -1] // 4
        return view if name == "norm" else view.narrow(0 if name == "columns" else 1, rank * size, size)

    def pages_of(layout):
        pages = NeededPages(layout.num_bytes)
        for name, view in layout.views(torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta")):
            part = part_of(view, name)
            offset = part.storage_offset() * 4
            pages.add(offset=offset, size=part.shape, stride=part.stride(), itemsize=4)
        seen.append(pages)
        return pages

    read = buffer.read(pointer, pages_of=pages_of)
    expected = load_file(buffer.path(pointer.slot))
    for name, tensor in read.tensors().items():
        assert torch.equal(part_of(tensor, name), part_of(expected[name], name))
    held = resident(read.buffer)
    assert seen[0].num_bytes / 2 < held <= seen[0].num_bytes + 2 * PAGE_SIZE  # some may be counted to a neighbour
    assert held < 0.3 * read.buffer.numel()

    data = bytearray(buffer.path(pointer.slot).read_bytes())
    for place in (4, 30, len(data) // 2, len(data) - 3):  # header and weights, of any worker's part
        data[place] ^= 1
        buffer.path(pointer.slot).write_bytes(data)
        with pytest.raises(ValueError, match="does not hold the weights of write 1"):
            buffer.read(pointer, pages_of=pages_of)
        data[place] ^= 1
    buffer.path(pointer.slot).write_bytes(data[:-1])
    with pytest.raises(ValueError, match="does not hold"):
        buffer.read(pointer, pages_of=pages_of)
