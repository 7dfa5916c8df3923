"""Commands and their options; the other modules of this package implement them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llmrl.cli import env as environments
from llmrl.cli import recipe, recorded
from llmrl.cli.options import (
    ApiKey,
    AsJSON,
    ChatTemplate,
    Data,
    EnvName,
    EnvOptions,
    Host,
    MaxModelLen,
    MaxNewTokens,
    Model,
    Port,
    Split,
    Temperature,
    console,
    fail,
    on_stderr,
    print_json,
    refusals,
)

app = typer.Typer(
    name="llmrl",
    help="Post-train language models with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from llmrl import __version__

        console.print(f"llmrl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options that every command shares."""


@app.command()
def doctor(
    plan: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Print the GPU memory that training this model needs."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Check a server instead: what it supports as an engine."),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="First let pip fix what it can in this environment.")] = False,
    as_json: AsJSON = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Check a model instead: whether its checkpoint can be trained and served."),
    ] = None,
    entries: Annotated[
        list[str] | None,
        typer.Argument(help="Entries of the configuration for --plan: hardware=gpu8, train.token_budget=8192, …"),
    ] = None,
) -> None:
    """Check this machine: versions, CPU, GPUs, vLLM, Ray, model cache. Report what is wrong and how to fix it.

    Exits with 1 if something that llmrl requires is wrong.
    """
    from llmrl.cli import doctor as command

    if plan is not None:
        with refusals(ValueError, OSError):
            needed = command.plan_of(plan, entries or [])
        return print_json(needed) if as_json else command.print_plan(needed, console)
    if model is not None:
        from llmrl.cli.model_check import examine_model

        with refusals(ValueError, OSError):
            findings = examine_model(model)
    elif engine is not None:
        findings = command.examine_server(engine)
    else:
        findings = command.examine()
    with refusals(OSError, exit_code=1):
        if fix and model is None and command.fix(findings, on_stderr()):
            findings = command.examine()
    if as_json:
        print_json({"checks": [asdict(finding) for finding in findings]})
    else:
        command.print_findings(findings, console)
    raise typer.Exit(any(finding.state == "wrong" for finding in findings))


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Folders of runs; the last one in `runs/` by default.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; view.html in the first run by default.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", "-t", help="Print the run here and write no page.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Draw the curves to RUN/curve.png and write no page.")] = False,
    max_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Number of last rollouts to keep of each run.")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Write runs as one HTML page: their curves, their conversations, and the log-prob and version of every token.

    While a run is in progress, the page is kept up to date until Ctrl-C.
    """
    from llmrl.cli import view as command
    from llmrl.viewer import last_run

    if out is not None and (as_json or terminal or png):
        raise fail("--out names the page, which --json, --terminal and --png do not write; leave one of them out.")
    try:
        paths = runs or [last_run()]
        if as_json:
            command.print_reports(paths)
        elif terminal:
            command.print_runs(paths, max_rollouts)
        elif png:
            command.draw_curves(paths)
        else:
            command.write_pages(paths, out or paths[0] / "view.html", max_rollouts)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command("eval")
def evaluate(
    env: Annotated[
        str, typer.Option("--env", "-e", help="Environment (see `llmrl env list`), or your own: FILE.py:FUNCTION.")
    ] = "addition",
    model: Model = "embedded",
    data: Data = None,
    split: Split = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of problems.")] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="Number of answers to sample for each problem.")
    ] = 4,
    temperature: Temperature = 1.0,
    max_new_tokens: MaxNewTokens = 64,
    max_model_len: MaxModelLen = 1024,
    chat_template: ChatTemplate = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to save rollouts and results in.")] = None,
    as_json: AsJSON = False,
    options: EnvOptions = None,
) -> None:
    """Measure a model in an environment: pass@1, pass@k, confidence intervals, and the mean of each reward."""
    from llmrl.cli import evaluate as command
    from llmrl.cli.models import ChatModel
    from llmrl.engines import EngineError
    from llmrl.envs import make_task_env

    shown = on_stderr() if as_json else console
    with refusals(ValueError, TypeError, FileNotFoundError, FileExistsError, ImportError):
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        found = ChatModel.find(model, max_model_len, chat_template, shown)
        environment = make_task_env(env, split, data=data, repeats=samples, **command.options_of(options or []))
        command.check_has_problems(env, environment)
        folder = None if out is None else command.open_folder(out)
    with refusals(EngineError, ImportError, exit_code=1):
        report = command.run(
            env, environment, found, sampling=sampling, seed=seed, limit=limit, folder=folder, console=shown
        )
    if as_json:
        print_json({"env": env, "model": found.path, "split": split, **report.to_summary()})


@app.command()
def audit(
    env: EnvName,
    options: EnvOptions = None,
    model: Model = "embedded",
    data: Data = None,
    limit: Annotated[int, typer.Option(min=2, help="Maximum number of problems to answer.")] = 32,
    chat_template: ChatTemplate = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write the result to.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Find errors of an environment before training, such as rewards for answers that deserve none.

    It plays prepared answers in a model's chat template, without the model. Exits with 1 if something is broken.
    """
    from llmrl.cli import audit as command
    from llmrl.cli.evaluate import options_of
    from llmrl.watch.findings import Verdict

    with refusals(ValueError, TypeError, FileNotFoundError, ImportError):
        result = command.run_audit(
            env,
            model=model,
            data=data,
            chat_template=chat_template,
            num_problems=limit,
            options=options_of(options or []),
            console=on_stderr(),
        )
    if as_json:
        print_json(result.to_json())
    else:
        command.print_audit(result, console)
    if out is not None:
        with refusals(OSError, exit_code=1):
            command.write_page(result, out)
    raise typer.Exit(result.verdict is Verdict.BROKEN)


