"""Training runs on several ranks, in processes forked from one that has all imported: `sharded_runs.py FOLDER`."""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  # imported once, here
import peft  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from causal_types import tiny_config
from loss_batches import ragged_batch, tiny_model, with_lora
from models_with_images import make_checkpoint
from parsed_tokenizers import parse_once
from rich.console import Console
from tensordict import lazy_stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmrl import DatasetChatEnv, RubricReward
from llmrl.config.model import LoRAEntries, ModelConfig
from llmrl.config.ranks import this_rank
from llmrl.config.sections import (
    EnvConfig,
    EvalConfig,
    ExportConfig,
    GRPOCollectConfig,
    GRPOConfig,
    GRPOTrainConfig,
    RunConfig,
)
from llmrl.data.keys import LOSS_MASK_KEY, TOKENS_KEY
from llmrl.objectives import GRPOLoss, GSPOLoss, SFTLoss
from llmrl.replay.fork import fork
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.step import as_json, replay_steps
from llmrl.replay.what_if import what_if
from llmrl.runs.run import Run
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.scripts import grpo as script
from llmrl.testing import ScriptedEngine, make_tiny_model
from llmrl.trainer import LoRAConfig, TransformersWrapper, load_model, make_optimizer, shard_model, train_step

NUM_STEPS = 10
M_MMAP_THRESHOLD = -3  # of malloc.h
ADAPTERS = {"lora": 4}
REFERENCE = {"kl_to_ref_coeff": 0.05, "num_minibatches": 2, "gradient_checkpointing": True}
LOSSES = {
    1: ["grpo", "gspo", "sft", "lora", "float32", "bfloat16", "float16"],
    2: ["gspo", "lora", "bfloat16", "float16"],
    4: ["grpo", "sft"],
}


class Engine(ScriptedEngine):
    """Its answers are a function of the prompt, the version, and how often both were asked for."""

    def __init__(self, model):
        self.tokenizer, self.asked = AutoTokenizer.from_pretrained(model), Counter()
        super().__init__(self.answer, encode=self.tokenizer.encode, record_requests=False)

    def answer(self, prompt_ids):
        key = (tuple(prompt_ids), self.policy_version)
        self.asked[key] += 1
        number = sum(prompt_ids) + 7 * self.policy_version + self.asked[key]
        return [3 + number * place % 50 for place in range(1, 3 + number % 5)]

    def get_tokenizer(self):
        return self.tokenizer

    def load_weights(self, weights, *, version=None):
        self.policy_version += 1
        self.sum = sum(float(tensor.double().sum()) for tensor in weights.values())
        return self.policy_version


def length(completion):
    return len(completion) % 5 / 5


def make_env(name, repeats):
    env = DatasetChatEnv([f"{number} + 1 =" for number in range(6)], repeats=repeats, name=name, shuffle=True)
    return env.append_transform(RubricReward(length))


def train(path, model, *, resume=False, lora=None, keep_batches=False, **entries):
    """A run as `llmrl.train` makes it, in small micro-batches."""
    settings = {"token_budget": 24, "bin_length": 24, "learning_rate": 1e-4, "schedule": "linear"} | entries
    cfg = GRPOConfig(
        run=RunConfig(path=str(path), trackers=[], checkpoint_every=2, keep_batches=keep_batches),
        model=ModelConfig(path=model, lora=LoRAEntries(rank=lora)),
        env=EnvConfig(name="train"),
        collect=GRPOCollectConfig(groups_per_batch=2, group_size=4, max_new_tokens=8),
        eval=EvalConfig(every=3, metric="eval/held-out/reward"),
        export=ExportConfig(every=2, save_total_limit=1, max_shard_size="1MB"),
        train=GRPOTrainConfig(num_steps=5, **settings),
        resume=resume,
    )
    play(cfg, model, {"held-out": make_env("held-out", 1)})


def play(cfg, model, held_out):
    """The script's loop, with an engine that is lent to it."""
    with Run(cfg, console=Console(file=io.StringIO())) as run:
        script.grpo(cfg, run, TrainerDevice(cfg), run.lend(Engine(model)), make_env("train", 4), held_out)


def kill_in_step(step):
    """Kill this process in the midst of a step."""
    real = script.minibatches

    def call(batch, loss, *, seed, **options):
        for place, part in enumerate(real(batch, loss, seed=seed, **options)):
            if seed == step and place == options["num_minibatches"] - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield part

    script.minibatches = call


