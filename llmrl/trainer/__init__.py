"""The trainer's own model: how it scores tokens, how rows are packed, how it is sharded, one step of training."""

from __future__ import annotations

from llmrl.trainer.scoring import write_log_probs
from llmrl.trainer.sharding import shard_model
from llmrl.trainer.train_step import TrainStepReport, train_step
from llmrl.trainer.transformers_wrapper import TransformersWrapper

__all__ = ["TrainStepReport", "TransformersWrapper", "shard_model", "train_step", "write_log_probs"]
