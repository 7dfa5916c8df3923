"""Run the code of TorchRL's LLM pages, tutorials and examples with its imports changed, and read its scripts.

    python test/helpers/torchrl_pages.py CHECKOUT [--only llms.rst …] [--keep FOLDER]

Each block runs in a process of its own: with TorchRL, with the imports of llmrl and, where that fails, with the lines
changed that `torchrl_page_edits.py` gives. Names that a page leaves to its reader are defined there, too, and models of
the hub are local. Scripts that need GPUs are read instead: each import and call of theirs that llmrl refuses is listed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torchrl_hub
from torchrl_page_edits import DEFINED, EDITS, HERE, NEEDS_GPUS, PARTS, REFUSED

from llmrl._utils.arguments import keywords_of, refuse_unknown

PAGES = (
    "docs/source/reference/llms.rst",
    "docs/source/reference/services.rst",
    "tutorials/sphinx-tutorials/llm_wrappers.py",
    "tutorials/sphinx-tutorials/llm_browser.py",
    "tutorials/sphinx-tutorials/trl_interop.py",
    "examples/llm/python_mcp_tool.py",
    "examples/llm/tool_service_example.py",
    "examples/llm/web_search_tool.py",
)
SCRIPTS = (
    "sota-implementations/grpo/grpo-sync.py",
    "sota-implementations/grpo/grpo-async.py",
    "sota-implementations/grpo/grpo_utils.py",
    "sota-implementations/expert-iteration/expert-iteration-sync.py",
    "sota-implementations/expert-iteration/expert-iteration-async.py",
    "sota-implementations/expert-iteration/ei_utils.py",
)
_LLM = re.compile(
    r"torchrl\.\w+\.llm|PythonInterpreter|PythonExecutorService|IFEval|extract_tags|reward_spec|input_mode|tds"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A program on a page."""

    name: str
    """The page's file and the block's first line."""
    code: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of TorchRL")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of blocks and scripts")
    parser.add_argument("--keep", type=Path, help="keep the programs and their output in this folder")
    options = parser.parse_args()

    def is_asked(name: str) -> bool:
        return options.only is None or name.startswith(tuple(options.only))

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print("| page | programs | with TorchRL | run | changed | refused | parts of programs |")
        print("|---|---|---|---|---|---|---|")
        told = []
        for page in PAGES:
            blocks = [block for block in blocks_of(options.checkout / page) if is_asked(block.name)]
            outcomes = {block.name: outcome_of(block, folder) for block in blocks}
            if blocks:
                print_page(page, outcomes)
            told += [f"{name}: {reason}" for name, (_, kind, reason) in outcomes.items() if kind != "run"]
    print("\n" + "\n".join(told))
    for script in SCRIPTS:
        if is_asked(Path(script).name):
            print(f"\n{script}:")
            for line, reason in refused_lines((options.checkout / script).read_text()):
                print(f"  {line}: {reason}")


def print_page(page: str, outcomes: dict[str, tuple[bool, str, str]]) -> None:
    counts = Counter(kind for _, kind, _ in outcomes.values())
    num_programs = len(outcomes) - counts["part"]
    with_torchrl = sum(runs for runs, _, _ in outcomes.values())
    kinds = [str(counts[kind]) for kind in ("run", "changed", "refused", "part")]
    failed = f" (unexplained: {counts['failed']})" if counts["failed"] else ""
    print(f"| `{Path(page).name}` | {num_programs} | {with_torchrl} | {' | '.join(kinds)}{failed} |", flush=True)


