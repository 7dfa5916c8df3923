"""Engines of this process that take weights as vLLM's workers do, and die, refuse or half load at any of their calls.

Each holds a number, which all elements of its weights have in common, so that one sees which weights a token would be
of; `Labels` looks at all of them at each call, and keeps which number every version was seen with.
"""

from __future__ import annotations

import random
import threading

import safetensors.torch
import torch
from weight_sync_tools import FakeEngine

from llmrl.engines.base import EngineError
from llmrl.weight_sync.buffers import UNREACHABLE, PackedLayout, open_shared, read_tag
from llmrl.weight_sync.double_buffer import BufferPointer, DoubleBuffer
from llmrl.weight_sync.gloo import Receiver, open_group

MIXTURE = -1
"""In place of the number: weights of which some are old and some are new."""
FAULTS = ("dies", "refuses", "half", "all die")


def weights_of(number):
    """Weights of that number, up to 255, which bfloat16 holds exactly."""
    return {"embed": torch.full((8, 256), float(number)), "norm": torch.full((64,), float(number))}


def number_of(weights):
    """The number that all elements are; None where they differ."""
    numbers = {number for tensor in weights.values() for number in tensor.float().unique().tolist()}
    return int(numbers.pop()) if len(numbers) == 1 else MIXTURE


class Labels:
    """Which weights each version was seen with, over all engines that sample at that moment.

    Args:
        seed: of the faults.
        rate: how likely each call of an engine is to go wrong.
    """

    def __init__(self, seed, rate):
        self.seed, self.rate = seed, rate
        self.engines = []
        self.seen, self.wrong, self.log = {}, [], []
        self._lock = threading.RLock()

    def add(self, engine):
        with self._lock:
            self.engines.append(engine)
            return len(self.engines) - 1

    def look(self):
        """Note what a token of each engine would be labelled, and what weights it would be of."""
        with self._lock:
            for engine in self.engines:
                if engine.is_alive and not engine.is_paused:
                    self.expect(engine.policy_version, engine.held, engine)

    def expect(self, version, number, holder):
        """Weights of a version are those that they always were, and no mixture."""
        with self._lock:
            known = self.seen.setdefault(version, number)
            if known != number or number == MIXTURE:
                self.wrong.append(f"{holder}: version {version} was the weights {known} and is {number}")

    def kill_all(self):
        with self._lock:
            for engine in self.engines:
                engine.die()


class Replica(FakeEngine):
    """See above; `backend` is llmrl's, `far` for one on another host, `adapters` or `stream`."""

    def __init__(self, labels, backend):
        super().__init__()
        self.labels = labels
        self.weight_transfer_backend = {"far": "llmrl", "stream": "nccl"}.get(backend, backend)
        self.is_far = backend == "far"
        self.held, self.policy_version = 0, 0
        self.is_paused = False
        self._taken = None
        self._file = self._receiver = None
        self._lock = labels._lock
        self.number = labels.add(self)
        self._random = random.Random(f"{labels.seed} {self.number}")

    def __repr__(self):
        return f"engine {self.number}"

    def die(self):
        self.is_alive = False
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def shutdown(self):
        self.die()
        super().shutdown()

    def _call(self, name, *arguments):
        self.labels.look()
        fault = self._random.choice(FAULTS) if self._random.random() < self.labels.rate else ""
        self.labels.log.append((self.number, name, fault, self.policy_version, self.held))
        if fault == "all die":
            self.labels.kill_all()
        elif fault == "dies":
            self.die()
        if not self.is_alive:
            raise EngineError(f"{self} died in {name}")
        if fault == "refuses":
            raise EngineError(f"{self} refuses {name}")
        return fault == "half"

    def pause(self, mode, *, clear_cache):
        self._call("pause")
        self.is_paused = True

    def resume(self):
        self._call("resume")
        with self._lock:
            self.is_paused = False
        self.labels.look()

    def reset_prefix_cache(self, *, reset_running_requests):
        return not self._call("reset")

    def init_weight_transfer_engine(self, info):
        self._call("init")
        if self.is_far and info.get("path"):
            raise EngineError(f"{UNREACHABLE}: another host")
        if info.get("master_address"):
            group = open_group(info["master_address"], info["master_port"], rank=1, world_size=info["world_size"])
            self._receiver = Receiver(group)

    def start_weight_update(self):
        self._taken = None
        self._call("start")

    def update_weights(self, info):
        self._taken = None
        is_half = self._call("update")
        if info.get("is_discarded"):
            return
        try:
            taken = number_of(self._read(info))
        except (ValueError, OSError, RuntimeError) as error:
            raise EngineError(f"{error}") from error
        if self.weight_transfer_backend == "nccl":
            with self._lock:
                self.held = MIXTURE if is_half else taken
        if is_half:
            raise EngineError(f"{self} stopped half-way")
        self._taken = taken

    def finish_weight_update(self, version):
        is_half = self._call("finish")
        with self._lock:
            taken, self._taken = self._taken, None
            if is_half and taken is not None and self.weight_transfer_backend != "adapters":
                self.held = MIXTURE
            if is_half:
                raise EngineError(f"{self} loaded half of it")
            if taken is not None and (self.weight_transfer_backend != "adapters" or version != self.policy_version):
                self.held = taken
            self.policy_version = int(version)
        self.labels.look()

    def _read(self, info):
        """What a worker does with the announcement of weights."""
        if "streamed" in info:
            return weights_of(info["streamed"])
        if "weights" in info:
            return {"lora": safetensors.torch.load(info["weights"])["base_model.model.0.lora_A.weight"]}
        if "pointer" in info:
            pointer, (since, self._file) = BufferPointer(**info["pointer"]), (self._file, None)
            read = DoubleBuffer(info["folder"]).read(pointer, since=since)
            self._file = read if pointer.anchor_every > 1 else None
            return read.tensors()
        layout = PackedLayout.from_plain(info["names"], info["dtype_names"], info["shapes"])
        if "path" in info:
            buffer = open_shared(info["path"], info["num_bytes"])
        else:
            receiver = self._receiver
            if receiver is None:
                raise ValueError("no group")
            if info.get("num_delta_bytes"):
                buffer = receiver.receive_delta(info["num_delta_bytes"])
            else:
                buffer = receiver.receive(layout.num_bytes, pages=None, checksum=info.get("checksum"))
        if read_tag(buffer) != info["tag"]:
            raise ValueError("another tag")
        return {name: tensor.clone() for name, tensor in layout.views(buffer)}