def replay(path):
    """Compute all steps again on the ranks of the run, and a step with another rate; rank 0 writes what differs."""
    run = RecordedRun(path)
    quantities = ["advantages", "log_probs", "metrics", "weights"]
    found = {one.step: as_json(one) for one in replay_steps(run, run.steps, quantities=quantities)}
    [from_checkpoint] = replay_steps(run, run.steps[-1:], quantities=quantities)
    found["from checkpoint"] = as_json(from_checkpoint)
    found["what if"] = what_if(run, 3, last_step=4, changes=["train.learning_rate=5e-5"]).as_json()
    fork(run, 3, path.with_name("forked"))
    if this_rank() == 0:
        path.with_suffix(".json").write_text(json.dumps(found))


def ranks(num_ranks, work):
    """Fork so many ranks that work; when one dies all end, as under torchrun. Their exit codes, in the order of it."""
    store = Path(os.environ["STORE"])
    store.unlink(missing_ok=True)
    children = []
    for rank in range(num_ranks):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 1
        try:
            torch.set_num_threads(1)  # makes torch's pool anew, before two threads do so at once, which it cannot bear
            if num_ranks > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
            work(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    codes = []
    while children:
        pid, status = os.wait()
        children.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes


def losses(folder, num_ranks):
    """Ten steps of each kind of loss, with and without adapters; the weights after them."""

    def work(rank):
        results = {}
        for name in LOSSES[num_ranks]:
            model = tiny_model(is_tied=name == "grpo")
            model = with_lora(model, ["q_proj", "down_proj"]) if name == "lora" else model
            if name == "sft":
                model.gradient_checkpointing_enable()
            dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
            policy = TransformersWrapper(model, generate=False, token_budget=24, bin_length=24, autocast_dtype=dtype)
            if num_ranks > 1:
                shard_model(model, compute_dtype=dtype)
            loss = {"gspo": GSPOLoss, "sft": SFTLoss}.get(name, GRPOLoss)(policy)
            optimizer, schedule = make_optimizer(
                model, learning_rate=1e-4, weight_decay=0.01, schedule="cosine", warmup_steps=3, num_steps=NUM_STEPS
            )
            for seed in range(NUM_STEPS):
                report = train_step(loss, ragged_batch(seed, num_rows=9), optimizer)
                schedule.step()
            assert report.num_micro_batches > 2
            whole = {key: getattr(p, "full_tensor", lambda p=p: p)() for key, p in model.named_parameters()}
            results[name] = {key: tensor.detach().clone() for key, tensor in whole.items()}
        if rank == 0:
            torch.save(results, folder / f"losses-{num_ranks}.pt")

    return ranks(num_ranks, work)


def loading(folder):
    """Load checkpoints sharded, and whole; what rank 0 finds to differ, by type and adapters."""
    types = ["llama", "gemma3_text", "qwen3_moe", "qwen3_5"]

    def save(rank):
        for name in types:
            if name == "qwen3_5":
                make_checkpoint(name, folder / name)
            else:
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(tiny_config(name)).to(torch.bfloat16).save_pretrained(folder / name)

    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        batch = ragged_batch(0)
        ids, masks = ([row[key] for row in batch.unbind(0)] for key in (TOKENS_KEY, LOSS_MASK_KEY))
        found = {}
        for name in types:
            for rank_of_adapters in (None, 2) if name != "qwen3_moe" else (None,):
                options = {"gradient_checkpointing": True}
                if rank_of_adapters is not None:
                    options["lora"] = LoRAConfig(rank=rank_of_adapters)
                models, drawn, log_probs = [], [], []
                for where in ({}, {"mesh": mesh}):
                    torch.manual_seed(1)
                    models.append(load_model(folder / name, **options, **where))
                    drawn.append(float(torch.rand(1)))
                    policy = TransformersWrapper(models[-1], generate=False)
                    packed = policy.pack([one % 40 for one in ids], masks)
                    log_probs.append(torch.cat([policy.packed_log_probs(one)[0].detach() for one in packed]))
                whole, sharded = (dict(model.named_parameters()) for model in models)
                assert all(isinstance(one, DTensor) for one in sharded.values()), name
                gathered = {key: one.full_tensor() for key, one in sharded.items()}
                found[f"{name} {rank_of_adapters}"] = {
                    "classes": len({type(model) for model in models}) - 1,
                    "names": len(whole.keys() ^ gathered.keys()),
                    "weights": sum(not torch.equal(one, gathered[key]) for key, one in whole.items()),
                    "trained": sum(one.requires_grad != sharded[key].requires_grad for key, one in whole.items()),
                    "drawn": abs(drawn[0] - drawn[1]),
                    "log_probs": round(float((log_probs[0] - log_probs[1]).abs().max()), 5),
                }
        if rank == 0:
            (folder / "loading.json").write_text(json.dumps(found))

    return ranks(1, save) + ranks(2, work)


# Where weights, activations, or the head are most of what is held.
MEMORY = {
    "weights": {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 5, "vocab_size": 64},
    "activations": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 64},
    "head": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 60_000},
}
MEMORY["checkpointing"] = MEMORY["activations"]
NUM_TOKENS = {"weights": 64, "activations": 2048, "checkpointing": 2048, "head": 512}


