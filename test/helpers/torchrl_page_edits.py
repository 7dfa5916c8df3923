"""What TorchRL's pages leave to their reader, what this machine lacks, and the lines that llmrl replaces."""

from __future__ import annotations

import sys
from pathlib import Path

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_SERVER = Path(__file__).with_name("mcp_server.py")
_INTERPRETERS = """
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import PythonExecutorService, PythonInterpreter
env = ChatEnv(batch_size=(2,), system_prompt="Execute Python code when requested.")
"""
_SERVICES = f"""
import ray
from torchrl.services import get_services
{_INTERPRETERS}
ray.init()
"""
# Names that a program takes from its reader.
DEFINED = {
    "llms.rst:25": f"""
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{_MODEL}")
""",
    "llms.rst:75": f"""
from transformers import AutoModelForCausalLM
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import AsyncVLLM, vLLMWrapper
training_model = AutoModelForCausalLM.from_pretrained("{_MODEL}")
def make_env():
    return DatasetChatEnv(dataset=["7 + 8 ="], num_epochs=1)
def make_policy():
    engine = AsyncVLLM.from_pretrained("{_MODEL}", num_replicas=1)
    return vLLMWrapper(engine, input_mode="history", generate_kwargs={{"max_new_tokens": 5}})
""",
    "services.rst:369": f"""{_SERVICES}
get_services(backend="ray", namespace="my_namespace").register(
    "python_executor", PythonExecutorService, pool_size=2, timeout=10.0, num_cpus=1, max_concurrency=2
)
""",
    "services.rst:400": _INTERPRETERS,
    "services.rst:492": _SERVICES,
    "web_search_tool.py": """
from web_sites import Site

class Search(Site):
    def answer(self, path, headers):
        return 200, '<title>PyTorch on loopback</title>\\n<a class="result__a" href="/more">A tutorial</a>', {}

SITE = "http://" + Search().address
""",
}
_SMALLER = (("pool_size=32", "pool_size=2"), ("num_cpus=32", "num_cpus=1"), ("(128,)", "(2,)"))
# What this machine has in the place of the page's: sizes, a server of tools, rows; with TorchRL and with llmrl.
HERE: dict[str, tuple[tuple[str, str], ...]] = {
    "llms.rst:615": (
        (
            "rollout_td = ...",
            "rollout_td = TensorDict({'tokens': {'full': torch.ones(1, 3, dtype=torch.int64)}, "
            "'masks': {'all_attention_mask': torch.ones(1, 3, dtype=torch.int64)}}, batch_size=1)",
        ),
    ),
    "services.rst:325": _SMALLER,
    "services.rst:492": (
        ("pool_size=16", "pool_size=2"),
        ("num_cpus=16", "num_cpus=1"),
        ("pool_size=64", "pool_size=2"),
        ("num_cpus=64", "num_cpus=1"),
    ),
    "llm_wrappers.py": (('LLM(model="Qwen/Qwen2.5-0.5B")', 'LLM(model="Qwen/Qwen2.5-0.5B", max_model_len=2048)'),),
    "llms.rst:580": (
        ("model-name", _MODEL),
        (
            "GRPOConfig(max_steps=1_000),\n)",
            "GRPOConfig(max_steps=2, use_cpu=True, bf16=False, max_completion_length=4, report_to=[]),\n)\n"
            "trainer.train()\nassert trainer.state.global_step == 2",
        ),
    ),
    "web_search_tool.py": (
        ("https://html.duckduckgo.com", "{SITE}"),
        ('{"url": "https://pytorch.org"}</tool>\'', '{"url": "SITE"}</tool>\'.replace("SITE", SITE)'),
        (
            "    fetch_response = (",
            '    assert "A tutorial" in str(tool_response.content)\n    fetch_response = (',
        ),
        (
            'print("\\n\\nFetch',
            'assert "on loopback" in str(result2["next", "history"].prompt.content)\n    print("\\n\\nFetch',
        ),
    ),
    "python_mcp_tool.py": (
        ('"command": "uvx"', f'"command": {sys.executable!r}'),
        ('"args": ["mcp-run-python", "stdio"]', f'"args": [{str(_SERVER)!r}, "stdio"]'),
    ),
}
_METHOD = "a few lines of a transform's method"
# Parts of programs, which run nowhere by themselves.
PARTS = {
    "llms.rst:371": _METHOD,
    "llms.rst:386": _METHOD,
    "llms.rst:402": _METHOD,
    "llms.rst:417": _METHOD,
    "llms.rst:451": _METHOD,
    "llms.rst:473": _METHOD,
    "services.rst:443": "the inside of TorchRL's service",
    "services.rst:610": "lines that go on from another program's",
}
# Programs that with TorchRL wait for GPUs.
NEEDS_GPUS = {"llms.rst:25", "llms.rst:75"}
# Programs that are refused: a pattern of the error, and what has their place.
REFUSED = {
    "llms.rst:43": ("llmrl has no SGLangWrapper", "an SGLang server is an engine: `ServerEngine`"),
}
# Lines that are replaced: old, new, and why.
EDITS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "llms.rst:75": (
        (
            "track_policy_version=True)",
            "track_policy_version=True, dialog_turns_per_batch=1)",
            "line 81, a collector without `dialog_turns_per_batch=`: give it, as TorchRL's needs, too",
        ),
    ),
    "llms.rst:205": (
        (
            "td = env.reset()",
            "from tensordict import TensorDict; td = env.reset(TensorDict(query=['Hello!'], batch_size=1))",
            "line 231, `env.reset()` of a `ChatEnv` without a query: give it one, as TorchRL's needs, too",
        ),
    ),
    "llms.rst:292": (
        (
            "text=\"Let's",
            "query=\"Let's",
            "line 310, `text=` of a reset: `query=`, as TorchRL's takes, too",
        ),
        (
            'reset_data.set("text_response", [action])',
            'reset_data; reset_data["history"].full = reset_data["history"].prompt.append('
            "torch.stack([History(role='assistant', content=action)]), inplace=False)",
            "line 322, `text_response`: the answer is appended to the history, as in TorchRL, too",
        ),
        (
            's_["history"].apply_chat_template',
            's_["history"].prompt.apply_chat_template',
            "line 326, `history` has `prompt`, `response` and `full`, as in TorchRL, too",
        ),
        (
            "from pprint import pprint",
            "from pprint import pprint; import torch; from torchrl.data.llm import History",
            "",
        ),
    ),
    "llm_browser.py": (
        (
            "    headless=True,  # Set to False to see the browser actions\n",
            "",
            "line 99, `headless=`: it never opens a window",
        ),
    ),
}
