"""Cost of sending weight deltas of real AdamW steps (float32 trainer, bfloat16 engines), by files and by gloo."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llmrl.engines.base import EngineError
from llmrl.weight_sync.buffers import HEADER_SIZE, UNREACHABLE, PackedLayout, checksum_of
from llmrl.weight_sync.channels import MemoryChannel
from llmrl.weight_sync.double_buffer import DoubleBuffer
from llmrl.weight_sync.gloo import Receiver, free_port, open_group
from llmrl.weight_sync.source import ModelWeights

LEARNING_RATES = {"addition (the demo)": 2e-5, "gsm8k": 1e-6}
"""Learning rates of the scripts' tasks."""
NUM_STEPS = 6
_PHASES = ("write", "read"), ("pack", "send")


def seconds_of(action: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class RemoteWorker:
    """A process without a model that receives broadcasts as an engine's worker does."""

    num_workers, timeout_seconds = 1, 120.0

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()

    def __enter__(self) -> RemoteWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()

    def _ask(self, info: Any) -> int:
        self._pipe.send(info)
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise EngineError(answer)
        return int(answer)

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        """Connect like a host that cannot access the trainer's memory."""
        if "path" in init_info:
            raise EngineError(UNREACHABLE)
        self._ask(init_info)

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: Any) -> None:
        """Receive a broadcast."""
        self._ask(update_info)

    def checksum(self) -> int:
        """Return the checksum of the received weights."""
        return self._ask("checksum")


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    receiver, held = None, torch.empty(0, dtype=torch.uint8)
    while (info := pipe.recv()) is not None:
        try:
            if info == "checksum":
                pipe.send(checksum_of(held[HEADER_SIZE:]))
                continue
            if address := info.get("master_address"):
                receiver = Receiver(open_group(address, info["master_port"], rank=1, world_size=2))
            elif receiver is not None and info.get("num_delta_bytes"):
                held = receiver.receive_delta(info["num_delta_bytes"])
            elif receiver is not None:
                held = receiver.receive(info["num_bytes"], pages=None, checksum=info.get("checksum"))
            pipe.send(0)
        except (ValueError, RuntimeError) as error:
            pipe.send(str(error))


def true_steps(path: str, learning_rate: float) -> Iterator[ModelWeights]:
    """Yield the weights of a model at the start, and after each policy-gradient step on its own samples."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    source = ModelWeights(model, torch.bfloat16)
    yield source
    for _ in range(NUM_STEPS + 1):
        with torch.no_grad():
            token_ids = model.generate(torch.tensor([[1]] * 4), do_sample=True, max_new_tokens=32, min_new_tokens=32)
        advantages = torch.randn(4, 1)
        log_probs = model(token_ids).logits[:, :-1].log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
        (-(advantages * log_probs).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield source


def measure_files(path: str, learning_rate: float) -> dict[str, float]:
    """Return medians of the bytes and seconds of delta files and whole files, for writing and reading separately."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        whole = DoubleBuffer(f"{folder}/whole")
        deltas = DoubleBuffer(f"{folder}/deltas", anchor_every=NUM_STEPS + 2)
        steps = true_steps(path, learning_rate)
        held = deltas.read(deltas.write(next(steps)))
        for source in steps:
            row = {"whole_write_s": seconds_of(lambda: whole.write(source))}  # noqa: B023
            row["delta_write_s"] = seconds_of(lambda: deltas.write(source))  # noqa: B023
            row["whole_read_s"] = seconds_of(lambda: whole.read(whole.pointer()))
            started = time.perf_counter()
            held = deltas.read(deltas.pointer(), since=held)
            row["delta_read_s"] = time.perf_counter() - started
            pointer, reference = deltas.pointer(), whole.pointer()
            assert pointer is not None
            assert reference is not None
            assert pointer.checksum == reference.checksum, "the files differ"
            row["bytes_ratio"] = deltas.delta_path(pointer.serial).stat().st_size / pointer.num_bytes
            rows.append(row)
    return _medians(rows, *_PHASES[0])


def measure_gloo(path: str, learning_rate: float) -> dict[str, float]:
    """Return the same for broadcasts: packing, during which engines generate, and sending, during which they wait."""
    rows = []
    steps = true_steps(path, learning_rate)
    source = next(steps)
    num_bytes = PackedLayout.of(source.metadata()).num_bytes
    channels = {
        name: MemoryChannel(source, lambda: ("127.0.0.1", free_port()), anchor_every=anchor_every)
        for name, anchor_every in (("whole", 1), ("delta", NUM_STEPS + 2))
    }
    with RemoteWorker() as first, RemoteWorker() as second:
        workers = dict(zip(channels, (first, second), strict=True))
        connections = {name: channel.connect(workers[name]) for name, channel in channels.items()}
        for name, channel in channels.items():
            channel.stage(0)
            connections[name].send_weights()
        for version, _ in enumerate(steps, start=1):
            row = {}
            for name, channel in channels.items():
                row[f"{name}_pack_s"] = seconds_of(lambda: channel.stage(version))  # noqa: B023
                row[f"{name}_send_s"] = seconds_of(connections[name].send_weights)
            assert first.checksum() == second.checksum(), "the weights differ"
            delta = channels["delta"].delta
            row["bytes_ratio"] = (num_bytes if delta is None else len(delta[1])) / num_bytes
            rows.append(row)
        for name, channel in channels.items():
            connections[name].shutdown()
            channel.close()
    return _medians(rows, *_PHASES[1])


def _medians(rows: list[dict[str, float]], *phases: str) -> dict[str, float]:
    """Return the median of each column without the first step, in which all moments are new, and delta ratios."""
    result = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    return result | {f"{name}_ratio": result[f"delta_{name}_s"] / result[f"whole_{name}_s"] for name in phases}


def measure_deltas(path: str) -> dict[str, dict[str, dict[str, float]]]:
    """Measure both channels at each learning rate, and print the results."""
    results = {}
    for way, measure, phases in (("files", measure_files, _PHASES[0]), ("gloo", measure_gloo, _PHASES[1])):
        results[way] = {name: measure(path, learning_rate) for name, learning_rate in LEARNING_RATES.items()}
        table = Table(title=f"{way}: deltas of a step compared with all weights (bfloat16 of a float32 trainer)")
        for column in ("learning rate of", "bytes", f"{phases[0]}, s", "of whole", f"{phases[1]}, s", "of whole"):
            table.add_column(column, justify="right")
        for name, row in results[way].items():
            keys = [key for phase in phases for key in (f"delta_{phase}_s", f"{phase}_ratio")]
            table.add_row(name, *(f"{row[key]:.4f}" for key in ("bytes_ratio", *keys)))
        Console().print(table)
    return results
