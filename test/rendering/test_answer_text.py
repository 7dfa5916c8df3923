"""The text of an answer while it is sampled: never more than the parser of the whole answer returns."""

from __future__ import annotations

import random

import pytest
from fuzzing import fuzz_seeds
from rendering_families import FAMILIES, PECULIAR_FAMILIES, TOOLS, family_renderer

from llmrl.rendering.answer_text import AnswerText

USER = {"role": "user", "content": "Begin."}
CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1}}}
FAMILIES_OF_TEMPLATES = [family for family in (*FAMILIES, *PECULIAR_FAMILIES) if family != "gpt_oss"]  # has no template
PIECES = (
    "It is 2.", " ", "\n", "\n\n", "<", "<tool", "<think", "</think>", "Ünïcödé 🙂🙃", "{", "[", "x = [1, 2]", "STOP",
    "ST", "```\n", "a < b", "\t", "fin",
)  # fmt: skip


def steps_of(renderer, ids, draw, **options):
    """Reasoning and content after each update, with a random number of new tokens each."""
    text = AnswerText(renderer, **options)
    end = 0
    while end < len(ids):
        end = min(len(ids), end + draw.choice((1, 1, 1, 2, 5)))
        text.update(ids[:end])
        yield text, end


@pytest.mark.parametrize("family", FAMILIES_OF_TEMPLATES)
def test_what_is_said_is_the_beginning_of_what_is_parsed(model_path, family):
    renderer = family_renderer(model_path, family)
    tools = () if renderer.tool_fault else TOOLS
    prompt_ids = renderer.render([USER], tools=tools, add_generation_prompt=True)
    num_early = 0
    for seed in fuzz_seeds(25):
        draw = random.Random(seed)
        said = "".join(draw.choices(PIECES, k=draw.randint(0, 6)))
        message = {"role": "assistant", "content": said}
        if tools and draw.random() < 0.3:
            message["tool_calls"] = [CALL]
        if renderer.thought_marks is not None and draw.random() < 0.5:
            message["reasoning_content"] = "".join(draw.choices(PIECES[:5], k=3))
        if draw.random() < 0.5:
            whole = renderer.render([USER, message], tools=tools)
            ids = whole[len(prompt_ids) :] if whole[: len(prompt_ids)] == prompt_ids else renderer.encode(said)
        else:
            ids = [*renderer.encode(said), *renderer.stop_token_ids[: draw.randint(0, 1)]]
        parsed = renderer.parse(ids, tools=tools, prompt_ids=prompt_ids).message
        last = ("", "")
        for text, _ in steps_of(renderer, ids, draw, prompt_ids=prompt_ids):
            for now, before, final in zip(
                (text.reasoning, text.content),
                last,
                (parsed.get("reasoning_content", ""), parsed["content"]),
                strict=True,
            ):
                assert now.startswith(before), (seed, now, before)
                assert final.lstrip().startswith(now.lstrip()), (seed, ids, final, now)
            last = (text.reasoning, text.content)
        num_early += bool(last[1])
    assert num_early > 5 or renderer.tool_parser == "glm4"  # where calls may begin anywhere


def test_text_that_may_begin_a_stop_string_is_held_back(renderer):
    ids = renderer.encode("One, two, STICK and STOP here")
    seen = [text.content for text, _ in steps_of(renderer, ids, random.Random(0), stop=["STOP"])]
    assert seen[-1] == "One, two, STICK and" and not any(text.endswith(("S", "ST", "STO")) for text in seen)


def test_the_tokens_of_what_was_said_are_counted(renderer):
    ids = renderer.encode("I 🙂 add <tool_call>{")
    text = AnswerText(renderer)
    text.update(ids)
    assert text.content == "I 🙂 add"
    for num_characters in range(1, len(text.content) + 1):
        count = text.num_tokens(num_characters)
        shortest = next(
            n for n in range(len(ids) + 1) if renderer.decode(ids[:n]).startswith(text.content[:num_characters])
        )
        assert count == shortest
