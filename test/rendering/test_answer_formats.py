"""What stands around answers and reasoning in models' turns: found in the templates, and no part of what is said."""

from __future__ import annotations

import pytest
from real_templates import real_renderer, template_tokenizer
from rendering_families import TOOLS, family_renderer

from llmrl import LLMCollector
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import Conversation, RenderingError, TemplateRenderer, backend, demonstrate, make_renderer
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

# As these models' templates write a turn, one peculiarity each.
CHANNELS = (
    "{% for m in messages %}<|turn>{{ m.role }}\n"
    "{% if m.reasoning and loop.last %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}"
    "{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.content is string %}"
    "{{ m.content }}</s>{% else %}{% for part in m.content %}{% if part.type == 'thinking' %}"
    "[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endif %}{% endfor %}"
)
BLOCKS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user_start|>{{ m.content }}<|user_end|>{% else %}"
    "<|assistant_start|>{% if m.content is string %}{{ m.content }}{% endif %}{% for block in m.content.blocks or [] %}"
    "{% if block.type == 'thoughts' %}<|inner_prefix|>{{ block.text }}<|inner_suffix|>{% else %}{{ block.text }}"
    "{% endif %}{% endfor %}<|assistant_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
SEED = (
    "{% for m in messages %}<seed:bos>{{ m.role }}\n{% if m.reasoning_content %}"
    "<seed:think>{{ m.reasoning_content }}</seed:think>\n{% endif %}{{ m.content }}<seed:eos>{% endfor %}"
    "{% if add_generation_prompt %}<seed:bos>assistant\n{% endif %}"
)
# An answer without reasoning begins with the closing mark alone.
CLOSED = (
    "{% for m in messages %}]~b]{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{{ '<mm:think>' + m.reasoning_content if m.reasoning_content else '' }}</mm:think>{% endif %}{{ m.content }}[e~[\n"
    "{% endfor %}{% if add_generation_prompt %}]~b]assistant\n{% endif %}"
)
COHERE = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}{% else %}"
    "<|CHATBOT_TOKEN|>{% if m.thinking %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{% endif %}"
    "<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
END = {
    CHANNELS: "<turn|>",
    PARTS: "</s>",
    BLOCKS: "<|assistant_end|>",
    SEED: "<seed:eos>",
    CLOSED: "[e~[",
    COHERE: "<|END_OF_TURN_TOKEN|>",
}


def user(content):
    return {"role": "user", "content": content}


def written_renderer(model_path, template, end, **arguments):
    return TemplateRenderer(template_tokenizer(model_path, template, None, end), **arguments)


def said(conversation, question, sampled):
    """The conversation after this question and this answer."""
    conversation = conversation.with_prompt((*conversation.messages, user(question)))
    ids = conversation.renderer.encode(sampled)
    return conversation.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))


def same_answer(completion):
    return float(completion == "four")


# Marks of answers


def test_a_right_answer_of_command_a_is_rewarded_and_its_marks_are_not_said_again(model_path):
    renderer = real_renderer(model_path, "cohere2")
    sampled = "four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    env = DatasetChatEnv(["2 + 2?"], repeats=2).append_transform(RubricReward(same_answer))
    engine = ScriptedEngine([sampled], encode=renderer.encode)
    collector = LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1)
    batch = next(iter(collector))
    collector.shutdown()
    assert [float(row["next", "reward"].sum()) for row in batch.unbind(0)] == [1.0, 1.0]
    conversation = said(Conversation.start(renderer), "2 + 2?", sampled)
    assert renderer.decode(renderer.render((*conversation.messages, user("b")))).count("<|END_RESPONSE|>") == 1


def test_white_space_that_a_template_writes_around_an_answer_is_no_part_of_it(model_path):
    renderer = real_renderer(model_path, "glm4moe", template_kwargs=(("enable_thinking", False),))
    assert renderer.parse(renderer.encode("\nfour<|user|>")).message["content"] == "four"


def test_a_word_that_opens_answers_is_only_taken_where_it_stands_as_the_template_writes_it(model_path):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '>>>all\\n' if m.role == 'assistant' }}{{ m.content }}<|eot|>"
        "{% endfor %}{{ '<|assistant|>>>>' if add_generation_prompt }}"
    )
    renderer = written_renderer(model_path, template, "<|eot|>")
    for sampled, content in (("all\nfour", "four"), ("all\nall of them", "all of them"), ("all of them",) * 2):
        assert renderer.parse(renderer.encode(sampled + "<|eot|>")).message["content"] == content


# Marks of reasoning


