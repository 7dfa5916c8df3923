"""Common options of commands, their console and JSON output, and their exit after an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from llmrl._utils.json_values import finite
from llmrl._utils.terminal import printable

console = Console(highlight=False)
Model = Annotated[str, typer.Option("--model", "-m", help="Folder, hub name, folder of a run, or `embedded`.")]
EnvName = Annotated[str, typer.Argument(metavar="ENV", help="Environment: a name, or FILE.py:FUNCTION for your own.")]
EnvOptions = Annotated[
    list[str] | None, typer.Argument(help="Options of the environment, such as num_digits=2.", show_default=False)
]
Data = Annotated[str | None, typer.Option(help="Data set: hub name, or local folder or file.")]
Split = Annotated[str, typer.Option(help="Split of the environment's data.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")]
MaxModelLen = Annotated[int, typer.Option(min=16, help="Maximum number of tokens of the whole conversation.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object, and everything else on stderr.")]
Host = Annotated[str, typer.Option(help="Address to listen on; if other machines can reach it, a key is needed.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
ApiKey = Annotated[str | None, typer.Option(envvar="LLMRL_API_KEY", help="API key that clients must send.")]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="Jinja file of the chat template, for a model that has no template, such as a base model.",
        exists=True,
        dir_okay=False,
    ),
]


def print_json(content: object) -> None:
    """Print one JSON object; numbers that JSON does not support become null."""
    print(json.dumps(finite(content), ensure_ascii=False, default=str))


def as_shown(content: object) -> str:
    """Return text of unknown origin as a console prints it: without markup and terminal control sequences."""
    return escape(printable(str(content)))


def shown_number(value: float | None, form: str, *, missing: str = "–") -> str:
    """Return a number in a format such as `.3f`, or `missing` if there is none."""
    if value is None:
        return missing
    return format(value, form)


def on_stderr() -> Console:
    """Return a console for what is not the result of a command."""
    return Console(stderr=True, highlight=False)


def fail(message: object, *, exit_code: int = 2) -> typer.Exit:
    """Print an error and return the exit; the default exit code is that of wrong usage."""
    on_stderr().print(f"[bold red]llmrl:[/bold red] {as_shown(message)}", soft_wrap=True)
    return typer.Exit(exit_code)


@contextmanager
def refusals(*kinds: type[Exception], exit_code: int = 2) -> Iterator[None]:
    """Print an error of these kinds, and exit."""
    try:
        yield
    except kinds as error:
        raise fail(error, exit_code=exit_code) from None
