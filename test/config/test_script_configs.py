"""Every configuration of the scripts composes, names what is read, gives its reasons, and runs dry."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loss_batches import flat, near_policy, ragged_batch
from omegaconf import OmegaConf
from script_configs import FOLDER, SCRIPTS, composed, config, script_of
from warm_processes import run_warm

from llmrl.collectors.best_answers import BestAnswers
from llmrl.config import sections
from llmrl.config.dry_run import as_dry_run, plan_of, with_differing_rewards
from llmrl.config.launch import hints, prepared
from llmrl.config.sections import GRPOConfig, ScriptConfig
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import MCAdvantage
from llmrl.recipes.run import is_finished
from llmrl.runs.null_engine import NullEngine
from llmrl.runs.run import NothingLearned
from llmrl.runs.setup import make_collector, make_env, make_eval_envs, start_engine, sync_scheme
from llmrl.runs.trainer_device import TrainerDevice
from llmrl.trainer import TrainStepReport, train_step
from llmrl.transforms import RubricReward

pytestmark = pytest.mark.usefixtures("takes_long")  # hydra composes configurations

ALGORITHMS = ("grpo", "grpo-async", "expert-iteration", "expert-iteration-async", "sft", "distillation")
TASKS = sorted(path.stem for path in FOLDER.glob("task/*.yaml"))
HARDWARE = sorted(path.stem for path in FOLDER.glob("hardware/*.yaml"))
# Every algorithm, task and hardware at least once, but for the number of ranks, which a dry run has one of.
DRY_RUNS = (
    ("grpo", "gsm8k", "gpu1"),
    ("grpo-async", "ifeval", "gpu8"),
    ("expert-iteration", "math", "ray-cluster"),
    ("expert-iteration-async", "countdown", "cpu"),
    ("grpo", "reasoning-gym", "cpu", "loss=dppo", "train.max_divergence=0.1"),
    ("expert-iteration", "guess", "cpu"),
    ("grpo-async", "search", "gpu1"),
    ("grpo", "code", "ray-cpu"),
    ("sft", "reasoned-addition", "gpu1"),
    ("distillation", "addition", "cpu", "eval.num_samples=4", "eval.metric=eval/addition/pass@4"),
)


def test_every_script_and_configuration_is_known_here():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted((*ALGORITHMS, "common"))
    scripts = {path.stem for path in SCRIPTS.glob("*/*.py")}
    assert scripts == {
        *("grpo", "grpo-sync", "grpo-async"),
        *("expert_iteration", "expert-iteration-sync", "expert-iteration-async", "sft", "distillation"),
    }
    assert {task for _, task, *_ in DRY_RUNS} | {"addition", "own"} == set(TASKS)
    assert {hardware for _, _, hardware, *_ in DRY_RUNS} == {one for one in HARDWARE if not one.endswith("ranks")}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_composes_with_every_task_and_hardware(algorithm):
    for task, hardware in zip(TASKS, itertools.cycle(HARDWARE), strict=False):
        cfg = config(algorithm, f"task={task}", f"hardware={hardware}")
        assert isinstance(cfg, ScriptConfig) and cfg.algorithm == algorithm.removesuffix("-async")
        assert cfg.run.path.startswith(f"runs/{algorithm}")
    assert (config(algorithm).collect.max_staleness == 1) == (algorithm == "grpo-async")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+train.learning_rat=1e-5"], "Did you mean 'train.learning_rate'"),
        (["+env.num_eval_samples=3"], "no entry 'env.num_eval_samples'"),
        (["train.num_steps=many"], "'many' of type 'str' could not be converted to Integer"),
        (["collect.group_size=null"], "collect.group_size"),
        (["sync.transport=nccl"], r"sync\.transport must be one of direct, ipc, files; got 'nccl'"),
        (["model.dtype=float8"], r"model\.dtype must be one of float32, bfloat16, float16; got 'float8'"),
        (["train.head_kernel=lger"], "train.head_kernel must be one of torch, liger"),
        (["train.schedule=cosin"], "train.schedule must be one of"),
        (["sync.pause_mode=stop"], "sync.pause_mode must be one of"),
        (["collect.temperature=0"], "collect.temperature must be at least 0.01, got 0"),
    ],
)
def test_an_entry_that_is_none_or_of_another_type_is_refused(overrides, message):
    # Without hydra's own check, so that the same holds for what a file says.
    cfg = OmegaConf.create(OmegaConf.to_container(composed("grpo"), resolve=True))
    changes = OmegaConf.from_dotlist([one.lstrip("+") for one in overrides])
    with pytest.raises(ValueError, match=message):
        prepared(OmegaConf.merge(cfg, changes), GRPOConfig)


def test_a_misspelt_entry_on_the_command_line_is_answered_with_the_nearest(tmp_path, own_programs):
    command = [sys.executable, str(SCRIPTS / "grpo/grpo-async.py"), "train.learning_rat=1e-5"]
    result = run_warm(command, cwd=tmp_path)
    assert result.returncode == 1 and "Did you mean 'train.learning_rate'?" in result.stderr
    assert "Traceback" not in result.stderr and list(tmp_path.iterdir()) == []


def test_a_script_may_import_torchrls_configurations(tmp_path, own_programs):
    script = tmp_path / "mine.py"
    program = "from torchrl.trainers.algorithms import configs  # registers a group `loss`\n"
    program += "from llmrl.config.launch import launch\nfrom llmrl.scripts.grpo import GRPOConfig, main\n"
    script.write_text(f"{program}launch(main, GRPOConfig, {str(FOLDER / 'grpo.yaml')!r})\n")
    output = run_warm([sys.executable, str(script), "loss=dapo", "--cfg", "job"], cwd=tmp_path)
    assert output.returncode == 0 and "loss: dapo" in output.stdout, output.stderr


def test_the_help_of_a_script_names_what_an_entry_may_be(tmp_path, own_programs):
    command = [sys.executable, str(SCRIPTS / "grpo/grpo-sync.py"), "--help"]
    result = run_warm(command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for line in (
        "loss: grpo, dr_grpo, dapo, cispo, gspo, rloo, dppo",
        "train.schedule: constant, linear, cosine",
        "sync.transport: direct, ipc, files",
    ):
        assert f"\n  {line}\n" in result.stdout
    assert "task: addition" in result.stdout and list(tmp_path.iterdir()) == []


def test_what_only_a_file_says_is_checked_alike(tmp_path):
    for hardware, entry in (("misspelt", "train:\n  token_budgets: 3"), ("mistyped", "train:\n  token_budget: much")):
        (tmp_path / "hardware").mkdir(exist_ok=True)
        (tmp_path / f"hardware/{hardware}.yaml").write_text(f"# @package _global_\n{entry}\n")
        with pytest.raises(Exception, match="token_budget"):
            composed("grpo", f"hydra.searchpath=[file://{tmp_path}]", f"hardware={hardware}")


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_number_has_a_reason(path):
    lines = path.read_text().splitlines()
    bare = [line for line in lines if re.match(r"\s+\w+: -?\.?\d", line) and not re.search(r"# \w", line)]
    assert not bare


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*/*.py")), ids=lambda path: path.name)
def test_scripts_are_short_and_use_the_public_library(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 130
    assert not re.search(r"from llmrl[\w.]* import .*\b_\w", text)


@pytest.mark.parametrize("name", ["grpo/grpo.py", "expert-iteration/expert_iteration.py"])
def test_a_script_shows_all_that_is_done_to_the_model(name):
    text = (SCRIPTS / name).read_text()
    parts = (
        "make_env(",
        "start_engine(",
        "vLLMWrapper(",
        "load_model(",
        "loss = ",
        "build_optimizer(",
        "make_collector(",
    )
    loop = ("for step, batch in run.steps(", "train_step(", "schedule.step()", "start_update(model)")
    places = [text.index(part) for part in (*parts, *loop)]
    assert places == sorted(places) and len(text.splitlines()) >= 90


def test_environments_come_from_the_configuration():
    cfg = config("grpo", "task=countdown", "eval.num_problems=5", "eval.num_samples=3")
    envs = [make_env(cfg), *make_eval_envs(cfg).values()]
    prompts = [env.base_env.prompts for env in envs]
    assert prompts[0].num_samples == 16 and [one.num_samples for one in prompts[1:]] == [3]
    assert len(prompts[0].items) == 10_000
    assert len(prompts[0].items[0]["numbers"]) == 3
    asked = [{item["query"] for item in one.items} for one in prompts]
    assert not asked[0] & asked[1]
    with pytest.raises(TypeError, match="num_count"):
        make_env(config("grpo", "task=countdown", "+env.options.num_counts=3"))


def test_further_environments_are_evaluated_by_their_names():
    entry = "+eval.envs={hard:{name:addition,options:{num_digits:3}}}"
    envs = make_eval_envs(config("grpo", entry, "eval.num_samples=2"))
    assert list(envs) == ["addition", "hard"] and envs["hard"].base_env.prompts.num_samples == 2
    assert "+" in envs["hard"].reset()[0]["query"]
    with pytest.raises(ValueError, match=r"eval\.patience needs eval\.metric"):
        config("grpo", "eval.patience=2")
    with pytest.raises(ValueError, match=r"eval\.every must be at least 1, got 0"):
        config("grpo", "eval.every=0")


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("grpo", ["eval.metric=eval/adition/pass@1"], "Did you mean 'eval/addition/pass@1'"),
        ("grpo", ["eval.metric=eval/addition/pass@4", "eval.num_samples=3"], "eval/addition/pass@3"),
        ("grpo", ["eval.metric=eval/loss"], "eval/addition/pass@1"),
        ("grpo", ["eval.metric=eval/gsm8k/reward"], "eval/addition/reward"),
        ("grpo", ["eval.metric=eval/addition/reward/no_such_mean"], "eval/addition/reward/"),
        ("grpo", ["eval.metric=eval/addition/pass@1", "eval.num_problems=0"], "nothing is evaluated"),
        (
            "sft",
            ["eval.metric=eval/loss", "conversations.held_out=null", "eval.num_problems=0"],
            "nothing is evaluated",
        ),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_an_engine_is_started(algorithm, overrides, message):
    with pytest.raises(ValueError, match=rf"^eval\.metric must be a metric of the evaluation, got .*{message}"):
        make_eval_envs(config(algorithm, *overrides))


def test_metrics_that_evaluations_have_are_taken():
    for metric in ("pass@1", "pass@2_low", "reward", "completion_tokens_right", "tool_calls/answered", "reward_max"):
        assert make_eval_envs(config("grpo", f"eval.metric=eval/addition/{metric}", "eval.num_samples=2"))
    cfg = config("sft", "eval.metric=eval/loss", "eval.num_problems=0")
    assert make_eval_envs(cfg) == make_eval_envs(as_dry_run(cfg)) == {}
    entry = "+eval.envs={hard:{name:addition,options:{num_digits:3}}}"
    assert "hard" in make_eval_envs(config("grpo", entry, "eval.metric=eval/hard/pass@1"))


def test_hardware_reaches_the_engine(monkeypatch):
    given = {}
    for starts in ("AsyncVLLM", "EngineReplicas"):
        monkeypatch.setattr(
            f"llmrl.runs.setup.{starts}.from_pretrained",
            lambda model, starts=starts, **options: given.update(options, starts=starts),
        )
    model = "model.path=mine"
    start_engine(config("grpo-async", model, "hardware=ray-cluster", "ray.address=10.0.0.1:6379"))
    assert given["starts"] == "EngineReplicas" and given["num_replicas"] == 15
    assert given["weight_transfer"] is True and given["use_ray"]
    assert given["ray_options"] == {"num_cpus": 1, "num_gpus": 1} and given["ray_init_config"] == {
        "address": "10.0.0.1:6379"
    }
    # A Ray that happens to run on this machine is not joined unasked.
    start_engine(config("grpo-async", model, "hardware=gpu8"))
    assert given["num_replicas"] == 7 and given["ray_init_config"]["address"] == "local"
    start_engine(config("grpo", model, "hardware=gpu1", "engine.tensor_parallel_size=2"))
    assert given["weight_transfer"] == "ipc" and given["gpu_memory_utilization"] == 0.4
    assert given["engine_args"] == {"tensor_parallel_size": 2} and given["starts"] == "AsyncVLLM"
    start_engine(config("grpo", model, "+engine.engine_args.max_num_batched_tokens=2048"))
    assert given["engine_args"] == {"tensor_parallel_size": 1, "max_num_batched_tokens": 2048}
    with pytest.raises(ValueError, match=r"needs engine\.use_ray=true"):
        start_engine(config("grpo", model, "collect.num_collectors=2"))
    start_engine(config("grpo", model, "sync.lora=adapter", "model.lora.rank=24", "sync.max_adapters=6"))
    assert given["weight_transfer"] == "adapters"
    assert given["engine_args"] == {"tensor_parallel_size": 1, "max_lora_rank": 24, "max_loras": 6}


def test_engine_and_trainer_have_one_dtype():
    dtypes = {name: config("grpo", f"hardware={name}").model.dtype for name in ("cpu", "gpu1", "ray-cluster")}
    assert dtypes == {"cpu": "float32", "gpu1": "bfloat16", "ray-cluster": "bfloat16"}
    assert config("grpo", "hardware=gpu8").model.autocast_dtype is torch.bfloat16
    assert as_dry_run(config("grpo", "hardware=gpu8")).model.dtype == "float32"


def test_weights_travel_as_the_configuration_says(tmp_path):
    def scheme_of(*entries):
        return sync_scheme(config("grpo", *entries), NullEngine("a-model"))

    scheme = scheme_of("sync.transport=files", f"run.path={tmp_path}", "sync.anchor_every=8")
    assert (scheme.remote_addr, scheme.anchor_every) == (str(tmp_path / "weights"), 8)
    assert scheme_of("sync.anchor_every=8").anchor_every == 8
    assert scheme_of("sync.pause_mode=wait").pause_mode == "wait"
    scheme = scheme_of("sync.reset_running_requests=false")
    assert scheme.master_address is None and (scheme.pause_mode, scheme.reset_running_requests) == ("keep", False)
    alone = ("sync.lora=adapter", "model.lora.rank=4")
    assert scheme_of(*alone).lora == "adapter" and scheme_of().lora == "merged"
    for entries, message in (
        (alone[:1], r"give them a rank, model\.lora\.rank=16"),
        ((*alone, "sync.transport=files"), r"sync\.lora=adapter needs sync\.transport=direct, got files"),
        ((*alone, "hardware=gpu1"), r"sync\.lora=adapter needs sync\.transport=direct, got ipc"),
        ((*alone, "sync.max_adapters=1"), r"sync\.max_adapters must be at least 2, got 1"),
        (
            ("hardware=gpu1", "sync.anchor_every=8"),
            r"anchor_every=8 needs sync\.transport=direct or files, got ipc",
        ),
        (
            (*alone, "sync.anchor_every=8"),
            r"sync\.anchor_every=8 is for full weights, and sync\.lora=adapter sends adapters only",
        ),
        (("sync.anchor_every=0",), r"sync\.anchor_every must be at least 1, got 0"),
        (("sync.lora=adapters",), r"sync\.lora must be one of merged, adapter; got 'adapters'"),
    ):
        with pytest.raises(ValueError, match=message):
            config("grpo", *entries)
    # Engines of a cluster may be on another host than the trainer.
    assert scheme_of("hardware=ray-cluster").master_address is not None


def test_an_engine_sleeps_where_it_shares_a_gpu_in_turn():
    sleeps = {name: config(name, "hardware=gpu1").engine_sleeps for name in ALGORITHMS}
    assert sleeps == {
        "grpo": True,
        "grpo-async": False,
        "expert-iteration": True,
        "expert-iteration-async": False,
        "sft": True,
        "distillation": True,
    }
    assert not config("grpo", "hardware=gpu1", "engine.sleep_while_training=false").engine_sleeps
    assert not config("grpo").engine_sleeps
    for hardware, algorithm in (("gpu8", "grpo"), ("gpu1", "grpo-async"), ("gpu1", "expert-iteration-async")):
        with pytest.raises(ValueError, match=r"sleep_while_training=true needs an engine on the trainer's GPU"):
            config(algorithm, f"hardware={hardware}", "engine.sleep_while_training=true")
    with pytest.raises(ValueError, match=r"offload_activations=true needs train\.gradient_checkpointing=true"):
        config("grpo", "train.offload_activations=true")


def test_adapters_come_from_the_configuration():
    assert config("grpo").model.lora.build() is None
    lora = config("grpo", "model.lora.rank=4", "model.lora.target_modules=[q_proj,v_proj]").model.lora.build()
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 32, ("q_proj", "v_proj"))
    assert config("grpo", "model.lora.rank=4").model.lora.build().target_modules == "all-linear"


def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="hardware=cpu"):
        TrainerDevice(config("grpo", "hardware=gpu1"))


def test_a_dry_run_changes_no_task_and_no_algorithm():
    cfg = config("expert-iteration-async", "task=search", "hardware=ray-cluster")
    dry = as_dry_run(cfg)
    assert (dry.env.name, dry.env.options) == (cfg.env.name, cfg.env.options)
    for entry in ("group_size", "max_turns", "num_best", "in_background"):
        assert getattr(dry.collect, entry) == getattr(cfg.collect, entry)
    assert dry.train.num_updates == 4
    assert (dry.ray.address, dry.train.device, dry.engine.num_replicas) == (None, "cpu", None)
    assert cfg.ray.address == "auto"


def test_a_dry_run_has_one_rank_and_a_tiny_teacher():
    dry = as_dry_run(config("grpo", "train.num_ranks=8", "train.context_ranks=2"))
    assert (dry.train.num_ranks, dry.train.context_ranks) == (1, 1)
    for given in ("path=someone/elses", "url=http://localhost:1"):
        teacher = as_dry_run(config("distillation", "teacher.hint=null", f"teacher.{given}", "teacher.top_k=4")).teacher
        assert (teacher.path, teacher.url, teacher.top_k) == (dry.model.path, None, 4)
    assert as_dry_run(config("distillation")).teacher == config("distillation").teacher


def test_metrics_of_an_own_environment_have_one_name_in_every_folder(tmp_path):
    for folder in ("here", "there"):
        file = tmp_path / folder / "sums.py"
        file.parent.mkdir()
        file.write_text("from llmrl.envs import AdditionEnv as make\n")
        assert list(make_eval_envs(config("grpo", "task=own", f"env.name={file}:make"))) == ["sums.py:make"]
    assert list(make_eval_envs(config("grpo", "eval.num_problems=2"))) == ["addition"]


def test_a_dry_run_reads_a_local_file_of_problems_and_needs_no_hub(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    own = as_dry_run(config("grpo", "task=gsm8k", f"env.data={file}"))
    assert own.env.data == str(file)
    missing = as_dry_run(config("grpo", "task=gsm8k", f"env.data={tmp_path / 'none.jsonl'}"))
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        make_env(missing)
    for data in ("null", "openai/gsm8k"):
        assert isinstance(as_dry_run(config("grpo", "task=gsm8k", f"env.data={data}")).env.data, list)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["collect.max_staleness=1"], "max_staleness=null"),
        (["collect.num_collectors=2"], "needs engine.use_ray=true"),
        (["collect.max_concurrent_rollouts=most"], "a number from 1, auto or null, got 'most'"),
        (["collect.max_concurrent_rollouts=auto", "collect.num_collectors=2", "engine.use_ray=true"], "give a number"),
        (["sync.transport=ipc", "engine.num_replicas=2"], "one engine on the trainer's GPU"),
        (["engine.use_ray=true", "engine.ray_options={num_gpus: 1}", "engine.tensor_parallel_size=2"], "as many GPUs"),
        (["engine.gpu_memory_utilization=1.5"], "must be above 0 and at most 1, got 1.5"),
        (["engine.num_replicas=0"], "at least 1"),
        (["train.device=gpu"], "train.device must be cpu, cuda"),
    ],
)
def test_what_excludes_each_other_is_refused_before_anything_starts_also_dry(overrides, message):
    with pytest.raises(ValueError, match=message):
        config("expert-iteration-async", "dry_run=true", *overrides)


@pytest.mark.parametrize(
    "entry",
    ["train.target_reward=0.9", "collect.max_staleness=1", "collect.max_concurrent_rollouts=8"],
)
def test_supervised_training_refuses_what_is_for_sampled_answers(entry):
    with pytest.raises(ValueError, match=f"{entry.partition('=')[0]} is for answers that are sampled"):
        config("sft", entry, "engine.use_ray=true")


def test_a_dry_run_says_what_was_asked_for():
    plan = " ".join(plan_of(config("grpo-async", "task=gsm8k", "hardware=gpu8", "model.path=embedded")))
    for words in (
        "7 of bfloat16, in Ray actors, 90% of a GPU's memory",
        "32768 tokens per micro-batch",
        "weights by direct",
    ):
        assert words in plan
    # 134.5 million parameters: 4 bytes of each as weights, 8 as moments, 2 in an engine.
    assert "0.13 B parameters: the trainer about" in plan and "an engine 0.3 GiB" in plan
    assert "optimizer 1.0" in plan and "weights 0.5" in plan and "gradients 0.5" in plan
    assert "known when the model is here" in " ".join(plan_of(config("grpo", "model.path=organisation/model")))


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("collect.num_generations=8", "'collect.group_size'"),
        ("num_generations=8", "'collect.group_size'"),
        ("train.beta=0.1", "'train.kl_to_ref_coeff'"),
        ("grpo.beta=0.1", "'train.kl_to_ref_coeff'"),
        ("actor.clip_ratio_high=0.28", "'train.clip_epsilon_high'"),
        ("train.lr=1e-6", "'train.learning_rate'"),
        ("output_dir=x", "'run.path'"),
        ("reward_funcs=[a]", "env.name=my_env.py:make"),
        ("train.learning_rat=1e-6", "'train.learning_rate'"),
    ],
)
def test_names_of_other_libraries_are_answered_with_ours(override, meant):
    [hint] = hints([override], GRPOConfig)
    assert meant in hint


def test_rows_are_learned_so_often_and_new_ones_waited_for():
    best = BestAnswers(3, rows_per_sample=5, max_reuse=8)
    for num_kept, num_learned, is_learned in ((0, 0, True), (2, 0, False), (2, 15, False), (2, 16, True)):
        best.num_kept, best.num_learned = num_kept, num_learned
        assert best.is_learned == is_learned
    best = BestAnswers(3, rows_per_sample=5, max_reuse=8)
    batch = ragged_batch(1)
    best.extend(batch[:2])
    best.extend(batch[2:])
    held = [row["tokens", "full"].tolist() for row in batch.unbind(0)[-3:]]
    assert [row["tokens", "full"].tolist() for row in best.rows] == held and best.num_kept == 6
    sample = best.sample()
    assert sample.shape == (5,) and all(row["tokens", "full"].tolist() in held for row in sample.unbind(0))
    restored = BestAnswers(3, rows_per_sample=5, max_reuse=8)
    restored.load_state_dict(best.state_dict())
    assert (restored.num_kept, restored.num_learned, len(restored.rows)) == (6, 5, 3)


@pytest.fixture(scope="module")
def tiny_engine(tiny_model_path, real_vllm):
    """One engine for all dry runs, of the model that they train."""
    from llmrl.engines import AsyncVLLM

    with AsyncVLLM.from_pretrained(
        tiny_model_path, max_model_len=2048, kv_cache_memory=1 << 28, cpu_threads=1
    ) as engine:
        yield engine


@pytest.fixture
def run_script(tiny_engine, tiny_model_path, monkeypatch):
    """A function that runs a script on that engine, and gives its model and optimizer."""

    def run(cfg, **replaced):
        script, made = script_of(cfg.algorithm), {}
        make_optimizer = sections.make_optimizer

        @functools.wraps(make_optimizer)  # a section gives it the entries that it has keywords for
        def kept(model, **options):
            made["before"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            made["model"], (made["optimizer"], schedule) = model, make_optimizer(model, **options)
            return made["optimizer"], schedule

        with monkeypatch.context() as patch:
            patch.setattr(sections, "make_optimizer", kept)
            parts = {"start_engine": lambda cfg: contextlib.nullcontext(tiny_engine)}
            for name, part in (parts | replaced).items():
                patch.setattr(script, name, part)
            script.main(cfg)
        return made

    return run


@pytest.mark.parametrize(("algorithm", "task", "hardware", "more"), [(*one[:3], one[3:]) for one in DRY_RUNS])
def test_every_configuration_runs_dry(algorithm, task, hardware, more, tiny_engine, run_script, capsys, monkeypatch):
    version, kept = tiny_engine.policy_version, {}
    monkeypatch.setattr("llmrl.runs.run.shutil", SimpleNamespace(rmtree=lambda path: kept.update(path=path)))
    cfg = config(algorithm, f"task={task}", f"hardware={hardware}", "dry_run=true", *more)
    made = run_script(cfg)
    changed = [name for name, tensor in made["model"].state_dict().items() if not tensor.equal(made["before"][name])]
    assert len(changed) == len(made["before"]), "something was trained"
    folder = Path(cfg.run.path)
    assert (folder / "model/config.json").exists() and (folder / "checkpoint.safetensors").exists()
    assert [row["step"] for row in metrics_of(folder)] == [1, 2]
    # What learns from a file sends its weights to be evaluated only.
    assert tiny_engine.policy_version == version + (1 if algorithm == "sft" else 2)
    assert capsys.readouterr().out.endswith("dry run: two steps done\n")
    assert tiny_engine.is_alive and kept["path"] == folder


def test_a_student_is_trained_on_its_teachers_likeliest_ids(tiny_model_path, tmp_path, run_script):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(100)  # a head sure of its tokens
    teacher.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path)
    taught = ("teacher.hint=null", f"teacher.path={tmp_path}", "teacher.top_k=4", f"model.path={tiny_model_path}")
    short = ("train.num_steps=2", "train.warmup_steps=0", "collect.max_new_tokens=8", f"run.path={tmp_path / 'run'}")
    cfg = config("distillation", *SMALL, *taught, *short)
    made = run_script(cfg)
    assert not any(made["before"][name].equal(tensor) for name, tensor in made["model"].state_dict().items())
    first, last = metrics_of(Path(cfg.run.path))
    assert first["loss_distill"] == pytest.approx(first["kl_to_teacher"], rel=0.5) and first["kl_to_teacher"] > 0.01
    assert last["kl_to_teacher"] > 0


SERVED = ("teacher.hint=null", "teacher.url=http://host:8000")
TOP_K = ("teacher.hint=null", "teacher.path=x", "teacher.top_k=4")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.top_k=4"], r"teacher\.hint='The answer.*leave teacher\.top_k=null, or teacher\.hint=null"),
        ([*TOP_K, "teacher.use_reward=true"], "use_reward=false"),
        ([*TOP_K, "teacher.coeff=0.5"], r"teacher\.coeff=1\.0"),
        ([*TOP_K, "train.clip_epsilon=0.1"], "train.clip_epsilon is for a teacher that gives an advantage, got 0.1"),
        ([*TOP_K, "train.importance_cap=null"], "train.importance_cap is for .*, got None; teacher.top_k=4"),
        ([*SERVED, "collect.temperature=0.7"], "whole distributions at temperature 1, and collect.temperature=0.7"),
        ([*SERVED, "collect.top_k=9"], "and collect.top_k=9 samples from others: leave collect.top_k=0"),
        (["teacher.hint=null", "teacher.path=x", "teacher.top_k=0"], "teacher.top_k must be at least 1, got 0"),
        ([*TOP_K, "collect.min_p=0.1", "collect.top_k=9"], r"leave collect\.top_k=0\."),
    ],
)
def test_what_a_teacher_cannot_take_is_refused_before_anything_starts(overrides, message):
    with pytest.raises(ValueError, match=message):
        config("distillation", *overrides)


def test_a_hint_that_cannot_be_filled_in_ends_a_run_before_an_engine_starts(run_script, tmp_path):
    few = ("task=countdown", "env.options.num_problems=8")  # problems without a column `answer`
    cfg = config("distillation", *few, f"run.path={tmp_path / 'run'}")
    with pytest.raises(ValueError, match=r"teacher\.hint='The answer is \{answer\}.*columns \['numbers', 'query'"):
        run_script(cfg, start_engine=lambda cfg: pytest.fail("an engine was started"))


SMALL = ("collect.groups_per_batch=2", "run.trackers=[]", "eval.num_problems=1")


def metrics_of(path):
    lines = [line.split(",") for line in (path / "metrics.csv").read_text().splitlines()]
    rows = [{n: float(v) for n, v in zip(lines[0], line, strict=True) if v} for line in lines[1:]]
    return [row for row in rows if "policy_version" in row]


def test_a_buffer_filled_in_the_background_survives_a_restart(tiny_engine, tiny_model_path, tmp_path, run_script):
    small = (*SMALL, "run.checkpoint_every=2", f"model.path={tiny_model_path}", f"run.path={tmp_path / 'run'}")

    def make_differing(cfg, env, *, policy, postproc):
        return make_collector(cfg, env, policy=policy, postproc=lambda batch: postproc(with_differing_rewards(batch)))

    def run(num_steps, *more):
        more = ("sync.transport=files", f"train.num_steps={num_steps}", *more)
        tiny_engine.policy_version = 0
        cfg = config("expert-iteration-async", *small, *more)
        made = run_script(cfg, make_collector=make_differing)
        # The checkpoint's would be those of then.
        assert {group["lr"] for group in made["optimizer"].param_groups} == {cfg.train.learning_rate}

    run(3)  # the checkpoint is of step 2: step 3 is trained again
    begun_with = (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(ValueError, match=r"env\.name='addition'"):
        run(8, "resume=true", "task=gsm8k")
    assert (tmp_path / "run/config.yaml").read_text() == begun_with
    run(8, "resume=true", "train.learning_rate=1.0e-5")
    metrics = metrics_of(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert [row["policy_version"] for row in metrics] == list(range(1, 9))
    kept = [row["num_kept_rows"] for row in metrics]
    assert [row["num_buffer_rows"] for row in metrics] == [sum(kept[: step + 1]) for step in range(8)]
    assert kept[0] > 0 and all(row["num_trained_tokens"] > 0 for row in metrics)
    lines = (tmp_path / "run/rollouts.jsonl").read_text().splitlines()
    played = [record["rollout_id"] for line in lines if (record := json.loads(line))["split"] == "train"]
    assert len(played) == len(set(played)) == 16 * sum(number > 0 for number in kept)
    assert (tmp_path / "run/weights/current.json").exists()


@pytest.mark.parametrize("high", [None, 0.28])
@pytest.mark.parametrize("algorithm", ["grpo", "grpo-async"])
def test_on_policy_the_clip_is_inactive_and_the_mismatch_a_truncated_weight(algorithm, high):
    cfg = config(algorithm, "train.importance_cap=1.3", *([f"train.clip_epsilon_high={high}"] if high else []))
    batch = ragged_batch(3)
    actor = near_policy(batch, spread=0.5)  # the engine computes otherwise, by half a nat
    output = cfg.build_loss(actor)(batch)
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


def test_a_saved_batch_that_is_not_finite_is_skipped_and_a_resumed_run_goes_on(
    tiny_engine, tiny_model_path, tmp_path, run_script
):
    small = (*SMALL, "collect.group_size=2", f"model.path={tiny_model_path}", f"run.path={tmp_path / 'run'}")
    num_batches = itertools.count(1)

    class Advantage(MCAdvantage):
        def __call__(self, batch):
            batch = super().__call__(with_differing_rewards(batch))
            if next(num_batches) == 2:
                batch[0]["advantage"] = torch.full((1, 1), math.nan)
            return batch

    def run(num_steps, *more):
        tiny_engine.policy_version = 0
        with pytest.warns(UserWarning, match=r"step is skipped\. The batch's advantage .* in rows 0\."):
            run_script(config("grpo", *small, f"train.num_steps={num_steps}", *more), MCAdvantage=Advantage)

    run(2)
    run(3, "resume=true")
    metrics = metrics_of(tmp_path / "run")
    assert [row["is_skipped"] for row in metrics] == [0, 1, 0]
    assert [row["policy_version"] for row in metrics] == [1, 2, 3]


def unequal(completion):
    """A reward that is never the same twice, and larger than 1."""
    return 2.0 + next(unequal.counter)


def never(completion):
    return 0.0


@pytest.fixture
def ended(run_script, tiny_model_path, capsys):
    """What a run prints, its metrics, and whether it says that nothing was learned."""

    def run(path, reward, *overrides, **replaced):
        def make(repeats):
            return DatasetChatEnv([{"query": "Say A."}], repeats=repeats).append_transform(RubricReward(reward))

        small = (*SMALL, "collect.group_size=2", "train.num_steps=2", f"model.path={tiny_model_path}")
        unequal.counter = itertools.count()
        envs = {"make_env": lambda cfg: make(cfg.collect.group_size), "make_eval_envs": lambda cfg: {"a": make(2)}}
        error = None
        try:
            run_script(
                config("grpo", *small, f"run.path={path}", "train.target_reward=null", *overrides), **envs, **replaced
            )
        except NothingLearned as raised:
            error = raised
        assert (path / "model/config.json").exists()
        for file in (path / "metrics.csv", path / "summary.json"):
            assert not file.exists() or "nan" not in file.read_text().lower()
        output = " ".join(capsys.readouterr().out.split())
        return output, metrics_of(path) if (path / "metrics.csv").exists() else [], error

    return run


def test_every_stop_has_its_reason_and_a_reward_above_one_is_none(ended, tmp_path):
    output, metrics, error = ended(tmp_path / "steps", unequal)
    assert "all 2 steps are done" in output and len(metrics) == 2 and error is None
    assert set(json.loads((tmp_path / "steps/summary.json").read_text())) == {"before", "after", "ended"}
    assert all(row["reward_mean"] > 1.1 and row["num_dropped"] == 0 for row in metrics)
    output, metrics, _ = ended(tmp_path / "target", unequal, "train.target_reward=1.5")
    assert "the mean reward reached train.target_reward=1.5 at step 1" in output and len(metrics) == 1


def test_adapters_a_reference_epochs_a_schedule_and_evaluations_are_entries(ended, tmp_path):
    entries = (
        *("model.lora.rank=2", "train.kl_to_ref_coeff=0.1", "train.num_epochs=2", "train.num_minibatches=2"),
        *("train.schedule=linear", "train.warmup_steps=1", "eval.every=1", "train.num_steps=4"),
        *("eval.metric=eval/a/reward", "eval.patience=1"),
    )
    output, metrics, error = ended(tmp_path / "run", unequal, *entries)
    assert error is None and "all 4 steps are done" in output  # the reward rises, so that patience is never over
    assert all(row["loss_kl_to_ref"] >= 0 and row["num_trained_tokens"] > 0 for row in metrics)
    assert metrics[0]["loss_kl_to_ref"] < metrics[-1]["loss_kl_to_ref"]
    header = (tmp_path / "run/metrics.csv").read_text().splitlines()[0]
    # Rewards are larger than 1, and none is named `success`: which answers are right is not known.
    assert "eval/a/reward_std" in header and "pass@1" not in header
    assert (tmp_path / "run/model-best/config.json").exists()


def test_an_interrupted_step_is_finished_and_the_run_still_reports(ended, tmp_path):
    def interrupted(loss, batch, optimizer, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return train_step(loss, batch, optimizer, **options)

    output, metrics, error = ended(tmp_path / "run", unequal, "train.num_steps=5", train_step=interrupted)
    assert "this step is finished first" in output and "interrupted; what was learned so far is kept" in output
    assert [row["step"] for row in metrics] == [1] and metrics[0]["is_skipped"] == 0 and error is None
    assert not is_finished(tmp_path / "run")
    ended(tmp_path / "run", unequal, "train.num_steps=2", "resume=true")
    assert is_finished(tmp_path / "run")


def test_a_run_that_learns_nothing_says_so_and_ends_with_an_error(ended, tmp_path, monkeypatch):
    monkeypatch.setattr("llmrl.collectors.base.SIGNAL_PATIENCE", 2)
    output, metrics, error = ended(tmp_path / "constant", never)
    assert "step 1 has nothing to learn from: 16 groups in a row" in output and metrics == []
    counts = dict(re.findall(r"'constant_rewards( \(length\))?': (\d+)", output))  # a few answers may end themselves
    assert sum(map(int, counts.values())) == 32 and " (length)" in counts
    assert "nothing was left to learn from at step 1" in str(error)

    def skipped(loss, batch, optimizer, **options):
        return TrainStepReport(is_skipped=True, num_rows=batch.shape[0])

    output, metrics, error = ended(tmp_path / "skipped", unequal, train_step=skipped)
    assert "step 1 changed nothing" in output and "nothing was learned: no step changed the weights" in output
    assert [row["is_skipped"] for row in metrics] == [1.0, 1.0] and "all 2 steps are done" in str(error)


def test_a_dry_run_of_another_loss_on_the_command_line_ends_well_and_leaves_nothing(tmp_path, real_vllm):
    script = SCRIPTS / "grpo/grpo-async.py"
    another = ("loss=cispo", "train.clip_epsilon_high=3.0", "train.num_minibatches=2")
    command = [sys.executable, str(script), "task=gsm8k", "hardware=gpu1", "dry_run=true", *another]
    result = run_warm(command, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("dry run: two steps done\n")
    assert list(tmp_path.iterdir()) == []
