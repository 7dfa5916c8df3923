"""The stages, one function each: it takes sizes and a device, and returns measurements for one line of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine_stages import engine, stream, types
from recipe_settings import settings
from sizes import MODELS, Rows, Sizes, flops_of, make_batch, make_model

Result = dict[str, Any]

sys.path.append(str(Path(__file__).resolve().parents[2] / "test" / "helpers"))  # tiny models of every architecture

PEAK_FLOPS = 989e12
"""Dense bfloat16 FLOPs per second of an H100 or H200, the reference of `mfu`."""
FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "qwen3_moe", "qwen3_5_text", "lfm2",
    "granitemoehybrid",
)  # fmt: skip


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def measured(device: str) -> Iterator[Result]:
    """Measure the seconds of a block and, on a GPU, the peak of additional memory in GiB."""
    held = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    synchronize(device)
    result: Result = {}
    started = time.perf_counter()
    yield result
    synchronize(device)
    result["seconds"] = time.perf_counter() - started
    if device == "cuda":
        result["peak_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30


def repeated(function: Callable[[], object], device: str, num: int = 3) -> Result:
    """Return the measurements of one call, after a first call that compiles."""
    with measured(device) as first:
        function()
    with measured(device) as result:
        for _ in range(num):
            function()
    return {**result, "seconds": result["seconds"] / num, "first_seconds": first["seconds"]}


def attempted(function: Callable[[], Result]) -> Result:
    """Run a part of a stage. Its error becomes its result, so that other parts still run."""
    try:
        return function()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch._dynamo.reset()


def fork(sizes: Sizes, device: str) -> Result:
    """Test whether a process that is forked after `torch.cuda.is_available()` can use the GPU; engines are spawned."""
    is_available = torch.cuda.is_available()
    child = os.fork()
    if not child:
        try:
            torch.zeros(1, device=device)
            os._exit(0)
        except RuntimeError:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return {"is_available": is_available, "forked_process_works": os.waitstatus_to_exitcode(status) == 0}


def exactness(sizes: Sizes, device: str) -> Result:
    """Compare packed rows, with and without shared prefixes, with single rows and `eager` attention, per model type."""
    from causal_types import rows

    token_ids, _ = rows()
    results: Result = {}
    for family in FAMILIES if device == "cuda" else FAMILIES[:2]:
        shared = attempted(lambda family=family: _exactness_of(family, token_ids, device))
        apart = attempted(
            lambda family=family: _exactness_of(family, [ids[5 * i :] for i, ids in enumerate(token_ids)], device)
        )
        results[family] = {"shared": shared, "apart": apart}
    return results


def _exactness_of(family: str, token_ids: list[torch.Tensor], device: str) -> Result:
    from causal_types import tiny_config, tiny_model

    from llmrl.trainer import TransformersWrapper

    config = tiny_config(family, head_dim=32, num_key_value_heads=2, initializer_range=0.1)
    reference = tiny_model(family, config=config, attn_implementation="eager").to(device)
    results: Result = {}
    halves = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16,)
    for dtype in (None, *halves):
        name = str(dtype or torch.float32).removeprefix("torch.")
        policy = TransformersWrapper(tiny_model(family, config=config).to(device), generate=False, autocast_dtype=dtype)
        (packed,) = policy.pack(token_ids, [torch.ones_like(ids).bool() for ids in token_ids], token_budget=400)
        log_probs, _ = policy.packed_log_probs(packed)
        log_probs.sum().backward()
        expected = []
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            for ids in token_ids:
                logits = reference(input_ids=ids[None].to(device), use_cache=False).logits[0].float()
                expected.append(logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None].to(device))[:, 0])
        reference.zero_grad()
        torch.cat(expected).sum().backward()
        flat = torch.stack([expected[i][j - 1] for i, j in zip(packed.row_index, packed.token_index, strict=True)])
        pairs = zip(policy.model.parameters(), reference.parameters(), strict=True)
        norms = [((p.grad - q.grad).norm(), q.grad.norm()) for p, q in pairs if q.grad is not None]
        results[name] = {
            "log_prob_error": float((log_probs - flat).abs().mean().detach()),
            "gradient_error": float(
                torch.stack([a for a, _ in norms]).norm() / torch.stack([b for _, b in norms]).norm()
            ),
        }
    model = policy.causal_model
    return {**results, "attention": model.config._attn_implementation, "faults": model.faults}


def attention(sizes: Sizes, device: str) -> Result:
    """Measure the forward and backward pass of one layer's attention at several lengths."""
    results: Result = {}
    for length in sizes.lengths:
        for name, batch in {"apart": (1, 0, length), "shared": (16, length * 3 // 4, length // 64)}.items():
            for way in ("dense", "ours"):
                if way == "ours" or length <= sizes.dense_length:
                    results[f"{length} {name} {way}"] = attempted(
                        lambda batch=batch, way=way: _attention(sizes, device, batch, is_dense=way == "dense")
                    )
    return results


def _attention(sizes: Sizes, device: str, batch: Rows, *, is_dense: bool) -> Result:
    from llmrl.trainer.packing.attention import packed_attention
    from llmrl.trainer.packing.masks import packed_mask
    from llmrl.trainer.packing.packed_rows import pack_rows

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = [row["tokens", "full"] for row in make_batch(batch, 1000).unbind(0)]
    masks = [torch.ones_like(ids).bool() for ids in made]
    (packed,) = pack_rows(made, masks, token_budget=2 * sum(len(ids) for ids in made))
    packed = packed.to(device)
    num_heads, num_key_heads, size = sizes.heads
    shape = (1, packed.num_packed_tokens)
    query, key, value = (
        torch.randn(*shape, num, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for num in (num_heads, num_key_heads, num_key_heads)
    )
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = num_heads // num_key_heads, True

    def forward_and_backward() -> None:
        mask = packed_mask(packed, implementation="sdpa" if is_dense else "llmrl_packed", dtype=dtype)
        output, _ = packed_attention(module, query, key, value, mask)
        output.sum().backward()

    return repeated(forward_and_backward, device)


def head(sizes: Sizes, device: str) -> Result:
    """Measure the output head, with chunks of several sizes and with liger's kernel."""
    from llmrl.trainer.head.fused_head import fused_log_probs
    from llmrl.trainer.head.log_probs import LogitTransform, chunked_log_probs

    num, width, vocab_size = sizes.head
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = (torch.randn(num, width, device=device, dtype=dtype)).requires_grad_()
    weight = (0.02 * torch.randn(vocab_size, width, device=device)).requires_grad_()
    targets = torch.randint(0, vocab_size, (num,), device=device)
    held: dict[str, torch.Tensor] = {}

    def ours(chunk_size: int | None) -> torch.Tensor:
        with torch.autocast(device, dtype=dtype, enabled=device == "cuda"):
            return chunked_log_probs(hidden, weight, targets, chunk_size=chunk_size)[0]

    def liger() -> torch.Tensor:
        positions = torch.arange(num, device=device)
        with torch.autocast(device, dtype=dtype):
            return fused_log_probs(hidden, weight, targets, positions=positions, transform=LogitTransform())

    def run(name: str, function: Callable[[], torch.Tensor]) -> Result:
        def forward_and_backward() -> None:
            held[name] = function()
            held[name].mean().backward()
            held[name] = held[name].detach()
            hidden.grad = weight.grad = None

        result = repeated(forward_and_backward, device)
        first = next(iter(held))
        return {**result, "difference": float((held[name] - held[first]).abs().max())}

    ways: dict[str, Callable[[], torch.Tensor]] = {
        f"chunks of {size}": (lambda size=size: ours(size)) for size in sizes.chunk_sizes
    }
    ways |= {"default": lambda: ours(None)} | ({"liger": liger} if device == "cuda" else {})
    return {name: attempted(lambda name=name, way=way: run(name, way)) for name, way in ways.items()}


def train(sizes: Sizes, device: str) -> Result:
    """Measure whole training steps (tokens per second, `mfu`, memory), and a padded step of transformers to compare."""
    results: Result = {}
    for name in sizes.models:
        for batch in sizes.batches:
            compiled = (_compiled_step,) if device == "cuda" else ()  # takes a minute on a CPU
            for way in (_train_step, *compiled, _padded_step):
                key = f"{name} {batch[0]} x ({batch[1]} + {batch[2]}) {way.__name__.strip('_')}"
                results[key] = attempted(lambda name=name, batch=batch, way=way: way(sizes, device, name, batch))
    return results


def _compiled_step(sizes: Sizes, device: str, name: str, batch: Rows) -> Result:
    return _train_step(sizes, device, name, batch, compile_layers=True)


def _train_step(sizes: Sizes, device: str, name: str, batch: Rows, **options: bool) -> Result:
    model, step = _trained(name, device, batch, token_budget=sizes.token_budget, **options)
    reports = []
    result = repeated(lambda: reports.append(step()), device, sizes.num_steps)
    return {**_rates(result, name, model, batch), "num_micro_batches": reports[-1].num_micro_batches}


def _trained(name: str, device: str, batch: Rows, *, gradient_checkpointing: bool = True, **options: Any) -> Any:
    """Return a model, and a function that makes a training step and returns its report. A skipped step is an error."""
    from llmrl.objectives import GRPOLoss
    from llmrl.trainer import TransformersWrapper, make_optimizer, train_step

    model = make_model(name, device, gradient_checkpointing=gradient_checkpointing)
    loss = GRPOLoss(TransformersWrapper(model, generate=False, **options))
    rows = make_batch(batch, MODELS[name]["vocab_size"])
    optimizer, _ = make_optimizer(model, learning_rate=1e-6)

    def step() -> Any:
        report = train_step(loss, rows, optimizer)
        if report.is_skipped:
            raise RuntimeError(f"the step was skipped: {report.skip_reason}")
        return report

    return model, step


def _padded_step(sizes: Sizes, device: str, name: str, batch: Rows) -> Result:
    """Measure a step of transformers. The rows need no padding, so it is the best case without shared prefixes."""
    model = make_model(name, device, gradient_checkpointing=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    rows = torch.stack([row["tokens", "full"] for row in make_batch(batch, MODELS[name]["vocab_size"]).unbind(0)])
    num_together = max(1, sizes.token_budget // rows.shape[1])

    def step() -> None:
        for part in rows.to(device).split(num_together):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                logits = model(input_ids=part, use_cache=False).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _rates(repeated(step, device, sizes.num_steps), name, model, batch)


def _rates(result: Result, name: str, model: torch.nn.Module, batch: Rows) -> Result:
    num_rows, num_shared, num_own = batch
    flops = flops_of(name, model, batch) / result["seconds"]
    rates = {"row_tokens_per_second": num_rows * (num_shared + num_own) / result["seconds"], "mfu": flops / PEAK_FLOPS}
    return {**result, **rates}


def sharded(sizes: Sizes, device: str) -> Result:
    """Compare a step of FSDP with one rank with the unsharded step."""
    from llmrl.objectives import GRPOLoss
    from llmrl.trainer import TransformersWrapper, shard_model, train_step

    name, results = sizes.sharded_model, {}
    rows = make_batch((2, 0, sizes.batches[0][2]), MODELS[name]["vocab_size"])
    dtype = torch.bfloat16 if device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            for is_sharded in (False, True):
                model = make_model(name, device, gradient_checkpointing=True)
                policy = TransformersWrapper(model, generate=False, token_budget=sizes.token_budget)
                if is_sharded:
                    shard_model(model, compute_dtype=dtype)
                optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.0), GRPOLoss(policy)
                with measured(device) as result:
                    report = train_step(loss, rows, optimizer)
                results["sharded" if is_sharded else "whole"] = {
                    **result,
                    "loss": report.loss,
                    "grad_norm": report.grad_norm,
                }
                del model, policy, loss, optimizer
        finally:
            torch.distributed.destroy_process_group()
    return results


def resume(sizes: Sizes, device: str) -> Result:
    """Measure the peak memory of loading a checkpoint, and return the size of model and optimizer to compare."""
    from llmrl.data.state_file import load_state, save_state
    from llmrl.trainer import make_optimizer

    model = make_model(sizes.models[-1], device)
    optimizer, _ = make_optimizer(model, learning_rate=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.safetensors")
        save_state(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        held = 12 * sum(parameter.numel() for parameter in model.parameters()) / 2**30
        with measured(device) as result:
            state = load_state(path, advice="")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    return {**result, "model_and_optimizer_gib": held}


def _sum_of(tensors: Any, sums: Any) -> None:
    tensor = tensors.get()
    sums.put(float(tensor.double().sum()))


def ipc(sizes: Sizes, device: str) -> Result:
    """Test whether a spawned process reads a tensor of this process without a copy through the host."""
    context = torch.multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    process = context.Process(target=_sum_of, args=(tensors, sums))
    process.start()
    tensor = torch.arange(1 << (28 if device == "cuda" else 10), device=device, dtype=torch.float32)
    synchronize(device)
    started = time.perf_counter()
    tensors.put(tensor)
    received = sums.get(timeout=120)
    seconds = time.perf_counter() - started
    process.join(60)
    return {"is_the_same": received == float(tensor.double().sum()), "seconds": seconds, "exit_code": process.exitcode}


def learning(sizes: Sizes, device: str) -> Result:
    """Test whether a random model learns by GRPO to generate small token ids, with a `TransformersEngine`."""
    import asyncio

    from sizes import training_row
    from tensordict import lazy_stack

    from llmrl.engines import SamplingConfig, TransformersEngine
    from llmrl.objectives import GRPOLoss
    from llmrl.trainer import TransformersWrapper, make_optimizer, train_step

    model, num_rows = make_model("tiny", device), 16
    policy = TransformersWrapper(model, generate=False, autocast_dtype=None)
    engine = TransformersEngine(model, max_num_seqs=num_rows)
    optimizer, _ = make_optimizer(model, learning_rate=1e-2)
    loss, sampling = GRPOLoss(policy), SamplingConfig(max_new_tokens=8, ignore_eos=True)
    half, prompt, rewards = MODELS["tiny"]["vocab_size"] / 2, [1, 2, 3], []

    async def completions() -> list[Any]:
        return await asyncio.gather(*(engine.generate(prompt, sampling) for _ in range(num_rows)))

    for _ in range(sizes.num_learning_steps):
        answers = asyncio.run(completions())
        scores = torch.tensor([[token < half for token in answer.token_ids] for answer in answers]).float().mean(1)
        rewards.append(float(scores.mean()))
        rows = []
        for index, (answer, score) in enumerate(zip(answers, scores, strict=True)):
            tokens = torch.tensor([*prompt, *answer.token_ids])
            mask = torch.arange(len(tokens)) >= len(prompt)
            log_probs = torch.cat([torch.zeros(len(prompt)), torch.tensor(list(answer.log_probs))])
            advantage = float((score - scores.mean()) / (scores.std() + 1e-4))
            rows.append(training_row(tokens, mask, log_probs, advantage, f"rollout-{index}"))
        train_step(loss, lazy_stack(rows), optimizer)
    return {"first_reward": rewards[0], "last_reward": sum(rewards[-3:]) / 3}


def recipes(sizes: Sizes, device: str) -> Result:
    """Measure steps of each GPU recipe with its longest rows and a model of its size, and return the planned memory."""
    return {name: attempted(lambda each=each: _recipe(sizes, device, **each)) for name, each in settings().items()}


def _recipe(sizes: Sizes, device: str, *, model: str, training: dict[str, Any]) -> Result:
    from llmrl.trainer.memory_plan import ModelShape, TrainingShape, plan_memory

    # Adapters need peft, which is not in the kit. Training all weights instead takes more memory.
    shape = dataclasses.replace(TrainingShape(**training), lora_rank=None, is_gpu=device == "cuda")
    if sizes.models == ("tiny",):
        model, shape = "tiny", dataclasses.replace(shape, token_budget=128, longest_row=60, bin_length=60)
    batch = shape.token_budget // shape.longest_row, 0, shape.longest_row
    with measured(device) as result:
        actor, step = _trained(
            model, device, batch, gradient_checkpointing=shape.gradient_checkpointing, token_budget=shape.token_budget
        )
        step()  # compiles, and allocates the moments
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        actor.config.save_pretrained(folder)
        planned = plan_memory(ModelShape.read(folder), shape).total / 2**30
    return {**_rates({**result, "seconds": seconds}, model, actor, batch), "planned_gib": planned}


STAGES: dict[str, tuple[Callable[[Sizes, str], Result], int]] = {
    "fork": (fork, 120),
    "exactness": (exactness, 500),
    "attention": (attention, 400),
    "head": (head, 300),
    "train": (train, 580),
    "sharded": (sharded, 300),
    "resume": (resume, 240),
    "stream": (stream, 120),
    "ipc": (ipc, 240),
    "learning": (learning, 400),
    "recipes": (recipes, 400),
    "engine": (engine, 580),
    "types": (types, 580),
}
"""The function and the time limit, in seconds, of each stage."""
