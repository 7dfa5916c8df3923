"""Turns of our wrapper in TorchRL's buffer and loss: what was sampled is scored alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import AutoModelForCausalLM

from llmrl.envs import ChatEnv
from llmrl.trainer import TransformersWrapper

pytestmark = pytest.mark.usefixtures("takes_long")
QUERIES = ["7 + 8 =", "Say hi."]


@pytest.fixture(scope="module")
def model(tiny_model_path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()


def from_a_buffer(turns: TensorDictBase) -> TensorDictBase:
    """Turns with what training adds, written into TorchRL's buffer and read again."""
    buffer = ReplayBuffer(storage=LazyStackStorage(2), batch_size=2)
    turns = turns.clone()
    turns["advantage"] = torch.tensor([1.0, -0.5]).reshape(2, 1, 1)
    buffer.extend(turns)
    return buffer[:]


def sampled_log_probs(turns: TensorDictBase) -> list[torch.Tensor]:
    return [row[row != 0] for row in turns.get(("log_probs", "full"), as_list=True)]


def test_our_turns_are_scored_by_torchrls_loss_as_they_were_sampled(model: Any, tokenizer: Any) -> None:
    llm = pytest.importorskip("torchrl.objectives.llm")
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
    with set_list_to_stack(True):
        turns = policy(ChatEnv(batch_size=(2,)).reset(TensorDict(query=QUERIES, batch_size=(2,))))
        scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        loss = llm.GRPOLoss(scorer, masking_strategy="rlhf", entropy_bonus=False)(from_a_buffer(turns))
    assert abs(float(loss.kl_approx)) < 1e-4 and float(loss.clip_fraction) == 0
    assert all(len(row) == 5 for row in sampled_log_probs(turns))
    assert float(loss.loss_objective) == pytest.approx(-0.25, abs=1e-3)
