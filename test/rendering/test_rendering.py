"""Renderers: what the template writes, as a delta; refused where that cannot be exact."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_families import END_OF_TURN, FAMILIES, TOOLS, family_renderer, family_tokenizer, template_text

from llmrl.rendering import PackageRenderer, RenderingError, TemplateRenderer, demonstrate, make_renderer

FAMILY_NAMES = sorted(FAMILIES)
# Without the beginnings of special tokens, which are split in contents (security/test_special_tokens.py).
characters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<[")
texts = st.text(characters, min_size=1, max_size=12).map(lambda s: f"a{s}b")


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def calling(**arguments):
    function = {"name": "add", "arguments": arguments}
    return assistant("", tool_calls=[{"type": "function", "id": "call00000", "function": function}])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_end_of_turn_is_found_in_the_template(model_path, family):
    renderer = family_renderer(model_path, family)
    assert renderer.decode(renderer.stop_token_ids[:1]) == END_OF_TURN[family]


@pytest.mark.parametrize(
    ("family", "is_rewritten"),
    [("chatml", False), ("qwen25", False), ("llama3", True), ("gemma", False), ("qwen3", True), ("mistral", True)],
)
def test_rewriting_templates_are_recognised(model_path, family, is_rewritten):
    assert family_renderer(model_path, family).is_history_rewritten is is_rewritten


@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=25)
@given(contents=st.lists(texts, min_size=3, max_size=7).filter(lambda c: len(c) % 2 == 1), is_closed=st.booleans())
def test_bridging_equals_full_rendering(model_path, family, contents, is_closed):
    renderer = family_renderer(model_path, family)
    messages = [user(c) if i % 2 == 0 else assistant(c) for i, c in enumerate(contents)]
    held = renderer.render(messages[:1], add_generation_prompt=True)
    for index in range(1, len(messages), 2):
        held += renderer.encode(messages[index]["content"])
        if is_closed:
            held += renderer.stop_token_ids[:1]
        held += renderer.bridge(held, messages[index + 1 : index + 2])
    full = renderer.render(messages, add_generation_prompt=True)
    assert full == renderer.encode(renderer.render_text(messages, add_generation_prompt=True))
    assert renderer.decode(held) == renderer.decode(full)
    if family == "chatml" and all(content.isascii() for content in contents):
        assert held == full


@pytest.mark.parametrize("family", ["qwen25", "qwen3", "llama3", "mistral"])
@pytest.mark.parametrize("num_results", [1, 2])
def test_tool_results_are_bridged_as_the_template_writes_them(model_path, family, num_results):
    renderer = family_renderer(model_path, family)
    results = [
        {"role": "tool", "name": "add", "content": f"r{n}", "tool_call_id": "call00000"} for n in range(num_results)
    ]
    messages = [user("q"), calling(a=1), *results]
    full = renderer.render(messages, tools=TOOLS, add_generation_prompt=True)
    delta = renderer.bridge([], results, tools=TOOLS)
    assert full[-len(delta) :] == delta
    assert delta[0] in renderer.stop_token_ids
    prefix = full[: -len(delta)]
    assert prefix + renderer.bridge(prefix, results, tools=TOOLS) == full
    assert prefix + delta[:1] + renderer.bridge(prefix + delta[:1], results, tools=TOOLS) == full


def test_newline_after_end_of_turn_appears_exactly_once(model_path):
    renderer = family_renderer(model_path, "chatml")
    answer = renderer.encode("yes")
    wanted = "yes<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    for ending in ("", "<|im_end|>", "<|im_end|>\n"):
        held = answer + renderer.encode(ending)
        assert renderer.decode(held + renderer.bridge(held, [user("b")])) == wanted


def test_several_messages_in_a_turn_are_one_delta(model_path):
    renderer = family_renderer(model_path, "qwen25")
    new = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, user("and now?")]
    full = renderer.render([user("a"), calling(a=1), *new], add_generation_prompt=True)
    delta = renderer.bridge([], new)
    assert full[-len(delta) :] == delta
    assert renderer.decode(delta).count("<|im_start|>user") == 2


def test_a_default_system_prompt_is_written_once(model_path):
    renderer = family_renderer(model_path, "chatml")
    held = renderer.render([user("a")], add_generation_prompt=True)
    held += renderer.encode("x<|im_end|>")
    held += renderer.bridge(held, [user("b")])
    assert renderer.decode(held).count("You are terse.") == 1


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral"])
def test_the_begin_token_is_written_once(model_path, family):
    renderer = family_renderer(model_path, family)
    begin = renderer.tokenizer.bos_token_id
    held = renderer.render([user("a")], add_generation_prompt=True)
    held += renderer.bridge(held + renderer.encode("x"), [user("b")])
    assert held.count(begin) == 1 and held[0] == begin


def test_bridging_costs_the_same_whatever_came_before(model_path):
    renderer = family_renderer(model_path, "qwen25")
    seen = []
    apply = renderer.tokenizer.apply_chat_template
    renderer.tokenizer.apply_chat_template = lambda chat, **kwargs: seen.append(len(chat)) or apply(chat, **kwargs)
    try:
        renderer.bridge(list(range(100_000)), [user("b")])
    finally:
        del renderer.tokenizer.apply_chat_template
    assert seen == [3]


@pytest.mark.parametrize("family", ["qwen25", "llama3", "mistral", "qwen3", "chatml", "gemma"])
def test_tool_schemas_reach_the_prompt(model_path, family):
    renderer = family_renderer(model_path, family, tool_results="user")
    assert "Adds." in renderer.decode(renderer.render([user("q")], tools=TOOLS, add_generation_prompt=True))


def test_calls_are_written_into_a_template_that_knows_none(model_path):
    renderer = family_renderer(model_path, "chatml")
    text = renderer.decode(renderer.render([user("q"), calling(a=1)]))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text


def parts(*texts):
    return [{"type": "text", "text": text} if text else {"type": "image"} for text in texts]


def renderer_of_parts(tokenizer, *, is_system_known=True):
    """A template that reads contents as text or as parts, and shows neither tools nor calls."""
    refusal = "" if is_system_known else "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = (
        f"{{% for m in messages %}}{refusal}{{{{ '<|im_start|>' + m['role'] + '\n' }}}}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '(image)' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return TemplateRenderer(tokenizer, chat_template=template, tool_results="user")


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_tool_prompt_beside_parts_is_that_beside_their_text(tokenizer, role):
    renderer = renderer_of_parts(tokenizer, is_system_known=role == "system")

    def shown(content):
        first = {"role": role, "content": content}
        return renderer.render_text([first, user("q")], tools=TOOLS, add_generation_prompt=True)

    assert shown(parts("Be ", "brief.")) == shown("Be brief.")
    assert "Adds." in shown(parts("See ", "", ".")) and "See (image)." in shown(parts("See ", "", "."))


def test_calls_beside_parts_are_those_beside_their_text(tokenizer):
    renderer = renderer_of_parts(tokenizer)

    def shown(content):
        return renderer.render_text([user("q"), {**calling(a=1), "content": content}, user("r")])

    assert shown(parts("Let me ", "see.")) == shown("Let me see.")
    assert "(image)\n<tool_call>" in shown(parts("Look: ", "")) and shown([]) == shown("")


def test_images_beside_carried_tool_results_stay(tokenizer):
    renderer = renderer_of_parts(tokenizer)
    shot = {"role": "tool", "content": parts("See ", "")}

    def shown(*following):
        text = renderer.render_text([user("q"), calling(a=1), *following])
        return text[text.index("<tool_response>") :]

    result = {"role": "tool", "content": "3"}
    written = "<tool_response>\n3\n</tool_response>"
    written_shot = "<tool_response>\nSee (image)\n</tool_response>"
    assert shown(result, user(parts("Now ", ""))).startswith(f"{written}\nNow (image)<|im_end|>")
    assert shown(result, user(parts("Now ", "this"))).startswith(f"{written}\nNow this<|im_end|>")
    assert shown(shot, result, user("r")).startswith(f"{written_shot}\n{written}\nr<|im_end|>")
    assert shown(shot, shot, user(parts("", "r"))).startswith(f"{written_shot}\n{written_shot}\n(image)r<|im_end|>")


def test_an_answer_in_parts_is_demonstrated_as_its_text(tokenizer):
    renderer = renderer_of_parts(tokenizer)
    in_parts, as_text = (
        demonstrate(renderer, [user("q"), assistant(content)]) for content in (parts("fo", "ur"), "four")
    )
    assert in_parts.turns[0].completion_ids == as_text.turns[0].completion_ids
    assert renderer.decode(in_parts.turns[0].completion_ids) == "four<|im_end|>"


def test_empty_tool_calls_render_like_none(model_path):
    for family in FAMILY_NAMES:
        renderer = family_renderer(model_path, family)
        with_empty = renderer.render([user("q"), assistant("x", tool_calls=[]), user("r")])
        assert with_empty == renderer.render([user("q"), assistant("x"), user("r")])


def test_parse_reads_reasoning_calls_and_completeness(model_path):
    renderer = family_renderer(model_path, "qwen3")
    text = '<think>\nhm\n</think>\n\nWell.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    parsed = renderer.parse(renderer.encode(text + "<|im_end|>"))
    assert parsed.is_complete and parsed.malformed_tool_calls == ()
    assert parsed.message["reasoning_content"] == "hm" and parsed.message["content"] == "Well."
    assert parsed.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    cut = renderer.parse(renderer.encode(text)[:-3])
    assert not cut.is_complete and "tool_calls" not in cut.message and len(cut.malformed_tool_calls) == 1


def test_parse_of_nothing_is_an_empty_incomplete_answer(model_path):
    parsed = family_renderer(model_path, "chatml").parse([])
    assert parsed.message == assistant("") and not parsed.is_complete


def test_padding_that_is_also_end_of_turn_strips_one_real_end_only(model_path):
    renderer = family_renderer(model_path, "chatml")
    end = renderer.stop_token_ids[0]
    assert renderer.tokenizer.pad_token_id == renderer.tokenizer.eos_token_id == end
    assert renderer.parse([*renderer.encode("x"), end]).message["content"] == "x"
    assert renderer.parse([end, *renderer.encode("x")]).message["content"] == "<|im_end|>x"


def test_text_cut_inside_a_character_is_parsed(model_path):
    renderer = family_renderer(model_path, "chatml")
    ids = renderer.encode("a🦜")
    for stop in range(len(ids) + 1):
        assert isinstance(renderer.parse(ids[:stop]).message["content"], str)
    assert renderer.parse(ids).message["content"] == "a🦜"


@settings(max_examples=50)
@given(data=st.data())
def test_parse_never_raises(model_path, data):
    renderer = family_renderer(model_path, data.draw(st.sampled_from(FAMILY_NAMES)))
    ids = data.draw(st.lists(st.integers(0, len(renderer.tokenizer) - 1), max_size=12))
    assert renderer.parse(ids).message["role"] == "assistant"


def test_reasoning_that_the_prompt_opened_is_recognised(model_path):
    template = template_text("qwen3").replace("<think>\\n\\n</think>\\n\\n", "<think>\\n")
    renderer = TemplateRenderer(
        family_tokenizer(model_path, "qwen3"), chat_template=template, template_kwargs={"enable_thinking": False}
    )
    parsed = renderer.parse(renderer.encode("hm\n</think>\n\nyes<|im_end|>"))
    assert parsed.message["reasoning_content"] == "hm" and parsed.message["content"] == "yes"


def test_no_template_is_refused(model_path):
    tokenizer = pickle.loads(pickle.dumps(family_tokenizer(model_path, "chatml")))
    tokenizer.chat_template = None
    with pytest.raises(RenderingError, match="no chat template"):
        make_renderer(tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "special token"),
        (
            "{% for m in messages %}{{ loop.index0 }}{{ m.content }}<|im_end|>{{ messages|length }}{% endfor %}",
            "exactly",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "assistant"),
    ],
)
def test_templates_that_cannot_be_appended_exactly_are_refused(tokenizer, template, message):
    with pytest.raises(RenderingError, match=message):
        TemplateRenderer(tokenizer, chat_template=template)


def test_a_refusal_of_the_template_says_what_it_was_given(model_path):
    with pytest.raises(RenderingError, match=r"\['user', 'user'\].*alternate"):
        family_renderer(model_path, "gemma").render([user("a"), user("b")])


def test_unknown_template_variables_and_backends_are_refused(tokenizer):
    with pytest.raises(TypeError, match="enable_thinkin"):
        TemplateRenderer(tokenizer, template_kwargs={"enable_thinkin": False})
    with pytest.raises(ValueError, match="backend"):
        make_renderer(tokenizer, backend="hf")


def test_a_renderer_survives_pickling(model_path):
    renderer = family_renderer(model_path, "llama3")
    copy = pickle.loads(pickle.dumps(renderer))
    assert copy.bridge([], [user("b")]) == renderer.bridge([], [user("b")])


def test_the_package_backend_agrees_with_the_template(model_path):
    pytest.importorskip("renderers")
    with pytest.raises(RenderingError, match="does not know"):
        PackageRenderer(family_tokenizer(model_path, "chatml"))
    tokenizer = pickle.loads(pickle.dumps(family_tokenizer(model_path, "qwen3")))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<tool_response>", "</tool_response>"], "unk_token": "<|unknown|>"}
    )
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    package = make_renderer(tokenizer, backend="renderers")
    template = TemplateRenderer(tokenizer)
    messages = [user("a"), assistant("b"), user("c")]
    assert package.stop_token_ids[0] == template.stop_token_ids[0]
    assert package.render(messages, add_generation_prompt=True) == template.render(messages, add_generation_prompt=True)
    assert package.parse(template.encode("x<|im_end|>")).message["content"] == "x"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call><|im_end|>'
    parsed = package.parse(template.encode(call))
    assert "tool_calls" not in parsed.message and "not JSON" in parsed.malformed_tool_calls[0].reason