@app.command()
def chat(
    model: Model = "embedded",
    env: Annotated[
        str | None,
        typer.Option("--env", "-e", help="Environment: a name, or FILE.py:FUNCTION; `/problem` poses a problem."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="Tool that the model may call: `python`.")] = None,
    temperature: Temperature = 0.7,
    max_new_tokens: MaxNewTokens = 256,
    max_model_len: MaxModelLen = 2048,
    chat_template: ChatTemplate = None,
) -> None:
    """Talk to a model through an environment, with its tools; `/tokens` shows the probability of each token."""
    from llmrl.cli.chat import ChatSession, make_env, talk
    from llmrl.cli.models import ChatModel
    from llmrl.engines import EngineError
    from llmrl.policies import vLLMWrapper

    with refusals(ValueError, TypeError, FileNotFoundError, ImportError):
        environment = make_env(env, system_prompt=system, tools=tool or [])
        found = ChatModel.find(model, max_model_len, chat_template, console)
    with refusals(EngineError, ImportError, exit_code=1):
        engine = found.start_engine(console)
    with engine:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        policy = vLLMWrapper(engine, renderer=found.renderer, generate_kwargs=sampling)
        talk(
            ChatSession(policy, environment),
            console,
            lambda: console.input("[bold cyan]you:[/bold cyan] "),
            found.renderer.decode,
        )


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repository: Annotated[
        str, typer.Argument(help="Repository on the hub, such as me/my-model; created if it is missing.")
    ],
    step: Annotated[
        int | None, typer.Option(min=1, help="Push the export of this step; by default the trained model.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a created repository public.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Push a run's model to the Hugging Face hub, with a card that describes the training, its data and its results."""
    from llmrl.cli.models import model_path
    from llmrl.runs.exports import push_folder

    with refusals(ValueError, OSError):
        folder = Path(model_path(str(run))) if step is None else run / f"exports/step-{step:06d}"
        url = push_folder(folder, repository, is_public=public)
    if as_json:
        return print_json({"url": url})
    console.print(url, soft_wrap=True)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder, hub name, folder of a run, or `embedded`.")] = "embedded",
    name: Annotated[str | None, typer.Option(help="Model name for clients; by default the last part of MODEL.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of engines that share the requests.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature for requests without one.")] = 1.0,
    max_new_tokens: MaxNewTokens = 1024,
    max_model_len: MaxModelLen = 4096,
    chat_template: ChatTemplate = None,
    out: Annotated[Path | None, typer.Option(help="Folder to save the conversations in, for `view`.")] = None,
) -> None:
    """Serve a model through the APIs of OpenAI and Anthropic: chat completions, responses, messages, and `/metrics`."""
    from llmrl.cli import serve as command
    from llmrl.cli.evaluate import open_folder
    from llmrl.cli.models import ChatModel
    from llmrl.engines import EngineError
    from llmrl.policies import vLLMWrapper

    with refusals(ValueError, TypeError, FileNotFoundError, FileExistsError, ImportError):
        named = name or Path(model).name
        settings = command.ServeSettings(name=named, host=host, port=port, api_key=api_key, out=out)
        found = ChatModel.find(model, max_model_len, chat_template, console)
        if out is not None:  # fail before the engine starts
            open_folder(out).close()
    with refusals(EngineError, ImportError, exit_code=1):
        engine = found.start_engine(console, num_replicas=replicas if replicas > 1 else None)
    with engine, refusals(OSError, exit_code=1):
        # Clients choose how to sample, and nothing is trained here.
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "replay": False}
        command.run(settings, vLLMWrapper(engine, renderer=found.renderer, generate_kwargs=sampling), console)


app.add_typer(environments.app, name="env")
app.add_typer(recipe.app, name="recipe")
for _command in (recorded.replay, recorded.rescore, recorded.conversations, recorded.bisect, recorded.fork):
    app.command()(_command)


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="task, env, agent or loop.")],
    name: Annotated[str, typer.Argument(help="Name of the folder and of its module.")],
    as_json: AsJSON = False,
) -> None:
    """Create a folder with a task, an environment, an agent or a training loop, a configuration and a test.

    A task scores one answer, an env has several turns, an agent is your program, and a loop is the training script.
    """
    from llmrl.cli.new import make_project

    with refusals(ValueError, FileExistsError):
        first, *others = make_project(kind, name, Path())
    if as_json:
        return print_json({"folder": name, "edit": first, "files": [first, *others]})
    console.print(f"[bold]{first}[/bold]  edit this one", soft_wrap=True)
    for path in others:
        console.print(path, soft_wrap=True)
    console.print(f"Next: cd {name}, then follow README.md.")


_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_SCRIPT, add_help_option=False)
def train(context: typer.Context, as_json: AsJSON = False) -> None:
    """Train with GRPO. Give FILE.py:FUNCTION for your own environment, or task=NAME, then entries such as seed=1.

    `llmrl train --help` lists all entries.
    """
    from llmrl.cli.train import entries_of

    with refusals(ValueError, FileNotFoundError):
        entries = entries_of(context.args)
    _run_script(entries, as_json=as_json)


@app.command(context_settings=_SCRIPT)
def demo(context: typer.Context, as_json: AsJSON = False) -> None:
    """Post-train the embedded model on one-digit sums; further arguments are entries, such as `seed=1`."""
    _run_script(context.args, as_json=as_json)


def _run_script(entries: list[str], *, as_json: bool) -> None:
    """Run the script in place of this process, or as a child process if the run is printed as JSON at its end."""
    if as_json:
        from llmrl.cli.run_report import run_and_report

        raise typer.Exit(run_and_report(entries))
    from llmrl.cli.train import run_script

    run_script(entries)
