"""The namespaces of TorchRL's LLM layer: their submodules, and the names that llmrl does not have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

# TorchRL's names that llmrl does not have: the replacement, if any, and a remark. The documentation prints them.
ELSEWHERE: tuple[tuple[str, str | None, str], ...] = (
    ("ContentBase", None, "parts of other kinds are plain dicts, which are passed through"),
    ("AdaptiveKLController", None, "use a number, and change `coeff` between steps"),
    ("ConstantKLController", None, "use a number, `KLComputation(coeff=…)`"),
    ("PromptData", "llmrl.envs.DatasetChatEnv", "rows are plain mappings"),
    ("PairwiseDataset", None, "override `Rubric.score_group` for a pairwise judge"),
    ("RewardData", "llmrl.data.Rollout", ""),
    ("PromptTensorDictTokenizer TensorDictTokenizer", "llmrl.transforms.IncrementalTokenizer", ""),
    ("RolloutFromModel", "llmrl.collectors.LLMCollector", ""),
    ("TokenizedDatasetLoader", "llmrl.envs.DatasetChatEnv", ""),
    ("create_infinite_iterator", "llmrl.envs.DatasetChatEnv", "`num_epochs=None`"),
    ("get_dataloader", "llmrl.envs.sources.load_rows", "hub names, files, folders"),
    ("IFEvalData", "llmrl.data.Rollout", "the rollout's columns"),
    ("RemoteTransformersWrapper", "llmrl.engines.TransformersEngine", ""),
    ("make_async_vllm_engine", "llmrl.engines.AsyncVLLM", "`.from_pretrained`"),
    ("make_vllm_worker", "llmrl.engines.AsyncVLLM", ""),
    (
        "stateless_init_process_group stateless_init_process_group_async VLLMCollectiveTransport",
        "llmrl.weight_sync.StreamChannel",
        "",
    ),
    ("SGLangWrapper", "llmrl.engines.ServerEngine", "for a server that returns token ids and log-probs"),
    ("AsyncSGLang RLSGLangEngine", "llmrl.engines.ServerEngine", ""),
    ("RayMCAdvantage", "llmrl.objectives.MCAdvantage", "groups are complete before they leave a collector"),
    ("vLLMUpdater vLLMUpdaterV2", "llmrl.weight_sync.VLLMWeightSyncScheme", ""),
    ("VLLMWeightSender VLLMDoubleBufferWeightSender", "llmrl.weight_sync.WeightSync", ""),
    ("VLLMWeightReceiver", "llmrl.weight_sync.EngineGroup", ""),
    ("VLLMDoubleBufferWeightReceiver", "llmrl.weight_sync.DoubleBufferReader", ""),
    ("VLLMDoubleBufferTransport", "llmrl.weight_sync.FileChannel", ""),
    (
        "SGLangWeightSyncScheme SGLangWeightSender SGLangCollectiveTransport get_sglang_model_metadata",
        None,
        "an SGLang server loads weights itself",
    ),
)
# Names of the toolkit `torchrl.envs.llm.agentic`, in the same form.
AGENTIC: tuple[tuple[str, str | None, str], ...] = (
    ("ToolCompose", "llmrl.tools.ToolTransform", ""),
    ("DispatchResult ParsedCall ParseResult", None, "use `llmrl.tools.outcomes_of` for the outcomes of the calls"),
    ("as_tool", "llmrl.tools.function_tool", ""),
    ("PythonTool", "llmrl.tools.PythonInterpreter", '`calls="tool_call"`'),
    ("MCPToolset MCPServerConfig", "llmrl.tools.MCPToolTransform", "servers are dicts"),
    (
        "ToolCallParser AnthropicToolUseParser JSONToolCallParser OpenAIToolCallParser XMLToolCallParser",
        None,
        "calls are read in the chat template's format, or by `tool_parser=`",
    ),
    ("ToolContext", "llmrl.tools.ToolSession", ""),
    ("validate_args json_schema_from_pydantic", None, "the transform validates the arguments of a tool by its schema"),
    ("Repl ReplResult SubprocessRepl", "llmrl.tools.PythonExecutorService", ""),
    ("JupyterRepl ReplDisplay ReplError", None, "Jupyter kernels are not supported, and results are text"),
    ("default_sandbox BubblewrapSandbox SeatbeltSandbox", "llmrl.tools.ConfinedSandbox", ""),
    ("DockerSandbox", "llmrl.tools.ContainerSandbox", ""),
    ("E2BSandbox", "llmrl.tools.E2BSandbox", "it has the methods of `Sandbox`"),
    ("ModalSandbox", "llmrl.tools.ModalSandbox", "it has the methods of `Sandbox`"),
    (
        "UnsafeSubprocessSandbox",
        "llmrl.tools.Sandbox",
        "a protocol for your own sandbox; `llmrl.testing.check_sandbox` tests it",
    ),
    ("ResourceLimits", "llmrl.tools.PythonLimits", ""),
    ("SandboxError", "llmrl.tools.ToolError", ""),
)
# Submodules from which TorchRL's programs import, by namespace. Here each of them is the namespace itself.
_SUBMODULES = {
    "data.llm": "dataset history prompt reward topk utils",
    "envs.llm": "chat envs datasets datasets.countdown datasets.gsm8k datasets.ifeval datasets.math libs libs.mlgym "
    "reward reward.countdown reward.gsm8k reward.ifeval reward.math",
    "envs.llm.transforms": "browser dataloading format kl policy_version reason tokenizer tools",
    "envs.llm.agentic": "compose parsers protocols rate_limit repl sandbox schema tools",
    "modules.llm": "backends backends.sglang backends.sglang.base backends.sglang.sglang_server "
    "backends.sglang.sglang_utils backends.vllm backends.vllm.vllm_async backends.vllm.vllm_sync policies "
    "policies.common policies.sglang_wrapper policies.transformers_wrapper policies.vllm_wrapper trl_interop utils",
    "objectives.llm": "distillation grpo sft",
    "collectors.llm": "base ray_collector utils weight_update weight_update.vllm weight_update.vllm_v2",
    "weight_update.llm": "sglang_nccl vllm_double_buffer vllm_nccl",
}


def namespace(name: str) -> Callable[[str], object]:
    """Register the submodules of a namespace, and return its `__getattr__`.

    For a name that llmrl does not have, it raises an `ImportError` with the replacement, because
    `from … import` would drop the text of an `AttributeError`.
    """
    module = sys.modules[name]
    submodules = _SUBMODULES[name.removeprefix("llmrl.torchrl.")].split()
    for submodule in submodules:
        sys.modules[f"{name}.{submodule}"] = module
    steps = {step for submodule in submodules for step in submodule.split(".")}

    def get(attribute: str) -> object:
        if attribute in steps:
            return module
        _refuse_elsewhere(attribute)
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    return get


def _refuse_elsewhere(attribute: str) -> None:
    for names, ours, remark in (*ELSEWHERE, *AGENTIC):
        if attribute in names.split():
            advice = f"use {ours}" + f" ({remark})" * bool(remark) if ours else remark
            raise ImportError(f"llmrl has no {attribute}: {advice}.", name=attribute)


def area(name: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a package such as `llmrl.torchrl.envs`: llmrl's names of `llm`, then TorchRL's."""
    theirs = name.removeprefix("llmrl.")

    def get(attribute: str) -> object:
        ours = importlib.import_module(f"{name}.llm")
        if attribute == "llm":
            return ours
        if attribute in ours.__all__:
            return getattr(ours, attribute)
        _refuse_elsewhere(attribute)  # TorchRL has names of its LLM layer here, too
        return getattr(importlib.import_module(theirs), attribute)

    return get
