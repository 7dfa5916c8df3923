"""Kernels of vLLM's CPU build that llmrl replaces, beside what they should compute."""

import pytest
import torch

from llmrl.weight_sync.plugin import register


@pytest.mark.parametrize("shape", [(5, 128), (5, 4, 32)])
def test_heads_are_rotated_by_the_position_of_their_token(shape, imports_vllm):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    register()
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(32, 32, 64, 1e4, True, torch.float32)
    positions = torch.tensor([0, 1, 2, 7, 40])
    query = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    angles = positions[:, None, None] / 1e4 ** (torch.arange(16) / 16)
    first, second = query.view(5, 4, 32).chunk(2, -1)
    expected = torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )
    found, _ = layer.forward_cpu(positions, query.clone(), query.clone())
    torch.testing.assert_close(found.view(5, 4, 32), expected, rtol=0, atol=1e-5)


def test_each_drafted_token_has_its_requests_cuts(imports_vllm):
    from vllm.v1.sample import rejection_sampler

    register()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expand = rejection_sampler.expand_batch_to_tokens
    temperatures = expand(torch.tensor([0.0, 0.5, 0.7]), ends, 5, replace_from=0, replace_to=1)
    torch.testing.assert_close(temperatures, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))
    assert expand(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5).tolist() == [3, 3, 5, 5, 5]
