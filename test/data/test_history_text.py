"""Templated text read back into conversations, and masks of what the assistant wrote."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_families import END_OF_TURN, family_tokenizer, template_text

from llmrl.data import History, templated_text
from llmrl.data.templated_text import parse_templated

APPENDING = ["chatml", "qwen25", "llama3", "gemma"]
# Letters that the embedded model's vocabulary can spell: it lacks some bytes.
contents = st.text(
    st.characters(max_codepoint=0x24F, exclude_categories=("Cs", "Cc"), exclude_characters="<>[]"), min_size=1
).map(lambda text: f"a{text}b")


def conversation(texts, *, has_system=False):
    chat = [{"role": "system", "content": "s"}] if has_system else []
    return chat + [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.mark.parametrize("family", [*APPENDING, "mistral"])
@settings(max_examples=25)
@given(texts=st.lists(contents, min_size=2, max_size=6))
def test_a_templated_conversation_is_read_back(model_path, family, texts):
    chat = conversation(texts)
    text = History.from_chats(chat).apply_chat_template(
        family_tokenizer(model_path, family), chat_template=template_text(family), add_generation_prompt=False
    )
    read = [m for m in History.from_text(text).to_chats() if m["role"] != "system"]  # some templates write their own
    assert read == chat


@pytest.mark.parametrize("family", APPENDING)
def test_a_generation_prompt_is_not_a_message_and_a_cut_answer_is_unfinished(model_path, family):
    tokenizer = family_tokenizer(model_path, family)
    chat = conversation(["q"])
    prompt = History.from_chats(chat).apply_chat_template(tokenizer, chat_template=template_text(family))
    assert parse_templated(prompt)[0][-1] == chat[-1]
    messages, is_ended = parse_templated(prompt + "half an ans")
    assert messages[-1] == {"role": "assistant", "content": "half an ans"} and not is_ended[-1]
    assert parse_templated(prompt + "all" + END_OF_TURN[family])[1][-1]


def test_batches_of_texts_and_what_is_refused():
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert History.from_text([text, text]).batch_size == (2,)
    assert History.from_text(text, chat_template_name="qwen").content == ["Hi"]
    with pytest.raises(ValueError, match="no marks of any"):
        History.from_text("plain text")
    with pytest.raises(ValueError, match="family must be one of"):
        History.from_text(text, chat_template_name="alpaca")
    with pytest.raises(ValueError, match="no turn as 'gemma'"):
        History.from_text(text, chat_template_name="gemma")
    with pytest.raises(ValueError, match="no turn as 'chatml'"):
        History.from_text("<|im_start|>assistant\n")


def test_messages_of_mistral_that_cannot_be_read_are_not_left_out():
    asked = "[INST] q [/INST]"
    for text in (
        f"<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT]{asked} a</s>",
        f'<s>{asked}[TOOL_CALLS] []</s>[TOOL_RESULTS] {{"content": 5}}[/TOOL_RESULTS] It is 5.</s>',
    ):
        with pytest.raises(ValueError, match="pass messages instead"):
            History.from_text(text)
    tools = "[AVAILABLE_TOOLS] [] [/AVAILABLE_TOOLS]"
    read = History.from_text(f"<s>{tools}{asked} a</s>{tools}{asked} b</s>").to_chats()
    assert [message["content"] for message in read] == ["q", "a", "q", "b"]


def test_a_template_that_replaces_another_is_not_read_by_the_parser_of_the_other(monkeypatch):
    for known in (templated_text._TEMPLATES, templated_text._READERS, templated_text._MODEL_NAMES):
        monkeypatch.setitem(known, "mine", None)
    templated_text.add_chat_template("mine", "a", inverse_parser=lambda text: History.from_chats(conversation(["q"])))
    assert History.from_text("x", chat_template_name="mine").content == ["q"]
    templated_text.add_chat_template("mine", "b")
    with pytest.raises(ValueError, match="family must be one of"):
        History.from_text("x", chat_template_name="mine")


@pytest.mark.parametrize("family", APPENDING)
@pytest.mark.parametrize("has_system", [False, True])
@settings(max_examples=15)
@given(texts=st.lists(contents, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_masks_hold_what_the_assistant_wrote_and_its_end(model_path, family, has_system, texts):
    if family == "gemma" and has_system:
        return  # it knows no system role
    tokenizer = family_tokenizer(model_path, family)
    chat = conversation(texts, has_system=has_system)
    encoded = History.from_chats(chat).apply_chat_template(
        tokenizer,
        chat_template=template_text(family),
        add_generation_prompt=False,
        return_assistant_tokens_mask=True,
    )
    token_ids, mask = encoded["input_ids"].tolist(), encoded["assistant_masks"].tolist()
    whole = History.from_chats(chat).apply_chat_template(
        tokenizer, chat_template=template_text(family), add_generation_prompt=False, tokenize=True
    )
    assert [token_ids] == whole.tolist() and len(mask) == len(token_ids)
    written = tokenizer.decode([token_id for token_id, is_written in zip(token_ids, mask, strict=True) if is_written])
    end = END_OF_TURN[family]
    assert written == "".join(message["content"] + end for message in chat if message["role"] == "assistant")


@pytest.mark.parametrize("family", APPENDING)
@pytest.mark.parametrize("texts", [["q", "a"], ["q", "a", "q", "b"]])
def test_an_answer_that_goes_on_has_no_end_in_its_mask(model_path, family, texts):
    tokenizer = family_tokenizer(model_path, family)
    encoded = History.from_chats(conversation(texts)).apply_chat_template(
        tokenizer,
        chat_template=template_text(family),
        add_generation_prompt=False,
        continue_final_message=True,
        return_assistant_tokens_mask=True,
    )
    end = END_OF_TURN[family]
    assert tokenizer.decode(encoded["input_ids"][encoded["assistant_masks"]]) == end.join(texts[1::2])
    assert tokenizer.decode(encoded["input_ids"]).endswith(texts[-1])


def masked_text(history, tokenizer, **options):
    encoded = history.apply_chat_template(
        tokenizer, add_generation_prompt=False, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    return tokenizer.decode(encoded["input_ids"][encoded["assistant_masks"]])


@pytest.mark.parametrize("family", APPENDING)
def test_the_end_of_a_turn_that_nothing_wrote_is_not_in_the_mask(model_path, family):
    tokenizer = family_tokenizer(model_path, family)
    options = {"chat_template": template_text(family)}
    chat = conversation(["q", "15", "and?", "The answer is"])
    cut = History.from_chats([*chat[:-1], {**chat[-1], "is_complete": False}])
    end = END_OF_TURN[family]
    assert masked_text(History.from_chats(chat), tokenizer, **options) == f"15{end}The answer is{end}"
    assert masked_text(cut, tokenizer, **options) == f"15{end}The answer is"
    unsaid = History.from_chats([chat[0], {**chat[1], "content": "", "is_complete": False}])
    assert masked_text(unsaid, tokenizer, **options) == ""
    prompt = History.from_chats(chat[:1]).apply_chat_template(tokenizer, **options)
    read = History.from_text(prompt + "half an answer")
    assert read.is_complete[-1] is False and masked_text(read, tokenizer, **options) == "half an answer"


@pytest.mark.parametrize("family", APPENDING)
def test_a_conversation_that_begins_with_the_assistant_has_a_mask(model_path, family):
    tokenizer = family_tokenizer(model_path, family)
    end = END_OF_TURN[family]
    begun = History.from_chats([{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}])
    try:
        text = masked_text(begun, tokenizer, chat_template=template_text(family))
    except Exception as error:  # a template that demands a user first says so itself
        assert family == "gemma" and "alternate" in str(error)
    else:
        assert text == f"Hello{end}"


def test_the_templates_of_torchrls_names_and_marked_ones_say_what_the_mask_holds(model_path):
    tokenizer = family_tokenizer(model_path, "chatml")
    chat = conversation(["q", "15<|im_end|>x", "and?", "16"])
    history = History.from_chats(chat)
    assert masked_text(history, tokenizer) == "15<|im_end|>x<|im_end|>16<|im_end|>"
    assert masked_text(history, tokenizer, chat_template_name="chatml") == "15<|im_end|>x<|im_end|>16<|im_end|>"
    for name in ("qwen", "chatml_format"):  # TorchRL's masks end before the end of the turn
        assert masked_text(history, tokenizer, chat_template_name=name) == "15<|im_end|>x16"
    marked = (
        "{% for m in messages %}{{ m.role + ':' }}{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }};"
        "{%- endgeneration -%}{%- else -%}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert masked_text(history, tokenizer, chat_template=marked) == "15<|im_end|>x;16;"
    cut = History.from_chats([*chat[:-1], {**chat[-1], "is_complete": False}])
    assert masked_text(cut, tokenizer, chat_template=marked) == "15<|im_end|>x;16"


def test_a_template_that_rewrites_has_no_mask(model_path):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    with pytest.raises(ValueError, match="differently once others follow"):
        History.from_chats(chat).apply_chat_template(
            family_tokenizer(model_path, "qwen3"),
            chat_template=template_text("qwen3"),
            return_assistant_tokens_mask=True,
        )


def test_parts_of_other_kinds_are_carried_through(tmp_path):
    parts = [{"type": "image", "url": "x.png"}, {"type": "text", "text": "what is it?"}]
    history = History.from_chats([[{"role": "user", "content": parts}], [{"role": "user", "content": "b"}]])
    history.save(tmp_path / "chats.jsonl")
    loaded = History.load(tmp_path / "chats.jsonl")
    assert loaded.to_chats() == history.to_chats() and loaded.to_chats()[0][0]["content"] == parts
    assert loaded.append({"role": "assistant", "content": "a cat"})[0].content == ["what is it?", "a cat"]


def test_a_chat_copies_as_itself():
    history = History.from_chats([{"role": "user", "content": "a"}])
    assert history.clone().chats is history.chats