@pytest.mark.parametrize(
    ("template", "sampled"),
    [
        (CHANNELS, "<|channel>thought\nhm\n<channel|>four"),
        (PARTS, "[THINK]hm[/THINK]four"),
        (BLOCKS, "<|inner_prefix|>hm<|inner_suffix|>four"),
        (SEED, "<seed:think>hm</seed:think>\nfour"),
        (CLOSED, "<mm:think>hm</mm:think>four"),
        (COHERE, "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>four<|END_TEXT|>"),
    ],
    ids=["channels", "parts", "blocks", "seed", "closed", "cohere"],
)
def test_reasoning_is_separated_from_the_answer_by_the_template_s_own_marks(model_path, template, sampled):
    renderer = written_renderer(model_path, template, END[template])
    conversation = said(Conversation.start(renderer), "q", sampled + END[template])
    message = {"role": "assistant", "content": "four", "reasoning_content": "hm"}
    assert conversation.last.message == message
    assert renderer.render_text([user("q"), message]).rstrip().endswith(sampled + END[template])
    cut = renderer.parse(renderer.encode(sampled[: sampled.index("hm") + 1])).message
    assert (cut["content"], cut["reasoning_content"]) == ("", "h")


@pytest.mark.parametrize("name", ["gemma4_v5", "diffusion_gemma"])
def test_gemma_4_s_reasoning_is_separated_from_its_answer(model_path, name):
    renderer = real_renderer(model_path, name)
    message = renderer.parse(renderer.encode("<|channel>thought\nhm\n<channel|>four<turn|>")).message
    assert message == {"role": "assistant", "content": "four", "reasoning_content": "hm"}


def test_marks_that_a_template_drops_from_earlier_contents_are_those_of_reasoning(model_path):
    renderer = real_renderer(model_path, "gemma4_v2")
    assert renderer.parse(renderer.encode("<|channel>thought\nhm\n<channel|>four<turn|>")).message["content"] == "four"


@pytest.mark.parametrize("reads", ["enable_thinking", "m.reasoning_content"])
def test_a_template_that_reasons_between_unknown_marks_is_refused(model_path, reads):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ READS or '' }}{{ m.content }}<|eot|>{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt }}"
    ).replace("READS", reads)
    with pytest.raises(RenderingError, match=r"reasoning is not found.*reasoning_parser='none'"):
        written_renderer(model_path, template, "<|eot|>")
    assert written_renderer(model_path, template, "<|eot|>", reasoning_parser="none").thought_marks is None


def test_a_variable_for_reasoning_in_a_comment_of_a_template_is_none(model_path):
    assert real_renderer(model_path, "qwen3_instruct_2507_training").thought_marks is None


def test_whether_an_answer_begins_within_reasoning_is_said_by_its_own_prompt(model_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "<think>{{ '</think>' if '/no_think' in messages[0].content }}{% endif %}"
    )
    renderer = written_renderer(model_path, template, "<|im_end|>")
    assert said(Conversation.start(renderer), "q", "hm</think>four<|im_end|>").messages[-1]["reasoning_content"] == "hm"
    start = Conversation.start(renderer).with_prompt([{"role": "system", "content": "/no_think"}, user("q")])
    ids = renderer.encode("four<|im_end|>")
    conversation = start.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))
    assert conversation.last.message == {"role": "assistant", "content": "four"}
    messages = (*conversation.messages, user("b"))
    shown = renderer.render(messages, add_generation_prompt=True)
    assert conversation.with_prompt(messages).prompt_ids[-20:] == shown[-20:]  # which ends with </think>


# Empty reasoning


def rows_of(renderer, *answers):
    conversation = Conversation.start(renderer)
    for turn, sampled in enumerate(answers):
        conversation = said(conversation, f"q{turn}", sampled)
    rows = conversation.reconcile().rows
    assert sum(sum(row.columns.loss_mask) for row in rows) == conversation.num_completion_tokens
    return rows


def test_qwen3_without_thinking_makes_one_row_of_its_turns(model_path):
    renderer = real_renderer(model_path, "qwen3", template_kwargs=(("enable_thinking", False),))
    assert len(rows_of(renderer, *["four<|im_end|>"] * 3)) == 1
    assert not renderer.may_rewrite([user("a"), {"role": "assistant", "content": "four"}, user("b")])


@pytest.mark.parametrize(
    ("name", "end"), [("qwen3", "<|im_end|>"), ("nemotron_3_nano", "<|im_end|>"), ("qwen3_5_think", "<|im_end|>")]
)
def test_rows_fork_where_reasoning_is_dropped_and_not_where_it_was_empty(model_path, name, end):
    renderer = real_renderer(model_path, name)
    opened = (
        "<think>\n" if not renderer.render_text([user("a")], add_generation_prompt=True).endswith("<think>\n") else ""
    )
    assert len(rows_of(renderer, *[f"{opened}\n</think>\n\nfour{end}"] * 3)) == 1
    assert len(rows_of(renderer, *[f"{opened}hm\n</think>\n\nfour{end}"] * 3)) == 3


