"""Answers of an environment's tools to calls with empty arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrl.envs import EnvBase

from llmrl._utils.asynchronous import run_sync
from llmrl._utils.types import JSON
from llmrl.data import History, text_of
from llmrl.data.tensordicts import plain
from llmrl.envs.primer import dataset_env_of
from llmrl.envs.sampler import index_of
from llmrl.envs.stepper import EnvStepper
from llmrl.rendering.tool_calls import make_tool_call

_EMPTY: Mapping[object, JSON] = {
    "string": "",
    "integer": 0,
    "number": 0.0,
    "boolean": False,
    "array": [],
    "object": {},
    "null": None,
}


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """Answers of the tools of one conversation to calls with empty arguments."""

    index: int
    """Index of the problem's row."""
    text: str


def empty_arguments(schema: Mapping[str, object]) -> dict[str, JSON]:
    """Return empty arguments for a tool's required parameters: empty texts, zeros, the first of several choices.

    Example:
        >>> empty_arguments({"properties": {"query": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]})
        {'n': 0}
    """
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    return {name: _empty(properties.get(name, {})) for name in required}


def _empty(schema: Mapping[str, object]) -> JSON:
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
    if kind == "object":
        return empty_arguments(schema)
    return _EMPTY.get(kind, "")


def tool_answers(env: EnvBase, num_problems: int, *, timeout_s: float) -> list[ToolAnswer]:
    """Call each tool once in the first problems; return the answers of conversations without error or timeout."""
    return run_sync(_tool_answers(env, num_problems, timeout_s))


async def _tool_answers(env: EnvBase, num_problems: int, timeout_s: float) -> list[ToolAnswer]:
    drawing = dataset_env_of(env)
    assert drawing is not None  # `audit` has checked it
    stepper = EnvStepper(env, timeout_seconds=timeout_s)
    found = []
    try:
        for number in range(num_problems):
            position = number * drawing.prompts.num_samples
            try:
                element = await stepper.open(await stepper.draw(drawing.prompts, position))
            except Exception:
                continue
            try:
                schemas = plain(element.get("tools", None))
                if not schemas:
                    return []
                prompt = element.get(("history", "prompt")).chats
                functions = [schema["function"] for schema in schemas]
                calls = [make_tool_call(one["name"], empty_arguments(one.get("parameters") or {})) for one in functions]
                message = {"role": "assistant", "content": "", "tool_calls": calls}
                element.set(("history", "full"), History.from_chats([*prompt, message], check=False))
                group = plain(element.get(("rollout", "group_id")))
                stepped, element = await stepper.step(element)
                said = stepped.get(("next", "history", "prompt")).chats[len(prompt) + 1 :]
                text = "\n".join(text_of(one.get("content")) for one in said)
                found.append(ToolAnswer(index_of(group), text))
            except Exception:
                continue
            finally:
                await stepper.release(element)
    finally:
        stepper.shutdown()
    return found
