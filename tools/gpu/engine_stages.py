"""Stages that send weights from the trainer: on another CUDA stream, to vLLM, and to vLLM's types of models."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from sizes import Sizes, make_model

Result = dict[str, Any]


def stream(sizes: Sizes, device: str) -> Result:
    """Return the share of weights that another CUDA stream reads before they are updated, with and without staging."""
    from llmrl.trainer import make_optimizer
    from llmrl.weight_sync.source import ModelWeights
    from llmrl.weight_sync.stream import StreamChannel

    model = make_model(sizes.models[0], device)
    optimizer, _ = make_optimizer(model, learning_rate=1e-3)
    channel = StreamChannel(ModelWeights(model), "nccl", lambda: ("", 0))
    other = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    work = torch.randn(sizes.heads[0] * sizes.heads[2], sizes.heads[0] * sizes.heads[2], device=device)
    results: Result = {}
    for way in ("at once", "staged"):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(50):  # work that delays the optimizer's step
            work = torch.nn.functional.normalize(work @ work)
        optimizer.step()
        if way == "staged":
            channel.stage(1)
        with other:
            read = [parameter.detach().clone() for parameter in model.parameters()]
        if device == "cuda":
            torch.cuda.synchronize()
        stale = sum(int((a != b).sum()) for a, b in zip(read, model.parameters(), strict=True))
        results[way] = {"stale_share": stale / sum(weight.numel() for weight in read)}
    return results


def types(sizes: Sizes, device: str) -> Result:
    """Return the log-prob difference, in nats, of vLLM and trainer after an update, by type of model and dtype."""
    from causal_types import causal_types
    from engine_checkpoints import write_checkpoint
    from engine_halves import nats_after_update, wrapper_types
    from stages import attempted

    def of_type(model_type: str, dtype: str) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model_type, names[model_type], Path(folder))
            return {"nats": nats_after_update(Path(folder), device, dtype)}

    names = causal_types() | wrapper_types()
    return {
        f"{model_type} {dtype}": attempted(lambda one=model_type, dtype=dtype: of_type(one, dtype))
        for model_type, dtype in sizes.served_types
    }


def engine(sizes: Sizes, device: str) -> Result:
    """Return the seconds of a weight update of vLLM, the log-prob difference after it, and the memory that sleep frees.

    On a GPU, weights are sent by CUDA IPC to an engine on the trainer's GPU and, with a second GPU, by NCCL. On a CPU
    they are sent through shared memory. The first way is repeated with n-gram drafts.
    """
    ways = {"ipc": {"weight_transfer": "ipc", "enable_sleep": True}} if device == "cuda" else {"llmrl": {}}
    if torch.cuda.device_count() > 1:
        ways["nccl"] = {"weight_transfer": "nccl"}
    ways["drafts"] = next(iter(ways.values())) | {"speculative": "ngram"}
    return {way: _updated(sizes, device, way, options) for way, options in ways.items()}


def _updated(sizes: Sizes, device: str, way: str, options: dict[str, Any]) -> Result:
    from stages import measured

    from llmrl.engines import AsyncVLLM, SamplingConfig
    from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata

    name = sizes.engine_model
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as exit_stack:
        make_model(name, device, dtype=dtype).save_pretrained(folder)
        generation = Path(folder, "generation_config.json")
        generation.write_text(json.dumps({"eos_token_id": 0}))
        engine = exit_stack.enter_context(
            AsyncVLLM.from_pretrained(
                folder, max_model_len=512, gpu_memory_utilization=0.3 if device == "cuda" else None,
                kv_cache_memory=None if device == "cuda" else 1 << 26, engine_args={"skip_tokenizer_init": True},
                **options,
            )
        )  # fmt: skip
        model = make_model(name, f"{device}:{torch.cuda.device_count() - 1}" if device == "cuda" else device)
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), engine)
        exit_stack.callback(sender.shutdown)
        results: Result = {"start_seconds": engine.start_s}
        for turn in ("first", "after sleep"):
            if turn == "after sleep":
                if not options.get("enable_sleep"):
                    continue
                before = torch.cuda.mem_get_info()[0]
                engine.sleep()
                results["freed_gib"] = (torch.cuda.mem_get_info()[0] - before) / 2**30
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            with measured(device) as result:
                sender.update_weights()
            prompt = [*range(1, 9)] * 4
            (answer,) = engine.generate_batch([prompt], SamplingConfig(max_new_tokens=16, ignore_eos=True))
            tokens = torch.tensor([[*prompt, *answer.token_ids]], device=model.device)
            with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=device == "cuda"):
                log_probs = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            own = log_probs.gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()
            difference = float((own - torch.tensor(answer.log_probs)).abs().mean())
            results[turn] = {**result, **sender.last_timings, "log_prob_difference": difference}
            results[turn] |= engine.take_load().to_metrics()
        return results
