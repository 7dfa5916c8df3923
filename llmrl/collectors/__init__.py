"""Collectors: conversations in, batches out."""

from llmrl.collectors.collector import CollectionStalled, LLMCollector
from llmrl.collectors.player import RolloutLimits
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.rows import batch_rows, rollout_rows

__all__ = ["CollectionReport", "CollectionStalled", "LLMCollector", "RolloutLimits", "batch_rows", "rollout_rows"]
