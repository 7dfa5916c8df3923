"""Adapters over weights of 4 bits: what is computed, sent, saved and resumed."""

from __future__ import annotations

import pytest
import torch
from biased_models import letters_of
from loss_batches import with_drawn_adapters
from script_configs import config
from transformers import AutoModelForCausalLM
from weight_sync_tools import log_prob_difference, make_sender, sharp_llama

from llmrl import DatasetChatEnv, RubricReward, TransformersEngine, VLLMWeightSyncScheme, get_model_metadata, train
from llmrl.data.state_file import load_state
from llmrl.runs.run_folder import RunFolder
from llmrl.scripts import grpo
from llmrl.trainer import LoRAConfig, load_model, train_step
from llmrl.weight_sync.source import ModelWeights

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

QUANTIZED = LoRAConfig(rank=4, alpha=8, quantize_base=True)
# The values of NF4, arXiv:2305.14314, appendix E.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def in_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of sixteen values for each weight, times the largest of its block of 64."""
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scales[..., None] - NF4).abs().argmin(-1)
    return (NF4[nearest] * scales).view(weight.shape)


def merged_by_hand(path, parameters, *, scale):
    """Weights of a checkpoint in NF4, with the product of a model's adapters."""
    adapters = {name.removeprefix("base_model.model."): one.detach() for name, one in parameters.items()}
    expected = {}
    for name, weight in AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            update = adapters[f"{layer}.lora_B.default.weight"] @ adapters[f"{layer}.lora_A.default.weight"]
            weight = in_nf4(weight.detach()) + scale * update
        expected[name] = weight.detach()
    return expected


def test_engines_are_sent_the_weights_that_the_trainer_computes_with(tmp_path):
    sharp_llama(tmp_path)
    whole = load_model(tmp_path)
    model = with_drawn_adapters(load_model(tmp_path, lora=QUANTIZED), size=0.05, seed=1)
    assert get_model_metadata(model) == get_model_metadata(whole)
    expected, sent = merged_by_hand(tmp_path, dict(model.named_parameters()), scale=8 / 4), dict(ModelWeights(model))
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(sent[name], weight, atol=1e-6, rtol=0, msg=name)
    whole.load_state_dict(expected, strict=False)
    ids = torch.arange(20, 60)[None]
    for is_training in (True, False):
        model.train(is_training)
        with torch.no_grad():
            actual = model(ids).logits.log_softmax(-1)
            torch.testing.assert_close(actual, whole(ids).logits.log_softmax(-1), atol=1e-4, rtol=0)
    num_bytes = sum(one.numel() * one.element_size() for name, one in model.named_parameters() if "_proj.base" in name)
    assert num_bytes == sum(one.numel() for name, one in expected.items() if "_proj" in name) / 2


def test_a_running_engine_agrees_with_the_trainer(trainable_engine, model_path):
    model = with_drawn_adapters(load_model(model_path, lora=QUANTIZED), size=0.05, seed=1).eval()
    assert log_prob_difference(model, trainable_engine) > 0.05  # the engine's weights are not quantized yet
    sender = make_sender(VLLMWeightSyncScheme(), model, trainable_engine)
    sender.update_weights()
    sender.shutdown()
    assert log_prob_difference(model, trainable_engine) < 2e-3


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_to_the_bit_and_is_exact_from_the_first_rollout_on(
    tiny_model_path, tmp_path, monkeypatch, takes_long
):
    env = DatasetChatEnv([f"{a} + 1 =" for a in range(6)], repeats=4, name="train")
    env = env.append_transform(RubricReward(letters_of))
    seen = []

    def run(**options):
        engine = TransformersEngine(tiny_model_path)
        try:
            return train(
                tiny_model_path, env, path=tmp_path / "run", engine=engine, num_steps=4, groups_per_batch=2,
                max_new_tokens=8, learning_rate=1e-2, checkpoint_every=2, lora_rank=2, quantize_base=True, **options,
            )  # fmt: skip
        finally:
            engine.shutdown()

    def step_then_kill(loss, batch, optimizer, **options):
        if len(seen) == 3:
            raise Killed
        report = train_step(loss, batch, optimizer, **options)
        seen.append({name: one.clone() for name, one in loss.actor_network.model.named_parameters()})
        return report

    monkeypatch.setattr(grpo, "train_step", step_then_kill)
    with pytest.raises(Killed):
        run()
    state = load_state(tmp_path / "run/checkpoint.safetensors", advice="")["tracked"]["model"]
    assert state and all(".lora_" in name for name in state)
    killed = seen[-1]
    seen.clear()
    path = run(resume=True)  # steps 3, from its saved batch, and 4
    resumed, last = seen
    assert [name for name, weight in killed.items() if not torch.equal(resumed[name], weight)] == []
    assert any(not torch.equal(resumed[name], last[name]) for name in resumed)
    steps = [row for row in RunFolder(path, read_only=True).read_metrics() if int(row["step"])]
    assert len(steps) == 4 and all(float(row["log_prob_difference_mean"]) < 1e-4 for row in steps)
    saved = AutoModelForCausalLM.from_pretrained(path / "model")
    assert not hasattr(saved.config, "quantization_config")
    expected = merged_by_hand(tiny_model_path, last, scale=32 / 2)
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["model.lora.rank=null"], "give them a rank"),
        (["sync.lora=adapter"], "needs sync.lora=merged"),
        (["train.num_ranks=2"], "for one rank"),
    ],
)
def test_what_cannot_be_done_is_refused(entries, said):
    with pytest.raises(ValueError, match=said):
        config("grpo", "model.lora.rank=4", "model.lora.quantize_base=true", *entries)


def test_a_base_that_is_to_be_sharded_is_refused(tmp_path):
    sharp_llama(tmp_path)
    with pytest.raises(ValueError, match="one rank"):
        load_model(tmp_path, lora=QUANTIZED, mesh=object())
