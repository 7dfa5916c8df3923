"""A sequence classifier as a reward, and a replay buffer as a data set."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import LlamaConfig, LlamaForSequenceClassification

from llmrl.data import History
from llmrl.torchrl.modules.llm import HFRewardModelWrapper, TorchRLBufferDataset

LENGTHS = (3, 7, 5)


def make_classifier(num_labels=1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=num_labels,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config).eval()


def rows():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, 31, (length,), generator=generator) for length in LENGTHS]
    return lazy_stack([TensorDict({"tokens": {"full": ids}, "query": f"q{len(ids)}"}) for ids in tokens])


def test_ragged_rows_are_scored_in_one_call_as_one_by_one():
    model, batch = make_classifier(), rows()
    calls = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    scored = HFRewardModelWrapper(model, inference_mode=True)(batch)["reward"]
    assert calls == [(3, 7)] and scored.dtype == torch.float32 and not scored.requires_grad
    with torch.no_grad():
        alone = [model(input_ids=row["tokens", "full"][None]).logits.item() for row in batch.unbind(0)]
    assert scored.tolist() == pytest.approx(alone, abs=1e-5)


def test_padded_rows_are_scored_with_their_mask_and_gradients_flow():
    model, batch = make_classifier(), rows()
    ids = batch.get(("tokens", "full"), as_padded_tensor=True, padding_value=0, padding_side="right")
    dense = TensorDict(
        {"ids": ids, "mask": torch.stack([torch.arange(7) < length for length in LENGTHS]).long()}, batch_size=3
    )
    wrapper = HFRewardModelWrapper(model, token_key="ids", attention_mask_key="mask", reward_key=("next", "score"))
    assert wrapper.in_keys == ["ids", "mask"] and wrapper.out_keys == [("next", "score")]
    scores = wrapper(dense)["next", "score"]
    assert torch.allclose(scores, HFRewardModelWrapper(model)(batch)["reward"], atol=1e-5)
    scores.sum().backward()
    assert model.score.weight.grad.abs().sum() > 0


def test_padded_rows_of_a_buffer_of_lazy_stacks_are_scored_with_their_mask():
    buffer = ReplayBuffer(storage=LazyStackStorage(2))
    for ids, mask in (([0, 0, 5, 6], [0, 0, 1, 1]), ([1, 2, 3, 4], [1, 1, 1, 1])):
        buffer.add(TensorDict(ids=torch.tensor(ids), mask=torch.tensor(mask)))
    model = make_classifier()
    scores = HFRewardModelWrapper(model, token_key="ids", attention_mask_key="mask")(buffer[:])["reward"]
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([ids])).logits.item() for ids in ([5, 6], [1, 2, 3, 4])]
    assert scores.tolist() == pytest.approx(alone, abs=1e-5)


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(RuntimeError, match=r"one scalar reward per input, \[3\] or \[3, 1\]"):
        HFRewardModelWrapper(make_classifier(num_labels=2))(rows())
    with pytest.raises(KeyError, match="HFRewardModelWrapper has no"):
        HFRewardModelWrapper(make_classifier(), token_key="ids")(rows())
    dense = TensorDict({"tokens": {"full": torch.ones(2, 3, dtype=torch.int64)}}, batch_size=2)
    with pytest.raises(KeyError, match="all_attention_mask"):
        HFRewardModelWrapper(make_classifier())(dense)
    with pytest.raises(ValueError, match="leave attention_mask_key=None out"):
        HFRewardModelWrapper(make_classifier(), attention_mask_key=None)(rows())


@pytest.fixture
def buffer():
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    batch = rows()
    for row in batch.unbind(0):
        row["history"] = History.from_chats([{"role": "user", "content": "Hi"}])
    buffer.extend(batch)
    return buffer


def test_a_buffers_rows_are_dicts_of_tensors_and_values(buffer):
    data = TorchRLBufferDataset(buffer, 2, keys=[("tokens", "full"), "query"], device="cpu", num_batches=3)
    sampled = list(data)
    assert len(sampled) == 6 and "TorchRLBufferDataset" in repr(data)
    for row in sampled:
        assert set(row) == {"tokens.full", "query"} and row["query"] == f"q{len(row['tokens.full'])}"
    assert {"tokens.full", "query", "history.messages"} <= set(next(iter(TorchRLBufferDataset(buffer, 1))))
    endless = iter(TorchRLBufferDataset(buffer, 2, num_batches=None))
    assert len([next(endless) for _ in range(9)]) == 9


def test_a_buffer_is_a_hugging_face_data_set(buffer, takes_long):
    datasets = pytest.importorskip("datasets")
    data = TorchRLBufferDataset(buffer, 2, keys=["query"]).as_hf_dataset()
    assert isinstance(data, datasets.IterableDataset)
    assert [set(row) for row in data] == [{"query"}] * 2


def test_wrong_arguments_are_named(buffer):
    with pytest.raises(TypeError, match=r"must be a torchrl.data.ReplayBuffer, got list"):
        TorchRLBufferDataset([], 2)
    for arguments in ({"batch_size": 0}, {"batch_size": 1, "num_batches": 0}, {"batch_size": "2"}):
        with pytest.raises(ValueError, match="must be a positive integer"):
            TorchRLBufferDataset(buffer, **arguments)
    with pytest.raises(KeyError, match="A row of the replay buffer has no"):
        next(iter(TorchRLBufferDataset(buffer, 1, keys=["prompt"])))
    with pytest.raises(RuntimeError, match="no_such_device"):
        TorchRLBufferDataset(buffer, 1, device="no_such_device")
