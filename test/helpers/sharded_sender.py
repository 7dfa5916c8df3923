"""One rank of a sharded trainer that sends its weights: `python sharded_sender.py RANK FOLDER`."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from loss_batches import with_lora
from torch.distributed.tensor import DTensor
from weight_sync_tools import TakingEngine

from llmrl.trainer import shard_model
from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError, get_model_metadata
from llmrl.weight_sync.source import named_weights


class GatherCount:
    """How many gathered weights lived at once."""

    def __init__(self):
        self.most, self._living, self._gather = 0, [], DTensor.full_tensor
        DTensor.full_tensor = lambda tensor, **options: self._count(tensor, **options)

    def _count(self, tensor, **options):
        result = self._gather(tensor, **options)
        self._living = [one for one in [*self._living, weakref.ref(result)] if one() is not None]
        self.most = max(self.most, len(self._living))
        return result


def make_model(kind):
    """`plain`, or `lora` with adapters of the head too; large beside what a process allocates anyway."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1280, num_hidden_layers=8, num_attention_heads=8,
        tie_word_embeddings=kind == "plain",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return with_lora(model, ["q_proj", "down_proj", "lm_head"]) if kind == "lora" else model


def peak_growth_of(action):
    """Bytes by which the process's memory grew at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = _memory("VmHWM")
    action()
    return _memory("VmHWM") - before


def _memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def send(kind, rank):
    """Two updates, one that the engine refuses, another one; what this rank saw."""
    model = make_model(kind)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in named_weights(model)}
    whole_bytes = 4 * sum(tensor.numel() for tensor in expected.values())
    shard_model(model)
    engine = TakingEngine()
    sender = VLLMWeightSyncScheme(rank=rank).create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), engine if rank == 0 else None)
    for parameter in model.get_decoder().layers[0].parameters():
        parameter.full_tensor()  # what a process allocates for its first collectives is not the update's
    gathered, versions, message = GatherCount(), [], ""
    peak_growth = peak_growth_of(lambda: versions.append(sender.update_weights()))
    engine.is_keeping = True
    versions.append(sender.update_weights())
    DTensor.full_tensor = gathered._gather
    engine.is_full = True
    try:
        sender.update_weights()
    except WeightSyncError as error:
        message = str(error)
    engine.is_full = False
    versions.append(sender.update_weights())
    is_right = rank > 0 or list(engine.taken) == list(expected)
    for name, tensor in engine.taken.items() if rank == 0 else ():
        torch.testing.assert_close(tensor, expected[name])
    sender.shutdown()
    return {
        "versions": versions,
        "message": message,
        "is_right": is_right,
        "engine_length": trained_model(model).engine_length,
        "is_sharded": all(p.to_local().numel() * 2 == p.numel() for p in model.parameters()),
        "most_gathered": gathered.most,
        "peak_growth": peak_growth,
        "whole_bytes": whole_bytes,
    }, model


def write(model, rank, folder):
    """Through a double buffer: into a folder that cannot be made, and into one that can."""
    (folder / "file").touch()
    outcomes = []
    for name in ("file/inside", "buffer"):
        sender = VLLMDoubleBufferSyncScheme(remote_addr=str(folder / name), rank=rank).create_sender()
        sender.register_model(model)
        sender.init_all_workers_group()
        try:
            growth = peak_growth_of(lambda sender=sender: outcomes.append(sender.update_weights()))
        except OSError as error:
            outcomes.append(str(error))
        sender.shutdown()
    return {"failed_write": outcomes[0], "version_written": outcomes[1], "peak_growth_of_write": growth}


def main():
    """Report as one line of JSON."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for kind in ("plain", "lora"):
        results[kind], model = send(kind, rank)
    results |= write(model, rank, folder)
    print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
