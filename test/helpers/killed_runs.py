"""A training run that is killed and resumed, again and again, in processes forked from one that has all imported.

Everything in it is a function of its weights, its data and random numbers: the engine's answers, too. So a resumed run
must end with the weights of one that was never killed, bit by bit.

    python killed_runs.py FOLDER NUM_KILLS SEED
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import os
import random
import signal
import sys
import traceback
import types
import zlib
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console

from llmrl._utils.files import write_folder_atomically
from llmrl.collectors import LLMCollector
from llmrl.config.model import ModelConfig
from llmrl.config.sections import (
    EnvConfig,
    EvalConfig,
    GRPOCollectConfig,
    GRPOConfig,
    GRPOTrainConfig,
    RunConfig,
)
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import TemplateRenderer
from llmrl.runs import exports
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.run_folder import holds_run
from llmrl.testing import ScriptedEngine, ensure_embedded_model
from llmrl.trainer import make_optimizer
from llmrl.transforms import RubricReward

NUM_STEPS = 5
SCORES = (0.1, 0.2, 1 / 3, 0.3, 1 / 3, 0.3, 0.9)  # of steps: patience is over before the last
SUMS = [{"query": f"{number} + 1 =", "answer": str(number + 1)} for number in range(9)]


def checksum(model):
    return int(sum(parameter.double().sum() for parameter in model.parameters()).mul(1e6))


class Scheme:
    """Weights reach the engine as their sum."""

    def __init__(self, served):
        self.served = served

    def create_sender(self):
        return self

    def register_model(self, model):
        self.model = model

    def init_all_workers_group(self, metadata, engine):
        self.engine = engine

    def update_weights(self, weights=None):
        self.served["checksum"] = checksum(self.model)
        self.engine.policy_version += 1
        return self.engine.policy_version

    def start_update(self):
        update = Future()
        update.set_result(self.update_weights())
        return update

    def shutdown(self):
        pass


def is_near(completion, answer):
    return 1.0 - abs(int(completion) - int(answer)) / 10 if completion.isdigit() else 0.0


def weights_of(model):
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


class ExportedLine:
    """In place of a model in Hugging Face format, which a line has none of."""

    is_sharded = False

    def __init__(self, model):
        self.model = model

    def copy_to_host(self):
        self.model = copy.deepcopy(self.model)


def write_weights(exported, path, *_):
    text = json.dumps(weights_of(exported.model))
    write_folder_atomically(path, lambda folder: (folder / "weights.json").write_text(text))


@mock.patch.multiple(exports, ExportedModel=ExportedLine, write_model=write_weights)
def train(
    path,
    renderer,
    *,
    resume,
    max_staleness=None,
    make_scheme=Scheme,
    answers=("",),
    on_step=lambda step, batch: None,
    sums=SUMS,
    num_steps=NUM_STEPS,
    target_reward=None,
    evaluation=None,
    score=None,
    **entries,
):
    """A loop with everything that has a state: random numbers in the loop, moments, a schedule, evaluations.

    Args:
        path, resume: of the run.
        renderer: of its conversations.
        max_staleness: of the collector.
        make_scheme: of its weights.
        answers: what the engine says in turn; "" is a random number that depends on the weights.
        on_step: called with step and batch in the midst of each step.
        sums: the dataset.
        num_steps, target_reward: of the whole run.
        evaluation: how its configuration has it.
        score: of a step, recorded as `eval/score` unless it is None.
        entries: of the configuration.

    Returns:
        What ended the loop.
    """
    cfg = GRPOConfig(
        run=RunConfig(path=str(path), trackers=[], checkpoint_every=2),
        model=ModelConfig(path="a-line"),
        env=EnvConfig(name="sums"),
        collect=GRPOCollectConfig(groups_per_batch=2, group_size=3, max_new_tokens=64, max_staleness=max_staleness),
        train=GRPOTrainConfig(num_steps=num_steps, learning_rate=0.1, schedule="linear", warmup_steps=2),
        eval=evaluation or EvalConfig(every=2),
        resume=resume,
        **entries,
    )
    turns = itertools.cycle(answers)
    with Run(cfg, console=Console(file=io.StringIO())) as run:
        model = torch.nn.Linear(3, 1)
        served = {"checksum": checksum(model)}

        def answer(prompt_ids):
            return next(turns) or f"{(random.randrange(10) + served['checksum']) % 10}<|im_end|>"

        engine = ScriptedEngine(answer, encode=renderer.encode, record_requests=False)
        policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": 64})
        optimizer, schedule = make_optimizer(
            model, learning_rate=0.1, schedule="linear", warmup_steps=2, num_steps=num_steps
        )
        env = DatasetChatEnv(sums, repeats=3, shuffle=True).append_transform(RubricReward(is_near))
        held_out = DatasetChatEnv(SUMS[:2], repeats=2).append_transform(RubricReward(is_near))
        collector = run.enter(
            LLMCollector(
                env,
                policy=policy,
                groups_per_batch=2,
                max_staleness=max_staleness,
                weight_sync_schemes={"policy": make_scheme(served)},
                postproc=MCAdvantage(grpo_size=3),
            )
        )
        evaluator = run.enter(Evaluator({"sums": held_out}, policy))
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        run.track(collector, engine, tokenizer=renderer.tokenizer, **parts)

        def evaluate(step):
            measured = None if score is None else score(step)
            run.evaluate(step, evaluator, **({} if measured is None else {"score": measured}))

        evaluate(0)
        for step, batch in run.steps(num_steps, target_reward=target_reward):
            on_step(step, batch)
            for row in batch.unbind(0):
                features = torch.rand(4, 3) * row["tokens", "full"][-4:, None] / 1000
                (row["advantage"].mean() * model(features).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with run.timer("sync"):
                version = run.follow(collector.start_update(model))
            run.log(step, {"is_skipped": 0.0}, version=version)
            if run.is_due(step, cfg.eval.every):
                evaluate(step)
    (path / "weights.json").write_text(json.dumps({"weights": weights_of(model), "version": engine.policy_version}))
    return run.why_stopped


def kill_at(count, counted):
    """Kill this process at the `count`-th call of a function of the run's, or of what writes files, on any thread."""
    counted["calls"] = 0

    def counting(function):
        @functools.wraps(function)
        def call(*arguments, **options):
            counted["calls"] += 1
            if counted["calls"] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    modules = [module for name, module in sys.modules.items() if name.startswith("llmrl.runs.")]
    owners = {value for module in modules for value in vars(module).values() if is_of_runs(value, type)}
    for owner in [*modules, *owners]:
        for name, value in list(vars(owner).items()):
            if is_of_runs(value, types.FunctionType) and not name.startswith("__"):
                setattr(owner, name, counting(value))
    for owner, name in ((os, "fsync"), (os, "pwrite"), (zlib, "crc32"), (Path, "replace"), (Path, "unlink")):
        setattr(owner, name, counting(getattr(owner, name)))


