"""Configuration of a training run: one dataclass per section, with the reasons for the defaults.

`llmrl.config.launch` builds these sections from YAML files and the command line with hydra. An entry without a default
is set by a task or by the caller. Values that depend on task, hardware or algorithm are in the YAML files of
`sota-implementations/config/`. Sections also build the objects that their entries describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from llmrl._utils.imports import own_function
from llmrl.collectors import RolloutLimits
from llmrl.config.engine import EngineConfig, RayConfig, SyncConfig
from llmrl.config.entries import NAMED, Section, above, any_value, at_least, matching, one_of, within
from llmrl.config.losses import LOSSES, build_loss, check_loss_entries, check_num_updates
from llmrl.config.model import ModelConfig
from llmrl.objectives import GRPOLoss
from llmrl.objectives.advantages.normalization import Normalization
from llmrl.trainer import TransformersWrapper, load_model, make_optimizer
from llmrl.watch.tracking import TRACKERS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

    Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "sequence_sum"]
    Divergence = Literal["tv", "kl"]
    HeadKernel = Literal["torch", "liger"]
    MomentsName = Literal["float32", "8bit"]
    InFlight = int | Literal["auto"] | None
    LossName = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "dppo"]
    Schedule = Literal["constant", "linear", "cosine"]
else:  # OmegaConf supports neither Literal nor unions: it checks for strings, and `one_of` checks their values
    Aggregation = Divergence = HeadKernel = LossName = MomentsName = Schedule = str
    InFlight = Any


@dataclass(slots=True, kw_only=True)
class RunConfig(Section):
    """Files, metrics and traces that a run writes."""

    section: ClassVar[str] = "run"
    path: str = field(metadata=NAMED)
    """Folder of everything that the run writes."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"], metadata=one_of(*TRACKERS))
    """Destinations of metrics in addition to `metrics.csv`: `tensorboard`, `wandb`, `trackio`, `mlflow`."""
    traces: int = field(default=0, metadata=at_least(0))
    """Number of conversations per step that trackers show; 0 by default, since some trackers are on other machines."""
    spans: bool = False
    """Whether to send OpenTelemetry spans of rollouts to `OTEL_EXPORTER_OTLP_ENDPOINT`."""
    checkpoint_every: int = field(default=5, metadata=at_least(1))
    """Steps between checkpoints (12 bytes per parameter, one is kept); later steps are recovered by replay."""
    keep_batches: bool = False
    """Whether to keep the batches before the checkpoint, so that `llmrl replay` can compute any step again."""
    sample_every: int = field(default=5, metadata=at_least(1))
    """Steps between sample conversations in the live view."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.traces and not self.trackers:
            raise ValueError(f"run.traces={self.traces} needs run.trackers to show the conversations; got none.")


@dataclass(slots=True, kw_only=True)
class EnvConfig(Section):
    """A task environment (`llmrl.envs.make_task_env`)."""

    section: ClassVar[str] = "env"
    name: str = field(metadata=NAMED)
    """Name of the environment, such as `addition`, `PACKAGE/NAME`, `verifiers:TASKSET` or `FILE.py:FUNCTION`."""
    data: Any = None
    """A file, folder or hub name instead of the task's own problems."""
    train_split: str = field(default="train", metadata=NAMED)
    """Split of the problems for training."""
    eval_split: str = field(default="test", metadata=NAMED)
    """Split of the held-out problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task, such as `num_digits`."""

    @property
    def label(self) -> str:
        """Name in metrics; the name of a file has no folders, so that it is the same on every machine."""
        own = own_function(self.name)
        return self.name if own is None else f"{own[0].name}:{own[1]}"


