"""Random conversations under models' own templates: what is held, read and trained against what the template writes.

The reference is the template itself, rendered by a tokenizer of its own: the scripted model says what the template
writes for an answer after its prompt.
"""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from fuzzing import fuzz_seeds
from real_templates import PUBLISHED, REWRITTEN, real_tokenizer

from llmrl.rendering import Conversation, RenderingError, TemplateRenderer, common_prefix_length

# Their turns are several messages, or their contents are lists of parts.
REFUSED = {"gptoss", "idefics3", "llava_next", "muse_glimmer", "smolvlm"}
TAKEN = sorted({*PUBLISHED, *REWRITTEN} - REFUSED)
# What ends a turn by the beginning of a template's name; None where it is what opens the next role's turn.
ENDS = {
    "apertus": "<|assistant_end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm": None,
    "kimi": "<|im_end|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "minimax": "[e~[",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
    "seed": "<seed:eos>",
}
WORDS = [
    "yes",
    "no",
    "42",
    "ünï",
    "日本",
    "a b",
    "x\ny",
    "{",
    "}",
    '"',
    "'",
    "\\",
    "<b>",
    "1 < 2",
    "def f():\n  return",
    "🙂",
]
MARKS = ["<|im_end|>", "<think>", "</think>", "<tool_call>", "<|eot_id|>", "<eos>", "[INST]"]
KEYS = ["a", "b_c", "city"]


def schema(kind, **more):
    return {"type": kind, "description": "d", **more}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


TOOLS = [
    tool(
        "look_up",
        a=schema("string"),
        b_c=schema("integer"),
        city=schema("object", properties={"a": schema("array", items=schema("string")), "b_c": schema("boolean")}),
    ),
    # Of what its array and its object hold nothing is known.
    tool("run", a=schema("array"), b_c=schema("object"), city=schema("string")),
]
# Formats that write a value's parts as bare text need their schemas.
BARE = {"minimax_m3"}


class Script:
    """What a random conversation says."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def words(self, *, marks=()):
        return " ".join(self.random.choices(WORDS + list(marks), k=self.random.randint(1, 4)))

    def value(self, expected, depth=0):
        """A value of a schema; of any kind, nested a little, where that does not say."""
        draw = self.random
        kind = expected.get("type") or draw.choice(
            ["string", "integer", "boolean", "null", "number", "array", "object"]
        )
        if kind == "string":
            return draw.choice(["", "90210", "true", "null", "[1]", "C:\\new", self.words(), self.words()])
        if kind == "integer":
            return draw.choice([0, -7, 10**12])
        if kind == "number":
            return draw.choice([0.5, -1e-7, 1e30])
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "null":
            return None
        if kind == "array":
            return [
                self.value(expected.get("items", {}), depth + 1) for _ in range(draw.randint(0, 2 if depth < 3 else 0))
            ]
        properties = expected.get("properties", {key: {} for key in KEYS})
        keys = draw.sample(sorted(properties), draw.randint(0, 2 if depth < 3 else 0))
        return {key: self.value(properties[key], depth + 1) for key in keys}

    def calls(self, tools):
        calls = []
        for index in range(self.random.choice([1, 1, 1, 2, 3])):
            function = self.random.choice(tools)["function"]
            properties = function["parameters"]["properties"]
            keys = self.random.sample(KEYS, self.random.randint(0, 3))
            function = {"name": function["name"], "arguments": {key: self.value(properties[key]) for key in keys}}
            calls.append({"type": "function", "id": f"call{index:05d}", "function": function})
        return calls

    def answer(self, tools):
        message = {"role": "assistant", "content": f"Well, {self.words()}".strip()}
        if self.random.random() < 0.5:
            message["reasoning_content"] = f"Hm, {self.words().strip()}"
        if tools and self.random.random() < 0.6:
            message["tool_calls"] = self.calls(tools)
            if self.random.random() < 0.6:
                message["content"] = ""
        return message


class Reference:
    """The template as Hugging Face renders it."""

    def __init__(self, model_path, name, switches):
        self.tokenizer, self.switches = real_tokenizer(model_path, name), switches
        self.end = ENDS[max((each for each in ENDS if name.startswith(each)), key=len)]

    def text(self, messages, tools, *, is_prompt):
        error = None
        for is_text in (False, True):
            try:
                return self.tokenizer.apply_chat_template(
                    [as_text_arguments(message) if is_text else message for message in messages],
                    tools=tools, add_generation_prompt=is_prompt, tokenize=False, **self.switches,
                )  # fmt: skip
            except Exception as raised:
                error = error or raised
        raise error

    def completion(self, messages, answer, tools, following):
        """What a model samples that gives this answer; None where the template does not write it after its prompt."""
        prompt = self.text(messages, tools, is_prompt=True)
        whole = self.text([*messages, answer], tools, is_prompt=False)
        num_equal = common_prefix_length(prompt, whole)
        lead, said = prompt[num_equal:].strip(), whole[num_equal:]
        if lead:  # the prompt opens thoughts, or closes them, which the template does not show of this answer
            said = said.rpartition("</think>")[2].lstrip()
            if lead.endswith("<think>"):
                said = f"{answer.get('reasoning_content', '')}\n</think>\n\n{said}"
            elif not lead.endswith("</think>"):
                return None
        if said.startswith(
            "<|turn>"
        ):  # the prompt goes on in the turn of the call, and the answer is written in another
            return None
        if self.end is None:
            return said + ("<|observation|>" if following == "tool" else "<|user|>")
        said, found, _ = said.partition(self.end)
        if not found and said.endswith("<|tool_response>"):
            return said
        return said + found if found else None


def as_text_arguments(message):
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def said_by(message):
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (message.get("reasoning_content") or "").strip(), (message.get("content") or "").strip(), calls


@cache
def playable(model_path, name, switch):
    """A renderer of a template and its reference, and whether it writes tools, and reasoning."""
    tokenizer = real_tokenizer(model_path, name)
    switches = {} if switch is None else {"enable_thinking": switch}
    renderer = TemplateRenderer(tokenizer, template_kwargs=switches)
    text = tokenizer.chat_template
    has_tools = "tool_calls" in text and not renderer.tool_fault and not renderer.is_tool_prompt_added
    return renderer, Reference(model_path, name, switches), has_tools, "reasoning_content" in text


class Game:
    """One random conversation, checked turn by turn."""

    def __init__(self, model_path, seed, name=None):
        self.script = Script(seed)
        draw = self.random = self.script.random
        self.name = name or draw.choice(TAKEN)
        text = real_tokenizer(model_path, self.name).chat_template
        switch = draw.choice([None, True, False]) if "enable_thinking" in text else None
        self.renderer, self.reference, has_tools, self.has_reasoning = playable(model_path, self.name, switch)
        tools = TOOLS[:1] if self.name in BARE else TOOLS
        self.tools = tools if has_tools and draw.random() < 0.7 else None
        self.conversation = Conversation.start(self.renderer)
        self.sampled = []  # ids, each with a log-prob of its own
        self.num_calls = 0
        self.is_exact = True  # whether every answer so far is spelled as the template spells it
        self.note = f"seed {seed}, {self.name}, enable_thinking={switch}, tools={bool(self.tools)}"

    def play(self):
        draw = self.random
        messages = [{"role": "system", "content": self.script.words(marks=MARKS)}] if self.has_system() else []
        messages.append({"role": "user", "content": self.script.words(marks=MARKS)})
        for _ in range(draw.randint(1, 4)):
            self.prompt(messages)
            answer = self.next_answer(messages)
            if answer is None:
                break
            held = self.complete(messages, *answer)
            if held is None:
                break
            messages = held
            if len(messages) > 3 and draw.random() < 0.15:
                messages = self.rewritten(messages)
        self.check_trained()

    def has_system(self):
        system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        try:
            return self.random.random() < 0.4 and "s" in self.reference.text(system, None, is_prompt=True)
        except Exception:
            return False

    def prompt(self, messages):
        """Ask for an answer; the prompt is what the template writes for these messages."""
        before = self.conversation
        held = self.renderer.decode(before.prompt_ids)
        self.conversation = before.with_prompt(messages, tools=self.tools)
        text = self.renderer.decode(self.conversation.prompt_ids)
        if self.is_exact:
            whole = self.reference.text(messages, self.tools, is_prompt=True)
            is_appended = not whole.startswith(held) and text.startswith(held) and whole.endswith(text[len(held) :])
            equal = common_prefix_length(text, whole)
            assert text == whole or is_appended, (
                f"{self.note}\n{text[:equal]!r}\nthen\n{text[equal:]!r}\nnot\n{whole[equal:]!r}"
            )

    def next_answer(self, messages):
        """A message, and what a model samples that gives it."""
        answer = self.script.answer(self.tools)
        if not self.has_reasoning:
            answer.pop("reasoning_content", None)
        if self.name == "kimi_k2":  # its ids are the names of tools and a running number
            for call in answer.get("tool_calls", ()):
                call["id"] = f"functions.{call['function']['name']}:{self.num_calls}"
                self.num_calls += 1
        following = "tool" if answer.get("tool_calls") else "user"
        try:
            sampled = self.reference.completion(messages, answer, self.tools, following)
        except Exception:
            if len(answer.get("tool_calls", ())) < 2:
                raise
            answer["tool_calls"] = answer["tool_calls"][:1]  # some templates write one call a message
            sampled = self.reference.completion(messages, answer, self.tools, following)
        if sampled is None:
            return None
        if answer.get("reasoning_content") and answer["reasoning_content"] not in sampled:
            answer.pop("reasoning_content")
        if answer["content"] and answer["content"] not in sampled:
            answer["content"] = ""
        return answer, sampled

    def complete(self, messages, answer, sampled):
        """Sample an answer, whole or cut, and return the messages of the next prompt; None where nothing follows."""
        ids = self.renderer.encode(sampled)
        is_cut = self.random.random() < 0.15
        if is_cut:
            ids = ids[: self.random.randrange(len(ids))]
        first = len(self.sampled)
        self.conversation = self.conversation.with_completion(
            ids, log_probs=[-1.0 - first - index for index in range(len(ids))], versions=[0] * len(ids)
        )
        self.sampled += ids
        assert self.conversation.prompt_ids[len(self.conversation.prompt_ids) - len(ids) :] == ids
        parsed = self.conversation.last
        follow = {"role": "user", "content": self.script.words(marks=MARKS)}
        if is_cut:
            self.is_exact = False
            assert not parsed.is_complete or not ids
            said = [call["function"] for call in parsed.message.get("tool_calls", ())]
            asked = said_by(answer)[2]
            assert said == asked[: len(said)] or parsed.malformed_tool_calls, f"{self.note}\n{parsed}\n{answer}"
            if parsed.message.get("tool_calls"):
                return None
            return [*messages, self.conversation.last.message, follow]
        assert parsed.is_complete and not parsed.malformed_tool_calls, f"{self.note}\n{sampled!r}\n{parsed}"
        assert said_by(parsed.message) == said_by(answer), f"{self.note}\n{sampled!r}\n{parsed.message}\n{answer}"
        new = [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"],
             "content": self.script.words(marks=MARKS)}
            for call in answer.get("tool_calls", ())
        ]  # fmt: skip
        # The answer as written, and not as read, so that ids of calls are those of their results.
        self.conversation = self.conversation.with_messages([*messages, answer])
        return [*messages, answer, *(new or [follow])]

    def rewritten(self, messages):
        """A history that its environment changed: an earlier message of the user, or all but the beginning dropped."""
        place = self.random.choice([i for i, message in enumerate(messages) if message["role"] == "user"])
        if place == len(messages) - 1 or self.random.random() < 0.5:
            return [*messages[:place], {**messages[place], "content": self.script.words()}, *messages[place + 1 :]]
        return messages[: place + 1]

    def check_trained(self):
        """Every sampled token is trained once, with its own log-prob."""
        result = self.conversation.reconcile()
        trained = [
            (round(-1.0 - log_prob), token)
            for row in result.rows
            for token, is_trained, log_prob in zip(
                row.columns.token_ids, row.columns.loss_mask, row.columns.log_probs, strict=True
            )
            if is_trained
        ]
        lost = result.counts["num_realigned_tokens"]
        assert len(set(trained)) == len(trained) == len(self.sampled) - lost, f"{self.note}: {result.counts}"
        assert all(self.sampled[place] == token for place, token in trained), self.note


@pytest.mark.parametrize("name", TAKEN)
def test_a_conversation_under_a_published_template_is_held_read_and_trained(takes_long, model_path, name):
    Game(model_path, 7, name).play()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_template_that_cannot_be_rendered_exactly_is_refused(model_path, name):
    with pytest.raises(RenderingError):
        TemplateRenderer(real_tokenizer(model_path, name))


def test_a_random_conversation_is_held_read_and_trained_as_its_template_writes_it(takes_long, model_path):
    num_games = num_turns = 0
    for seed in fuzz_seeds(8):
        game = Game(model_path, seed)
        game.play()
        num_games += 1
        num_turns += game.conversation.num_turns
    assert num_turns > num_games  # few answers are none that the template would write
