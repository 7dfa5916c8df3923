"""Scoring: pure functions over settled conversations, weighed by a rubric."""

from llmrl.rewards.reward import RewardFn, ScoredRollout, UnknownRewardInput
from llmrl.rewards.rubric import Rubric, Score

__all__ = ["RewardFn", "Rubric", "Score", "ScoredRollout", "UnknownRewardInput"]
