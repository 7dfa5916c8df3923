"""What the tests of weight sync share: changing every parameter, and comparing an engine with a model."""

from __future__ import annotations

import asyncio
import threading

import torch

from llmrl.engines import SamplingConfig
from llmrl.engines.base import EngineError
from llmrl.weight_sync.buffers import PackedLayout, open_shared

SAMPLING = SamplingConfig(max_new_tokens=24, ignore_eos=True)


def change_every_parameter(model, *, seed, size):
    """Relative noise on every parameter, the embedding that is also the head included."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * _noise(seed, parameter.shape))


def sharp_llama(path, *, is_tied=True):
    """A random llama, small and sure of its tokens, by default with a tied head; its checkpoint is at `path`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=is_tied, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return model.float().eval()


def set_noisy(model, original, *, seed, size):
    """Every parameter as in the state `original`, with relative noise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.mul(original[name], 1 + size * _noise(seed, parameter.shape), out=parameter)


def _noise(seed, shape):
    """A few thousand normal numbers over and over: as good as new ones here, and soon made."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.randn(4099, generator=generator)
    num_periods = -(-shape.numel() // len(period))
    return period.repeat(num_periods)[: shape.numel()].view(shape)


def difference_of(model, prompt_ids, completion):
    """[num_tokens] the engine's log-probs less the model's."""
    return differences_of(model, [prompt_ids], [completion])[0]


def differences_of(model, prompts, completions):
    """[num_completions, num_tokens] the engine's log-probs less the model's; all of them of one length."""
    token_ids = torch.tensor([[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)])
    start = len(prompts[0])
    with torch.no_grad():
        log_probs = model(token_ids).logits[:, start - 1 : -1].log_softmax(-1)
    own = log_probs.gather(2, token_ids[:, start:, None])[:, :, 0]
    return torch.tensor([completion.log_probs for completion in completions]) - own


def sample(engine, num_prompts=2):
    """Prompts and what the engine answers."""
    prompts = [[1, 493, 198, 148 + i, 314, 260, 375] for i in range(num_prompts)]

    async def generate():
        return await asyncio.gather(*(engine.generate(prompt, SAMPLING) for prompt in prompts))

    return prompts, asyncio.run(generate())


def log_prob_difference(model, engine):
    """Mean absolute difference of the engine's log-probs from the model's on freshly sampled tokens."""
    return differences_of(model, *sample(engine)).abs().mean().item()


def assert_each_weight_arrives(model, engine, sender, names, *, tolerance):
    """Change one weight at a time, send, compare; a model without the change must be far off."""
    original = weights_of(model)
    for seed, name in enumerate(names):
        model.load_state_dict(original)
        with torch.no_grad():
            parameter = model.get_parameter(name)
            parameter.mul_(1 + _noise(seed, parameter.shape))
        sender.update_weights()
        prompts, completions = sample(engine)
        new = differences_of(model, prompts, completions).abs().mean()
        model.load_state_dict(original)
        old = differences_of(model, prompts, completions).abs().mean()
        assert new < tolerance < old / 2, (name, new, old)


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
    from llmrl.weight_sync import channels
    from llmrl.weight_sync.buffers import SharedBuffer

    class FarBuffer(SharedBuffer):
        def __init__(self, num_bytes):
            super().__init__(num_bytes)
            self.path = "/memory/of/another/host"

    monkeypatch.setattr(channels, "SharedBuffer", FarBuffer)


class FakeEngine:
    """Records the calls of its control plane."""

    weight_transfer_backend = "nccl"
    model_dtype = torch.bfloat16
    quantization = None
    is_alive = True
    max_model_len = 64
    vocab_size = None

    def __init__(self, num_workers=1, version=0, fails_at=None, dies_at=None, hangs_at=None):
        self.num_workers, self.policy_version = num_workers, version
        self.fails_at, self.dies_at, self.hangs_at = fails_at, dies_at, hangs_at
        self.calls = []
        self._is_ended = threading.Event()

    @property
    def names(self):
        return [call[0] for call in self.calls]

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self.dies_at:
            self.is_alive = False
        if name == self.hangs_at:
            assert self._is_ended.wait(60), f"{name} hung and the engine was not ended"
        if name == self.fails_at or not self.is_alive:
            raise EngineError(f"{name} refused")

    async def generate(self, prompt_ids, sampling, *, request_id=None, routing_key=None):
        raise AssertionError("no test generates with it")

    async def abort(self, request_id):
        raise AssertionError("no test generates with it")

    async def progress(self):
        return None

    def shutdown(self):
        self.is_alive = False
        self._is_ended.set()

    def pause(self, mode, *, clear_cache):
        self._call("pause", mode, clear_cache)

    def resume(self):
        self._call("resume")

    def reset_prefix_cache(self, *, reset_running_requests):
        self._call("reset_prefix_cache", reset_running_requests)
        return True

    def init_weight_transfer_engine(self, info):
        self._call("init", info)

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, info):
        self._call("update", info)

    def finish_weight_update(self, version):
        self._call("finish", version)
        self.policy_version = int(version)


class TakingEngine(FakeEngine):
    """Copies what it is sent through shared memory, or refuses it."""

    weight_transfer_backend = "llmrl"
    is_full, is_keeping = False, False
    taken: dict[str, torch.Tensor]

    def update_weights(self, info):
        super().update_weights(info)
        if self.is_full:
            raise EngineError("no room")
        if self.is_keeping and not info.get("is_discarded"):
            layout = PackedLayout.from_plain(info["names"], info["dtype_names"], info["shapes"])
            buffer = open_shared(info["path"], info["num_bytes"])
            self.taken = {name: tensor.clone() for name, tensor in layout.views(buffer)}
