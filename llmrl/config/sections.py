"""The configuration of a training run: one dataclass for each section, with the reason of each default.

`llmrl.config.launch` composes them from YAML files and the command line with hydra; Python builds them as they are. An
entry without a default is decided by a task or by the caller. What depends on task, hardware or algorithm stands, with
its reason, in the YAML files of `sota-implementations/config/`. A section also builds what its entries describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from llmrl.collectors import RolloutLimits
from llmrl.config.engine import EngineConfig, RayConfig, SyncConfig
from llmrl.config.entries import NAMED, Section, above, any_value, at_least, matching, one_of, within
from llmrl.config.losses import LOSSES, build_loss, check_loss_entries
from llmrl.config.model import ModelConfig
from llmrl.objectives import GRPOLoss
from llmrl.objectives.advantages.normalization import Normalization
from llmrl.trainer import TransformersWrapper, load_model, make_optimizer
from llmrl.watch.tracking import TRACKERS

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

    Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "sequence_sum"]
    Divergence = Literal["tv", "kl"]
    HeadKernel = Literal["torch", "liger"]
    InFlight = int | Literal["auto"] | None
    LossName = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "dppo"]
    Schedule = Literal["constant", "linear", "cosine"]
else:  # OmegaConf supports neither Literal nor unions: it checks that they are strings, and `one_of` which ones
    Aggregation = Divergence = HeadKernel = LossName = Schedule = str
    InFlight = Any


@dataclass(slots=True, kw_only=True)
class RunConfig(Section):
    """What a run leaves behind, and when."""

    section: ClassVar[str] = "run"
    path: str = field(metadata=NAMED)
    """Folder of everything that the run leaves."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"], metadata=one_of(*TRACKERS))
    """Where metrics go besides `metrics.csv`: `tensorboard`, `wandb`, `trackio`, `mlflow`."""
    traces: int = field(default=0, metadata=at_least(0))
    """Conversations of each step that trackers show, too; 0, since some trackers are on another's machine."""
    spans: bool = False
    """Send OpenTelemetry's spans of rollouts to where `OTEL_EXPORTER_OTLP_ENDPOINT` says."""
    checkpoint_every: int = field(default=5, metadata=at_least(1))
    """Steps between checkpoints (12 bytes per parameter, one is kept); the steps since are recovered by replay."""
    sample_every: int = field(default=5, metadata=at_least(1))
    """Steps between sample conversations in the live view."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.traces and not self.trackers:
            raise ValueError(f"run.traces={self.traces} needs run.trackers, which show them; got none.")


@dataclass(slots=True, kw_only=True)
class EnvConfig(Section):
    """A task environment (`llmrl.envs.make_task_env`)."""

    section: ClassVar[str] = "env"
    name: str = field(metadata=NAMED)
    """Name of the task, such as `addition` or `gsm8k`."""
    data: Any = None
    """A file, folder or hub name in place of the task's own problems."""
    train_split: str = field(default="train", metadata=NAMED)
    """Split of the problems that are trained on."""
    eval_split: str = field(default="test", metadata=NAMED)
    """Split of the problems that are held out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task, such as `num_digits`."""


