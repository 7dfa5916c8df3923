"""`Tokenizer` and `TemplateTransform`: environments that policies of tokens or of text play."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.envs import TransformedEnv, check_env_specs

from llmrl.data.tensordicts import batch_elements
from llmrl.envs import ChatEnv, DatasetChatEnv, LLMEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.transforms import IncrementalTokenizer, RubricReward, TemplateTransform, Tokenizer

TEXTS = ["7 + 8 =", "What is the sum of the digits of 1234?", ""]


class Again(MessageEnv):
    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        return MessageStep([{"role": "user", "content": f"You said {message['content']}."}], reward=1.0)


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_tokens_are_those_of_torchrls_tokenizer(tokenizer, add_special_tokens, takes_long):
    from torchrl.envs.llm.transforms import Tokenizer as TorchRLTokenizer

    options = {"tokenizer": tokenizer, "add_special_tokens": add_special_tokens}
    ours = Tokenizer(["text"], [("tokens", "prompt")], **options)
    theirs = TorchRLTokenizer(["text"], [("tokens", "prompt")], **options)
    for text in TEXTS[:2]:
        data, other = ours(TensorDict(text=text)), theirs(TensorDict(text=text))
        for key in (("tokens", "prompt"), ("tokens", "attention_mask")):
            torch.testing.assert_close(data[key], other[key])
    batch, padded = ours(TensorDict(text=TEXTS, batch_size=3)), theirs(TensorDict(text=TEXTS, batch_size=3))
    for row, other in zip(batch.unbind(0), padded.unbind(0), strict=True):
        is_real = other["tokens", "attention_mask"].bool()
        torch.testing.assert_close(row["tokens", "prompt"], other["tokens", "prompt"][is_real])
        assert row["tokens", "attention_mask"].sum() == is_real.sum()


def test_a_policys_tokens_are_the_text_that_torchrl_reads(tokenizer, takes_long):
    from torchrl.envs.llm.transforms import Tokenizer as TorchRLTokenizer

    keys = {"in_keys_inv": ["text_response"], "out_keys_inv": ["tokens_response"], "tokenizer": tokenizer}
    for text in (" 15", "15<|im_end|>"):
        data = TensorDict(tokens_response=torch.tensor(tokenizer.encode(text)))
        assert Tokenizer(**keys).inv(data)["text_response"] == TorchRLTokenizer(**keys).inv(data)["text_response"]
    kept = Tokenizer(**keys, skip_special_tokens=False).inv(data)["text_response"]
    assert kept == "15<|im_end|>"


def tokens_env(tokenizer, env=None):
    transform = Tokenizer(["text"], ["tokens"], ["text_response"], ["tokens_response"], tokenizer=tokenizer)
    return TransformedEnv(LLMEnv() if env is None else env, transform)


def test_a_text_environment_is_played_by_a_policy_of_tokens(tokenizer):
    env = tokens_env(tokenizer)
    data = env.reset(lazy_stack([TensorDict(text=text) for text in ("1 + 1 =", "12 + 34 =")], 0))
    assert [len(element["tokens"]) for element in data.unbind(0)] == [len(tokenizer.encode(t)) for t in data["text"]]
    for element, answer in zip(data.unbind(0), (" 2", " 46"), strict=True):
        element["tokens_response"] = torch.tensor(tokenizer.encode(answer))
    step = env.step(data)["next"]
    assert list(step["text"]) == ["1 + 1 = 2", "12 + 34 = 46"]
    assert [tokenizer.decode(element["tokens"]) for element in step.unbind(0)] == list(step["text"])


def test_specs_of_tokenized_environments(tokenizer):
    env = tokens_env(tokenizer)
    check_env_specs(env, tensordict=env.reset(TensorDict(text="a")))
    assert list(env.full_action_spec.keys(True, True)) == ["tokens_response"]
    chat = ChatEnv(input_mode="text")
    keys = ([("text", "prompt")], [("tokens", "prompt")], [("text", "full")], [("tokens", "full")])
    env = TransformedEnv(chat, Tokenizer(*keys, tokenizer=tokenizer, return_attention_mask=False))
    check_env_specs(env, tensordict=env.reset(TensorDict(query="a")))
    assert list(env.full_action_spec.keys(True, True)) == [("tokens", "full")]


def test_rows_of_text_are_tokenized_before_an_environment_of_tokens_is_reset(tokenizer):
    loader = DataLoader([{"text": text} for text in TEXTS[:2]], batch_size=2)
    transform = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer, call_before_reset=True)
    env = LLMEnv.from_dataloader(loader, from_text=False)
    env.insert_transform(0, transform)
    data = env.reset()
    assert tokenizer.decode(data["tokens"]) == TEXTS[0]
    data["tokens_response"] = torch.tensor([1])
    assert env.step(data)["next", "tokens"].tolist() == [*data["tokens"].tolist(), 1]


def test_what_is_missing_or_not_meant_is_named(tokenizer):
    with pytest.raises(KeyError, match="'text'"):
        Tokenizer(["text"], ["tokens"], tokenizer=tokenizer)(TensorDict(prompt="a"))
    with pytest.raises(ValueError, match="must be equally many"):
        Tokenizer(["text"], tokenizer=tokenizer)
    with pytest.raises(TypeError, match="as_padded_tensor"):
        Tokenizer(["text"], ["tokens"], tokenizer=tokenizer, max_length=8)
    with pytest.raises(KeyError, match="text_response"):
        TransformedEnv(LLMEnv(), Tokenizer(None, None, ["text_reply"], ["t"], tokenizer=tokenizer)).reset(
            TensorDict(text="a")
        )


@pytest.mark.parametrize("batch_size", [None, (2,)])
def test_specs_of_a_templated_environment(renderer, batch_size):
    env = DatasetChatEnv([{"query": "1 + 1 ="}, {"query": "1 + 2 ="}], batch_size=batch_size)
    env = env.append_transform(RubricReward(is_two)).append_transform(TemplateTransform(renderer=renderer))
    check_env_specs(env)
    assert list(env.full_action_spec.keys(True, True)) == [("text", "response")]


def is_two(completion):
    return float(completion == "2")


def test_a_conversation_is_played_by_a_policy_of_text(renderer):
    env = MessageChatEnv(lambda item: Again()).append_transform(TemplateTransform(renderer=renderer))
    engine = ScriptedEngine(["one<|im_end|>", "two<|im_end|>"], encode=renderer.encode)
    policy = LLMWrapperBase(engine, renderer=renderer, input_mode="text")
    data = env.reset()
    for _ in range(2):
        data = env.step_mdp(env.step(policy(data)))
    assert data["history"].prompt.content == ["go", "one", "You said one.", "two", "You said two."]
    expected = renderer.render_text(data["history"].prompt.chats, add_generation_prompt=True)
    assert data["text"].prompt == expected


def test_text_and_tokens_are_the_same_prompt(renderer, tokenizer):
    env = DatasetChatEnv([{"query": "1 + 1 ="}, {"query": "And 12 + 34?"}])
    env = env.append_transform(TemplateTransform(tokenizer)).append_transform(IncrementalTokenizer(renderer=renderer))
    for element in env.reset(TensorDict(batch_size=[2])).unbind(0):
        assert renderer.encode(element["text"].prompt) == element["tokens", "prompt"].tolist()


def test_a_tool_call_in_the_text_is_one_in_the_history(renderer):
    env = DatasetChatEnv(["Weather?"]).append_transform(TemplateTransform(renderer=renderer))
    data = env.reset()
    data["text", "response"] = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
    [call] = env.step(data)["next", "history"].prompt.chats[-1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}


def test_templates_are_refused_without_a_source_or_an_answer(renderer, tokenizer):
    for arguments in ({}, {"tokenizer": tokenizer, "renderer": renderer}, {"chat_template": "x", "renderer": renderer}):
        with pytest.raises(ValueError, match="either a tokenizer"):
            TemplateTransform(**arguments)
    env = DatasetChatEnv(["Hi"]).append_transform(TemplateTransform(renderer=renderer))
    with pytest.raises(KeyError, match="response"):
        env.step(env.reset())


def test_a_template_of_ones_own_is_used(tokenizer):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    env = DatasetChatEnv(["Hi"]).append_transform(TemplateTransform(tokenizer, template))
    assert env.reset()["text"].prompt == "<|im_start|>user: Hi<|im_end|><|im_start|>assistant: "


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_batches_of_any_shape_come_back_in_their_shape(renderer, tokenizer, shape):
    rows = [{"query": "a " * n} for n in range(1, 5)]
    env = DatasetChatEnv(rows).append_transform(RubricReward(is_two))
    env = env.append_transform(IncrementalTokenizer(renderer=renderer))
    engine = ScriptedEngine(["2<|im_end|>"], encode=renderer.encode)
    data = env.reset(TensorDict(batch_size=shape))
    policy = LLMWrapperBase(engine, renderer=renderer)
    step = env.step(policy(data))["next"]
    assert data.shape == step.shape == shape and step["reward"].shape == (*shape, 1, 1)
    lengths = [len(element["tokens", "prompt"]) for element in batch_elements(data)]
    assert lengths == sorted(set(lengths)) and (step["reward"] == 1).all()


def test_stacked_texts_are_read_one_by_one(tokenizer):
    rows = [TensorDict(text=text) for text in TEXTS[:2]]
    texts = TensorDict(text=NonTensorStack(*TEXTS[:2]), batch_size=2)
    transform = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer)
    for batch in (lazy_stack(rows, 0), texts):
        assert [tokenizer.decode(row["tokens"]) for row in transform(batch).unbind(0)] == TEXTS[:2]
