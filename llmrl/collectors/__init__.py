"""Collectors, which play conversations and return them in batches."""

from llmrl._utils.spans import stop_spans, trace_spans
from llmrl.collectors.collector import LLMCollector
from llmrl.collectors.demonstrations import Demonstrations
from llmrl.collectors.groups import CollectionStalled, DropReason, GroupRules, NoSignal
from llmrl.collectors.ray_collector import RayLLMCollector
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.rollout_runner import RolloutLimits
from llmrl.collectors.rows import batch_rows, rollout_rows

__all__ = [
    "CollectionReport",
    "CollectionStalled",
    "Demonstrations",
    "DropReason",
    "GroupRules",
    "LLMCollector",
    "NoSignal",
    "RayLLMCollector",
    "RolloutLimits",
    "batch_rows",
    "rollout_rows",
    "stop_spans",
    "trace_spans",
]