def is_of_runs(value, kind):
    """Of what is called for each value of a file there would be most moments: what writes the file is counted."""
    module = value.__module__ if isinstance(value, kind) else ""
    return module.startswith("llmrl.runs.") and module != "llmrl.data.state_file"


def forked(path, renderer, *, resume, count=-1):
    """Train in a process of its own; its exit status."""
    if (pid := os.fork()) == 0:
        counted: dict[str, int] = {}
        code = 1
        try:
            kill_at(count, counted)
            evaluation = EvalConfig(every=1, metric="eval/score", patience=3)
            options = {"num_steps": len(SCORES) - 1, "evaluation": evaluation, "score": SCORES.__getitem__}
            train(path, renderer, resume=resume, **options)
            (path / "calls").write_text(str(counted["calls"]))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def main():
    folder, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
    assert forked(folder / "whole", renderer, resume=False) == 0
    num_calls, choose = int((folder / "whole/calls").read_text()), random.Random(seed)
    for place in range(num_kills):
        # Every other one is killed again as it resumes, where that moment comes before its end.
        path = folder / f"killed-{place}"
        moments = [choose.randrange(1, num_calls) for _ in range(1 + place % 2)]
        for count in (*moments, -1):
            status = forked(path, renderer, resume=holds_run(path), count=count)
            assert status in (0, signal.SIGKILL), (moments, status)
            if status == 0:
                break
        print(moments)


if __name__ == "__main__":
    main()