def blocks_of(path: Path) -> Iterator[Block]:
    """Yield the programs of a page that concern the LLM layer; a file of Python is one."""
    if path.suffix == ".py":
        yield Block(path.name, path.read_text())
        return
    lines = path.read_text().splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        indent = len(line) - len(line.lstrip())
        first = number + 1
        if line.strip() == ".. code-block:: python":
            body = []
            number += 1
            while number < len(lines) and (not lines[number].strip() or _indent(lines[number]) > indent):
                body.append(lines[number])
                number += 1
            code = textwrap.dedent("\n".join(body))
        elif line.lstrip().startswith(">>> "):
            body = []
            while number < len(lines) and lines[number].strip():
                body.append(lines[number].strip())
                number += 1
            code = "\n".join(one[4:] for one in body if one.startswith((">>>", "...")))
        else:
            number += 1
            continue
        if _LLM.search(code):
            yield Block(f"{path.name}:{first}", code.strip() + "\n")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def outcome_of(block: Block, folder: Path) -> tuple[bool, str, str]:
    """Return whether a program runs with TorchRL, what becomes of it with llmrl, and why."""
    if block.name in PARTS:
        return False, "part", PARTS[block.name]
    code = changed(block.code, HERE.get(block.name, ()), block.name)
    defined = DEFINED.get(block.name, "")
    with_torchrl = block.name not in NEEDS_GPUS and run(defined + code, folder, f"{block.name}-theirs")[0]
    ours, error = run(_ours(defined + code), folder, f"{block.name}-ours")
    if ours:
        return with_torchrl, "run", ""
    if block.name in REFUSED:
        pattern, reason = REFUSED[block.name]
        return with_torchrl, "refused" if re.search(pattern, error) else "failed", f"{reason} [{error}]"
    edits = [(old, new) for old, new, _ in EDITS.get(block.name, ())]
    if edits and run(_ours(changed(defined + code, edits, block.name)), folder, f"{block.name}-changed")[0]:
        return with_torchrl, "changed", "; ".join(reason for *_, reason in EDITS[block.name] if reason)
    return with_torchrl, "failed", error


def changed(code: str, edits: object, name: str) -> str:
    for old, new in edits:
        if old not in code:
            raise ValueError(f"{name} does not contain {old!r}; correct torchrl_page_edits.py.")
        code = code.replace(old, new)
    return code


def _ours(code: str) -> str:
    """Return a program after the command of the page on moving."""
    areas = "data|envs|modules|objectives|collectors|weight_update"
    return re.sub(rf"\btorchrl\.({areas})\.llm\b", r"llmrl.torchrl.\1.llm", code)


def run(code: str, folder: Path, name: str) -> tuple[bool, str]:
    """Run a program, and return whether it ended well and the last line that it printed."""
    place = folder / re.sub(r"\W+", "-", name)
    place.mkdir(exist_ok=True)
    (place / "program.py").write_text(code)
    hub = torchrl_hub.folder_of([code], folder)
    places = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | torchrl_hub.environment(hub) | {"PYTHONPATH": ":".join(places)}
    with (place / "output.log").open("w") as log:
        command = [sys.executable, "program.py"]
        try:
            code_of_exit = subprocess.run(
                command, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=900, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return False, "it did not end in 900 seconds"
    lines = [line for line in (place / "output.log").read_text().splitlines() if line.strip()]
    # Examples catch their own errors, and print them.
    caught = next((line for line in lines if re.match(r"Example \d+ failed: ", line)), None)
    return code_of_exit == 0 and caught is None, caught or (lines[-1] if lines else "")


def refused_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of a program that import or pass what llmrl refuses, with its answers."""
    tree = ast.parse(text)
    found: list[tuple[int, str]] = []
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"torchrl\.\w+\.llm\b", node.module or ""):
            for alias in node.names:
                try:
                    module = importlib.import_module(f"llmrl.{node.module}")
                    names[alias.asname or alias.name] = getattr(module, alias.name)
                except (ImportError, AttributeError) as error:
                    if "sglang" not in node.module:  # a server, as `SGLangWrapper` says
                        found.append((alias.lineno, str(error)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, given = _called(node, names)
        if called is None:
            continue
        try:
            _check(called, given)
        except TypeError as error:
            found.append((node.lineno, str(error)))
    return sorted(found)


def _called(node: ast.Call, names: dict[str, object]) -> tuple[object, list[str]]:
    """Return what a call of a name, a method of it or `partial` of it calls, if it is llmrl's, and the keywords."""
    function: ast.expr | None = node.func
    if ast.unparse(node.func) in ("partial", "functools.partial"):
        function = node.args[0]
    keywords = [one.arg for one in node.keywords if one.arg is not None]
    if isinstance(function, ast.Name):
        return names.get(function.id), keywords
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return getattr(names.get(function.value.id), function.attr, None), keywords
    return None, keywords


def _check(called: object, given: list[str]) -> None:
    """Raise TypeError, as the call does, if a keyword is refused."""
    function: object = getattr(called, "__func__", called)
    if isinstance(called, type):
        called.__new__(called, **dict.fromkeys(given))
        function = called.__init__
    known = keywords_of(inspect.unwrap(function)) if callable(function) else None
    if known is not None:
        refuse_unknown(getattr(called, "__qualname__", str(called)), given, known)


if __name__ == "__main__":
    main()
