"""`python -m benchmarks NAME`: run a benchmark; the last line of output is one JSON object.

A benchmark is a module of this folder with a docstring that describes the measurement and a function `run() -> dict`,
which prints a table and returns `name`, `ratio`, `ratio_of` (description of the ratio), `goal`, `met` and `medians`
(the raw numbers). llmrl and the peer are measured in the same run, because ratios are comparable between machines and
seconds are not.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, section, updated

FIELDS = {"name", "ratio", "ratio_of", "goal", "met", "medians"}
_FOLDER = Path(__file__).parent


def found() -> dict[str, str]:
    """Return the name and explanation of every benchmark, without importing them."""
    names = {}
    for path in sorted(_FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and _is_run(node) for node in tree.body):
            names[path.stem] = ast.get_docstring(tree) or ""
    return names


def _is_run(node: ast.FunctionDef) -> bool:
    return node.name == "run" and len(node.args.defaults) == len(node.args.args)


def run_one(name: str) -> dict[str, Any]:
    """Run a benchmark in this process, check its result, and return it."""
    result = importlib.import_module(f"benchmarks.{name}").run()
    if missing := FIELDS - set(result):
        raise KeyError(f"the result of benchmarks/{name}.py lacks {sorted(missing)}")
    result["met"] = bool(result["met"])
    return result


def write_page(result: dict[str, Any]) -> None:
    """Replace the benchmark's section in the performance page."""
    page = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(updated(page, section(result, found()[result["name"]])))


def run_all(*, is_page: bool) -> int:
    """Run each benchmark in its own process, so that none inherits memory; return 1 if any failed."""
    results, failed = [], []
    for name in found():
        print(f"== {name}", flush=True)
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks", name], cwd=_FOLDER.parent, stdout=subprocess.PIPE, text=True
        )
        print(process.stdout, end="", flush=True)
        if process.returncode:
            failed.append(name)
        else:
            results.append(json.loads(process.stdout.splitlines()[-1]))
            if is_page:
                write_page(results[-1])
    print(f"{'benchmark':24}{'ratio':>10}{'goal':>10}  met")
    for result in results:
        print(f"{result['name']:24}{result['ratio']:>10.3g}{result['goal']:>10.3g}  {'yes' if result['met'] else 'no'}")
    for name in failed:
        print(f"{name:24}    failed")
    print(json.dumps({"results": results, "failed": failed}))
    return bool(failed)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios of llmrl to its peers.")
    names = found()
    parser.add_argument("name", nargs="?", default="list", choices=["list", "all", *names], metavar="NAME")
    parser.add_argument("--page", action="store_true", help="write the result into docs/performance.md")
    arguments = parser.parse_args()
    chosen = arguments.name
    if chosen == "list":
        for name, line in names.items():
            print(f"{name:24}{line.partition(chr(10))[0]}")
        return 0
    if chosen == "all":
        return run_all(is_page=arguments.page)
    result = run_one(chosen)
    if arguments.page:
        write_page(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
