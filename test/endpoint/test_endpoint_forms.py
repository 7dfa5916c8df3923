"""Answers of a given form: vLLM's grammar, and the ids that it kept, so that the ratio is 1 on-policy."""

from __future__ import annotations

import json

import anthropic
import jsonschema
import openai
import pytest
import torch
import xgrammar
from endpoint_agents import SAMPLING
from real_templates import real_renderer

from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.endpoint.dialects import anthropic as anthropic_dialect
from llmrl.endpoint.dialects import chat, responses
from llmrl.endpoint.forms import grammar_of
from llmrl.endpoint.requests import AnswerForm
from llmrl.envs import AgentEnv
from llmrl.objectives.scoring import log_probs_of
from llmrl.policies import vLLMWrapper
from llmrl.testing import ScriptedEngine
from llmrl.trainer import TransformersWrapper

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["city", "old"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Name an old city."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ADD}} for name in ("add", "count")]


def check_city(text, *, is_whole):
    """The grammar allows white space without end, so that few answers are cut by their limit; those have begun."""
    if is_whole:
        jsonschema.validate(json.loads(text), CITY)
    else:
        assert text.startswith("{")


def check_call(choice, names):
    """See `check_city`: a call that was cut is no call."""
    if choice.finish_reason == "length":
        assert not choice.message.tool_calls
        return
    [call] = choice.message.tool_calls
    assert call.function.name in names
    jsonschema.validate(json.loads(call.function.arguments), ADD)


async def play(row, model):
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    create = client.chat.completions.create
    asked = {"model": model.name, "messages": MESSAGES}
    answer = await create(**asked, response_format=FORMAT)
    check_city(answer.choices[0].message.content, is_whole=answer.choices[0].finish_reason == "stop")

    answer = await create(**asked, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "count"}})
    check_call(answer.choices[0], {"count"})
    answer = await create(**asked, tools=TOOLS, tool_choice="required")
    check_call(answer.choices[0], {"add", "count"})

    shape = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    answer = await client.responses.create(model=model.name, input="Name an old city.", text=shape)
    check_city(answer.output_text, is_whole=answer.status == "completed")

    claude = anthropic.AsyncAnthropic(base_url=model.base_url, api_key=model.api_key)
    shape = {"format": {"type": "json_schema", "schema": CITY}}
    answer = await claude.messages.create(
        model=model.name, messages=MESSAGES, max_tokens=80, extra_body={"output_config": shape}
    )
    check_city(answer.content[0].text, is_whole=answer.stop_reason == "end_turn")
    await create(**asked, response_format={"type": "json_object"}, max_tokens=8)
    await create(**asked, max_tokens=8)
    with pytest.raises(openai.BadRequestError, match="multipleOf"):
        odd = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}}}
        await create(**asked, response_format={"type": "json_schema", "json_schema": {"schema": odd}})
    return 1.0


def test_answers_have_the_form_that_was_asked_for_and_the_ratio_is_one(vllm_engine, reference_model, tokenizer):
    policy = vLLMWrapper(vllm_engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 80, "temperature": 0.8})
    with LLMCollector(AgentEnv(play, [{"query": ""}], repeats=2), policy=policy, groups_per_batch=1) as collector:
        rows = next(iter(collector))
        rollouts = collector.rollouts
    assert [one.status for one in rollouts] == [RolloutStatus.COMPLETED] * 2, [one.error for one in rollouts]
    assert [one.num_turns for one in rollouts] == [7, 7]
    assert "overridden" not in rollouts[0].info["requests"]

    trainer = TransformersWrapper(reference_model, generate=False, generate_kwargs=policy.sampling)
    ours = log_probs_of(trainer, rows)
    for row, computed in zip(rows.unbind(0), ours, strict=True):
        is_trained = row["masks", "all_assistant_mask"]
        sampled = row["log_probs", "full"]
        torch.testing.assert_close(computed[is_trained], sampled[is_trained], atol=0.02, rtol=0)


