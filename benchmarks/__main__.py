"""`python -m benchmarks NAME`: run a benchmark; its last line is one JSON object.

A benchmark is a module of this folder with a docstring that says what it measures and `run() -> dict`, which prints a
table and returns `name`, `ratio`, `ratio_of` (what the ratio is of), `goal`, `met` and `medians` (the raw numbers).
Ours and the peer's are measured in the same run: the ratio travels between machines, the seconds do not.
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
    """Name of every benchmark and its explanation; nothing is imported."""
    names = {}
    for path in sorted(_FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and _is_run(node) for node in tree.body):
            names[path.stem] = ast.get_docstring(tree) or ""
    return names


def _is_run(node: ast.FunctionDef) -> bool:
    return node.name == "run" and len(node.args.defaults) == len(node.args.args)


def run_one(name: str) -> dict[str, Any]:
    """Run one in this process; its result, checked."""
    result = importlib.import_module(f"benchmarks.{name}").run()
    if missing := FIELDS - set(result):
        raise KeyError(f"benchmarks/{name}.py returned no {sorted(missing)}")
    result["met"] = bool(result["met"])
    return result


def write_page(result: dict[str, Any]) -> None:
    """Replace the benchmark's section of the performance page."""
    page = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(updated(page, section(result, found()[result["name"]])))


def run_all(*, is_page: bool) -> int:
    """Run each in a process of its own, so that none starts with another's memory; 1 when one failed."""
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
    """Run what the command line names."""
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
