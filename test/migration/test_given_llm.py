"""A `vllm.LLM` that the caller made is a policy's engine, as in TorchRL's own programs."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace

import pytest
from warm_processes import run_warm

from llmrl.engines import EngineError, SamplingConfig
from llmrl.torchrl.modules import given_llm

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from vllm import LLM

from llmrl.collectors import LLMCollector
from llmrl.envs import DatasetChatEnv
from llmrl.torchrl.data.llm import History
from llmrl.torchrl.modules.llm import ChatHistory, TransformersWrapper, vLLMWrapper

folder = sys.argv[1]
model = LLM(folder, max_model_len=256, enforce_eager=True, dtype="float32")
policy = vLLMWrapper(model, generate_kwargs={"max_new_tokens": 6, "ignore_eos": True})
chats = [[{"role": "user", "content": text}] for text in ("7 + 8 =", "Say hi.", "Name three colours.")]
prompts = ChatHistory(prompt=History.from_chats(chats), batch_size=(3,))
turns = policy(TensorDict(history=prompts, batch_size=(3,)))
assert [len(ids) for ids in turns.get(("tokens", "response"), as_list=True)] == [6] * 3
assert all((versions[-6:] == 0).all() for versions in turns.get(("policy_versions", "full"), as_list=True))

# A second model of the same weights gives the tokens the same log-probs.
scorer = TransformersWrapper(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), generate=False)
scored = scorer(turns.copy())
both = [one.get(("log_probs", "full"), as_list=True) for one in (turns, scored)]
for ours, theirs in zip(*both, strict=True):
    assert (ours != 0).sum() == 6 and torch.allclose(ours, theirs, atol=1e-3), (ours - theirs)

judge = vLLMWrapper(model, generate=False, log_probs_key="judged", min_batch_size=4, batching_timeout=1.0)
judged = judge(turns.copy())
both = [judged.get(("judged", "full"), as_list=True), scored.get(("log_probs", "full"), as_list=True)]
for ours, theirs in zip(*both, strict=True):
    assert torch.allclose(ours, theirs, atol=1e-3), (ours - theirs)

# Policies of one model take turns, as collectors do that were dropped without an end.
policies = [policy, *(vLLMWrapper(model, generate_kwargs={"max_new_tokens": 6, "ignore_eos": True}) for _ in range(3))]
with ThreadPoolExecutor(4) as pool:
    together = list(pool.map(lambda one: one(TensorDict(history=prompts.clone(), batch_size=(3,))), policies * 4))
for turns in together:
    assert [len(ids) for ids in turns.get(("tokens", "response"), as_list=True)] == [6] * 3

env = DatasetChatEnv(["7 + 8 =", "8 + 7 ="], repeats=2)
collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8)
assert [batch.shape for batch in collector] == [(4,), (4,)]
collector.shutdown()

try:
    vLLMWrapper(model, generate_kwargs={"temperature": 0.7})
except ValueError as error:
    assert "logprobs_mode='processed_logprobs'" in str(error), error
else:
    raise SystemExit("log-probs before the temperature were taken")
long = History.from_chats([{"role": "user", "content": "a " * 300}])
try:
    policy(TensorDict(history=ChatHistory(prompt=long)))
except ValueError as error:
    assert "context is 256" in str(error), error
else:
    raise SystemExit("a prompt without room was taken")
print("all is so")
"""


@pytest.mark.usefixtures("real_vllm", "takes_long", "own_programs")
def test_a_given_llm_generates_what_a_scorer_scores_alike(tiny_model_path, tmp_path):

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # A forked process has the threads of the one that it was forked from, and vLLM counts them.
    variables["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, program, tiny_model_path]
    ended = run_warm(command, env=os.environ | variables)
    assert ended.returncode == 0 and ended.stdout.endswith("all is so\n"), ended.stdout[-2000:] + ended.stderr[-4000:]


class Panic(BaseException):
    """What a panic of an extension in Rust raises, which is no Exception."""


def test_a_panic_of_the_llm_and_a_shutdown_are_errors_of_the_engine(monkeypatch):
    def generate(prompts, params, use_tqdm):
        raise Panic("index out of range")

    for name in ("sampling_params", "num_reported"):  # which import vLLM
        monkeypatch.setattr(given_llm, name, lambda *arguments, **options: None)
    model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100)
    engine = given_llm.GivenLLM(type("LLM", (), {"model_config": model_config, "generate": staticmethod(generate)})())

    async def generated():
        async with asyncio.timeout(240):  # an answer that never comes is no error of the engine
            await engine.generate([1, 2], SamplingConfig())

    with pytest.raises(EngineError, match="index out of range") as error:
        asyncio.run(generated())
    assert isinstance(error.value.__cause__, Panic)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineError, match="was shut down"):
        asyncio.run(generated())


def test_a_top_k_of_more_log_probs_than_the_llm_reports_is_refused_at_once():
    options = {"logprobs_mode": "processed_logprobs", "max_logprobs": 20, "return_sampling_mask": False}
    model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100, **options)
    engine = given_llm.GivenLLM(type("LLM", (), {"model_config": model_config})())
    with pytest.raises(ValueError, match=r"top_k=50 needs \d+ log-probs per token.*at most 20"):
        engine.check_sampling(SamplingConfig(top_k=50))
