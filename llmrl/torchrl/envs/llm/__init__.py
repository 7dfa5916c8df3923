"""The names of `torchrl.envs.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.data import as_nested_tensor, as_padded_tensor
from llmrl.envs import (
    DataLoadingPrimer,
    GSM8KPrepareQuestion,
    LLMEnv,
    LLMHashingEnv,
    MLGymWrapper,
    RayDataLoadingPrimer,
    make_gsm8k_env,
    make_mlgym,
)
from llmrl.torchrl.envs.tasks import (
    ChatEnv,
    CountdownEnv,
    CountdownRewardParser,
    DatasetChatEnv,
    GSM8KEnv,
    GSM8KRewardParser,
    IFEvalEnv,
    IFEvalScoreData,
    IfEvalScorer,
    MATHEnv,
    MATHRewardParser,
)
from llmrl.torchrl.names import namespace
from llmrl.transforms import (
    AddThinkingPrompt,
    BrowserTransform,
    KLComputation,
    KLRewardTransform,
    MCPToolTransform,
    PythonInterpreter,
    RetrieveKL,
    RetrieveLogProb,
    TemplateTransform,
    Tokenizer,
)

__all__ = [
    "AddThinkingPrompt",
    "BrowserTransform",
    "ChatEnv",
    "CountdownEnv",
    "CountdownRewardParser",
    "DataLoadingPrimer",
    "DatasetChatEnv",
    "GSM8KEnv",
    "GSM8KPrepareQuestion",
    "GSM8KRewardParser",
    "IFEvalEnv",
    "IFEvalScoreData",
    "IfEvalScorer",
    "KLComputation",
    "KLRewardTransform",
    "LLMEnv",
    "LLMHashingEnv",
    "MATHEnv",
    "MATHRewardParser",
    "MCPToolTransform",
    "MLGymWrapper",
    "PythonInterpreter",
    "RayDataLoadingPrimer",
    "RetrieveKL",
    "RetrieveLogProb",
    "TemplateTransform",
    "Tokenizer",
    "as_nested_tensor",
    "as_padded_tensor",
    "make_gsm8k_env",
    "make_mlgym",
]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