@dataclass(slots=True, kw_only=True)
class CollectConfig(Section):
    """What a batch is, and how its answers are sampled."""

    section: ClassVar[str] = "collect"
    groups_per_batch: int = field(metadata=at_least(1))
    """Prompts of a batch."""
    group_size: int = field(metadata=at_least(1))
    """Answers to each prompt."""
    max_new_tokens: int = field(metadata=at_least(1))
    """Maximum number of tokens of a turn."""
    max_turns: int = field(default=1, metadata=at_least(1))
    """Answers of one conversation; 1 is a question and its answer."""
    temperature: float = field(default=1.0, metadata=at_least(0.01))
    """Temperature of sampling; 1 samples from the policy itself."""
    top_p: float = field(default=1.0, metadata=above(0, at_most=1))
    """Below 1 the least likely tokens are never sampled; vLLM needs `top_k` beside it."""
    top_k: int = field(default=0, metadata=at_least(0))
    """Number of the likeliest tokens that are sampled from; 0 keeps all."""
    min_p: float = field(default=0.0, metadata=within(0, 0.999))
    """Tokens less likely than this share of the likeliest are never sampled; vLLM needs `top_k` beside it."""
    max_staleness: int | None = field(default=None, metadata=at_least(0))
    """Versions that a group may be old when it is trained on; null generates on demand, and nothing meanwhile."""
    max_concurrent_rollouts: InFlight = None
    """Conversations in flight; null is all of a batch and of those ahead, `auto` what the engine's memory bears."""
    num_collectors: int | None = field(default=None, metadata=at_least(1))
    """Collector actors on Ray; null collects in this process."""
    cpus_per_collector: int | None = field(default=None, metadata=at_least(1))
    """Cores of each collector actor; null is Ray's default."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not self.top_k and (self.top_p < 1 or self.min_p > 0):
            raise ValueError(
                f"collect.top_p={self.top_p:g} and collect.min_p={self.min_p:g} keep any number of tokens, which vLLM "
                "reports only where collect.top_k bounds it: add collect.top_k=200, say."
            )
        limit = self.max_concurrent_rollouts
        if limit not in (None, "auto") and not (type(limit) is int and limit > 0):
            raise ValueError(f"collect.max_concurrent_rollouts must be a number from 1, auto or null, got {limit!r}.")
        if limit == "auto" and self.num_collectors is not None:
            raise ValueError(
                "collect.max_concurrent_rollouts=auto is of a collector in this process: with collect.num_collectors "
                "give a number."
            )

    @property
    def budget(self) -> int:
        """Tokens that the answers of one conversation may have."""
        return self.max_turns * self.max_new_tokens

    @property
    def limits(self) -> RolloutLimits:
        """The limits of a conversation."""
        return RolloutLimits(max_turns=self.max_turns)

    @property
    def generate_kwargs(self) -> dict[str, float]:
        """What a policy samples by, and its trainer replays."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")}


