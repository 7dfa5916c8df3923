"""Facts about an environment for `llmrl env info`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torchrl.envs import EnvBase, StepCounter

from llmrl._utils.arguments import keywords_of, parameters_of
from llmrl._utils.json_values import as_json
from llmrl._utils.types import JSON
from llmrl.cli.options import as_shown
from llmrl.data.tensordicts import batch_elements, plain
from llmrl.envs.agent import AgentEnv
from llmrl.envs.chat import ChatEnv
from llmrl.envs.primer import dataset_env_of
from llmrl.envs.sampler import PromptSampler
from llmrl.envs.tasks.registry import NamedEnv, find_env
from llmrl.rendering import Renderer
from llmrl.transforms import ToolTransform, environment_parts, find_rubric_rewards

_ENTRY = re.compile(r"^(\w+(?:, \*{0,2}\w+)*): (.+(?:\n {2,}.+)*)", re.MULTILINE)
_NOT_OPTIONS = ("self", "split", "data", "dataset", "repeats", "device", "kwargs")


def info_of(name: str, make: Callable[..., EnvBase], renderer: Renderer) -> dict[str, JSON]:
    """Return the facts about the environment that `make` returns. Raises the errors of `make_task_env`."""
    named = find_env(name)
    env = make()
    parts = environment_parts(env)
    drawing = dataset_env_of(env)
    facts: dict[str, object] = {
        "name": name,
        "origin": named.origin,
        "about": named.about,
        "class": type(env).__name__,
        "options": _options(named, env),
        "columns": None if drawing is None else list(drawing.columns),
        "num_rows": _num_rows(named, make, env),
        "rewards": {fn.name: fn.weight for part in find_rubric_rewards(env) for fn in part.rubric.reward_fns},
        "tools": [tool for part in parts if isinstance(part, ToolTransform) for tool in part.tools],
        "roles": [role for role in getattr(drawing, "roles", ()) if role],
        "max_turns": next((part.max_steps for part in parts if isinstance(part, StepCounter)), None),
        "prompt": None if drawing is None or isinstance(drawing, AgentEnv) else _first_prompt(env, renderer),
    }
    return {key: as_json(value) for key, value in facts.items()}


def _num_rows(named: NamedEnv, make: Callable[..., EnvBase], env: EnvBase) -> dict[str, int | None]:
    """Return the number of rows of each split; None if the rows are endless."""
    found: dict[str, int | None] = {}
    for split in named.splits or ("",):
        try:
            drawing = dataset_env_of(make(split=split) if split else env)
        except Exception:  # the split does not exist
            continue
        if drawing is not None:
            found[split] = getattr(drawing.prompts.items, "__len__", lambda: None)()
    return found


def _options(named: NamedEnv, env: EnvBase) -> list[dict[str, object]]:
    owner = getattr(named.make, "__self__", None)
    make: Callable[..., object] = owner if isinstance(owner, type) else named.make
    parameters = parameters_of(make)
    names = [*parameters, *(name for name in keywords_of(make) or () if name not in parameters)]
    classes = [cls for part in (env, *environment_parts(env)) for cls in type(part).__mro__]
    source = getattr(getattr(owner, "task", None), "source", None)
    documented = _documentation([named.make, source, *classes, ChatEnv, PromptSampler])
    options: list[dict[str, object]] = []
    for name in names:
        parameter = parameters.get(name)
        if name in _NOT_OPTIONS or (parameter is not None and parameter.kind is parameter.VAR_KEYWORD):
            continue
        default = ""
        if parameter is not None and parameter.default not in (inspect.Parameter.empty, ...):
            default = repr(parameter.default)
        options.append({"name": name, "default": default, "about": documented.get(name, "")})
    return options


def _documentation(objects: Iterable[object]) -> dict[str, str]:
    """Return the descriptions of arguments from the `Args:` sections of docstrings; the first one counts for each name.

    Example:
        >>> def f(a, b):
        ...     '''Do it.
        ...
        ...     Args:
        ...         a, b: two
        ...             numbers.
        ...     '''
        >>> _documentation([f])
        {'a': 'two numbers.', 'b': 'two numbers.'}
    """
    found: dict[str, str] = {}
    for one in objects:
        text = inspect.getdoc(one) if callable(one) and vars(one).get("__doc__", one.__doc__) else None
        _, _, section = (text or "").partition("\nArgs:\n")
        for names, about in _ENTRY.findall(textwrap.dedent(section.partition("\n\n")[0])):
            if about.startswith("see `"):
                continue
            for name in names.split(", "):
                found.setdefault(name.lstrip("*"), " ".join(about.split()))
    return found


def _first_prompt(env: EnvBase, renderer: Renderer) -> str:
    """Return the first prompt as the model reads it."""
    element = batch_elements(env.reset())[0]
    tools = plain(element.get("tools", None))
    chat = element.get(("history", "prompt")).chats[0] if element.batch_size else element.get(("history", "prompt"))
    messages = chat if isinstance(chat, list | tuple) else chat.chats
    return renderer.decode(renderer.render(messages, tools=tools, add_generation_prompt=True))


def print_info(facts: Mapping[str, JSON], console: Console) -> None:
    """Print the facts."""
    for name in ("class", "origin", "about", "columns", "num_rows", "rewards", "tools", "roles", "max_turns"):
        shown = value = facts[name]
        if isinstance(value, list):
            shown = ", ".join(map(str, value))
        elif isinstance(value, dict):
            shown = ", ".join(f"{key} {number}".strip() for key, number in value.items())
        if shown not in (None, ""):
            console.print(f"[bold]{name.replace('_', ' '):12}[/bold]{as_shown(shown)}")
    table = Table("option", "default", "")
    options = facts["options"]
    assert isinstance(options, list)
    for option in options:
        assert isinstance(option, dict)
        table.add_row(*(escape(str(option[key])) for key in ("name", "default", "about")))
    console.print(table)
    if facts["prompt"] is not None:
        console.print("[bold]first prompt[/bold]")
        console.print(as_shown(facts["prompt"]))