def memory(folder, name, num_ranks):
    """A step of a larger model on one long row; bytes that the first rank holds at most beside what it began with."""

    def work(rank):
        # Memory that is given up is given back, so that what a process has is what it holds.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before the fork would be reused, and not be counted
        before = in_use("VmRSS")
        model = LlamaForCausalLM(LlamaConfig(**MEMORY[name], num_attention_heads=8, tie_word_embeddings=False))
        if name == "checkpointing":
            model.gradient_checkpointing_enable()
        length = NUM_TOKENS[name]
        policy = TransformersWrapper(model, generate=False, token_budget=length, bin_length=length)
        if num_ranks > 1:
            shard_model(model)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
        optimizer, _ = make_optimizer(model, learning_rate=1e-4)
        row = ragged_batch(0)[:1].unbind(0)[0]
        mask = torch.arange(length) > 0
        row["tokens", "full"] = torch.arange(length) % 41
        row["masks"] = {"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)}
        row["log_probs", "full"], row["policy_versions", "full"] = -1.0 * mask, 0 * mask
        for _ in range(1 if name == "weights" else 2):  # from the second on there are moments
            report = train_step(GRPOLoss(policy), lazy_stack([row]), optimizer)
            assert report.num_trained_tokens == length - 1
        if rank == 0:
            (folder / f"memory-{name}-{num_ranks}").write_text(str(in_use("VmHWM") - before))

    return ranks(num_ranks, work)


def in_use(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main():
    """All runs; what became of their processes as one line of JSON."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    os.environ["STORE"] = str(folder / "store")
    model = str(folder / "tiny")

    def save_model(rank):
        """Save a model with a tied head, as small ones have."""
        config = AutoConfig.from_pretrained(make_tiny_model(model), tie_word_embeddings=True)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(model)

    ranks(1, save_model)  # what loads a model starts threads, and no process is forked from one that has them
    AutoTokenizer.from_pretrained(model)
    gc.freeze()  # what is forked does not look through all that was imported
    codes = {f"losses-{num_ranks}": losses(folder, num_ranks) for num_ranks in (1, 2, 4)}

    codes["loading"] = loading(folder)

    def run(name, num_ranks, **entries):
        codes[name] = ranks(num_ranks, lambda rank: train(folder / name, model, **entries))

    def killed(name, num_ranks, step, **entries):
        def work(rank):
            if rank == num_ranks - 1:
                kill_in_step(step)
            train(folder / name, model, **entries)

        codes[f"{name} killed on {num_ranks}"] = ranks(num_ranks, work)

    run("reference", 1, **REFERENCE)
    killed("reference-resumed", 2, 4, **REFERENCE)
    run("reference-resumed", 4, resume=True, **REFERENCE)
    run("lora", 1, **ADAPTERS)
    killed("lora-resumed", 1, 3, **ADAPTERS)
    killed("lora-resumed", 2, 5, resume=True, **ADAPTERS)
    run("lora-resumed", 1, resume=True, **ADAPTERS)
    run("replayed", 2, keep_batches=True, **REFERENCE)
    codes["replay"] = ranks(2, lambda rank: replay(folder / "replayed"))
    for num_ranks in (1, 2, 4):
        codes[f"memory {num_ranks}"] = memory(folder, "weights", num_ranks)
    for name in ("activations", "checkpointing", "head"):
        codes[f"memory {name}"] = memory(folder, name, 1)
    print(json.dumps(codes))


if __name__ == "__main__":
    with parse_once():
        main()
