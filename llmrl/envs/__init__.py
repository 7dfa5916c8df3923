"""Environments: conversations between a policy and its task."""

from typing import TYPE_CHECKING

from llmrl._utils.lazy_names import lazy_getattr
from llmrl.envs.agent import AgentEnv
from llmrl.envs.agent_command import CommandResult, command
from llmrl.envs.chat import ChatEnv
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.game import Game, GameEnv
from llmrl.envs.hubs.gymnasium import GymnasiumEnv, GymnasiumTextEnv
from llmrl.envs.hubs.harbor import HarborEnv
from llmrl.envs.hubs.miniwob import MiniWoBEnv
from llmrl.envs.hubs.mlgym import MLGymWrapper, make_mlgym
from llmrl.envs.hubs.openenv import OpenEnvChatEnv
from llmrl.envs.hubs.openenv_server import OpenEnvServer
from llmrl.envs.hubs.tau2 import Tau2Env
from llmrl.envs.hubs.textarena import make_textarena_env
from llmrl.envs.hubs.verifiers import VerifiersEnv
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep
from llmrl.envs.mixed import EnvProgress, MixedEnv
from llmrl.envs.primer import DataLoadingPrimer, RayDataLoadingPrimer
from llmrl.envs.sampler import EndOfData, PromptSampler
from llmrl.envs.tasks.addition import AdditionEnv, addition_problems, make_addition_env
from llmrl.envs.tasks.code import CodeEnv, CodeReward, make_code_env
from llmrl.envs.tasks.code_problems import code_problems
from llmrl.envs.tasks.countdown import CountdownEnv, CountdownRewardParser, countdown_problems, make_countdown_env
from llmrl.envs.tasks.gsm8k import GSM8KEnv, GSM8KRewardParser, make_gsm8k_env
from llmrl.envs.tasks.guess import GuessEnv, guess_problems, make_guess_env
from llmrl.envs.tasks.ifeval import IFEvalEnv, IfEvalScorer, make_ifeval_env
from llmrl.envs.tasks.math import MATHEnv, MATHRewardParser, make_math_env
from llmrl.envs.tasks.reasoning_gym import ReasoningGymEnv, ReasoningGymProblems, make_reasoning_gym_env
from llmrl.envs.tasks.registry import make_task_env, task_environments
from llmrl.envs.tasks.search import SearchEnv, make_search_env, search_corpus
from llmrl.envs.tasks.sum_of_digits import SumOfDigitsEnv, make_sum_of_digits_env, sum_of_digits_problems
from llmrl.envs.tasks.task import TaskEnv, TaskOptions
from llmrl.envs.tool_env import ToolEnv
from llmrl.rewards import IFEvalScoreData

if TYPE_CHECKING:
    from llmrl.torchrl.envs.plain import GSM8KPrepareQuestion, LLMEnv, LLMHashingEnv

__all__ = [
    "AdditionEnv",
    "AgentEnv",
    "ChatEnv",
    "CodeEnv",
    "CodeReward",
    "CommandResult",
    "CountdownEnv",
    "CountdownRewardParser",
    "DataLoadingPrimer",
    "DatasetChatEnv",
    "EndOfData",
    "EnvProgress",
    "GSM8KEnv",
    "GSM8KPrepareQuestion",
    "GSM8KRewardParser",
    "Game",
    "GameEnv",
    "GuessEnv",
    "GymnasiumEnv",
    "GymnasiumTextEnv",
    "HarborEnv",
    "IFEvalEnv",
    "IFEvalScoreData",
    "IfEvalScorer",
    "LLMEnv",
    "LLMHashingEnv",
    "MATHEnv",
    "MATHRewardParser",
    "MLGymWrapper",
    "MessageChatEnv",
    "MessageEnv",
    "MessageStep",
    "MiniWoBEnv",
    "MixedEnv",
    "OpenEnvChatEnv",
    "OpenEnvServer",
    "PromptSampler",
    "RayDataLoadingPrimer",
    "ReasoningGymEnv",
    "ReasoningGymProblems",
    "SearchEnv",
    "SumOfDigitsEnv",
    "TaskEnv",
    "TaskOptions",
    "Tau2Env",
    "ToolEnv",
    "VerifiersEnv",
    "addition_problems",
    "code_problems",
    "command",
    "countdown_problems",
    "guess_problems",
    "make_addition_env",
    "make_code_env",
    "make_countdown_env",
    "make_gsm8k_env",
    "make_guess_env",
    "make_ifeval_env",
    "make_math_env",
    "make_mlgym",
    "make_reasoning_gym_env",
    "make_search_env",
    "make_sum_of_digits_env",
    "make_task_env",
    "make_textarena_env",
    "search_corpus",
    "sum_of_digits_problems",
    "task_environments",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, __all__, "llmrl.torchrl.envs.plain")
