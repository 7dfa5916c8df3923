"""Every configuration of the scripts composes, names what is read, gives its reasons, and runs dry."""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from loss_batches import flat, near_policy, ragged_batch
from omegaconf import OmegaConf
from rich.console import Console

from llmrl.envs import DatasetChatEnv
from llmrl.objectives import GRPOLoss, MCAdvantage, TopKRewardSelector
from llmrl.runs.dry_run import as_dry_run, with_differing_rewards
from llmrl.runs.run_setup import TrainerDevice, compute_dtype, start_engine, sync_scheme, task_env
from llmrl.runs.training_run import LossUpdate, NothingLearned, TrainingRun
from llmrl.trainer import TrainStepReport
from llmrl.transforms import RubricReward

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "sota-implementations"
FOLDER = SCRIPTS / "config"
ALGORITHMS = ("grpo-sync", "grpo-async", "expert-iteration-sync", "expert-iteration-async")
TASKS = sorted(path.stem for path in FOLDER.glob("task/*.yaml"))
HARDWARE = sorted(path.stem for path in FOLDER.glob("hardware/*.yaml"))
READ = {
    match
    for path in [*ROOT.glob("llmrl/runs/training_run.py"), *ROOT.glob("llmrl/runs/run_setup.py")]
    for match in re.findall(r"\bcfg\.(\w+)\.(\w+)", path.read_text())
}
# Every algorithm, task and hardware at least once.
DRY_RUNS = (
    ("grpo-sync", "gsm8k", "gpu1"),
    ("grpo-async", "ifeval", "gpu8"),
    ("expert-iteration-sync", "math", "ray-cluster"),
    ("expert-iteration-async", "countdown", "cpu"),
    ("grpo-sync", "reasoning-gym", "cpu"),
    ("grpo-async", "search", "gpu1"),
)


def composed(algorithm, *overrides):
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose(algorithm, list(overrides))


