"""Checks that a configuration fits into this machine's memory, before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from llmrl.config.entries import Section, at_least
from llmrl.config.imitation import DistillationConfig, SFTConfig
from llmrl.config.model import ModelConfig
from llmrl.config.sections import ScriptConfig, TrainerConfig
from llmrl.trainer.memory_plan import MemoryPlan, ModelShape, TrainingShape, plan_memory, what_fits

GIB = 2**30
_USABLE = 0.92
"""Share of a device's memory that remains after the CUDA context and fragmentation."""


@dataclass(slots=True, kw_only=True)
class PlannedTrainConfig(TrainerConfig):
    """Entries of `train` that determine the trainer's memory."""

    kl_to_ref_coeff: float | None = field(default=None, metadata=at_least(0))
    """The KL coefficient of `GRPOTrainConfig`; a value other than null needs a reference model."""


@dataclass(slots=True, kw_only=True)
class PlanConfig(Section):
    """Entries of a run's configuration that determine the trainer's memory."""

    model: ModelConfig
    """The trained model."""
    train: PlannedTrainConfig
    """The trainer."""


def training_shape(model: ModelConfig, train: TrainerConfig, *, budget: int = 0) -> TrainingShape:
    """Return the settings that determine the trainer's memory.

    `budget` is the maximum number of tokens in the answers of a conversation.
    """
    longest = model.max_model_len or train.token_budget
    return TrainingShape(
        num_ranks=train.num_ranks,
        context_ranks=train.context_ranks,
        token_budget=train.token_budget,
        bin_length=min(train.bin_length or longest, train.token_budget),
        longest_row=model.max_model_len or budget,
        gradient_checkpointing=train.gradient_checkpointing,
        offload_activations=train.offload_activations,
        is_half=model.dtype != "float32",
        lora_rank=model.lora.rank,
        quantize_base=model.lora.quantize_base,
        moments=train.moments,
        has_reference=getattr(train, "kl_to_ref_coeff", None) is not None,
        is_gpu=train.device != "cpu",
    )


def planned_run(cfg: ScriptConfig) -> tuple[ModelShape | None, TrainingShape]:
    """Return the shape of a run's model and the settings of its trainer, with a teacher that is loaded beside it.

    The shape is None if the model has no local folder or is not a dense transformer; such a teacher is not counted.
    """
    training = training_shape(cfg.model, cfg.train, budget=cfg.collect.budget)
    if isinstance(cfg, DistillationConfig) and cfg.teacher.path is not None and (teacher := _shape(cfg.teacher.path)):
        training = replace(training, num_teacher_parameters=teacher.num_parameters)
    return _shape(cfg.model.folder), training


def _shape(folder: str) -> ModelShape | None:
    try:
        return ModelShape.read(folder)
    except (ValueError, OSError):
        return None


def check_fit(cfg: ScriptConfig) -> None:
    """Raise ValueError if the trainer needs more GPU memory than there is; the message says what would fit.

    Also raises ValueError if `train.context_ranks` does not divide the number of the model's attention heads. Memory is
    checked only for training on a GPU of this machine, with a dense transformer in a local folder.
    """
    model, training = planned_run(cfg)
    if model is not None and model.num_heads % training.context_ranks:
        raise ValueError(
            f"train.context_ranks={training.context_ranks} does not divide the {model.num_heads} heads of the model's "
            "attention, and each rank computes an equal part of them."
        )
    num_bytes = _gpu_memory(cfg) if training.is_gpu else None  # a CPU may swap, and its batches fill no budget
    if model is None or num_bytes is None:
        return
    plan = plan_memory(model, training)
    usable = int(num_bytes * _USABLE)
    has_engine = not isinstance(cfg, SFTConfig) or cfg.eval.num_problems != 0
    place = torch.device(cfg.train.device).index or 0
    shares_gpu = has_engine and not cfg.engine.use_ray and place < cfg.engine.tensor_parallel_size
    if shares_gpu:
        beside = int(num_bytes * (1 - (cfg.engine.gpu_memory_utilization or 0.9)) * _USABLE)
        kept = sum(plan.lasting.values())
        if not cfg.engine_sleeps:
            usable = beside
        elif kept > beside:
            raise ValueError(
                f"what the trainer keeps while the engine generates, {kept / GIB:.1f} GiB, does not fit into the "
                f"{beside / GIB:.1f} GiB that the engine leaves: lower engine.gpu_memory_utilization, or train "
                "adapters (model.lora.rank=16)."
            )
    if plan.total <= usable:
        return
    fitting = "; or ".join(what_fits(model, training, usable))
    advice = f"What would fit: {fitting}." if fitting else "No entry of the configuration would make it fit."
    raise ValueError(
        f"the trainer needs {plan.total / GIB:.1f} GiB on each GPU and has {usable / GIB:.1f} GiB: "
        f"{', '.join(lines_of(plan))}. {advice}"
    )


def parts_of(plan: MemoryPlan) -> dict[str, float]:
    """Return the parts of a plan in GiB, the largest first."""
    parts = sorted((plan.lasting | plan.passing).items(), key=lambda pair: -pair[1])
    return {name: part / GIB for name, part in parts}


def lines_of(plan: MemoryPlan) -> Iterator[str]:
    """Yield the parts of a plan as text, the largest first."""
    return (f"{name} {part:.1f}" for name, part in parts_of(plan).items())


def _gpu_memory(cfg: ScriptConfig) -> int | None:
    """Return the memory of the trainer's smallest GPU in bytes, without CUDA, which must not be initialised here.

    None if it is not known, such as that of a part of a GPU (MIG).
    """
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(asked, capture_output=True, text=True)
    rows = [line.split(", ") for line in result.stdout.splitlines() if line.count(", ") == 2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(row[0] for row in rows))
    sizes = [
        next((size for index, uuid, size in rows if name == index or uuid.startswith(name or " ")), "")
        for name in visible.replace(" ", "").split(",")
    ]
    if not cfg.engine.use_ray:  # Ray assigns any of them
        first = torch.device(cfg.train.device).index or 0
        sizes = sizes[first : first + cfg.train.num_ranks]
    if result.returncode or not sizes or not all(map(str.isdigit, sizes)):
        return None
    return min(map(int, sizes)) * 2**20