def test_the_ids_that_a_grammar_kept_are_those_of_xgrammar(vllm_engine, reference_model, tokenizer):
    """Against a matcher of the bare schema, and log-probs of logits that are cut by its bits."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CITY}}
    sampling = SAMPLING.with_changes(max_new_tokens=60, grammar=json.dumps(tag))
    prompt = tokenizer.encode("A city as JSON:")
    [free, bounded] = vllm_engine.generate_batch([prompt], sampling) + vllm_engine.generate_batch(
        [prompt], sampling.with_changes(top_k=40)
    )
    size = vllm_engine.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(CITY))
    for completion in (free, bounded):
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[tokenizer.eos_token_id])
        ids = [*prompt, *completion.token_ids]
        with torch.no_grad():
            logits = reference_model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
        bits = xgrammar.allocate_token_bitmask(1, size)
        for token_id, kept, row, log_prob in zip(
            completion.token_ids, completion.sampling_mask, logits, completion.log_probs, strict=True
        ):
            matcher.fill_next_token_bitmask(bits, 0)
            cut = row.clone()[None]
            xgrammar.apply_token_bitmask_inplace(cut, bits)
            if completion is bounded:
                assert set(kept) <= set(cut.isfinite()[0].nonzero()[:, 0].tolist()) and len(kept) <= 40
            else:
                removed = {~one for one in kept} if kept[0] < 0 else set(range(size)) - set(kept)
                assert removed == set(cut.isinf()[0].nonzero()[:, 0].tolist())
                assert abs(float(cut.log_softmax(-1)[0, token_id]) - log_prob) < 0.02
            assert matcher.accept_token(token_id)
        assert matcher.is_terminated() == (completion.finish_reason == "stop")  # else white space reached the limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "sampled", "call"),
    [
        ("qwen3", '<think>Hm.</think>\n\n{"a": 7}', "<think>Hm.</think>\n\n<tool_call>\n%s\n</tool_call>"),
        ("qwen3_6", 'Hm.</think>\n\n{"a": 7}', None),  # the prompt begins the reasoning, and calls are no JSON
        ("deepseek_r1_distill", 'Hm.</think>{"a": 7}', None),
        ("llama3_1", '{"a": 7}', '{"name": "add", "parameters": {"a": 7}}'),
        ("cohere2", '{"a": 7}<|END_RESPONSE|>', None),
    ],
)
def test_a_form_is_in_the_templates_own_format_and_leaves_reasoning_free(model_path, template, sampled, call):
    renderer = real_renderer(model_path, template)
    info = xgrammar.TokenizerInfo.from_huggingface(renderer.tokenizer, vocab_size=len(renderer.tokenizer))
    compiler = xgrammar.GrammarCompiler(info)

    def message_of(text, form, tools):
        compiled = compiler.compile_structural_tag(grammar_of(form, renderer, tools))
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(renderer.stop_token_ids))
        ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
        assert all(map(matcher.accept_token, ids)) and matcher.is_terminated()
        matcher.reset()
        assert not all(map(matcher.accept_token, renderer.encode(text.replace("7", '"7"'))))
        prompt = renderer.render(MESSAGES, tools=tools, add_generation_prompt=True)
        return renderer.parse(ids, tools=tools, prompt_ids=prompt).message

    said = message_of(sampled, AnswerForm(option="response_format", schema=ADD), ())
    assert json.loads(said["content"]) == {"a": 7}
    assert ("reasoning_content" in said) == ("Hm." in sampled)
    demanded = AnswerForm(option="tool_choice", schema=None, function="add")
    if call is None:
        with pytest.raises(ValueError, match=r"as JSON after the prompt|cannot be used with tools"):
            grammar_of(demanded, renderer, TOOLS)
    else:
        text = call.replace("%s", '{"name": "add", "arguments": {"a": 7}}')
        [made] = message_of(text, demanded, TOOLS)["tool_calls"]
        assert made["function"] == {"name": "add", "arguments": {"a": 7}}


class GrammarlessEngine(ScriptedEngine):
    takes_grammars = False


@pytest.mark.parametrize("format", ["json_schema", "json_object"])
def test_an_engine_without_grammars_refuses_a_schema_and_ignores_what_may_be_ignored(renderer, format):
    async def ask(row, model):
        create = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key).chat.completions.create
        asked = {**FORMAT, "type": format}
        await create(model=model.name, messages=MESSAGES, tools=TOOLS, tool_choice="required")
        await create(model=model.name, messages=MESSAGES, response_format=asked)
        return 1.0

    policy = vLLMWrapper(GrammarlessEngine(["yes<|im_end|>"], encode=renderer.encode), renderer=renderer)
    with LLMCollector(AgentEnv(ask, [{"query": ""}]), policy=policy, groups_per_batch=1) as collector:
        [rollout] = collector.play(1)
    if format == "json_schema":
        assert "sample from AsyncVLLM" in rollout.error and rollout.info["requests"]["refused"]
        assert rollout.num_turns == 1
    else:
        assert rollout.reward == 1.0 and rollout.num_turns == 2
        assert rollout.info["requests"]["overridden"] == {"tool_choice": 1, "response_format": 1}
    with pytest.raises(ValueError, match="sample from AsyncVLLM"):
        vLLMWrapper(policy.engine, renderer=renderer, generate_kwargs={"grammar": "{}"})


@pytest.mark.parametrize("dialect", [chat, responses, anthropic_dialect])
def test_a_function_that_is_not_there_cannot_be_demanded(dialect):
    body = {"model": "policy", "messages": MESSAGES, "input": "Hi", "max_tokens": 8}
    with pytest.raises(dialect.RefusedRequest, match="one of the tools"):
        dialect.read({**body, "tool_choice": {"type": "tool", "name": "add"}})
