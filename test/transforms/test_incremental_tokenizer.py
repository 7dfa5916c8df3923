"""`IncrementalTokenizer` and the policy share one conversation: nothing is rendered twice."""

from __future__ import annotations

import functools

import pytest
from tensordict import TensorDict
from torchrl.envs import check_env_specs

from llmrl.envs import ChatEnv, DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.transforms import IncrementalTokenizer

DATASET = [{"query": "1 + 1 ="}, {"query": "1 + 2 =, and why?"}]
SAME_LENGTHS = [{"query": "1 + 1 ="}, {"query": "1 + 2 ="}]


class CountingRenderer:
    """A renderer that counts what it is asked to tokenize."""

    def __init__(self, renderer):
        self.renderer = renderer
        self.num_renders, self.num_bridges = 0, 0

    def render(self, *args, **kwargs):
        self.num_renders += 1
        return self.renderer.render(*args, **kwargs)

    def bridge(self, *args, **kwargs):
        self.num_bridges += 1
        return self.renderer.bridge(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.renderer, name)


class Again(MessageEnv):
    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        return MessageStep([{"role": "user", "content": "again"}])


@pytest.mark.parametrize("batch_size", [None, (2,)])
def test_specs_are_right(renderer, batch_size):
    # check_env_specs reads a column of the whole batch at once, which a ragged one refuses: prompts of one length here
    env = DatasetChatEnv(SAME_LENGTHS, batch_size=batch_size).append_transform(IncrementalTokenizer(renderer=renderer))
    check_env_specs(env, return_contiguous=False)


def test_prompt_tokens_are_the_templates_at_reset_and_after_each_turn(renderer):
    env = MessageChatEnv(lambda item: Again()).append_transform(IncrementalTokenizer(renderer=renderer))
    policy = LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=renderer)
    data = env.reset()
    for _ in range(3):
        expected = renderer.render(data["history"].prompt.chats, add_generation_prompt=True)
        assert data["tokens", "prompt"].tolist() == expected
        data = env.step_mdp(env.step(policy(data)))


def test_each_message_is_tokenized_once(renderer):
    counting = CountingRenderer(renderer)
    env = MessageChatEnv(lambda item: Again()).append_transform(IncrementalTokenizer(renderer=counting))
    policy = LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=counting)
    env.rollout(5, policy)
    assert (counting.num_renders, counting.num_bridges) == (1, 5)


def test_ragged_batches_keep_their_own_lengths(renderer):
    env = DatasetChatEnv(DATASET).append_transform(IncrementalTokenizer(renderer=renderer))
    data = env.reset(TensorDict(batch_size=[2]))
    short, long = data.get(("tokens", "prompt"), as_list=True)
    assert len(short) < len(long)


def test_options_that_no_conversation_takes_are_refused_before_the_first_one(renderer):
    policy = functools.partial(LLMWrapperBase, ScriptedEngine(["1"], encode=renderer.encode))
    for make in (IncrementalTokenizer, policy):
        with pytest.raises(ValueError, match="fork_threshold_tokens must be at least 0, got -1"):
            make(renderer=renderer, fork_threshold_tokens=-1)
    with pytest.raises(ValueError, match=r"mode must be one of .*got 'tokens'"):
        IncrementalTokenizer(renderer=renderer, mode="tokens")


def test_exactly_one_of_tokenizer_and_renderer(renderer, tokenizer):
    with pytest.raises(ValueError, match="exactly one"):
        IncrementalTokenizer()
    with pytest.raises(ValueError, match="exactly one"):
        IncrementalTokenizer(tokenizer, renderer=renderer)
    env = ChatEnv().append_transform(IncrementalTokenizer(tokenizer))
    assert env.reset(TensorDict({"query": "hi"}))["tokens", "prompt"].ndim == 1
