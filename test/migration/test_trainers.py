"""TorchRL's trainers run over a collector of llmrl, with their hooks, loggers and checkpoints."""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch
from torchrl.data import LazyStackStorage, RayReplayBuffer, ReplayBuffer, SamplerWithoutReplacement
from torchrl.record.loggers import CSVLogger
from torchrl.trainers import LogScalar, MixedPrecisionOptimizationStepper, Trainer
from torchrl.trainers.algorithms.grpo import GRPOTrainer
from transformers import AutoModelForCausalLM
from warm_processes import run_warm

from llmrl.collectors import LLMCollector
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import GRPOLoss, MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.trainer import TransformersWrapper
from llmrl.transforms import RubricReward

pytestmark = pytest.mark.usefixtures("takes_long")
ANSWERS = ["15<|im_end|>", "no<|im_end|>"]


def is_right(completion):
    return float(completion == "15")


@pytest.fixture
def make_collector(renderer):
    """A collector of two prompts with four answers each, every second of which is right."""
    collectors = []

    def make(**arguments):
        env = DatasetChatEnv(["7 + 8 =", "8 + 7 ="], repeats=4).append_transform(RubricReward(is_right))
        policy = LLMWrapperBase(ScriptedEngine(ANSWERS, encode=renderer.encode), renderer=renderer)
        collectors.append(
            LLMCollector(
                env, **{"policy": policy, "groups_per_batch": 2, "postproc": MCAdvantage(grpo_size=4), **arguments}
            )
        )
        return collectors[-1]

    yield make
    for collector in collectors:
        collector.shutdown()


@pytest.fixture
def policy(tiny_model_path):
    return TransformersWrapper(
        AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32), generate=False
    )


class Sender:
    """Takes the place of an engine's sender, and counts what it is asked."""

    num_updates = 0

    def update_weights(self):
        self.num_updates += 1


def logged(folder, name):
    [path] = folder.rglob(f"{name}.csv")
    return [float(line.split(",")[1]) for line in path.read_text().splitlines()]


def weights_of(policy):
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}


@pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")
@pytest.mark.parametrize("has_buffer", [False, True])
def test_grpo_trainer_trains_syncs_logs_and_goes_on_from_its_file(make_collector, policy, tmp_path, has_buffer):
    first = weights_of(policy)
    sender = Sender()

    def make_trainer(collector, policy):
        arguments = {}
        if has_buffer:
            arguments = {
                "replay_buffer": ReplayBuffer(
                    storage=LazyStackStorage(64), sampler=SamplerWithoutReplacement(), batch_size=4
                ),
                "empty_replay_buffer_on_weight_update": True,
            }
        loss = GRPOLoss(policy)
        return GRPOTrainer(
            collector=collector,
            total_frames=24,
            optim_steps_per_batch=None if has_buffer else 2,
            loss_module=loss,
            optimizer=torch.optim.AdamW(loss.parameters(), lr=1e-3),
            weight_sync_sender=sender,
            logger=CSVLogger("run", log_dir=str(tmp_path)),
            log_interval=1,
            save_trainer_interval=1,
            save_trainer_file=tmp_path / "trainer.pt",
            progress_bar=False,
            **arguments,
        )

    collector = make_collector()
    seen = []
    collector.set_post_collect_hook(lambda batch: seen.append(batch["next", "reward"].flatten().tolist()))
    trainer = make_trainer(collector, policy)
    trainer.train()

    assert [sorted(rewards) for rewards in seen] == [[0.0] * 4 + [1.0] * 4] * 3
    assert trainer.collected_frames == 24 and sender.num_updates == 3
    rewards = logged(tmp_path, "reward_mean")  # of a batch, or of the minibatches of a buffer
    assert all(0 <= reward <= 1 for reward in rewards) and (has_buffer or rewards == [0.5] * 3)
    assert all(torch.isfinite(weight).all() for weight in weights_of(policy).values())
    assert any(not torch.equal(weight, first[name]) for name, weight in weights_of(policy).items())

    other = TransformersWrapper(copy.deepcopy(policy.model), generate=False)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.zero_()
    resumed = make_trainer(make_collector(), other)
    resumed.load_from_file(tmp_path / "trainer.pt", weights_only=False)
    assert resumed.collected_frames == 24
    assert all(torch.equal(weight, weights_of(policy)[name]) for name, weight in weights_of(other).items())
    drawn = {row["rollout", "group_id"] for row in resumed.collector.next().unbind(0)}
    assert drawn == {"train/3/6", "train/3/7"} or not drawn & {"train/0/0", "train/0/1"}  # not from the beginning


def test_trainer_runs_its_hooks_over_a_collector(make_collector, policy, tmp_path):
    loss = GRPOLoss(policy)
    trainer = Trainer(
        collector=make_collector(),
        total_frames=16,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimization_stepper=MixedPrecisionOptimizationStepper(torch.optim.AdamW(loss.parameters(), lr=1e-3)),
        logger=CSVLogger("run", log_dir=str(tmp_path)),
        log_interval=1,
        progress_bar=False,
    )
    trainer.register_op("pre_steps_log", LogScalar(key=("next", "reward"), logname="reward"))
    shapes = []
    trainer.register_op("batch_process", lambda batch: shapes.append(batch.shape) or batch)
    trainer.train()
    assert shapes == [(8,), (8,)] and logged(tmp_path, "reward") == [0.5, 0.5]
    assert trainer.collector.init_random_frames == 0


def test_a_ray_replay_buffer_of_torchrls_completes_the_groups_of_a_collector(make_collector, policy, ray_cluster):
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, 64),
        transform_factory=partial(MCAdvantage, grpo_size=4),
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    try:
        collector = make_collector(postproc=None, replay_buffer=buffer)
        assert next(iter(collector)) is None and len(buffer) == 8
        rows = buffer.sample()
        assert rows["advantage"].abs().flatten().tolist() == pytest.approx([0.75**0.5] * 4, abs=1e-5)
        loss = GRPOLoss(policy)(rows)
        loss.loss_objective.backward()
        assert torch.isfinite(loss.loss_objective) and rows.batch_size == (4,)
    finally:
        buffer.close()


def test_a_collector_that_is_dropped_leaves_nothing_pending(model_path, own_programs):
    program = f"""
from transformers import AutoTokenizer
from llmrl.collectors import LLMCollector
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import TemplateRenderer
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward
def one(completion):
    return 1.0
renderer = TemplateRenderer(AutoTokenizer.from_pretrained({str(model_path)!r}))
engine = ScriptedEngine(["15<|im_end|>"], encode=renderer.encode, latency_s=0.05)
env = DatasetChatEnv(["7 + 8 ="], repeats=2).append_transform(RubricReward(one))
collector = LLMCollector(
    env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1, max_staleness=4
)
collector.next()
print("batch")
"""
    ended = run_warm([sys.executable, "-c", program])
    assert ended.stdout.endswith("batch\n") and ended.returncode == 0, ended.stderr
    assert "was destroyed but it is pending" not in ended.stderr
