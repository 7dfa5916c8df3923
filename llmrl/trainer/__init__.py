"""The trainer's model (loading, scoring, packing, sharding), its optimizer and the training step."""

from __future__ import annotations

from llmrl.trainer.engine_teacher import EngineTeacher
from llmrl.trainer.head.divergence import TeacherDistribution, TeacherTopK, TopK, chunked_divergence, chunked_top_k
from llmrl.trainer.loading import LoRAConfig, load_model, load_teacher, make_reference
from llmrl.trainer.minibatches import minibatches
from llmrl.trainer.optimizer import make_optimizer
from llmrl.trainer.scoring import write_hinted_log_probs, write_log_probs, write_top_k
from llmrl.trainer.sharding import shard_model
from llmrl.trainer.train_step import TrainStepReport, train_step
from llmrl.trainer.transformers_wrapper import TransformersWrapper

__all__ = [
    "EngineTeacher",
    "LoRAConfig",
    "TeacherDistribution",
    "TeacherTopK",
    "TopK",
    "TrainStepReport",
    "TransformersWrapper",
    "chunked_divergence",
    "chunked_top_k",
    "load_model",
    "load_teacher",
    "make_optimizer",
    "make_reference",
    "minibatches",
    "shard_model",
    "train_step",
    "write_hinted_log_probs",
    "write_log_probs",
    "write_top_k",
]