@dataclass(slots=True, kw_only=True)
class CollectConfig(Section):
    """Size of a batch, and sampling of its answers."""

    section: ClassVar[str] = "collect"
    groups_per_batch: int = field(metadata=at_least(1))
    """Number of prompts per batch."""
    group_size: int = field(metadata=at_least(1))
    """Number of answers per prompt."""
    max_new_tokens: int = field(metadata=at_least(1))
    """Maximum number of tokens per turn."""
    max_turns: int = field(default=8, metadata=at_least(1))
    """Maximum number of answers per conversation; a single-turn environment ends after one answer."""
    temperature: float = field(default=1.0, metadata=at_least(0.01))
    """Sampling temperature; 1 samples from the policy itself."""
    top_p: float = field(default=1.0, metadata=above(0, at_most=1))
    """Nucleus sampling: below 1, the least likely tokens are never sampled; vLLM also needs `top_k`."""
    top_k: int = field(default=0, metadata=at_least(0))
    """Number of the most likely tokens to sample from; 0 keeps all."""
    min_p: float = field(default=0.0, metadata=within(0, 0.999))
    """Minimum probability of a token relative to the most likely token; vLLM also needs `top_k`."""
    max_staleness: int | None = field(default=None, metadata=at_least(0))
    """Maximum age of a group in versions when it is trained on; null generates on demand, and not while training."""
    max_concurrent_rollouts: InFlight = None
    """Maximum number of rollouts in flight; null allows a batch and the batches ahead, `auto` adapts to the engine's
    memory."""
    num_collectors: int | None = field(default=None, metadata=at_least(1))
    """Number of collector actors on Ray; null collects in this process."""
    cpus_per_collector: int | None = field(default=None, metadata=at_least(1))
    """Number of cores per collector actor; null is Ray's default."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not self.top_k and (self.top_p < 1 or self.min_p > 0):
            raise ValueError(
                f"collect.top_p={self.top_p:g} and collect.min_p={self.min_p:g} keep an unbounded number of "
                "tokens, and vLLM reports the kept tokens only up to a bound: add one, such as collect.top_k=200."
            )
        limit = self.max_concurrent_rollouts
        if limit not in (None, "auto") and not (type(limit) is int and limit > 0):
            raise ValueError(f"collect.max_concurrent_rollouts must be a number from 1, auto or null, got {limit!r}.")
        if limit == "auto" and self.num_collectors is not None:
            raise ValueError(
                "collect.max_concurrent_rollouts=auto needs a collector in this process: with collect.num_collectors, "
                "give a number."
            )

    @property
    def budget(self) -> int:
        """Maximum number of tokens in the answers of one conversation."""
        return self.max_turns * self.max_new_tokens

    @property
    def limits(self) -> RolloutLimits:
        """Limits of a conversation."""
        return RolloutLimits(max_turns=self.max_turns)

    @property
    def generate_kwargs(self) -> dict[str, float]:
        """Sampling arguments of the policy, which its trainer replays."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")}


@dataclass(slots=True, kw_only=True)
class GRPOCollectConfig(CollectConfig):
    """Collection of groups that are compared by reward."""

    replace_constant_groups: bool = False
    """Whether another prompt replaces a group of equal rewards (dynamic sampling); otherwise the batch is smaller.
    Replacement may take many prompts: see docs/what-matters.md."""


