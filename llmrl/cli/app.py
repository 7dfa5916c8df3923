"""Commands and their options; the other modules of this package implement them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from llmrl.cli.json_output import print_json

app = typer.Typer(
    name="llmrl",
    help="Post-train language models with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
_Model = Annotated[str, typer.Option("--model", "-m", help="Folder, hub name, folder of a run, or `embedded`.")]
_MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")]
_MaxModelLen = Annotated[int, typer.Option(min=16, help="Maximum number of tokens of the whole conversation.")]
_Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
_AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object, and everything else on stderr.")]
_ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="Jinja file of the chat template, for a model that has no template, such as a base model.",
        exists=True,
        dir_okay=False,
    ),
]


def _fail(message: object, *, exit_code: int = 2) -> typer.Exit:
    """Print an error and return the exit; the default exit code is that of wrong usage."""
    Console(stderr=True).print(f"[bold red]llmrl:[/bold red] {escape(str(message))}", highlight=False, soft_wrap=True)
    return typer.Exit(exit_code)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from llmrl import __version__

        console.print(f"llmrl {__version__}", highlight=False)
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
    fix: Annotated[bool, typer.Option("--fix", help="Let pip fix what it can in this environment first.")] = False,
    as_json: _AsJSON = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Check a model instead: what becomes of its checkpoint in training."),
    ] = None,
    entries: Annotated[
        list[str] | None,
        typer.Argument(help="Entries of the configuration for --plan: hardware=FILE, train.token_budget=8192, …"),
    ] = None,
) -> None:
    """Check this machine: versions, CPU, GPUs, vLLM, Ray, model cache. Report what is wrong and how to fix it.

    Exits with 1 if something that llmrl requires is wrong.
    """
    from llmrl.cli import doctor as command

    if plan is not None:
        try:
            command.print_plan(plan, entries or [], console)
        except (ValueError, OSError) as error:
            raise _fail(error) from None
        return
    if model is not None:
        from llmrl.cli.model_check import examine_model

        try:
            findings = examine_model(model)
        except (ValueError, OSError) as error:
            raise _fail(error) from None
    else:
        findings = command.examine() if engine is None else command.examine_server(engine)
    try:
        if fix and model is None and command.fix(findings, Console(stderr=True)):
            findings = command.examine()
    except OSError as error:
        raise _fail(error, exit_code=1) from None
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
    terminal: Annotated[bool, typer.Option("--terminal", "-t", help="Print the run here; write no page.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Draw the curves to RUN/curve.png and write no page.")] = False,
    max_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Number of rollouts to keep of each run, the last ones.")
    ] = None,
    as_json: _AsJSON = False,
) -> None:
    """Write runs as one HTML page: their curves, their conversations, and the log-prob and version of every token.

    While a run is in progress, the page is kept up to date until Ctrl-C.
    """
    from llmrl.cli import view as command
    from llmrl.viewer import last_run

    try:
        paths = runs or [last_run()]
        if as_json:
            command.print_reports(paths)
        elif terminal:
            command.print_runs(paths, console, max_rollouts)
        elif png:
            command.draw_curves(paths, console)
        else:
            command.write_pages(paths, out or paths[0] / "view.html", console, max_rollouts)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise _fail(error) from None
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command("eval")
def evaluate(
    env: Annotated[
        str, typer.Option("--env", "-e", help="Environment (`--list` names them), or your own: FILE.py:FUNCTION.")
    ] = "addition",
    model: _Model = "embedded",
    data: Annotated[str | None, typer.Option(help="Data set: hub name, or local folder or file.")] = None,
    split: Annotated[str, typer.Option(help="Split of the environment's data.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of problems.")] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="Number of answers to sample for each problem.")
    ] = 4,
    temperature: _Temperature = 1.0,
    max_new_tokens: _MaxNewTokens = 64,
    max_model_len: _MaxModelLen = 1024,
    chat_template: _ChatTemplate = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to save rollouts and results in.")] = None,
    as_json: _AsJSON = False,
    list_environments: Annotated[bool, typer.Option("--list", help="List the environments and stop.")] = False,
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of the environment, such as num_digits=2.", show_default=False)
    ] = None,
) -> None:
    """Measure a model in an environment: pass@1, pass@k, confidence intervals, and the mean of each reward."""
    from llmrl.cli import evaluate as command
    from llmrl.cli.models import ChatModel
    from llmrl.engines import EngineError
    from llmrl.envs import make_task_env, task_environments

    if list_environments:
        if as_json:
            print_json({"environments": task_environments()})
        for name, line in {} if as_json else task_environments().items():
            console.print(f"[bold]{name:16}[/bold]{line}", highlight=False)
        return
    shown = Console(stderr=True) if as_json else console
    try:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        found = ChatModel.find(model, max_model_len, chat_template, shown)
        settings = command.EvaluationSettings(env=env, model=found, sampling=sampling, seed=seed, limit=limit, out=out)
        environment = make_task_env(env, split, data=data, repeats=samples, **command.options_of(options or []))
    except (ValueError, TypeError, FileNotFoundError, FileExistsError, ImportError) as error:
        raise _fail(error) from None
    try:
        report = command.run(settings, environment, shown)
    except (EngineError, ImportError) as error:
        raise _fail(error, exit_code=1) from None
    if as_json:
        print_json({"env": env, "model": found.path, "split": split, **report.to_summary()})


@app.command()
def chat(
    model: _Model = "embedded",
    env: Annotated[
        str | None,
        typer.Option("--env", "-e", help="Environment: a name, or FILE.py:FUNCTION; `/problem` asks a problem of it."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="Tool that the model may call: `python`.")] = None,
    temperature: _Temperature = 0.7,
    max_new_tokens: _MaxNewTokens = 256,
    max_model_len: _MaxModelLen = 2048,
    chat_template: _ChatTemplate = None,
) -> None:
    """Talk to a model through an environment, with its tools; `/tokens` shows the probability of each token."""
    from llmrl.cli.chat import ChatSession, make_env, talk
    from llmrl.cli.models import ChatModel
    from llmrl.engines import AsyncVLLM, EngineError
    from llmrl.policies import vLLMWrapper

    try:
        environment = make_env(env, system_prompt=system, tools=tool or [])
        found = ChatModel.find(model, max_model_len, chat_template, console)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        raise _fail(error) from None
    try:
        console.print(f"vLLM starts with {found.path}", highlight=False, soft_wrap=True)
        engine = AsyncVLLM.from_pretrained(found.path, max_model_len=found.max_model_len)
    except (EngineError, ImportError) as error:
        raise _fail(error, exit_code=1) from None
    try:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        policy = vLLMWrapper(engine, renderer=found.renderer, generate_kwargs=sampling)
        talk(
            ChatSession(policy, environment),
            console,
            lambda: console.input("[bold cyan]you:[/bold cyan] "),
            found.renderer.decode,
        )
    finally:
        engine.shutdown()


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repository: Annotated[
        str, typer.Argument(help="Repository on the hub, such as me/my-model; created if it is missing.")
    ],
    step: Annotated[int | None, typer.Option(min=1, help="Push the export of this step; by default the model.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a created repository public.")] = False,
) -> None:
    """Push a run's model to the Hugging Face hub, with a card that describes the training, its data and its results."""
    from llmrl.cli.models import model_path
    from llmrl.runs.exports import push_folder

    try:
        folder = Path(model_path(str(run))) if step is None else run / f"exports/step-{step:06d}"
        console.print(push_folder(folder, repository, is_public=public), highlight=False, soft_wrap=True)
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder, hub name, folder of a run, or `embedded`.")] = "embedded",
    name: Annotated[str | None, typer.Option(help="Model name for clients; by default the last part of MODEL.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="LLMRL_API_KEY", help="API key that clients must send.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of engines that share the requests.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature for requests without one.")] = 1.0,
    max_new_tokens: _MaxNewTokens = 1024,
    max_model_len: _MaxModelLen = 4096,
    chat_template: _ChatTemplate = None,
    out: Annotated[Path | None, typer.Option(help="Folder to save the conversations in, for `view`.")] = None,
) -> None:
    """Serve a model through the APIs of OpenAI and Anthropic: chat completions, responses, messages, and `/metrics`."""
    from llmrl.cli import serve as command
    from llmrl.cli.models import ChatModel
    from llmrl.engines import AsyncVLLM, EngineError
    from llmrl.policies import vLLMWrapper

    try:
        named = name or Path(model).name
        settings = command.ServeSettings(name=named, host=host, port=port, api_key=api_key, out=out)
        found = ChatModel.find(model, max_model_len, chat_template, console)
    except (ValueError, TypeError, FileNotFoundError, FileExistsError, ImportError) as error:
        raise _fail(error) from None
    try:
        console.print(f"vLLM starts with {found.path}", highlight=False, soft_wrap=True)
        engine = AsyncVLLM.from_pretrained(
            found.path, max_model_len=found.max_model_len, num_replicas=replicas if replicas > 1 else None
        )
    except (EngineError, ImportError) as error:
        raise _fail(error, exit_code=1) from None
    try:
        # Clients choose how to sample, and nothing is trained here.
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "replay": False}
        command.run(settings, vLLMWrapper(engine, renderer=found.renderer, generate_kwargs=sampling), console)
    except OSError as error:
        raise _fail(error, exit_code=1) from None
    finally:
        engine.shutdown()