def module_of(name):
    """What a method's scripts share."""
    path = SCRIPTS / name / f"{name.replace('-', '_')}_run.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_and_configuration_is_known_here():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted((*ALGORITHMS, "common"))
    scripts = {path.stem for path in SCRIPTS.glob("*/*.py")}
    assert scripts == {*ALGORITHMS, "grpo_run", "expert_iteration_run"}
    assert {task for _, task, _ in DRY_RUNS} | {"addition"} == set(TASKS)
    assert {hardware for _, _, hardware in DRY_RUNS} == set(HARDWARE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_composes_with_every_task_and_hardware(algorithm):
    assert len(READ) > 30
    for choice in [f"task={task}" for task in TASKS] + [f"hardware={hardware}" for hardware in HARDWARE]:
        cfg = OmegaConf.to_container(composed(algorithm, choice), resolve=False)
        missing = [f"{group}.{name}" for group, name in READ if name not in cfg[group]]
        assert not missing, choice
        assert cfg["run"]["path"].startswith(f"runs/{algorithm}-")


def test_every_entry_is_read_somewhere():
    sources = [*SCRIPTS.glob("*/*.py"), ROOT / "llmrl/runs/training_run.py", ROOT / "llmrl/runs/run_setup.py"]
    text = "\n".join(path.read_text() for path in sources)
    for algorithm in ALGORITHMS:
        cfg = OmegaConf.to_container(composed(algorithm), resolve=False)
        entries = [(group, name) for group in cfg if isinstance(cfg[group], dict) for name in cfg[group]]
        unread = [f"{group}.{name}" for group, name in entries if f".{name}" not in text and f'"{name}"' not in text]
        assert not unread


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_number_has_a_reason(path):
    lines = path.read_text().splitlines()
    bare = [line for line in lines if re.match(r"\s+\w+: -?\.?\d", line) and not re.search(r"# \w", line)]
    assert not bare


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*/*.py")), ids=lambda path: path.name)
def test_scripts_are_short_and_use_the_public_library(path):
    text = path.read_text()
    assert len(text.splitlines()) < 200
    assert not re.search(r"from llmrl[\w.]* import .*\b_\w", text)


def test_environments_come_from_the_configuration():
    cfg = composed("grpo-sync", "task=countdown", "env.num_eval_problems=5", "env.num_eval_samples=3")
    prompts = [task_env(cfg, part).base_env.prompts for part in ("train", "eval")]
    assert [(len(one.items), one.num_samples) for one in prompts] == [(10_000, 16), (5, 3)]
    assert len(prompts[0].items[0]["numbers"]) == 3
    asked = [{item["query"] for item in one.items} for one in prompts]
    assert not asked[0] & asked[1]
    with pytest.raises(TypeError, match="num_count"):
        task_env(composed("grpo-sync", "task=countdown", "+env.options.num_counts=3"), "train")


def test_hardware_reaches_the_engine(monkeypatch):
    given = {}
    for starts in ("AsyncVLLM", "EngineReplicas"):
        monkeypatch.setattr(
            f"llmrl.runs.run_setup.{starts}.from_pretrained",
            lambda model, starts=starts, **options: given.update(options, starts=starts),
        )
    start_engine(composed("grpo-async", "hardware=ray-cluster", "ray.address=10.0.0.1:6379"), "model")
    assert given["starts"] == "EngineReplicas" and given["num_replicas"] == 15
    assert given["weight_transfer"] is True and given["use_ray"]
    assert given["ray_options"] == {"num_cpus": 1, "num_gpus": 1} and given["ray_init_config"] == {
        "address": "10.0.0.1:6379"
    }
    # A Ray that happens to run on this machine is not joined unasked.
    start_engine(composed("grpo-async", "hardware=gpu8"), "model")
    assert given["num_replicas"] == 7 and given["ray_init_config"]["address"] == "local"
    start_engine(composed("grpo-sync", "hardware=gpu1", "engine.tensor_parallel_size=2"), "model")
    assert given["weight_transfer"] == "ipc" and given["gpu_memory_utilization"] == 0.4
    assert given["engine_args"] == {"tensor_parallel_size": 2} and given["starts"] == "AsyncVLLM"
    with pytest.raises(ValueError, match=r"sync\.transport must be one of direct, ipc, files; got 'nccl'"):
        start_engine(composed("grpo-sync", "sync.transport=nccl"), "model")
    with pytest.raises(ValueError, match=r"needs engine\.use_ray=true"):
        start_engine(composed("grpo-sync", "collect.num_collectors=2"), "model")


def test_engine_and_trainer_have_one_dtype():
    dtypes = {name: composed("grpo-sync", f"hardware={name}").model.dtype for name in ("cpu", "gpu1", "ray-cluster")}
    assert dtypes == {"cpu": "float32", "gpu1": "bfloat16", "ray-cluster": "bfloat16"}
    assert compute_dtype(composed("grpo-sync", "hardware=gpu8")) is torch.bfloat16
    assert as_dry_run(composed("grpo-sync", "hardware=gpu8")).model.dtype == "float32"
    with pytest.raises(ValueError, match=r"model\.dtype must be 'float32' or 'bfloat16', got 'float16'"):
        compute_dtype(composed("grpo-sync", "model.dtype=float16"))


def test_weights_travel_as_the_configuration_says(tmp_path):
    scheme = sync_scheme(composed("grpo-sync", "sync.transport=files", f"run.path={tmp_path}"))
    assert scheme.remote_addr == str(tmp_path / "weights")
    assert sync_scheme(composed("grpo-sync")).master_address is None
    # Engines of a cluster may be on another host than the trainer.
    assert sync_scheme(composed("grpo-sync", "hardware=ray-cluster")).master_address is not None


def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="hardware=cpu"):
        TrainerDevice(composed("grpo-sync", "hardware=gpu1"))


def test_a_dry_run_changes_no_task_and_no_algorithm():
    cfg = composed("expert-iteration-async", "task=search", "hardware=ray-cluster")
    dry = as_dry_run(cfg)
    for entry in ("env.name", "env.options", "collect.group_size", "collect.max_turns", "collect.num_best"):
        assert OmegaConf.select(dry, entry) == OmegaConf.select(cfg, entry) != None  # noqa: E711
    assert (dry.collect.in_background, dry.train.num_updates) == (True, 4)
    assert (dry.ray.address, dry.train.device, dry.engine.num_replicas) == (None, "cpu", None)
    assert cfg.ray.address == "auto"


def test_what_excludes_each_other_is_refused_before_anything_starts(tmp_path):
    cfg = composed("expert-iteration-async", "collect.max_staleness=1", f"run.path={tmp_path / 'run'}")
    with pytest.raises(ValueError, match="max_staleness=null"):
        module_of("expert-iteration").make_run(cfg)
    assert not (tmp_path / "run").exists()


def test_rows_are_learned_so_often_and_new_ones_waited_for():
    update = module_of("expert-iteration").LearnTheBest.__new__(module_of("expert-iteration").LearnTheBest)
    update.cfg = composed("expert-iteration-async", "train.max_reuse=8").train
    for num_kept, num_learned, is_waiting in ((0, 0, True), (2, 0, False), (2, 15, False), (2, 16, True)):
        update.num_kept, update.num_learned = num_kept, num_learned
        assert update.needs_rows == is_waiting


@pytest.fixture(scope="module")
def tiny_engine(tiny_model_path, real_vllm):
    """One engine for all dry runs, of the model that they train."""
    from llmrl.engines import AsyncVLLM

    with AsyncVLLM.from_pretrained(tiny_model_path, max_model_len=2048, kv_cache_memory=1 << 28) as engine:
        yield engine


@pytest.mark.parametrize(("algorithm", "task", "hardware"), DRY_RUNS)
def test_every_configuration_runs_dry(algorithm, task, hardware, tiny_engine):
    version, output = tiny_engine.policy_version, io.StringIO()
    cfg = composed(algorithm, f"task={task}", f"hardware={hardware}", "dry_run=true")
    with module_of(algorithm.rpartition("-")[0]).make_run(cfg, engine=tiny_engine, console=Console(file=output)) as run:
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        run.execute()
        changed = [name for name, tensor in run.model.state_dict().items() if not tensor.equal(before[name])]
        metrics = run.folder.read_metrics()
        assert (run.folder.model_path / "config.json").exists() and run.folder.checkpoint_path.exists()
    assert len(changed) == len(before), "something was trained"
    assert [row["step"] for row in metrics] == [1, 2] and tiny_engine.policy_version == version + 2
    assert output.getvalue().endswith("dry run: two steps done\n")
    assert tiny_engine.is_alive and not run.folder.path.exists()


def test_a_buffer_filled_in_the_background_survives_a_restart(tiny_engine, tiny_model_path, tmp_path):
    small = ("collect.groups_per_batch=2", "env.num_eval_problems=2", "run.trackers=[]", "run.checkpoint_every=2")
    overrides = (f"model.path={tiny_model_path}", f"run.path={tmp_path / 'run'}", "sync.transport=files", *small)
    script = module_of("expert-iteration")

    def run(num_steps, *more):
        cfg = composed("expert-iteration-async", *overrides, f"train.num_steps={num_steps}", *more)
        selector = TopKRewardSelector(cfg.collect.group_size, cfg.collect.num_best)
        parts = {"make_env": task_env, "engine": tiny_engine, "console": Console(file=io.StringIO())}
        parts["make_update"] = functools.partial(script.LearnTheBest, cfg)
        parts["postproc"] = lambda batch: selector.select(with_differing_rewards(batch))
        tiny_engine.policy_version = 0
        with TrainingRun(cfg, **parts) as training:
            training.execute()
            rates = {group["lr"] for group in training.optimizer.param_groups}
            assert rates == {cfg.train.learning_rate}, "the checkpoint's would be those of then"
            return training.folder.read_metrics(), len(training.update.rows)

    run(3)  # the checkpoint is of step 2: step 3 is trained again
    begun_with = (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(ValueError, match=r"env\.name='addition'"):
        run(8, "resume=true", "task=gsm8k")
    assert (tmp_path / "run/config.yaml").read_text() == begun_with
    metrics, num_rows = run(8, "resume=true", "train.learning_rate=1.0e-5")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert [row["policy_version"] for row in metrics] == list(range(1, 9))
    kept = [row["num_kept_rows"] for row in metrics]
    assert [row["num_buffer_rows"] for row in metrics] == [sum(kept[: step + 1]) for step in range(8)]
    assert kept[0] > 0 and num_rows == sum(kept) and all(row["num_trained_tokens"] > 0 for row in metrics)
    lines = (tmp_path / "run/rollouts.jsonl").read_text().splitlines()
    played = [record["rollout_id"] for line in lines if (record := json.loads(line))["split"] == "train"]
    assert len(played) == len(set(played)) == 16 * sum(number > 0 for number in kept)
    assert (tmp_path / "run/weights/current.json").exists()


@pytest.mark.parametrize("bounds", ["0.2", "[0.2,0.28]"])
@pytest.mark.parametrize("algorithm", ["grpo-sync", "grpo-async"])
def test_on_policy_the_clip_is_inactive_and_the_mismatch_a_truncated_weight(algorithm, bounds):
    cfg = composed(algorithm, f"train.clip_epsilon={bounds}", "train.importance_cap=1.3")
    batch = ragged_batch(3)
    actor = near_policy(batch, spread=0.5)  # the engine computes otherwise, by half a nat
    output = module_of("grpo").make_loss(cfg, actor)(batch)
    assert float(output.clip_fraction) == 0.0 and float(output.ratio) == 1.0 and float(output.kl_approx) == 0.0
    mask = flat(batch, "masks", "all_assistant_mask")
    gaps = (actor.log_probs.detach() - flat(batch, "log_probs", "full"))[mask].double()
    advantages = torch.cat([row["advantage"].reshape(1).expand(len(row["tokens", "full"])) for row in batch.unbind(0)])
    weights = gaps.exp().clamp(max=1.3)
    assert float(output.log_prob_difference_mean) == pytest.approx(float(gaps.abs().mean()), rel=1e-5)
    assert float(output.importance_weight) == pytest.approx(float(weights.mean()), rel=1e-5)
    assert float(output.importance_clip_fraction) == pytest.approx(float((weights == 1.3).double().mean()))
    assert (weights == 1.3).sum() > 1
    # The gradient of the policy: each token's advantage, times its weight.
    (gradient,) = torch.autograd.grad(output.total_loss(), actor.log_probs)
    torch.testing.assert_close(gradient[mask].double(), -weights * advantages[mask].double() / len(gaps))


def test_a_saved_batch_that_is_not_finite_is_skipped_and_a_resumed_run_goes_on(tiny_engine, tiny_model_path, tmp_path):
    small = ("collect.groups_per_batch=2", "collect.group_size=2", "env.num_eval_problems=1", "run.trackers=[]")
    overrides = (f"model.path={tiny_model_path}", f"run.path={tmp_path / 'run'}", "run.checkpoint_every=50", *small)
    num_batches = itertools.count(1)

    def postproc(batch):
        batch = MCAdvantage()(with_differing_rewards(batch))
        if next(num_batches) == 2:
            batch[0]["advantage"] = torch.full((1, 1), math.nan)
        return batch

    def run(num_steps, *more):
        cfg = composed("grpo-sync", *overrides, f"train.num_steps={num_steps}", *more)
        parts = {"make_env": task_env, "engine": tiny_engine, "console": Console(file=io.StringIO())}
        tiny_engine.policy_version = 0

        def make_update(actor, optimizer):
            return LossUpdate(module_of("grpo").make_loss(cfg, actor), optimizer, max_grad_norm=1.0)

        with TrainingRun(cfg, **parts, make_update=make_update, postproc=postproc) as training:
            with pytest.warns(UserWarning, match=r"step is skipped\. The batch's advantage .* in rows 0\."):
                training.execute()
            return training.folder.read_metrics()

    run(2)
    metrics = run(3, "resume=true")
    assert [row["is_skipped"] for row in metrics] == [0, 1, 0]
    assert [row["policy_version"] for row in metrics] == [1, 2, 3]


class Unchanged(LossUpdate):
    """Skips every step, as a loss that is never finite does."""

    def __call__(self, batch):
        return TrainStepReport(is_skipped=True, num_rows=batch.shape[0]).to_metrics()


def unequal(completion):
    """A reward that is never the same twice, and larger than 1."""
    return 2.0 + next(unequal.counter)


def never(completion):
    return 0.0


def ended(engine, tiny_model_path, run_path, reward, *overrides, is_changing=True):
    """What a run prints, its metrics, and whether it says that nothing was learned."""

    def make_env(cfg, part):
        env = DatasetChatEnv([{"query": "Say A."}], repeats=cfg.collect.group_size if part == "train" else 2)
        return env.append_transform(RubricReward(reward))

    def make_update(actor, optimizer):
        return (LossUpdate if is_changing else Unchanged)(GRPOLoss(actor), optimizer, max_grad_norm=1.0)

    small = ("collect.groups_per_batch=2", "collect.group_size=2", "run.trackers=[]", "train.num_steps=2")
    cfg = composed("grpo-sync", f"model.path={tiny_model_path}", f"run.path={run_path}", *small, *overrides)
    parts = {"make_env": make_env, "make_update": make_update, "postproc": MCAdvantage(2)}
    output, unequal.counter = io.StringIO(), itertools.count()
    error = None
    with TrainingRun(cfg, **parts, engine=engine, console=Console(file=output, width=1000)) as run:
        try:
            run.execute()
        except NothingLearned as raised:
            error = raised
        assert (run.folder.model_path / "config.json").exists()
        for path in (run.folder.metrics_path, run.folder.summary_path):
            assert not path.exists() or "nan" not in path.read_text().lower()
        return output.getvalue(), run.folder.read_metrics(), error


def test_every_stop_has_its_reason_and_a_reward_above_one_is_none(tiny_engine, tiny_model_path, tmp_path):
    output, metrics, error = ended(tiny_engine, tiny_model_path, tmp_path / "steps", unequal)
    assert "all 2 steps are done" in output and len(metrics) == 2 and error is None
    assert all(row["reward_mean"] > 1.1 and row["num_dropped"] == 0 for row in metrics)
    output, metrics, _ = ended(tiny_engine, tiny_model_path, tmp_path / "target", unequal, "train.target_reward=1.5")
    assert "the mean reward reached train.target_reward=1.5 at step 1" in output and len(metrics) == 1


def test_a_run_that_learns_nothing_says_so_and_ends_with_an_error(tiny_engine, tiny_model_path, tmp_path, monkeypatch):
    monkeypatch.setattr("llmrl.collectors.base.SIGNAL_PATIENCE", 2)
    output, metrics, error = ended(tiny_engine, tiny_model_path, tmp_path / "constant", never)
    assert "step 1 has nothing to learn from: 16 groups in a row" in output and metrics == []
    assert "'constant_rewards': 32" in output and "nothing was left to learn from at step 1" in str(error)
    output, metrics, error = ended(tiny_engine, tiny_model_path, tmp_path / "skipped", unequal, is_changing=False)
    assert "step 1 changed nothing" in output and "nothing was learned: no step changed the weights" in output
    assert [row["is_skipped"] for row in metrics] == [1.0, 1.0] and "all 2 steps are done" in str(error)


def test_a_dry_run_on_the_command_line_ends_well_and_leaves_nothing(tmp_path, real_vllm):
    script = SCRIPTS / "expert-iteration/expert-iteration-async.py"
    command = [sys.executable, str(script), "task=gsm8k", "hardware=gpu1", "dry_run=true"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("dry run: two steps done\n")
    assert list(tmp_path.iterdir()) == []
