"""What a training run can be told: one dataclass a section, with the reason of each default.

`llmrl.runs.launch` composes them from YAML files and the command line with hydra; Python builds them as they are. An
entry without a default is decided by a task or by the caller. What depends on task, hardware or algorithm stands, with
its reason, in the YAML files of `sota-implementations/config/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from llmrl.runs.engine_config import EngineConfig, RayConfig, SyncConfig, check_choice

if TYPE_CHECKING:
    ComputeDtype = Literal["float32", "bfloat16"]
    HeadKernel = Literal["torch", "liger"]
    InFlight = int | Literal["auto"] | None
    Schedule = Literal["constant", "linear", "cosine"]
else:  # OmegaConf knows no Literal, and fails of unions: it checks that they are strings, and we which ones
    ComputeDtype = HeadKernel = Schedule = str
    InFlight = Any


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """What a run leaves behind, and when."""

    path: str
    """Folder of everything that the run leaves."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go besides `metrics.csv`: `tensorboard`, `wandb`, `trackio`, `mlflow`."""
    traces: int = 0
    """Conversations of each step that trackers show, too; 0, since some trackers are on another's machine."""
    spans: bool = False
    """Send OpenTelemetry's spans of rollouts to where `OTEL_EXPORTER_OTLP_ENDPOINT` says."""
    checkpoint_every: int = 5
    """Steps between checkpoints (12 bytes per parameter, one is kept); the steps since are recovered by replay."""
    sample_every: int = 5
    """Steps between sample conversations in the live view."""

    def __post_init__(self) -> None:
        if self.traces < 0 or (self.traces and not self.trackers):
            raise ValueError(f"run.traces must be 0 or more, and some need run.trackers, got {self.traces}.")


