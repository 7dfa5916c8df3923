"""`llmrl env`: list environments, describe one, check its contract, serve it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from llmrl.cli.options import (
    ApiKey,
    AsJSON,
    ChatTemplate,
    Data,
    EnvName,
    EnvOptions,
    Host,
    Model,
    Port,
    Split,
    console,
    fail,
    on_stderr,
    print_json,
    refusals,
)

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

    from llmrl._utils.types import JSON
    from llmrl.audit import Contract
    from llmrl.envs import OpenEnvServer

app = typer.Typer(help="Environments: list them, describe one, check one, serve one.", no_args_is_help=True)

_STYLES = {"fine": "green", "look": "yellow", "broken": "bold red"}
_SILENCE_S = 300.0
_REFUSED = (ValueError, TypeError, FileNotFoundError, ImportError)


@app.command("list")
def list_environments(as_json: AsJSON = False) -> None:
    """Print the environments that commands and scripts accept by name, with their origin."""
    from llmrl.envs import task_environments
    from llmrl.envs.tasks.registry import HUBS, announced_environments, origin_of

    with refusals(ValueError):
        found = [(name, "llmrl", about) for name, about in task_environments().items()]
        found += [(f"{hub}:…", hub, about) for hub, (_, about) in HUBS.items()]
        found += [(name, origin_of(point), point.value) for name, point in announced_environments().items()]
    if as_json:
        return print_json({"environments": [dict(zip(("name", "origin", "about"), row, strict=True)) for row in found]})
    table = Table("environment", "from", "")
    for row in found:
        table.add_row(*row)
    console.print(table)


@app.command()
def info(
    env: EnvName,
    options: EnvOptions = None,
    model: Model = "embedded",
    data: Data = None,
    split: Split = "train",
    chat_template: ChatTemplate = None,
    as_json: AsJSON = False,
) -> None:
    """Print an environment's options, data, rewards, tools, roles, limit of turns and first prompt."""
    from llmrl.cli.env_info import info_of, print_info
    from llmrl.cli.models import make_chat_renderer, model_path

    chosen = _Chosen(env, split, data, options or [])
    with refusals(*_REFUSED):
        found = info_of(env, chosen.make, make_chat_renderer(model_path(model), chat_template))
    if as_json:
        return print_json(found)
    print_info(found, console)


@app.command()
def check(
    env: EnvName,
    options: EnvOptions = None,
    model: Model = "embedded",
    data: Data = None,
    split: Split = "train",
    limit: Annotated[int, typer.Option(min=1, help="Number of groups to play with each answer.")] = 4,
    chat_template: ChatTemplate = None,
    as_json: AsJSON = False,
) -> None:
    """Check an environment's contract: specs, seeds, groups, resume, hostile answers, rewards, time.

    It plays prepared answers in a separate process, without a model. Exits with 1 if something is broken.
    """
    chosen = _Chosen(env, split, data, options or [])
    shown = on_stderr()
    with shown.status("") as status:
        result = _checked_apart(chosen, model, chat_template, limit, lambda step: status.update(f"playing {step}"))
    if isinstance(result, str):
        raise fail(result)
    if as_json:
        print_json({"env": env, **result.to_json()})
    else:
        table = Table("check", "verdict", "")
        for one in result.checks:
            table.add_row(one.name, f"[{_STYLES[one.verdict]}]{one.verdict}[/]", one.says)
        console.print(table)
    raise typer.Exit(result.verdict == "broken")


@app.command()
def serve(
    env: EnvName,
    options: EnvOptions = None,
    data: Data = None,
    split: Split = "train",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
) -> None:
    """Serve an environment with OpenEnv's protocol to trainers of other libraries."""
    from llmrl.cli.serve import check_key
    from llmrl.envs import OpenEnvServer

    with refusals(OSError, exit_code=1), refusals(*_REFUSED):
        check_key(host, api_key)
        server = OpenEnvServer(_Chosen(env, split, data, options or []).make(), name=env, api_key=api_key)
        asyncio.run(_serve(server, host, port))


async def _serve(server: OpenEnvServer, host: str, port: int) -> None:
    from llmrl.cli.serve import stop_signal

    until = stop_signal()
    try:
        await server.start(host, port)
        console.print(f"{server.name} is served at [bold]{server.url}[/bold] until Ctrl-C")
        await until.wait()
    finally:
        await server.close()


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An environment with the options of a command line."""

    env: str
    split: str
    data: str | None
    words: list[str]

    def make(self, **changes: JSON) -> EnvBase:
        """Make the environment; `changes` are further arguments of `make_task_env`."""
        from llmrl.cli.evaluate import options_of
        from llmrl.envs import make_task_env

        arguments: dict[str, object] = {"split": self.split, **options_of(self.words), **changes}
        if self.data is not None:
            arguments["data"] = self.data
        return make_task_env(self.env, **arguments)  # type: ignore[arg-type]


def _checked_apart(
    chosen: _Chosen, model: str, chat_template: Path | None, num_groups: int, on_step: Callable[[str], None]
) -> Contract | str:
    """Check in another process, because an environment may end it; return the contract, or the error."""
    from llmrl.audit import Contract
    from llmrl.watch.findings import Finding, Verdict

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # Not a daemon, because rewards and environments may start processes, which those of a daemon may not.
    process = context.Process(target=_check, args=(theirs, chosen, model, chat_template, num_groups))
    process.start()
    theirs.close()
    step = "the start"
    try:
        while ours.poll(_SILENCE_S):
            kind, content = ours.recv()
            if kind == "done":
                return content
            step = content
            on_step(step)
        says = f"No progress in {step} for {_SILENCE_S:g} s: something waits without a time limit, such as a reward."
    except EOFError:
        process.join()
        says = f"The process ended with exit code {process.exitcode} during {step}: the environment ends it."
    finally:
        process.kill()  # a step that hangs would keep it running
        process.join()
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the environment has started
    return Contract([Finding("hostile", Verdict.BROKEN, says, ())])


def _check(connection: Connection, chosen: _Chosen, model: str, chat_template: Path | None, num_groups: int) -> None:
    os.setsid()  # begin a group, in which all that it starts can be ended
    os.dup2(2, 1)  # the environment's output is not part of the result
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    from llmrl.audit import check_env
    from llmrl.cli.models import make_chat_renderer, model_path

    try:
        renderer = make_chat_renderer(model_path(model), chat_template)
        result: Contract | str = check_env(
            lambda: chosen.make(repeats=2),
            renderer,
            num_groups=num_groups,
            on_step=lambda step: connection.send(("step", step)),
        )
    except _REFUSED as error:
        result = str(error)
    connection.send(("done", result))
