"""A vLLM worker's end of a transfer in a process of its own, told of everything in JSON by its standard input.

What stands in for the device is shared with the tests in one process: CUDA's memory is the host's, and what would be a
NCCL communicator is gloo's, which a peer that dies or stands still breaks in earnest.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import torch


class WorkerModel(torch.nn.Module):
    """Takes weights as vLLM's models do, and may end in the midst of it."""

    end_at = None
    """How many more parts come before the signal that ends this process."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 2)

    def load_weights(self, weights):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        if self.end_at is not None:
            self.end_at[0] -= 1
            if not self.end_at[0]:
                os.kill(os.getpid(), signal.Signals[self.end_at[1]])
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], weight)


class HostTorch:
    """`torch` with the host's memory as CUDA memory, and with streams that have nothing to wait for."""

    accelerator = SimpleNamespace(current_device_index=lambda: 0)
    cuda = SimpleNamespace(
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        get_device_properties=lambda index: SimpleNamespace(uuid="GPU-0"),
    )

    def empty(self, *size, device=None, **options):
        return torch.empty(*size, **options)

    def __getattr__(self, name):
        return getattr(torch, name)


# The end of a group waits until what is in flight has timed out: these last as long as their process.
_groups: list[torch.distributed.ProcessGroupGloo] = []


class GlooCommunicator:
    """Takes the place of vLLM's `PyNcclCommunicator`: a broadcast waits for peers, dead or not, until it is aborted."""

    def __init__(self, group, device):
        store = torch.distributed.PrefixStore("gloo", group.store)
        timeout = datetime.timedelta(seconds=100)
        self._group = torch.distributed.ProcessGroupGloo(store, group.rank, group.world_size, timeout)
        self._is_destroyed = False
        _groups.append(self._group)

    def broadcast(self, tensor, src, stream=None):
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        work = self._group.broadcast([tensor], options)
        while not (self._is_destroyed or (work.is_completed() and work.is_success())):
            time.sleep(0.001)

    def destroy(self):
        self._is_destroyed = True


def work(model):
    """Answer requests with what was done, until there are no more."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from llmrl.weight_sync.plugin import register

    register()
    torch.accelerator.current_device_index, torch.accelerator.synchronize = lambda: 0, lambda device=None: None
    packed_tensor.torch, pynccl.PyNcclCommunicator = HostTorch(), GlooCommunicator
    packed_tensor._get_streams = lambda index, count: [SimpleNamespace(synchronize=lambda: None)] * count
    record_metadata_for_reloading(model)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.bfloat16))
    create = WeightTransferEngineFactory.create_engine
    worker = create(WeightTransferConfig(backend="llmrl-nccl"), config, torch.device("cpu"), model)
    actions = {
        "init": lambda info: worker.init_transfer_engine(worker.parse_init_info(info)),
        "start": lambda _: worker.start_weight_update(),
        "update": worker.update_weights,
        "finish": lambda _: worker.finish_weight_update(),
        "end_at": lambda pair: setattr(model, "end_at", pair),
    }
    print(json.dumps({"is": "ready"}), flush=True)
    for line in sys.stdin:
        name, given = json.loads(line)
        try:
            answer = {"is": actions[name](given)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__" and sys.argv[1:] == ["work"]:
    work(WorkerModel().requires_grad_(False))