@dataclass(slots=True, kw_only=True)
class LoRAEntries:
    """Low-rank adapters, trained in place of the model's weights."""

    rank: int | None = None
    """Of the update of each weight; null trains all weights."""
    alpha: int = 32
    """The update is multiplied by `alpha / rank`."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the layers that are adapted; `all-linear` is all but the output head."""


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The model that is trained and generates."""

    path: str
    """A Hugging Face name or folder; `embedded` is SmolLM2-135M-Instruct from the package."""
    max_model_len: int | None = None
    """Tokens of a whole conversation; null is the model's own limit."""
    dtype: ComputeDtype = "float32"
    """That engine and trainer compute in, both, since an update below the engine's rounding never reaches it."""
    lora: LoRAEntries = field(default_factory=LoRAEntries)
    """Adapters; `sync.lora` says how the engine gets them."""

    def __post_init__(self) -> None:
        check_choice("model.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """A task environment (`llmrl.envs.make_task_env`)."""

    name: str
    """Of the task, such as `addition` or `gsm8k`."""
    data: Any = None
    """A file, folder or hub name in place of the task's own problems."""
    train_split: str = "train"
    """Of the problems that are trained on."""
    eval_split: str = "test"
    """Of the problems that are held out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task, such as `num_digits`."""


@dataclass(slots=True, kw_only=True)
class CollectConfig:
    """What a batch is, and how its answers are sampled."""

    groups_per_batch: int
    """Prompts of a batch."""
    group_size: int
    """Answers to each prompt."""
    max_new_tokens: int
    """Of a turn."""
    max_turns: int = 1
    """Answers of one conversation; 1 is a question and its answer."""
    temperature: float = 1.0
    """1 samples from the policy itself."""
    top_p: float = 1.0
    """Below 1 the least likely tokens are never sampled; vLLM needs `top_k` beside it."""
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are never sampled; vLLM needs `top_k` beside it."""
    max_staleness: int | None = None
    """Versions that a group may be old when it is trained on; null generates on demand, and nothing meanwhile."""
    max_concurrent_rollouts: InFlight = None
    """Conversations in flight; null is all of a batch and of those ahead, `auto` what the engine's memory bears."""
    num_collectors: int | None = None
    """Collector actors on Ray; null collects in this process."""
    cpus_per_collector: int | None = None
    """Cores of each collector actor; null is Ray's default."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"collect.temperature must be positive, got {self.temperature}.")
        limit = self.max_concurrent_rollouts
        if limit not in (None, "auto") and not (isinstance(limit, int) and limit > 0):
            raise ValueError(f"collect.max_concurrent_rollouts must be a number from 1, auto or null, got {limit!r}.")
        if limit == "auto" and self.num_collectors is not None:
            raise ValueError(
                "collect.max_concurrent_rollouts=auto is of a collector in this process: with collect.num_collectors "
                "give a number."
            )

    @property
    def generate_kwargs(self) -> dict[str, float]:
        """What a policy samples by, and its trainer replays."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")}


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    """The trainer's model, its optimizer, and how long it trains."""

    num_steps: int
    """Batches of the whole run."""
    learning_rate: float
    """The highest of the schedule."""
    schedule: Schedule = "constant"
    """After the warm-up; `linear` and `cosine` decay to 0 at `num_steps`, which short runs end before."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises; AdamW's first steps are small enough for a model that is tuned."""
    weight_decay: float = 0.0
    """A few hundred small steps are too few for it."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to it: the first steps have norms of 5 and more."""
    target_reward: float | None = None
    """End the training once a batch's mean reward is this high; null: never."""
    device: str = "cpu"
    """Of the trainer: `cpu`, `cuda`, `cuda:1`."""
    num_ranks: int = 1
    """Processes that the trainer is sharded over, one a GPU; under `torchrun` as many as that started."""
    cpu_threads: int | None = None
    """Of each process of the trainer; null is all cores, which ranks on a CPU divide."""
    token_budget: int = 8192
    """Packed tokens of a micro-batch: bounds memory, changes no gradient."""
    bin_length: int | None = None
    """Tokens that are packed into one sequence; null weighs attention against shared prompts."""
    head_kernel: HeadKernel = "torch"
    """What makes log-probs of hidden states; `liger` is faster on a GPU, and off by 0.01 to 0.02 nats per token."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, which saves their memory for a third of the speed."""
    offload_activations: bool = False
    """Keep what checkpointing keeps in the host's memory: long rows of deep models, slower."""
    compile_layers: bool = False
    """Compile the model's layers: faster steps after a first one that takes a minute."""

    def __post_init__(self) -> None:
        check_choice("train.schedule", self.schedule, ("constant", "linear", "cosine"))
        check_choice("train.head_kernel", self.head_kernel, ("torch", "liger"))
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("train.offload_activations=true needs train.gradient_checkpointing=true.")
        if self.num_ranks < 1:
            raise ValueError(f"train.num_ranks must be at least 1, got {self.num_ranks}.")
        if self.num_ranks > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(f"train.device={self.device!r} is one GPU, and train.num_ranks={self.num_ranks} need all.")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"train.device must be cpu, cuda or one GPU of it, as cuda:1, got {self.device!r}.")


