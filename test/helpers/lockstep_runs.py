"""Runs on two ranks that tell each other each collective before they take it: `lockstep_runs.py FOLDER [NAME ...]`."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
from parsed_tokenizers import parse_once
from sharded_runs import make_env, play, ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

import llmrl
from llmrl.config.model import LoRAEntries, ModelConfig
from llmrl.config.ranks import broadcast_from_rank0, this_rank
from llmrl.config.sections import (
    EnvConfig,
    EvalConfig,
    ExportConfig,
    GRPOCollectConfig,
    GRPOConfig,
    GRPOTrainConfig,
    RunConfig,
)
from llmrl.runs.run import NothingLearned, Run
from llmrl.scripts import grpo as script
from llmrl.testing import make_tiny_model

PACKAGE = Path(llmrl.__file__).parent
BEST = {"every": 1, "metric": "eval/held-out/reward"}


class Lockstep(TorchDispatchMode):
    """Fails where this rank takes another collective than the other rank, which would hang both."""

    def __init__(self, other_rank):
        super().__init__()
        self.other_rank, self.taken = other_rank, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if DTensor in types:
            return NotImplemented  # what it is made of comes here, too
        is_local = function.name().endswith(("::wait_tensor", "::_wrap_tensor_autograd"))
        if function.namespace in ("c10d", "_c10d_functional") and not is_local:
            self.say(f"{function.name()} in {own_caller()}")
        return function(*arguments, **options or {})

    def say(self, what):
        self.taken.append(what)
        self.other_rank.send(what)
        theirs = self.other_rank.recv()
        assert theirs == what, f"this rank takes {what}, the other one {theirs}"


def own_caller():
    """The function of llmrl that takes a collective."""
    frame = sys._getframe(1)
    while PACKAGE not in Path(frame.f_code.co_filename).parents or frame.f_code is broadcast_from_rank0.__code__:
        frame = frame.f_back
    return frame.f_code.co_qualname


def train(path, model, *, num_steps=2, checkpoint_every=9, evaluation=None, export=None, lora=None, **entries):
    """A run as `llmrl.train` makes it; an engine that the run starts is on the first rank alone."""
    cfg = GRPOConfig(
        run=RunConfig(path=str(path), trackers=[], checkpoint_every=checkpoint_every),
        model=ModelConfig(path=model, lora=LoRAEntries(rank=lora)),
        env=EnvConfig(name="train"),
        collect=GRPOCollectConfig(groups_per_batch=1, group_size=4, max_new_tokens=8),
        eval=EvalConfig(**(evaluation or {})),
        export=ExportConfig(every=export),
        train=GRPOTrainConfig(num_steps=num_steps, learning_rate=1e-4, token_budget=24, bin_length=24),
        **entries,
    )
    held_out = {"held-out": make_env("held-out", 1)} if evaluation else {}
    with contextlib.suppress(NothingLearned):
        play(cfg, model, held_out)


@contextlib.contextmanager
def interrupted_in_step_1():
    """Ctrl-C, which every rank's process is sent, in the midst of the first step; others than the first ignore it."""

    def interrupt(batch, loss, *, seed, **options):
        if seed == 1 and this_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return real(batch, loss, seed=seed, **options)

    real = script.minibatches
    with mock.patch.object(script, "minibatches", interrupt):
        yield


@contextlib.contextmanager
def unlearnable():
    """All rewards are equal, so that the first rank finds that there is nothing to train on."""

    def half(completion):
        return 0.5

    with (
        mock.patch("sharded_runs.length", half),
        mock.patch("llmrl.collectors.base.SIGNAL_PATIENCE", 2),
        mock.patch("llmrl.collectors.scheduler.SIGNAL_PATIENCE", 2),
    ):
        yield


@contextlib.contextmanager
def collective_on_one_rank():
    """What the test is for: something that all ranks do, in a place where one rank alone comes."""

    def end(self):
        real(self)
        if this_rank() == 0:
            broadcast_from_rank0("an afterthought")

    real = Run._end
    with mock.patch.object(Run, "_end", end):
        yield


RUNS = {
    # folder, entries, what happens meanwhile
    "plain": ("plain", {}, contextlib.nullcontext),
    "replayed": ("plain", {"resume": True, "num_steps": 3}, contextlib.nullcontext),
    "everything": ("all", {"checkpoint_every": 1, "evaluation": BEST, "export": 1}, contextlib.nullcontext),
    "resumed": (
        "all",
        {"checkpoint_every": 1, "evaluation": BEST, "export": 1, "resume": True, "num_steps": 3},
        contextlib.nullcontext,
    ),
    "adapters": ("adapters", {"checkpoint_every": 2, "lora": 4, "export": 2}, contextlib.nullcontext),
    "interrupted": ("interrupted", {"checkpoint_every": 1}, interrupted_in_step_1),
    "unlearnable": ("unlearnable", {"evaluation": BEST}, unlearnable),
    "planted": ("planted", {}, collective_on_one_rank),
}


def main():
    """All runs; their exit codes as one line of JSON, and the collectives of each in a file."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    os.environ["STORE"] = str(folder / "store")
    model = str(folder / "tiny")
    ranks(1, lambda rank: make_tiny_model(model))
    AutoTokenizer.from_pretrained(model)
    gc.freeze()  # what is forked does not look through all that was imported
    codes = {}
    for name in sys.argv[2:] or RUNS:
        path, entries, happening = RUNS[name]
        ends = multiprocessing.Pipe()

        def work(rank, name=name, path=path, entries=entries, happening=happening, ends=ends):
            if rank > 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `start_ranks` has it
            with Lockstep(ends[rank]) as lockstep, happening():
                train(folder / path, model, **entries)
            lockstep.say("the end")
            (folder / f"{name}-{rank}.json").write_text(json.dumps(lockstep.taken))

        codes[name] = ranks(2, work)
    print(json.dumps(codes))


if __name__ == "__main__":
    with parse_once():
        main()
