"""What each namespace of TorchRL's LLM layer has here: its submodules, and names that it has not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

# TorchRL's names that llmrl has not: what has their place, if anything, and a remark. The documentation prints them.
ELSEWHERE: tuple[tuple[str, str | None, str], ...] = (
    ("ContentBase", None, "parts of other kinds are plain dicts, carried through"),
    ("AdaptiveKLController", None, "a number; change `coeff` between steps"),
    ("ConstantKLController", None, "a number: `KLComputation(coeff=…)`"),
    ("PromptData", "llmrl.envs.DatasetChatEnv", "rows are plain mappings"),
    ("PairwiseDataset", None, "pairwise judges override `Rubric.score_group`"),
    ("RewardData", "llmrl.data.Rollout", ""),
    ("PromptTensorDictTokenizer TensorDictTokenizer", "llmrl.transforms.IncrementalTokenizer", ""),
    ("RolloutFromModel", "llmrl.collectors.LLMCollector", ""),
    ("TokenizedDatasetLoader", "llmrl.envs.DatasetChatEnv", ""),
    ("create_infinite_iterator", "llmrl.envs.DatasetChatEnv", "`num_epochs=None`"),
    ("get_dataloader", "llmrl.envs.sources.load_rows", "hub names, files, folders"),
    ("IFEvalData", "llmrl.data.Rollout", "its columns"),
    ("RemoteTransformersWrapper", "llmrl.engines.TransformersEngine", ""),
    ("make_async_vllm_engine", "llmrl.engines.AsyncVLLM", "`.from_pretrained`"),
    ("make_vllm_worker", "llmrl.engines.AsyncVLLM", ""),
    (
        "stateless_init_process_group stateless_init_process_group_async VLLMCollectiveTransport",
        "llmrl.weight_sync.StreamChannel",
        "",
    ),
    ("SGLangWrapper", "llmrl.engines.ServerEngine", "a server that gives token ids and log-probs"),
    ("AsyncSGLang RLSGLangEngine", "llmrl.engines.ServerEngine", ""),
    ("RayMCAdvantage", "llmrl.objectives.MCAdvantage", "groups are complete before they leave a collector"),
    ("vLLMUpdater vLLMUpdaterV2", "llmrl.weight_sync.VLLMWeightSyncScheme", ""),
    ("VLLMWeightSender VLLMDoubleBufferWeightSender", "llmrl.weight_sync.WeightSync", ""),
    ("VLLMWeightReceiver", "llmrl.weight_sync.EngineGroup", ""),
    ("VLLMDoubleBufferWeightReceiver", "llmrl.weight_sync.DoubleBufferReader", ""),
    ("VLLMDoubleBufferTransport", "llmrl.weight_sync.FileChannel", ""),
    ("SGLangWeightSyncScheme", None, "SGLang is reached as a server; it loads weights itself"),
    ("SGLangWeightSender SGLangCollectiveTransport get_sglang_model_metadata", None, ""),
)
# Names of the toolkit `torchrl.envs.llm.agentic`, in the same form.
AGENTIC: tuple[tuple[str, str | None, str], ...] = (
    ("ToolCompose", "llmrl.tools.ToolTransform", ""),
    ("DispatchResult ParsedCall ParseResult", None, "`llmrl.tools.outcomes_of` reads what became of the calls"),
    ("as_tool", "llmrl.tools.function_tool", ""),
    ("PythonTool", "llmrl.tools.PythonInterpreter", '`calls="tool_call"`'),
    ("MCPToolset MCPServerConfig", "llmrl.tools.MCPToolTransform", "servers are dicts"),
    (
        "ToolCallParser AnthropicToolUseParser JSONToolCallParser OpenAIToolCallParser XMLToolCallParser",
        None,
        "calls are read in the chat template's format, or by `tool_parser=`",
    ),
    ("ToolContext", "llmrl.tools.ToolSession", ""),
    ("validate_args json_schema_from_pydantic", None, "a tool's arguments are held to its schema by the transform"),
    ("Repl ReplResult SubprocessRepl", "llmrl.tools.PythonExecutorService", ""),
    ("JupyterRepl ReplDisplay ReplError", None, "there are no notebooks' kernels, and results are text"),
    ("default_sandbox BubblewrapSandbox SeatbeltSandbox", "llmrl.tools.ConfinedSandbox", ""),
    ("DockerSandbox", "llmrl.tools.ContainerSandbox", ""),
    ("E2BSandbox", "llmrl.tools.E2BSandbox", "its methods are those of `Sandbox`"),
    ("ModalSandbox", "llmrl.tools.ModalSandbox", "its methods are those of `Sandbox`"),
    (
        "UnsafeSubprocessSandbox",
        "llmrl.tools.Sandbox",
        "a protocol for those of others; `llmrl.testing.check_sandbox` tries one",
    ),
    ("ResourceLimits", "llmrl.tools.PythonLimits", ""),
    ("SandboxError", "llmrl.tools.ToolError", ""),
)
# Submodules from which TorchRL's programs import, by namespace. Here they are the namespace itself.
_SUBMODULES = {
    "data.llm": "dataset history prompt reward topk utils",
    "envs.llm": "chat envs datasets datasets.countdown datasets.gsm8k datasets.ifeval datasets.math libs libs.mlgym "
    "reward reward.countdown reward.gsm8k reward.ifeval reward.math",
    "envs.llm.transforms": "browser dataloading format kl policy_version reason tokenizer tools",
    "envs.llm.agentic": "compose parsers protocols rate_limit repl sandbox schema tools",
    "modules.llm": "backends backends.vllm backends.vllm.vllm_async backends.vllm.vllm_sync policies policies.common "
    "policies.transformers_wrapper policies.vllm_wrapper trl_interop utils",
    "objectives.llm": "distillation grpo sft",
    "collectors.llm": "base ray_collector utils weight_update weight_update.vllm weight_update.vllm_v2",
    "weight_update.llm": "vllm_double_buffer vllm_nccl",
}


def namespace(name: str) -> Callable[[str], object]:
    """Register the submodules of a namespace, and return its `__getattr__`, which says what replaces a missing name.

    `ImportError` is raised for such a name, since `from … import` would drop the text of an `AttributeError`.
    """
    module = sys.modules[name]
    submodules = _SUBMODULES[name.removeprefix("llmrl.torchrl.")].split()
    for submodule in submodules:
        sys.modules[f"{name}.{submodule}"] = module
    steps = {step for submodule in submodules for step in submodule.split(".")}

    def get(attribute: str) -> object:
        if attribute in steps:
            return module
        for names, ours, remark in (*ELSEWHERE, *AGENTIC):
            if attribute in names.split():
                advice = f"use {ours}" + f" ({remark})" * bool(remark) if ours else remark
                raise ImportError(f"llmrl has no {attribute}: {advice}.", name=attribute)
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    return get


def area(name: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a package such as `llmrl.torchrl.envs`: names of its `llm`, and TorchRL's others."""
    theirs = name.removeprefix("llmrl.")

    def get(attribute: str) -> object:
        ours = importlib.import_module(f"{name}.llm")
        if attribute == "llm":
            return ours
        if attribute in ours.__all__:
            return getattr(ours, attribute)
        return getattr(importlib.import_module(theirs), attribute)

    return get