@dataclass(slots=True, kw_only=True)
class EvalEnvConfig:
    """A further environment to evaluate in."""

    name: str
    """Of the task, such as `gsm8k`."""
    data: Any = None
    """A file, folder or hub name in place of the task's own problems."""
    split: str = "test"
    """Which of its problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    """What is measured on held-out problems, before, during and after training."""

    every: int | None = None
    """Steps between evaluations; null evaluates before and after training alone."""
    num_problems: int | None = None
    """Held-out problems that are used, of each environment; null is all, 0 evaluates in none."""
    num_samples: int = 1
    """Answers to each of them."""
    envs: dict[str, EvalEnvConfig] = field(default_factory=dict)
    """Environments beside the task's own, by the names that their metrics have."""
    metric: str | None = None
    """Decides which model is the best, which is kept in `model-best`: such as `eval/gsm8k/pass@1`; null keeps none."""
    patience: int | None = None
    """Evaluations in a row without a better one after which training ends; null: it goes on."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"eval.every must be at least 1, got {self.every}; null evaluates before and after alone.")
        if self.patience is not None and self.metric is None:
            raise ValueError("eval.patience needs eval.metric, by which an evaluation is better than another.")


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    """The model in Hugging Face format, for others: while training goes on, at its end, and on a hub."""

    every: int | None = None
    """Steps between exports (`exports/step-…`), written beside the training; null: at the end alone, as `model`."""
    save_total_limit: int | None = None
    """Exports that are kept, the last ones; null keeps all."""
    max_shard_size: str = "5GB"
    """Of a file of weights, in KB, MB, GB or TB."""
    push_to_hub: str | None = None
    """A repository, `me/my-model`, that is given each export and the model; private where it is made; null: none."""

    def __post_init__(self) -> None:
        for name in ("every", "save_total_limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"export.{name} must be at least 1 or null, got {value}.")
        if self.save_total_limit is not None and self.every is None:
            raise ValueError("export.save_total_limit needs export.every, without which there are no exports.")
        if not re.fullmatch(r"[1-9]\d*[KMGT]B", self.max_shard_size):
            raise ValueError(f"export.max_shard_size must be like 500MB or 5GB, got {self.max_shard_size!r}.")


@dataclass(slots=True, kw_only=True)
class ScriptConfig:
    """What every training script has."""

    run: RunConfig
    """What the run leaves behind."""
    model: ModelConfig
    """What is trained."""
    env: EnvConfig
    """What it is trained on."""
    collect: CollectConfig
    """What a batch is."""
    train: TrainConfig
    """How it is trained on."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """What is measured on problems held out."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """What is given away of the model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What generates."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How weights travel."""
    ray: RayConfig = field(default_factory=RayConfig)
    """Where actors are."""
    algorithm: str = ""
    """A run is resumed by its own."""
    seed: int = 0
    """Of the data order, the sampling and torch."""
    resume: bool = False
    """Go on with the run in `run.path` where it stopped."""
    dry_run: bool = False
    """Try the configuration: tiny model, two groups, two steps, CPU, nothing is left."""

    def __post_init__(self) -> None:
        # What hardware is asked for is checked here, so that a dry run, which replaces it, has checked it.
        engine, gpus = self.engine, self.engine.ray_options.get("num_gpus")
        if self.collect.num_collectors is not None and not engine.use_ray:
            raise ValueError(
                "collect.num_collectors needs engine.use_ray=true: collector actors reach engines through Ray."
            )
        if self.sync.transport == "ipc" and (engine.use_ray or (engine.num_replicas or 1) > 1):
            raise ValueError("sync.transport=ipc is for one engine on the trainer's GPU; with several use direct.")
        if self.sync.lora == "adapter" and self.model.lora.rank is None:
            raise ValueError("sync.lora=adapter sends adapters alone: give them a rank, model.lora.rank=16.")
        if engine.sleep_while_training and not self.engine_sleeps:
            needed = "sync.transport=ipc, collect.max_staleness=null and collect.in_background=false"
            raise ValueError(
                f"engine.sleep_while_training=true needs an engine on the trainer's GPU, in turn: {needed}."
            )
        if engine.use_ray and gpus and gpus != engine.tensor_parallel_size:
            raise ValueError(
                f"engine.ray_options.num_gpus is {gpus} and engine.tensor_parallel_size {engine.tensor_parallel_size}: "
                "an engine's actor has as many GPUs as the engine is sharded over."
            )

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine gives back the GPU's memory while the trainer trains."""
        is_ahead = self.collect.max_staleness is not None or getattr(self.collect, "in_background", False)
        return self.sync.transport == "ipc" and not is_ahead and self.engine.sleep_while_training is not False


@dataclass(slots=True, kw_only=True)
class GRPOTrainConfig(TrainConfig):
    """Training by group-relative policy optimization (`GRPOLoss`)."""

    clip_epsilon: float = 0.2
    """Bound of the ratio to the trainer's own log-probs before the step (PPO's); it is 1 while there is one update."""
    clip_epsilon_high: float | None = None
    """The upper bound where it is another one (DAPO's 0.28); null is `clip_epsilon`."""
    importance_cap: float | None = 2.0
    """Bound of the weight that makes up for trainer and engine differing: few tokens reach 2 (Yao et al., 2025)."""
    kl_to_ref_coeff: float | None = None
    """Weight of the KL to the model that training began with; null, since short runs stay near it."""
    num_epochs: int = 1
    """Times that a batch is learned from; 1 is on-policy, answers are seldom so expensive that 2 pays."""
    num_minibatches: int = 1
    """Updates an epoch; 1 takes the whole batch's gradient."""


@dataclass(slots=True, kw_only=True)
class GRPOConfig(ScriptConfig):
    """Of `sota-implementations/grpo/grpo.py`."""

    train: GRPOTrainConfig
    algorithm: str = "grpo"
