"""Reward functions and rubrics for finished conversations."""

from llmrl.rewards.adapters import score_reasoning_gym
from llmrl.rewards.answers import (
    extract_answer,
    extract_tag,
    extract_tags,
    has_gsm8k_answer,
    is_gsm8k_right,
    last_number,
)
from llmrl.rewards.countdown import evaluate_expression, is_countdown_right
from llmrl.rewards.ifeval import IFEvalScoreData, check_instructions, score_instructions
from llmrl.rewards.judge import Judge, JudgeUsage
from llmrl.rewards.math import boxed_answer, is_math_right
from llmrl.rewards.reward import ROLLOUT_INPUTS, RewardFn, RewardInput, UnknownRewardInput
from llmrl.rewards.rubric import Rubric, Score

__all__ = [
    "ROLLOUT_INPUTS",
    "IFEvalScoreData",
    "Judge",
    "JudgeUsage",
    "RewardFn",
    "RewardInput",
    "Rubric",
    "Score",
    "UnknownRewardInput",
    "boxed_answer",
    "check_instructions",
    "evaluate_expression",
    "extract_answer",
    "extract_tag",
    "extract_tags",
    "has_gsm8k_answer",
    "is_countdown_right",
    "is_gsm8k_right",
    "is_math_right",
    "last_number",
    "score_instructions",
    "score_reasoning_gym",
]