@dataclass(slots=True, kw_only=True)
class TrainerConfig(Section):
    """Placement and computation of the trainer's model."""

    section: ClassVar[str] = "train"
    device: str = field(default="cpu", metadata=matching(r"cpu|cuda(:\d+)?", "cpu, cuda or one GPU such as cuda:1"))
    """Device of the trainer: `cpu`, `cuda`, `cuda:1`."""
    num_ranks: int = field(default=1, metadata=at_least(1))
    """Number of processes over which the trainer is sharded, one per GPU; `torchrun` sets it to its own number."""
    context_ranks: int = field(default=1, metadata=at_least(1))
    """Number of ranks that compute each row together, a divisor of `num_ranks`; rows may be that many times as long."""
    cpu_threads: int | None = field(default=None, metadata=at_least(1))
    """Number of threads per trainer process; null is all cores, divided between the ranks on a CPU."""
    token_budget: int = field(default=8192, metadata=at_least(1))
    """Number of packed tokens per micro-batch; bounds memory and does not change the gradient."""
    bin_length: int | None = field(default=None, metadata=at_least(1))
    """Number of tokens packed into one sequence; null balances the cost of attention against shared prompts."""
    head_kernel: HeadKernel = field(default="torch", metadata=one_of("torch", "liger"))
    """Kernel that computes log-probs from hidden states; `liger` is faster on a GPU, but off by 0.01 to 0.02 nats per
    token."""
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass, which saves memory and costs a third of the speed."""
    offload_activations: bool = False
    """Whether to store checkpointed activations in host memory, for long rows of deep models; slower."""
    moments: MomentsName = field(default="float32", metadata=one_of("float32", "8bit"))
    """Format of AdamW's two moments: `8bit` (bitsandbytes, one rank only) needs 2 instead of 8 bytes per parameter."""
    compile_layers: bool = False
    """Whether to compile the model's layers: steps are faster, but the first takes a minute."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("train.offload_activations=true needs train.gradient_checkpointing=true.")
        if self.num_ranks % self.context_ranks:
            raise ValueError(f"train.context_ranks={self.context_ranks} must divide train.num_ranks={self.num_ranks}.")
        if self.moments == "8bit" and self.num_ranks > 1:
            raise ValueError(
                f"train.moments=8bit is for one rank, and train.num_ranks={self.num_ranks} shards the moments: set "
                "train.moments=float32."
            )
        if self.num_ranks > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"train.device={self.device!r} is a single GPU, and train.num_ranks={self.num_ranks} need one each: "
                "set train.device=cuda."
            )


@dataclass(slots=True, kw_only=True)
class TrainConfig(TrainerConfig):
    """The trainer: its model, its optimizer, and the length of training."""

    num_steps: int = field(metadata=at_least(1))
    """Number of steps of the whole run."""
    learning_rate: float = field(metadata=above(0))
    """Highest learning rate of the schedule."""
    schedule: Schedule = field(default="constant", metadata=one_of("constant", "linear", "cosine"))
    """Schedule after the warm-up; `linear` and `cosine` decay to 0 at `num_steps`."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Warm-up steps of the learning rate; 0 by default, since AdamW's first steps are small enough for fine-tuning."""
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    """Weight decay of matrices; 0 by default, since it has little effect over a few hundred small steps."""
    max_grad_norm: float | None = field(default=1.0, metadata=above(0))
    """Maximum norm of the gradient; larger gradients are scaled down. The first steps often have norms above 5."""
    target_reward: float | None = field(default=None, metadata=any_value("rewards are of any size"))
    """Mean reward of a batch at which training ends; null: never."""

    def __post_init__(self) -> None:
        TrainerConfig.__post_init__(self)
        if self.schedule != "constant" and self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} leaves no step of train.num_steps={self.num_steps} for "
                "the decay."
            )

    def build_optimizer(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return AdamW over the trainable parameters of a model, and its learning-rate schedule."""
        return make_optimizer(model, **self.arguments_of(make_optimizer))


@dataclass(slots=True, kw_only=True)
class EvalEnvConfig:
    """An additional environment for evaluation."""

    name: str = field(metadata=NAMED)
    """Name of the task, such as `gsm8k`."""
    data: Any = None
    """A file, folder or hub name instead of the task's own problems."""
    split: str = field(default="test", metadata=NAMED)
    """Split of the problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""


@dataclass(slots=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation on held-out problems before, during and after training."""

    section: ClassVar[str] = "eval"
    every: int | None = field(default=None, metadata=at_least(1))
    """Steps between evaluations; null evaluates only before and after training."""
    num_problems: int | None = field(default=None, metadata=at_least(0))
    """Number of held-out problems per environment; null is all, 0 disables evaluation."""
    num_samples: int = field(default=1, metadata=at_least(1))
    """Number of answers per problem."""
    envs: dict[str, EvalEnvConfig] = field(default_factory=dict)
    """Environments in addition to the task's own, by their names in metrics."""
    metric: str | None = field(
        default=None, metadata=matching(r"eval/.*\S", "a metric of the evaluation, such as eval/gsm8k/pass@1")
    )
    """Metric that selects the model in `model-best`, such as `eval/gsm8k/pass@1`; null saves no best model."""
    patience: int | None = field(default=None, metadata=at_least(1))
    """Number of evaluations in a row without improvement after which training ends; null: never."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.patience is not None and self.metric is None:
            raise ValueError("eval.patience needs eval.metric, the metric that must improve; got null.")
        if self.patience is not None and self.every is None:
            raise ValueError(
                f"eval.patience={self.patience} needs eval.every, the steps between evaluations; got null."
            )


@dataclass(slots=True, kw_only=True)
class ExportConfig(Section):
    """Exports of the model in Hugging Face format, during and after training, to the run's folder and a hub."""

    section: ClassVar[str] = "export"
    every: int | None = field(default=None, metadata=at_least(1))
    """Steps between exports (`exports/step-…`), written in parallel to training; null: only at the end, as `model`."""
    save_total_limit: int | None = field(default=None, metadata=at_least(1))
    """Number of exports to keep, the latest; null keeps all."""
    max_shard_size: str = field(default="5GB", metadata=matching(r"[1-9]\d*[KMGT]B", "like 500MB or 5GB"))
    """Maximum size of a weight file, in KB, MB, GB or TB."""
    push_to_hub: str | None = field(default=None, metadata=NAMED)
    """Repository, such as `me/my-model`, for exports and the final model; a new one is private; null: none."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.save_total_limit is not None and self.every is None:
            raise ValueError(
                f"export.save_total_limit={self.save_total_limit} needs export.every, the steps between exports."
            )


@dataclass(slots=True, kw_only=True)
class ScriptConfig(Section):
    """Sections and entries of every training script."""

    run: RunConfig
    """Files and metrics of the run."""
    model: ModelConfig
    """The trained model."""
    env: EnvConfig
    """The training environment."""
    collect: CollectConfig
    """Batches and sampling."""
    train: TrainConfig
    """The trainer."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out problems."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """Exports of the model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engines that generate."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Transport of weights."""
    ray: RayConfig = field(default_factory=RayConfig)
    """Ray cluster of the actors."""
    algorithm: str = ""
    """Name of the algorithm; a run can only be resumed with the same one."""
    seed: int = field(default=0, metadata=within(0, 2**32 - 1))
    """Seed of the data order, sampling and torch."""
    resume: bool = False
    """Whether to continue the run in `run.path`."""
    dry_run: bool = False
    """Whether to only try the configuration: tiny model, two groups, two steps, CPU, temporary folder."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        # Hardware settings are checked here, because a dry run replaces them later.
        engine = self.engine
        gpus = engine.ray_options.get("num_gpus")
        if self.collect.num_collectors is not None and not engine.use_ray:
            raise ValueError(
                "collect.num_collectors needs engine.use_ray=true: collector actors reach engines through Ray."
            )
        for entry, value, needed, has_effect in (
            ("sync.folder", self.sync.folder, "sync.transport=files", self.sync.transport == "files"),
            ("ray.address", self.ray.address, "engine.use_ray=true", engine.use_ray),
            (
                "collect.cpus_per_collector",
                self.collect.cpus_per_collector,
                "collect.num_collectors, the number of collector actors",
                self.collect.num_collectors is not None,
            ),
        ):
            if value is not None and not has_effect:
                raise ValueError(f"{entry}={value} has no effect without {needed}: add it, or leave {entry}=null.")
        if self.env.label in self.eval.envs:
            raise ValueError(
                f"eval.envs has an environment {self.env.label!r}, the name of the training environment, the held-out "
                "problems of which it would replace: give it another name."
            )
        if self.sync.transport == "ipc" and (engine.use_ray or (engine.num_replicas or 1) > 1):
            raise ValueError("sync.transport=ipc is for one engine on the trainer's GPU; otherwise use direct.")
        if self.sync.lora == "adapter" and self.model.lora.rank is None:
            raise ValueError("sync.lora=adapter sends adapters alone: give them a rank, model.lora.rank=16.")
        if self.model.lora.quantize_base and self.sync.lora == "adapter":
            raise ValueError(
                "model.lora.quantize_base=true needs sync.lora=merged: the engines' own weights are not quantized, so "
                "adapters alone would give another model there."
            )
        if self.model.lora.quantize_base and self.train.num_ranks > 1:
            raise ValueError("model.lora.quantize_base=true is for one rank, train.num_ranks=1.")
        if engine.sleep_while_training and not self.engine_sleeps:
            needed = "sync.transport=ipc, collect.max_staleness=null and collect.in_background=false"
            raise ValueError(
                "engine.sleep_while_training=true needs an engine on the trainer's GPU that generates and trains in "
                f"turn: {needed}."
            )
        if engine.use_ray and gpus and gpus != engine.tensor_parallel_size:
            raise ValueError(
                f"engine.ray_options.num_gpus is {gpus} and engine.tensor_parallel_size {engine.tensor_parallel_size}: "
                "an engine's actor needs as many GPUs as the engine is sharded over."
            )

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine releases its GPU memory while the trainer trains."""
        is_ahead = self.collect.max_staleness is not None or getattr(self.collect, "in_background", False)
        return self.sync.transport == "ipc" and not is_ahead and self.engine.sleep_while_training is not False

    def load_model(self, device: str, *, mesh: DeviceMesh | None = None) -> PreTrainedModel:
        """Load the model to train, in float32, with its adapters, sharded over the ranks of `mesh`."""
        return load_model(
            self.model.folder,
            device=device,
            mesh=mesh,
            compute_dtype=self.model.autocast_dtype,
            context_ranks=self.train.context_ranks,
            gradient_checkpointing=self.train.gradient_checkpointing,
            lora=self.model.lora.build(),
        )

    def build_actor(
        self, model: PreTrainedModel, *, generate_kwargs: Mapping[str, float] | None = None
    ) -> TransformersWrapper:
        """Return the policy that scores rows with the trained model.

        `generate_kwargs` are the sampling arguments of the rows, for their log-probs; None for rows
        that were not sampled.
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
    """Training with a clipped policy gradient (`GRPOLoss`)."""

    clip_epsilon: float | None = field(default=None, metadata=above(0, at_most=1))
    """Bound of the ratio to the trainer's log-probs before the step (PPO); null is the loss's default, 0.2 for GRPO."""
    clip_epsilon_high: float | None = field(default=None, metadata=above(0))
    """Upper bound, if it differs from the lower one (DAPO: 0.28); null is the loss's default, `clip_epsilon` for
    GRPO."""
    importance_cap: float | None = field(default=2.0, metadata=above(0))
    """Bound of the importance weight between trainer and engine; few tokens exceed 2 (Yao et al., 2025)."""


@dataclass(slots=True, kw_only=True)
class GRPOTrainConfig(ClippedTrainConfig):
    """Training with group-relative policy optimization, or with the loss that `loss` names."""

    dual_clip: float | None = field(default=None, metadata=above(1))
    """Bound of the ratio of tokens with a negative advantage; null: none."""
    aggregation: Aggregation | None = field(
        default=None, metadata=one_of("token_mean", "sequence_mean", "group_mean", "sequence_sum")
    )
    """Reduction of token losses to one number; null is the loss's default."""
    fixed_length: int | None = field(default=None, metadata=at_least(1))
    """Divisor of `dr_grpo`; null is the budget, `collect.max_turns` times `collect.max_new_tokens`."""
    max_divergence: float | None = field(default=None, metadata=above(0))
    """Bound of the divergence of a token in `dppo`; null is 0.15."""
    divergence: Divergence | None = field(default=None, metadata=one_of("tv", "kl"))
    """Divergence that `dppo` bounds for a token against all others: total variation (`tv`) or KL; null is `tv`."""
    kl_to_ref_coeff: float | None = field(default=None, metadata=at_least(0))
    """Weight of the KL to the initial model; null: no KL, since short runs stay near the initial model."""
    num_epochs: int = field(default=1, metadata=at_least(1))
    """Number of passes over a batch; 1 is on-policy, and 2 pays off only if answers are very expensive."""
    num_minibatches: int = field(default=1, metadata=at_least(1))
    """Number of updates per epoch; 1 uses the whole batch's gradient."""


@dataclass(slots=True, kw_only=True)
class GRPOConfig(ScriptConfig):
    """Configuration of `sota-implementations/grpo/grpo.py`."""

    collect: GRPOCollectConfig
    train: GRPOTrainConfig
    loss: LossName = field(default="grpo", metadata=one_of(*LOSSES))
    """Name of the loss; it also sets the normalisation of advantages."""
    algorithm: str = "grpo"

    def __post_init__(self) -> None:
        ScriptConfig.__post_init__(self)
        check_loss_entries(self.loss, self.train)
        check_num_updates(self.loss, num_epochs=self.train.num_epochs, num_minibatches=self.train.num_minibatches)

    @property
    def normalization(self) -> Normalization:
        """Normalisation of advantages in `MCAdvantage` for this loss."""
        return LOSSES[self.loss].normalization

    def build_loss(self, actor: TransformersWrapper) -> GRPOLoss:
        """Return the loss that `loss` names, with its entries of `train`."""
        return build_loss(self.loss, self.train, actor, budget=self.collect.budget)
