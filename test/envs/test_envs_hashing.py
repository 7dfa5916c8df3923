"""`LLMHashingEnv` names chains of tokens."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import check_env_specs

from llmrl.envs import LLMHashingEnv


def chain(env, tokens, actions):
    data = env.reset(TensorDict({"observation": torch.tensor(tokens)}, batch_size=torch.tensor(tokens).shape[:-1]))
    for action in actions:
        data["action"] = torch.tensor(action)
        data = env.step(data)["next"]
    return data


@pytest.mark.parametrize("shape", [(), (2,)])
def test_it_passes_check_env_specs(shape, tokenizer):
    env = LLMHashingEnv(tokenizer=tokenizer)
    tokens = torch.ones(*shape, 3, dtype=torch.int64)
    data = env.reset(TensorDict({"observation": tokens}, batch_size=shape))
    data["action"] = torch.full((*shape, 1), 5)
    step = env.step(data)["next"]
    assert step["observation"].shape == (*shape, 4) and step["hashing"].shape == (*shape, 1)
    if not shape:
        assert step["text"] == tokenizer.decode([1, 1, 1, 5])
        check_env_specs(
            LLMHashingEnv(9, text_output=False), tensordict=chain(LLMHashingEnv(9, text_output=False), [1], [])
        )


def test_equal_chains_have_one_hash_and_others_another():
    env = LLMHashingEnv(9, text_output=False)
    hashes = chain(env, [[1, 2], [1, 2], [2, 1]], [[[3], [3], [3]], [[4], [5], [4]]])["hashing"].flatten().tolist()
    assert len(set(hashes)) == 3
    assert hashes[0] == chain(env, [[1, 2]], [[[3]], [[4]]])["hashing"].item()
    assert hashes[0] == chain(env, [1, 2], [[3], [4]])["hashing"].item()


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match="tokenizer"):
        LLMHashingEnv(9)
    with pytest.raises(ValueError, match="observation"):
        LLMHashingEnv(9, text_output=False).reset()
