"""Environments: conversations with a policy."""

from llmrl.envs.addition import AdditionEnv, addition_problems, make_addition_env
from llmrl.envs.chat import ChatEnv
from llmrl.envs.countdown import CountdownEnv, CountdownRewardParser, countdown_problems
from llmrl.envs.dataset import DatasetChatEnv, EndOfData, PromptSampler
from llmrl.envs.gsm8k import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
from llmrl.envs.gymnasium import GymnasiumTextEnv
from llmrl.envs.ifeval import IFEvalEnv, IfEvalScorer
from llmrl.envs.math import MATHEnv, MATHRewardParser
from llmrl.envs.gsm8k import GSM8KEnv, make_gsm8k_env
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep
from llmrl.envs.task import TaskEnv, TaskOptions
from llmrl.envs.reasoning_gym import ReasoningGymEnv, ReasoningGymProblems
from llmrl.envs.search import make_search_env, search_corpus
from llmrl.envs.sum_of_digits import SumOfDigitsEnv, sum_of_digits_problems
from llmrl.envs.task import TaskEnv, TaskOptions

__all__ = [
    "AdditionEnv",
    "ChatEnv",
    "CountdownEnv",
    "CountdownRewardParser",
    "DatasetChatEnv",
    "EndOfData",
    "GSM8KEnv",
    "GSM8KEnv",
    "GSM8KPrepareQuestion",
    "GSM8KRewardParser",
    "GymnasiumTextEnv",
    "IFEvalEnv",
    "IfEvalScorer",
    "MATHEnv",
    "MATHRewardParser",
    "MessageChatEnv",
    "MessageEnv",
    "MessageStep",
    "PromptSampler",
    "TaskEnv",
    "TaskOptions",
    "ReasoningGymEnv",
    "ReasoningGymProblems",
    "SumOfDigitsEnv",
    "TaskEnv",
    "TaskOptions",
    "addition_problems",
    "countdown_problems",
    "make_addition_env",
    "make_gsm8k_env",
    "make_gsm8k_env",
    "make_search_env",
    "search_corpus",
    "sum_of_digits_problems",
]