_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


@app.command()
def replay(
    run: _Run,
    step: Annotated[int, typer.Option(min=1, help="Step to compute again.")],
    entries: Annotated[
        list[str] | None,
        typer.Argument(
            help="Entries to change, to see what the step would have been: loss=dapo, train.clip_epsilon=0.3"
        ),
    ] = None,
    quantities: Annotated[
        str, typer.Option(help="What to compare, separated by commas; rewards and advantages need no model.")
    ] = "prompts,rewards,advantages,log_probs,metrics,weights",
    reward: Annotated[
        str | None,
        typer.Option(help="Reward function of the run, FILE.py:FUNCTION; with --what-if, another one to train with."),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Compare with the step under --reward; changed entries imply it.")
    ] = False,
    drop_rollout: Annotated[list[str] | None, typer.Option(help="Rollout to leave out of batch and baseline.")] = None,
    last_step: Annotated[
        int | None, typer.Option(help="Last step of a what-if over several steps, each side on its own weights.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="HTML file to write, with the what-if beside the steps.")] = None,
    as_json: _AsJSON = False,
) -> None:
    """Compute a recorded step again and name the first quantity that differs; or compute it with something changed.

    Exits with 1 if a quantity differs by more than rounding.
    """
    from llmrl.cli.replay import run_replay

    try:
        is_equal = run_replay(
            run,
            step,
            quantities.split(","),
            reward,
            entries or [],
            drop_rollout or [],
            console,
            last_step=last_step,
            page=page,
            is_what_if=what_if,
            is_json=as_json,
        )
    except (ValueError, TypeError, OSError) as error:
        raise _fail(error) from None
    raise typer.Exit(not is_equal)


@app.command()
def rescore(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or a JSON lines file of conversations (OpenAI).")
    ],
    reward: Annotated[str, typer.Option(help="Reward function: FILE.py:FUNCTION.")],
    as_json: _AsJSON = False,
) -> None:
    """Score the rollouts of a run, or the conversations of a file, by a reward function, and compare the rewards."""
    from llmrl.cli.replay import run_rescore

    try:
        run_rescore(run, reward, console, is_json=as_json)
    except (ValueError, TypeError, OSError) as error:
        raise _fail(error) from None


@app.command()
def conversations(
    run: _Run,
    file: Annotated[Path | None, typer.Argument(help="New JSON lines file.")] = None,
    form: Annotated[
        str, typer.Option("--as", help="messages, sft, preferences, or spans (OpenTelemetry, to its OTLP endpoint).")
    ] = "messages",
    split: Annotated[str, typer.Option(help="train, or the name of an evaluation: eval/sums.")] = "train",
    as_json: _AsJSON = False,
) -> None:
    """Write the conversations of a run in OpenAI's format, as a data set, or send them as spans."""
    from llmrl.cli.replay import run_conversations

    try:
        run_conversations(run, file, form, split, is_json=as_json)
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def bisect(
    run: _Run,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Folder of a run that should be equal.")],
    page: Annotated[Path | None, typer.Option(help="HTML file to write, with the step of both runs.")] = None,
    as_json: _AsJSON = False,
) -> None:
    """Name the first step, row, token and quantity in which two runs differ.

    Exits with 1 if they do.
    """
    from llmrl.cli.replay import run_bisect

    try:
        is_equal = run_bisect(run, other, console, page=page, is_json=as_json)
    except (ValueError, OSError) as error:
        raise _fail(error) from None
    raise typer.Exit(not is_equal)


@app.command()
def fork(
    run: _Run,
    entries: Annotated[list[str], typer.Argument(help="run.path=FOLDER of the new run, and entries that it changes.")],
    step: Annotated[int, typer.Option(min=1, help="Last step that both runs share.")],
) -> None:
    """Make a new run from the middle of an old one; resuming it trains on."""
    from llmrl.cli.replay import run_fork

    try:
        run_fork(run, step, entries, console)
    except (ValueError, OSError) as error:
        raise _fail(error) from None


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="task, env, agent or loop.")],
    name: Annotated[str, typer.Argument(help="Name of the folder and of its module.")],
) -> None:
    """Start a folder of your own: a task, an environment, an agent or a training loop, with a configuration and a test.

    A task asks once and scores the answer; an env answers, turn by turn; an agent is a program of yours that asks the
    model at a URL; a loop is the training script.
    """
    from llmrl.cli.new import make_project

    try:
        first, *others = make_project(kind, name, Path())
    except (ValueError, FileExistsError) as error:
        raise _fail(error) from None
    console.print(f"[bold]{first}[/bold]  edit this one", highlight=False, soft_wrap=True)
    for path in others:
        console.print(path, highlight=False, soft_wrap=True)
    console.print(f"Next: cd {name}, then what README.md says.", highlight=False)


_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_SCRIPT, add_help_option=False)
def train(context: typer.Context, as_json: _AsJSON = False) -> None:
    """Train by GRPO: FILE.py:FUNCTION for an environment of your own, or task=NAME, then entries such as seed=1.

    `llmrl train --help` lists all entries.
    """
    from llmrl.cli.train import entries_of, run_script

    try:
        entries = entries_of(context.args)
    except (ValueError, FileNotFoundError) as error:
        raise _fail(error) from None
    if as_json:
        from llmrl.cli.run_report import run_and_report

        raise typer.Exit(run_and_report(entries))
    run_script(entries)


@app.command(context_settings=_SCRIPT)
def demo(context: typer.Context) -> None:
    """Post-train the embedded model on one-digit sums; further words are entries, such as `seed=1`."""
    from llmrl.cli.train import run_script

    run_script(context.args)
