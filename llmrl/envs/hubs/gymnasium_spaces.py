"""Conversion of gymnasium's observations to text, and of a policy's answers to actions."""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.spaces import Space

_MAX_NUMBERS = 1000
_MAX_ABOUT_CHARS = 6000
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_SECTION = re.compile(r"^#+ *(.*)$", re.MULTILINE)
_KEPT = re.compile(r"(description|mission|action|observation|reward)", re.IGNORECASE)
_INTEGER = re.compile(r"(?<![\w.])-?\d+(?![\w.]*\d)")


class NoAction(ValueError):
    """An answer is not a valid action; the message describes the valid ones."""


def observation_text(observation: object) -> str:
    """Return a string observation unchanged, and any other observation as JSON.

    Raises TypeError if the observation has more than a thousand numbers, such as an image.

    Example:
        >>> observation_text((11, 0))
        '[11, 0]'
    """
    if isinstance(observation, str):
        return observation
    text = json.dumps(_plain(observation))
    if (number := text.count(",") + 1) > _MAX_NUMBERS:
        raise TypeError(
            f"observations have {number} numbers, but at most {_MAX_NUMBERS} are written as text: wrap the environment "
            "in a gymnasium.ObservationWrapper that describes them."
        )
    return text


def action_of(space: Space, text: str) -> object:
    """Return the action in an answer; raise NoAction if it is not valid.

    The action of a `Discrete` space is the last integer in the answer; that of a `Text` space is
    the whole answer. For other spaces, the answer is parsed as JSON.

    Example:
        >>> from gymnasium import spaces
        >>> action_of(spaces.Discrete(4), "I go right, so 2.")
        2
        >>> action_of(spaces.Discrete(4), "right")
        Traceback (most recent call last):
        llmrl.envs.hubs.gymnasium_spaces.NoAction: An action is a number from 0 to 3.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return text
    try:
        if isinstance(space, spaces.Discrete):
            found: object = int(_INTEGER.findall(text)[-1])
        else:
            [found] = space.from_jsonable([json.loads(text)])
        if space.contains(found):
            return found
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError):
        pass
    raise NoAction(f"An action is {action_words(space)}.")


def action_words(space: Space) -> str:
    """Return a description of the actions of a space.

    Example:
        >>> from gymnasium import spaces
        >>> action_words(spaces.Discrete(4)), action_words(spaces.MultiDiscrete([2, 3]))
        ('a number from 0 to 3', 'JSON of the space MultiDiscrete([2 3])')
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return "a text"
    if isinstance(space, spaces.Discrete):
        return f"a number from {space.start} to {space.start + space.n - 1}"
    return f"JSON of the space {space}"


def about(env: gymnasium.Env) -> str:
    """Return the documentation of an environment's task, actions, observations and rewards."""
    whole = inspect.cleandoc(type(env.unwrapped).__doc__ or "")
    parts = _SECTION.split(whole)
    kept = [parts[0].strip()]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if _KEPT.match(title.strip()):
            kept.append(f"{title.strip()}\n{body.strip()}")
    return "\n\n".join(filter(None, kept))[:_MAX_ABOUT_CHARS]


def drawn(env: gymnasium.Env) -> str:
    """Return the rendering of `render_mode="ansi"`, with coloured characters in brackets; "" in other modes."""
    if getattr(env, "render_mode", None) != "ansi":  # GEM's environments have no such attribute
        return ""
    return _COLOURED.sub(r"[\1]", str(env.render() or "")).strip("\n")


def _plain(value: object) -> object:
    """Convert numpy's numbers and arrays, also nested in sequences and dicts, to Python's."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value
