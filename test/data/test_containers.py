"""The containers of a step: their views, specs and conversions, beside TorchRL's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, set_list_to_stack
from torchrl.data.llm import History as TorchRLHistory

from llmrl.data import (
    ChatHistory,
    History,
    LogProbs,
    Masks,
    Text,
    Tokens,
    as_nested_tensor,
    as_padded_tensor,
)
from llmrl.data.tensordicts import container_of, non_tensor, plain

CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 + 8 ="}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How are you?"}],
]
ANSWERS = [{"role": "assistant", "content": "15"}, {"role": "assistant", "content": "Fine, and you?"}]


def turns():
    pairs = zip(CHATS, ANSWERS, strict=True)
    full = [History.from_chats([*chat, answer]) for chat, answer in pairs]
    prompts = [History.from_chats(chat) for chat in CHATS]
    return lazy_stack([ChatHistory(prompt=p, full=f) for p, f in zip(prompts, full, strict=True)], 0)


def test_text_and_tokens_of_a_turn_are_torchrls(tokenizer, takes_long):
    from torchrl.modules.llm.policies import ChatHistory as TorchRLChatHistory

    text, tokens = turns().to_text(tokenizer), turns().to_tokens(tokenizer)
    with set_list_to_stack(True):
        for index, (chat, answer) in enumerate(zip(CHATS, ANSWERS, strict=True)):
            prompt, full = (TorchRLHistory.from_chats([messages]) for messages in (chat, [*chat, answer]))
            theirs = TorchRLChatHistory(prompt=prompt, full=full, batch_size=1)
            their_text, their_tokens = theirs.to_text(tokenizer), theirs.to_tokens(tokenizer)
            for key in ("prompt", "response", "full"):
                assert text[index].get(key) == next(iter(their_text.get(key)))
                assert tokens.as_list(key)[index].tolist() == their_tokens.get(key, as_list=True)[0].tolist()


def test_a_turn_goes_to_tokens_and_back(tokenizer):
    tokens = turns().to_tokens(tokenizer)
    again = tokens.to_history(tokenizer)
    assert again.full.to_chats() == [[*chat, answer] for chat, answer in zip(CHATS, ANSWERS, strict=True)]
    assert [response.to_chats() for response in again.response.unbind(0)] == [[answer] for answer in ANSWERS]
    assert tokens[0].to_text(tokenizer).full == turns()[0].to_text(tokenizer).full
    assert "<|im_start|>" not in tokens[0].to_text(tokenizer, skip_special_tokens=True).full


def test_a_response_alone_and_another_template(tokenizer):
    alone = ChatHistory(response=History.from_chats([CHATS[0][1], ANSWERS[0]]))
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert alone.to_text(tokenizer, chat_template=template).response == "[7 + 8 =][15]"
    with pytest.raises(ValueError, match="rewrites the prompt"):
        turns().to_text(tokenizer, chat_template=template)


@pytest.mark.parametrize("container", [Tokens, LogProbs, Masks, Text, ChatHistory])
def test_specs_are_of_their_container(container):
    spec = container.default_spec((2,))
    zero = spec.zero()
    assert spec.shape == zero.shape == (2,) and isinstance(zero, container)
    key = next(iter(spec.keys()))
    assert set(container.default_spec((), (key,)).keys()) == {key}


def test_views_of_one_entry():
    rows = [torch.arange(1, n) for n in (3, 5)]
    batch = lazy_stack([Tokens(full=row) for row in rows], 0)
    assert [row.tolist() for row in batch.as_list("full")] == [row.tolist() for row in rows]
    assert [row.tolist() for row in Tokens(full=rows[0]).as_list("full")] == [[1, 2]]
    # The words that TorchRL's scripts use:
    assert batch.get("full", as_padded_tensor=True, padding_side="left").tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert [row.tolist() for row in batch.get("full", as_list=True)] == [[1, 2], [1, 2, 3, 4]]
    assert batch.get("full", as_nested_tensor=True).is_nested
    several = lazy_stack([batch, batch], 0)
    padded = [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert several.as_padded_tensor("full").tolist() == [padded, padded]
    assert batch.as_padded_tensor("full").tolist() == padded and batch[0].as_padded_tensor("full").tolist() == [1, 2]
    with pytest.raises(ValueError, match="one batch dimension"):
        several.as_nested_tensor("full")


def test_lists_of_tensordicts_are_padded_and_nested_as_torchrls(takes_long):
    from torchrl.envs.llm.transforms import as_nested_tensor as torchrl_as_nested_tensor
    from torchrl.envs.llm.transforms import as_padded_tensor as torchrl_as_padded_tensor

    rows = [TensorDict(a=torch.arange(1, n), b={"c": torch.ones(n, 2)}) for n in (3, 5)]
    ours, theirs = as_padded_tensor(rows), torchrl_as_padded_tensor(rows)
    assert ours.batch_size == theirs.batch_size and (ours == theirs).all()
    ours, theirs = as_nested_tensor(rows), torchrl_as_nested_tensor(rows)
    assert ours.batch_size == theirs.batch_size
    for left, right in zip(ours["b", "c"].unbind(), theirs["b", "c"].unbind(), strict=True):
        torch.testing.assert_close(left, right)
    with pytest.raises(ValueError, match="empty"):
        as_padded_tensor([])


def test_a_batch_of_texts_is_converted_one_by_one(tokenizer):
    batch = Text(full=NonTensorStack("a", "b c d e f"), batch_size=2)
    assert [len(row) for row in batch.to_tokens(tokenizer).as_list("full")] == [
        len(tokenizer.encode(text)) for text in ("a", "b c d e f")
    ]


@pytest.mark.parametrize("way", ["pickle", "memmap", "clone", "shared"])
def test_a_container_made_without_checks_is_as_the_public_constructor_makes_it(way, tmp_path):
    """Containers of llmrl's own turns behave like those of the public constructor, and so do copies of them."""
    value = {"a": [1, "b"]}
    pairs = [
        (non_tensor(value), NonTensorData(data=value)),
        (container_of(Tokens, {"full": torch.arange(3)}), Tokens(full=torch.arange(3), batch_size=())),
    ]
    for made, public in pairs:
        assert type(made) is type(public) and made.batch_size == public.batch_size == torch.Size([])
        assert made._non_tensordict == public._non_tensordict
        assert [*made._tensordict.keys()] == [*public._tensordict.keys()]
        both = [
            pickle.loads(pickle.dumps(one))
            if way == "pickle"
            else TensorDict(one=one).memmap(tmp_path / str(id(one))).get("one")
            if way == "memmap"
            else one.clone()
            if way == "clone"
            else TensorDict(one=one).share_memory_().get("one")
            for one in (made, public)
        ]
        assert type(both[0]) is type(both[1])
        assert plain(both[0]) == value if made is pairs[0][0] else both[0].full.tolist() == [0, 1, 2]
        assert both[0].batch_size == torch.Size([])


def test_a_container_without_batch_size_holds_several_turns(tokenizer):
    question = [{"role": "user", "content": "2 + 2 ="}]
    chats = [[*question, {"role": "assistant", "content": content}] for content in ("4", "It is four.")]
    turns = ChatHistory(prompt=History.from_chats([question] * 2), full=History.from_chats(chats))
    text, tokens = turns.to_text(tokenizer), turns.to_tokens(tokenizer)
    assert text.full == [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    assert [prompt + response for prompt, response in zip(text.prompt, text.response, strict=True)] == text.full
    assert [tokenizer.decode(ids) for ids in tokens.full.unbind()] == text.full
    assert tokens.to_history(tokenizer).response.content == [["4"], ["It is four."]]
    assert tokens.padded is False
    tokens.padded = True
    with pytest.raises(ValueError, match="padded tokens"):
        tokens.to_text(tokenizer)


def test_a_tokenizer_without_a_template_writes_chatml(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    history = History.from_chats([{"role": "user", "content": "Hi"}])
    assert history.apply_chat_template(bare) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
