"""What the tests of weight sync share: changing every parameter, and comparing an engine with a model."""

from __future__ import annotations

import torch

from llmrl.engines import SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=24, ignore_eos=True)


def change_every_parameter(model, *, seed, size):
    """Relative noise on every parameter, the embedding that is also the head included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


def difference_of(model, prompt_ids, completion):
    """[num_tokens] the engine's log-probs less the model's."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *completion.token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    token_ids = torch.tensor(completion.token_ids)
    return torch.tensor(completion.log_probs) - logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def log_prob_difference(model, engine, *, sampling=SAMPLING, num_prompts=4):
    """Mean absolute difference of the engine's log-probs from the model's on freshly sampled tokens."""
    prompts = [[1, 493, 198, 148 + i, 314, 260, 375] for i in range(num_prompts)]
    completions = engine.generate_batch(prompts, sampling)
    differences = [difference_of(model, p, c).abs() for p, c in zip(prompts, completions, strict=True)]
    return torch.cat(differences).mean().item()


def weights_of(model):
    """A copy of the state."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_sender(scheme, model, engine):
    """A sender of `model` to `engine`, ready."""
    from llmrl.weight_sync import get_model_metadata

    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), engine)
    return sender


def out_of_reach(monkeypatch):
    """Make engines see the trainer's memory no more than if they ran on another host."""
    from llmrl.weight_sync import memory_trainer
    from llmrl.weight_sync.shared_memory import SharedBuffer

    class FarBuffer(SharedBuffer):
        def __init__(self, num_bytes):
            super().__init__(num_bytes)
            self.path = "/memory/of/another/host"

    monkeypatch.setattr(memory_trainer, "SharedBuffer", FarBuffer)
