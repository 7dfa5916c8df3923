"""New weights for the engine need no ceremony: the first call opens the way that the engine wants."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmrl.collectors import LLMCollector
from llmrl.collectors.weights import WeightSenders
from llmrl.engines import EngineError, TransformersEngine
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.trainer import LoRAConfig, TransformersWrapper, load_model
from llmrl.transforms import RubricReward


def score(completion):
    return 1.0


def perturbed(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def collector(tiny_model_path, renderer):
    engine = TransformersEngine(tiny_model_path)
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": 4})
    env = DatasetChatEnv(["1 + 1 =", "2 + 2 ="]).append_transform(RubricReward(score))
    with LLMCollector(env, policy=policy, groups_per_batch=2) as collector:
        yield collector
    engine.shutdown()


def assert_sampled_from(model, batch, version):
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        with torch.no_grad():
            log_probs = model.eval()(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        expected = log_probs.gather(-1, ids[1:, None])[:, 0][mask[1:]]
        torch.testing.assert_close(row["log_probs", "full"][mask], expected, rtol=1e-4, atol=1e-4)
        assert set(row["policy_versions", "full"][mask].tolist()) == {version}


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)], ids=["all weights", "adapters"])
def test_an_engine_of_this_process_has_the_weights_at_the_first_call(collector, tiny_model_path, lora):
    if lora is not None:
        pytest.importorskip("peft")
    model = load_model(tiny_model_path, lora=lora)
    batches = iter(collector)
    assert_sampled_from(load_model(tiny_model_path), next(batches), 0)
    perturbed(model, 0)
    assert (
        collector.update_policy_weights_(TransformersWrapper(model, generate=False)) == 1
    )  # a policy is as good as its model
    assert_sampled_from(model, next(batches), 1)
    perturbed(model, 1)
    assert collector.start_update().result() == 2  # the model is known
    assert_sampled_from(model, next(batches), 2)


def test_a_model_that_is_another_one_is_sent_from_then_on(collector, tiny_model_path):
    first, second = load_model(tiny_model_path), load_model(tiny_model_path)
    perturbed(second, 0)
    collector.update_policy_weights_(first)
    collector.update_policy_weights_(second)
    collector.update_policy_weights_()
    assert_sampled_from(second, next(iter(collector)), 3)


def test_what_cannot_be_sent_is_refused(collector, renderer):
    with pytest.raises(ValueError, match="needs the trainer's model"):
        collector.update_policy_weights_()
    with pytest.raises(RuntimeError, match="nonsense"):
        collector.update_policy_weights_({"nonsense": torch.zeros(1)})
    policy = LLMWrapperBase(ScriptedEngine(["a"], encode=renderer.encode), renderer=renderer)
    with LLMCollector(DatasetChatEnv(["a"]), policy=policy, groups_per_batch=1) as other:
        with pytest.raises(ValueError, match="weight"):
            other.update_policy_weights_(torch.nn.Linear(2, 2))


def test_a_sender_that_cannot_connect_is_shut_down():
    made = []

    class Sender:
        is_shut_down = False

        def register_model(self, model):
            made.append(self)

        def init_all_workers_group(self, model_metadata, engine):
            if len(made) == 1:
                raise EngineError("no worker answers")

        def shutdown(self):
            self.is_shut_down = True

    senders = WeightSenders({"policy": SimpleNamespace(create_sender=Sender)}, SimpleNamespace(engine=object()))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(EngineError, match="no worker answers"):
        senders.connected(model)
    assert senders.connected(model) == made[1:] and [one.is_shut_down for one in made] == [True, False]


def test_of_tied_weights_one_name_is_enough():
    from loss_batches import tiny_model

    model, other = tiny_model(is_tied=True), tiny_model(is_tied=True)
    perturbed(other, 0)
    engine = TransformersEngine(model, max_model_len=16)
    assert engine.load_weights(dict(other.named_parameters())) == 1
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(RuntimeError, match="nonsense"):
        engine.load_weights({**other.state_dict(), "nonsense": torch.zeros(1)})
    engine.shutdown()