@dataclass(slots=True, kw_only=True)
class TrainerConfig(Section):
    """The trainer's model: where it is, and how it is computed."""

    section: ClassVar[str] = "train"
    device: str = field(default="cpu", metadata=matching(r"cpu|cuda(:\d+)?", "cpu, cuda or one GPU of it, as cuda:1"))
    """Device of the trainer: `cpu`, `cuda`, `cuda:1`."""
    num_ranks: int = field(default=1, metadata=at_least(1))
    """Processes that the trainer is sharded over, one a GPU; under `torchrun` as many as that started."""
    cpu_threads: int | None = field(default=None, metadata=at_least(1))
    """Threads of each process of the trainer; null is all cores, which ranks on a CPU divide."""
    token_budget: int = field(default=8192, metadata=at_least(1))
    """Packed tokens of a micro-batch: bounds memory, changes no gradient."""
    bin_length: int | None = field(default=None, metadata=at_least(1))
    """Tokens that are packed into one sequence; null weighs attention against shared prompts."""
    head_kernel: HeadKernel = field(default="torch", metadata=one_of("torch", "liger"))
    """What makes log-probs of hidden states; `liger` is faster on a GPU, and off by 0.01 to 0.02 nats per token."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, which saves their memory for a third of the speed."""
    offload_activations: bool = False
    """Keep what checkpointing keeps in the host's memory: long rows of deep models, slower."""
    compile_layers: bool = False
    """Compile the model's layers: faster steps after a first one that takes a minute."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("train.offload_activations=true needs train.gradient_checkpointing=true.")
        if self.num_ranks > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(f"train.device={self.device!r} is one GPU, and train.num_ranks={self.num_ranks} need all.")


@dataclass(slots=True, kw_only=True)
class TrainConfig(TrainerConfig):
    """The trainer: its model, its optimizer, and how long it trains."""

    num_steps: int = field(metadata=at_least(1))
    """Batches of the whole run."""
    learning_rate: float = field(metadata=above(0))
    """Highest learning rate of the schedule."""
    schedule: Schedule = field(default="constant", metadata=one_of("constant", "linear", "cosine"))
    """Schedule after the warm-up; `linear` and `cosine` decay to 0 at `num_steps`, which short runs end before."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Steps over which the learning rate rises; AdamW's first steps are small enough for a model that is tuned."""
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    """Weight decay of matrices; a few hundred small steps are too few for it."""
    max_grad_norm: float | None = field(default=1.0, metadata=above(0))
    """Gradients are scaled down to it: the first steps have norms of 5 and more."""
    target_reward: float | None = field(default=None, metadata=any_value("rewards are of any size"))
    """End the training once a batch's mean reward is this high; null: never."""

    def __post_init__(self) -> None:
        # By its name: in a slotted dataclass the zero-argument `super()` is of a class that is no more.
        TrainerConfig.__post_init__(self)
        if self.schedule != "constant" and self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} leaves nothing of train.num_steps={self.num_steps} to decay "
                "in."
            )

    def build_optimizer(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return AdamW over what of a model is trained, and the schedule of its learning rate."""
        return make_optimizer(model, **self.arguments_of(make_optimizer))


@dataclass(slots=True, kw_only=True)
class EvalEnvConfig:
    """A further environment to evaluate in."""

    name: str = field(metadata=NAMED)
    """Name of the task, such as `gsm8k`."""
    data: Any = None
    """A file, folder or hub name in place of the task's own problems."""
    split: str = field(default="test", metadata=NAMED)
    """Split of its problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""


@dataclass(slots=True, kw_only=True)
class EvalConfig(Section):
    """What is measured on held-out problems, before, during and after training."""

    section: ClassVar[str] = "eval"
    every: int | None = field(default=None, metadata=at_least(1))
    """Steps between evaluations; null evaluates before and after training alone."""
    num_problems: int | None = field(default=None, metadata=at_least(0))
    """Held-out problems that are used, of each environment; null is all, 0 evaluates in none."""
    num_samples: int = field(default=1, metadata=at_least(1))
    """Answers to each of them."""
    envs: dict[str, EvalEnvConfig] = field(default_factory=dict)
    """Environments beside the task's own, by the names that their metrics have."""
    metric: str | None = field(
        default=None, metadata=matching(r"eval/.*\S", "a metric of the evaluation, as eval/gsm8k/pass@1")
    )
    """Decides which model is the best, which is kept in `model-best`: such as `eval/gsm8k/pass@1`; null keeps none."""
    patience: int | None = field(default=None, metadata=at_least(1))
    """Evaluations in a row without a better one after which training ends; null: it goes on."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.patience is not None and self.metric is None:
            raise ValueError("eval.patience needs eval.metric, by which an evaluation is better than another.")


@dataclass(slots=True, kw_only=True)
class ExportConfig(Section):
    """The model in Hugging Face format, for others: while training goes on, at its end, and on a hub."""

    section: ClassVar[str] = "export"
    every: int | None = field(default=None, metadata=at_least(1))
    """Steps between exports (`exports/step-…`), written beside the training; null: at the end alone, as `model`."""
    save_total_limit: int | None = field(default=None, metadata=at_least(1))
    """Exports that are kept, the last ones; null keeps all."""
    max_shard_size: str = field(default="5GB", metadata=matching(r"[1-9]\d*[KMGT]B", "like 500MB or 5GB"))
    """Maximum size of a file of weights, in KB, MB, GB or TB."""
    push_to_hub: str | None = field(default=None, metadata=NAMED)
    """A repository, `me/my-model`, that is given each export and the model; private where it is made; null: none."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.save_total_limit is not None and self.every is None:
            raise ValueError("export.save_total_limit needs export.every, without which there are no exports.")


@dataclass(slots=True, kw_only=True)
class ScriptConfig(Section):
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
    """Name of the algorithm; a run is resumed by its own."""
    seed: int = field(default=0, metadata=within(0, 2**32 - 1))
    """Seed of the data order, the sampling and torch."""
    resume: bool = False
    """Go on with the run in `run.path` where it stopped."""
    dry_run: bool = False
    """Try the configuration: tiny model, two groups, two steps, CPU, nothing is left."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        # What hardware is asked for is checked here, so that a dry run, which replaces it, has checked it.
        engine = self.engine
        gpus = self.engine.ray_options.get("num_gpus")
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

    def load_model(self, device: str) -> PreTrainedModel:
        """Load the model that is trained, in float32, with its adapters."""
        return load_model(
            self.model.folder,
            device=device,
            gradient_checkpointing=self.train.gradient_checkpointing,
            lora=self.model.lora.build(),
        )

    def build_actor(
        self, model: PreTrainedModel, *, generate_kwargs: Mapping[str, float] | None = None
    ) -> TransformersWrapper:
        """Return the policy that scores rows with the trained model.

        Args:
            model: the model.
            generate_kwargs: how the rows were sampled, which is replayed; None for rows that were not sampled.
        """
        return TransformersWrapper(
            model,
            generate=False,
            generate_kwargs=generate_kwargs,
            autocast_dtype=self.model.autocast_dtype,
            **self.train.arguments_of(TransformersWrapper.__init__),
        )


@dataclass(slots=True, kw_only=True)
class ClippedTrainConfig(TrainConfig):
    """Training by a clipped policy gradient (`GRPOLoss`)."""

    clip_epsilon: float | None = field(default=None, metadata=above(0, at_most=1))
    """Bound of the ratio to the trainer's own log-probs before the step (PPO's); null is the loss's own, GRPO's 0.2."""
    clip_epsilon_high: float | None = field(default=None, metadata=above(0))
    """The upper bound, if it is another one (DAPO's 0.28); null is the loss's own, of GRPO `clip_epsilon`."""
    importance_cap: float | None = field(default=2.0, metadata=above(0))
    """Bound of the weight that makes up for trainer and engine differing: few tokens reach 2 (Yao et al., 2025)."""


@dataclass(slots=True, kw_only=True)
class GRPOTrainConfig(ClippedTrainConfig):
    """Training by group-relative policy optimization, or by the loss that `loss` names."""

    dual_clip: float | None = field(default=None, metadata=above(1))
    """Bound of the ratio of tokens with a negative advantage; null has none."""
    aggregation: Aggregation | None = field(
        default=None, metadata=one_of("token_mean", "sequence_mean", "group_mean", "sequence_sum")
    )
    """How the losses of tokens become one number; null is the loss's own."""
    fixed_length: int | None = field(default=None, metadata=at_least(1))
    """What `dr_grpo` divides by; null is the budget, `collect.max_turns` times `collect.max_new_tokens`."""
    max_divergence: float | None = field(default=None, metadata=above(0))
    """Bound of an update in `dppo`, at each token; null is 0.15."""
    divergence: Divergence | None = field(default=None, metadata=one_of("tv", "kl"))
    """What `dppo` bounds: the total variation (`tv`) or the KL of a token against all others; null is `tv`."""
    kl_to_ref_coeff: float | None = field(default=None, metadata=at_least(0))
    """Weight of the KL to the model that training began with; null, since short runs stay near it."""
    num_epochs: int = field(default=1, metadata=at_least(1))
    """Times that a batch is learned from; 1 is on-policy, answers are seldom so expensive that 2 pays."""
    num_minibatches: int = field(default=1, metadata=at_least(1))
    """Updates an epoch; 1 takes the whole batch's gradient."""


@dataclass(slots=True, kw_only=True)
class GRPOConfig(ScriptConfig):
    """Configuration of `sota-implementations/grpo/grpo.py`."""

    train: GRPOTrainConfig
    loss: LossName = field(default="grpo", metadata=one_of(*LOSSES))
    """GRPO's, or a relative's; the advantage is the one that belongs to it."""
    algorithm: str = "grpo"

    def __post_init__(self) -> None:
        # By its name: in a slotted dataclass the zero-argument `super()` is of a class that is no more.
        ScriptConfig.__post_init__(self)
        check_loss_entries(self.loss, self.train)

    @property
    def normalization(self) -> Normalization:
        """How `MCAdvantage` compares the answers of a group, as the loss wants it."""
        return LOSSES[self.loss].normalization

    def build_loss(self, actor: TransformersWrapper) -> GRPOLoss:
        """Return the loss that `loss` names, with the entries of `train` that it takes."""
        return build_loss(self.loss, self.train, actor, budget=self.collect.budget)
