"""`History` as TorchRL's: the same calls on both say the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History as Theirs
from transformers import AutoTokenizer

from llmrl.data import History

ROLES = ("system", "user", "assistant")


def said(history):
    """Roles and texts as plain lists; messages of theirs are its last dimension."""

    def listed(value):
        return value if isinstance(value, str) else [listed(item) for item in value]

    return listed(history.role), listed(history.content)


def messages(*texts):
    return [{"role": ROLES[place % 3], "content": text} for place, text in enumerate(texts)]


def both(*chats):
    """A batch of conversations of equal length, theirs and ours."""
    theirs = torch.stack([torch.stack([Theirs(**message) for message in chat]) for chat in chats])
    return theirs, History.from_chats(list(chats))


def test_a_message_a_conversation_and_a_batch_are_built_as_there():
    for cls in (Theirs, History):
        message = cls(role="user", content="Hi")
        assert said(message) == ("user", "Hi") and message.batch_size == torch.Size([])
        chat = cls(role=["user", "assistant"], content=["Hi", "Hello"], batch_size=(2,))
        assert said(chat) == (["user", "assistant"], ["Hi", "Hello"]) and chat.batch_size == torch.Size([2])
        assert said(torch.stack([message, cls(role="assistant", content="Hello")])) == said(chat)
        assert said(lazy_stack([chat, chat])[0]) == said(chat)
        assert said(chat[1]) == ("assistant", "Hello") and said(chat[..., 0]) == ("user", "Hi")


CHATS = st.integers(1, 3).flatmap(
    lambda num_messages: st.lists(
        st.lists(st.text("ab ", max_size=3), min_size=num_messages, max_size=num_messages), min_size=1, max_size=3
    )
)


@given(texts=CHATS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_indices_find_the_messages_where_torchrl_has_them(texts, data):
    theirs, ours = both(*(messages(*chat) for chat in texts))
    shape = [len(texts), len(texts[0])]

    def part(size):
        places, ends = st.integers(-size, size - 1), st.integers(0, size)
        return st.one_of(places, st.builds(slice, ends, st.integers(1, size)).filter(lambda s: s.start < s.stop))

    index = data.draw(
        st.one_of(
            part(shape[0]),
            st.tuples(part(shape[0]), part(shape[1])),
            st.tuples(st.just(...), part(shape[1])),
            st.tuples(part(shape[0]), st.just(...)),
            st.lists(st.booleans(), min_size=shape[0], max_size=shape[0]).filter(any).map(torch.tensor),
        )
    )
    assert said(ours[index]) == said(theirs[index]) and ours[index].shape == theirs[index].shape
    assert ours.ndim == theirs.ndim == 2
    for name, size in (("expand", (2, *shape)), ("view", (shape[0], 1, shape[1])), ("reshape", (1, *shape))):
        changed = getattr(ours, name)(*size)
        assert changed.shape == torch.Size(size) and said(changed) == said(getattr(theirs, name)(*size))
    batch = TensorDict(turn=TensorDict(history=ours, batch_size=shape[:1]), batch_size=shape[:1])
    for changed, size in ((batch.expand(2, shape[0]), (2, *shape)), (batch.view(-1, 1), (shape[0], 1, shape[1]))):
        assert changed["turn", "history"].shape == torch.Size(size)
    single, their_single = ours[0], theirs[0]
    assert [said(message) for message in single] == [said(message) for message in their_single.unbind(0)]
    assert len(single) == shape[1] and len(ours) == shape[0]


@pytest.mark.parametrize("form", [list, torch.tensor, np.array])
def test_masks_and_places_choose_messages(form):
    chat = History.from_chats(messages("0", "1", "2"))
    assert chat[form([True, False, True])].content == ["0", "2"]
    assert chat[form([2, 0, -1])].content == ["2", "0", "2"]
    assert chat[form([False] * 3)].content == []
    batch = History.from_chats([messages("0", "1", "2"), messages("3", "4", "5")])
    assert batch[..., form([False, True, True])].content == [["1", "2"], ["4", "5"]]
    assert batch[form([False, True]), form([False, True, True])].content == [["4", "5"]]
    with pytest.raises(IndexError):
        chat[form([True, False])]


@given(texts=CHATS, inplace=st.booleans())
@settings(max_examples=40, deadline=None)
def test_messages_are_appended_as_there(texts, inplace):
    theirs, ours = both(*(messages(*chat) for chat in texts))
    answers = [{"role": "assistant", "content": str(place)} for place in range(len(texts))]
    added, their_added = (torch.stack([cls(**answer) for answer in answers]) for cls in (History, Theirs))
    longer = ours.append(added, inplace=inplace)
    assert said(longer) == said(theirs.append(their_added, inplace=inplace))
    assert said(ours) == said(theirs) and (longer is ours) == inplace
    more, their_more = ours.extend(ours, inplace=False, dim=-1), theirs.extend(theirs, inplace=False, dim=-1)
    assert said(more) == said(their_more)
    if len(texts) > 1:
        return
    assert said(ours[0].append(added[0])) == said(theirs[0].append(their_added[0]))
    assert said(ours[0].extend(ours[0])) == said(theirs[0].extend(theirs[0]))


def test_one_message_fills_a_batch():
    assert History(role="user", content="Hi", batch_size=2).content == ["Hi", "Hi"]
    assert History(role="user", content="Hi", batch_size=(1, 2)).unsqueeze(0).batch_size == (1, 1, 2)
    with pytest.raises(ValueError, match="batch_size must be that of role"):
        History(role=["user", "user"], content=["Hi", "Ho"], batch_size=3)


def test_batches_are_extended_by_conversations():
    theirs, ours = both(messages("a", "b"), messages("c", "d"))
    assert said(ours.extend(ours[:1], inplace=False)) == said(theirs.extend(theirs[:1], inplace=False))
    ours.extend(ours[1:])
    assert ours.content == [["a", "b"], ["c", "d"], ["c", "d"]]


def test_what_is_changed_in_place_is_changed_where_it_is_kept():
    batch = TensorDict({"history": History.from_chats(messages("a"))})
    batch["history"].append(History(role="user", content="b"))
    assert batch["history"].content == ["a", "b"]
    batch["history"].append({"role": "user", "content": "c"})
    assert batch["history"].content == ["a", "b"]


def test_a_batch_of_different_lengths_says_so_in_its_shape():
    ours = History.from_chats([messages("a"), messages("b", "c")])
    assert ours.shape == (2, -1) and ours.batch_size == (2,) and ours[1].shape == (2,)
    assert ours.expand(3, 2, -1).shape == (3, 2, -1) and ours.unbind(0)[0].shape == (1,)


def test_the_own_form_keeps_its_shape_as_it_grows():
    chat = History(role=["user", "assistant"], content=["a", "b"])
    grown = chat.append(History(role="user", content="c"), inplace=False)
    assert (chat.batch_size, grown.batch_size) == ((2,), (3,)) and grown.content == ["a", "b", "c"]
    assert lazy_stack([chat, chat])[..., -1].content == ["b", "b"]


def test_the_reward_designs_of_the_documentation_read_responses():
    """Groups of responses, of which the last message is read."""
    responses = torch.stack([History.from_chats([messages("a", "b", text)] * 2) for text in ("x", "y")])
    last = lazy_stack([response[..., -1] for response in responses.unbind(0)])
    assert last.content == [["x", "x"], ["y", "y"]] and last.batch_size == (2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: History(content="a"), "takes role and content"),
        (lambda h: History(role="user"), "neither content nor tool_calls"),
        (lambda h: History(role=["user"], content=["a", "b"]), "a list of 1"),
        (lambda h: History(role=["user"], content=["a"], batch_size=(2,)), "batch_size must be that of role"),
        (lambda h: h.append(History.from_chats(messages("a", "b"))), "use extend"),
        (lambda h: h.append(History(role="user", content="a"), dim=0), "dim must be the messages' dimension"),
        (lambda h: h.extend(h[:1], dim=-1), "of the batch size"),
        (lambda h: h.extend(h, dim=3), "dim must be from -2 to 1"),
        (lambda h: h.extend(h, dim=-3), "dim must be from -2 to 1"),
        (lambda h: History(role="user", content="a").append({"role": "user", "content": "a"}), "unsqueeze"),
        (lambda h: h.extend(History(role="user", content="a")), "append it"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    history = History.from_chats([messages("a"), messages("b")])
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(history)
    with pytest.raises(IndexError):
        history[0, 0, 0]
    with pytest.raises(IndexError):
        history[..., 3]


class TestRendering:
    @pytest.fixture(scope="class")
    def tokenizer(self, model_path):
        return AutoTokenizer.from_pretrained(model_path)

    def test_token_ids_have_the_tokenizers_own_form(self, tokenizer):
        chats = [messages("a", "b"), messages("Say more.", "c")]
        history = History.from_chats(chats)
        own = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats]
        texts = history.apply_chat_template(tokenizer=tokenizer)
        assert texts == [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
        ids = history.apply_chat_template(tokenizer=tokenizer, return_tensors="pt")
        assert [one.tolist() for one in ids] == [[one["input_ids"]] for one in own]
        ragged = history.apply_chat_template(tokenizer=tokenizer, return_dict=True)
        assert [row["input_ids"].tolist() for row in ragged.unbind(0)] == [one["input_ids"] for one in own]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_truncation_are_the_tokenizers(self, tokenizer, side):
        chats = [messages("a", "b"), messages("Say more of it.", "c")]
        tokenizer.padding_side = side
        own = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, padding=True, return_tensors="pt"
        )
        padded = History.from_chats(chats).apply_chat_template(tokenizer=tokenizer, return_dict=True, padding=True)
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(padded[name], own[name])
        cut = History.from_chats(chats[0]).apply_chat_template(
            tokenizer=tokenizer, return_dict=True, truncation=True, max_length=5, return_assistant_tokens_mask=False
        )
        assert cut["input_ids"].tolist() == tokenizer.apply_chat_template(chats[0], return_dict=True)["input_ids"][:5]

    def test_a_template_by_name(self, tokenizer):
        chat = messages("Be kind.", "Hi", "Hello")
        text = History.from_chats(chat).apply_chat_template(
            tokenizer=tokenizer, chat_template_name="llama4", add_generation_prompt=False
        )
        assert text == (
            "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe kind.<|eot|><|header_start|>user<|header_end|>"
            "\n\nHi<|eot|><|header_start|>assistant<|header_end|>\n\nHello<|eot|>"
        )
        for name in ("chatml", "llama3", "llama4", "gemma"):
            written = History.from_chats(chat).apply_chat_template(tokenizer=tokenizer, chat_template_name=name)
            assert History.from_text(written).content == ["Be kind.", "Hi", "Hello"]

    def test_an_end_of_text_ends_a_turn(self):
        history = History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|endoftext|>")
        assert history.content == ["Hi", "Hello"] and history.is_complete == [True, True]

    def test_unknown_keywords_and_lengths_are_refused(self, tokenizer):
        history = History.from_chats(messages("a"))
        with pytest.raises(ValueError, match="tokenise"):
            history.apply_chat_template(tokenizer=tokenizer, tokenise=True)
        with pytest.raises(ValueError, match=r"padding must be one of .*got 'do_not_pad'"):
            history.apply_chat_template(tokenizer=tokenizer, tokenize=True, padding="do_not_pad")
        with pytest.raises(ValueError, match="max_length"):
            history.apply_chat_template(tokenizer=tokenizer, truncation=True, return_dict=True)
        with pytest.raises(ValueError, match="must be one of"):
            history.apply_chat_template(tokenizer=tokenizer, chat_template_name="alpaca")
        with pytest.raises(ValueError, match="'pt'"):
            history.apply_chat_template(tokenizer=tokenizer, return_tensors="tf")


def test_a_message_may_be_given_as_a_conversation():
    alone = History(role="assistant", content="a", batch_size=1)
    assert alone.batch_size == (1,) and alone.role == ["assistant"] and alone.content == ["a"]
    assert [message.content for message in History.from_chats(messages("a", "b")).unbind(0)] == ["a", "b"]