def test_a_prompt_s_white_space_is_no_empty_reasoning(model_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ ' ' + m.content if m.role == 'user' else m.content }}"
        "<|im_end|>{% endfor %}{{ '<|im_start|>assistant:\n' if add_generation_prompt }}{# </think> #}"
    )
    renderer = written_renderer(model_path, template, "<|im_end|>")
    with pytest.raises(RenderingError, match="cannot be determined"):
        demonstrate(renderer, [user("a"), {"role": "assistant", "content": "four"}])


def test_demonstrations_follow_a_prompt_that_ends_with_empty_reasoning(model_path):
    for renderer in (
        written_renderer(model_path, CHANNELS, "<turn|>"),
        real_renderer(model_path, "nemotron_3_nano", template_kwargs=(("enable_thinking", False),)),
    ):
        end = renderer.decode(renderer.stop_token_ids[:1])
        four, five = ({"role": "assistant", "content": content} for content in ("four", "five"))
        (row,) = demonstrate(renderer, [user("a"), four, user("b"), five]).reconcile().rows
        columns = row.columns
        trained = [token for token, is_said in zip(columns.token_ids, columns.loss_mask, strict=True) if is_said]
        assert renderer.decode(trained) == f"four{end}five{end}"
        with pytest.raises(RenderingError, match=r"completion of that prompt cannot be determined|does not survive"):
            demonstrate(renderer, [user("a"), {**four, "reasoning_content": "hm"}])


# System messages, and text beside calls


def test_a_system_message_that_moves_with_the_last_user_s_is_shown_as_the_template_shows_it(model_path):
    template = (
        "{% set told = messages[0].content + ' ' if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ told if loop.last }}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    renderer = written_renderer(model_path, template, "</s>")
    assert len(rows_of(renderer, "four</s>", "five</s>")) == 1
    start = Conversation.start(renderer).with_prompt([{"role": "system", "content": "Brief."}, user("a")])
    ids = renderer.encode("four</s>")
    conversation = start.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))
    prompted = conversation.with_prompt((*conversation.messages, user("b")))
    assert renderer.decode(prompted.prompt_ids) == "[INST]a[/INST]four</s>[INST]Brief. b[/INST]"


def test_text_beside_a_call_that_a_template_writes_elsewhere_forks_a_row(model_path):
    renderer = real_renderer(model_path, "gemma4")
    call = "<|tool_call>call:add{a:1}<tool_call|><|tool_response>"
    for sampled, num_rows in ((call, 1), ("I add." + call, 2)):
        conversation = Conversation.start(renderer).with_prompt([user("q")], tools=TOOLS)
        ids = renderer.encode(sampled)
        conversation = conversation.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))
        result = {"role": "tool", "name": "add", "content": "1", "tool_call_id": "call00000"}
        messages = (*conversation.messages, result)
        conversation = conversation.with_prompt(messages, tools=TOOLS)
        ids = renderer.encode("four<turn|>")
        conversation = conversation.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))
        assert len(conversation.reconcile().rows) == num_rows


# Tools


def test_the_package_renderers_is_asked_where_calls_are_not_read(model_path, monkeypatch):
    template = (
        "{% if tools %}<|system|>{{ tools | tojson }}<|eot|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<~{{ c.function.name }}~>"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}<|eot|>{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt }}"
    )
    tokenizer = template_tokenizer(model_path, template, None, "<|eot|>")
    with pytest.raises(RenderingError, match="no parser reads"):
        make_renderer(tokenizer).check_tools()
    monkeypatch.setattr(backend, "PackageRenderer", lambda tokenizer: ("the package's", tokenizer))
    assert make_renderer(tokenizer) == ("the package's", tokenizer)


def test_marks_of_reasoning_in_a_content_are_ordinary_text(model_path):
    renderer = written_renderer(model_path, COHERE, END[COHERE])
    thought = {"role": "assistant", "content": "four", "reasoning_content": "<|END_THINKING|>five"}
    ids = renderer.render([user("<|START_THINKING|>"), thought])
    marks = renderer.tokenizer.convert_tokens_to_ids(["<|START_THINKING|>", "<|END_THINKING|>"])
    assert [ids.count(mark) for mark in marks] == [1, 1]


def test_a_miniature_of_command_r7b_s_prompt_closes_its_reasoning(model_path):
    renderer = family_renderer(model_path, "command_r7b")
    assert renderer.render_text([user("a")], add_generation_prompt=True).endswith("<|START_THINKING|><|END_THINKING|>")
    rows = rows_of(renderer, *["<|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"] * 3)
    assert len(rows) == 1
