"""Run TorchRL's own test files with nothing but their imports changed, and print what passes and why the rest fails.

    python test/helpers/torchrl_files.py CHECKOUT/test/llm [--only test_data.py …] [--select EXPRESSION] [--details]

Each file runs twice: as it is, with TorchRL, and with the imports of llmrl. A case is valid if it passes with TorchRL.
What a page of the documentation says to write instead is in `torchrl_reasons.py`; such cases run a third time, with
those lines changed. Names of the hub are a local folder: a model of one layer with the embedded model's tokenizer.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torchrl_hub
from torchrl_reasons import HERE, NOT_RUN, REASONS

from llmrl.torchrl.names import ELSEWHERE

FILES = (
    "test_conversions.py",
    "test_data.py",
    "test_llm_transforms.py",
    "test_llm_envs.py",
    "test_llm_objectives.py",
    "test_llm_collectors.py",
    "test_wrapper.py",
    "test_vllm.py",
)
_AREAS = "data|envs|modules|objectives|collectors|weight_update"
_DATA = {"_CHAT_TEMPLATES"}  # private names of what is data
_HERE = {"_frames", "_has_exclusive_keys"}  # private attributes that llmrl and tensordict have
LLM_NAME = re.compile(rf"(?<![.\0])\btorchrl\.({_AREAS})\.llm\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder test/llm of a checkout of TorchRL")
    parser.add_argument("--only", nargs="+", default=FILES, help="files to run")
    parser.add_argument("--select", default="", help="cases to run, as pytest's -k")
    parser.add_argument("--details", action="store_true", help="print each valid case that does not pass unchanged")
    parser.add_argument("--keep", type=Path, help="keep the changed files and the results in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        cases = {}
        for name in options.only:
            cases[name] = compare(options.folder, name, folder, options.select)
        print_tables(cases, details=options.details)


def compare(source: Path, name: str, folder: Path, select: str) -> dict[str, str]:
    """Return what became of each valid case of a file: "unchanged", "as the page says", or a reason."""
    text = (source / name).read_text()
    for file, old, new in HERE:
        if file == name and old not in text:
            raise ValueError(f"{name} does not contain {old!r}; correct torchrl_reasons.py.")
        text = text.replace(old, new) if file == name else text
    ours, kept = with_our_imports(text)
    theirs = run(text, source, folder / "theirs", name, select)
    here = run(ours, source, folder / "ours", name, select)
    valid = [case for case, (outcome, _) in theirs.items() if outcome == "passed"]
    asked = names_that_cases_use(ours, kept)
    outcomes, again = {}, []
    for case in valid:
        names, attributes = asked[function_of(case)]
        passes = here.get(case, ("missing", ""))[0] == "passed"
        if names or (attributes and not passes):
            outcomes[case] = reason_of_names(names)
        elif passes:
            outcomes[case] = "unchanged"
        else:
            outcomes[case] = reason_of(name, case)
            again.append(case)
    changed = changed_as_the_page_says(name, ours)
    if again and changed != ours:
        then = run(changed, source, folder / "changed", name, select)
        for case in again:
            if then.get(case, ("missing", ""))[0] == "passed":
                outcomes[case] = f"as the page says: {reason_of(name, case)}"
    return outcomes


def with_our_imports(text: str) -> tuple[str, set[str]]:
    """Return a file with llmrl's imports, and the names that it goes on taking from TorchRL."""
    lines, kept = text.splitlines(keepends=True), set()
    for node in reversed([one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ImportFrom)]):
        module = node.module or ""
        if not re.match(rf"torchrl\.({_AREAS})(\.llm\b.*)?$", module):
            continue
        public = re.sub(r"\._\w+", "", f"llmrl.{module}")
        here = [alias for alias in node.names if is_here(public, alias.name)]
        theirs = [alias for alias in node.names if alias not in here]
        kept |= {alias.asname or alias.name for alias in theirs}
        written = [ast.unparse(ast.ImportFrom(public, here, 0))] if here else []
        written += [ast.unparse(ast.ImportFrom(module.replace("torchrl.", "\0torchrl."), theirs, 0))] if theirs else []
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in written]
    changed = LLM_NAME.sub(r"llmrl.torchrl.\1.llm", "".join(lines))
    return changed.replace("\0", ""), kept


def is_here(module: str, name: str) -> bool:
    if name.startswith("_"):
        return False
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or importlib.import_module(f"{module}.{name}") is not None
    except ImportError:
        return False


def names_that_cases_use(text: str, kept: set[str]) -> dict[str, tuple[set[str], set[str]]]:
    """For each test function: names that it takes from TorchRL, and private attributes of others that it reads.

    What a function of the same file does that it calls counts, too, and names of attributes that are given as text.
    """
    tree = ast.parse(text)
    helpers = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    found: dict[str, tuple[set[str], set[str]]] = {}

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef):
                inner = list(ast.walk(node))
                called = {one.id for one in inner if isinstance(one, ast.Name)} & helpers.keys()
                inner += [one for name in called for one in ast.walk(helpers[name])]
                names = {one.id for one in inner if isinstance(one, ast.Name)} & kept
                names |= {one.arg for one in inner if isinstance(one, ast.arg)} & kept
                read = {one.attr for one in inner if isinstance(one, ast.Attribute) and not is_of_self(one)}
                read |= {one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)}
                private = {one for one in read if re.fullmatch(r"_[a-z]\w+", one)} - _HERE
                found[prefix + node.name] = (names - _DATA, private)

    look(tree.body, "")
    return found


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def function_of(case: str) -> str:
    return case.partition("[")[0]


def reason_of_names(names: set[str]) -> str:
    elsewhere = {name for ours, _, _ in ELSEWHERE for name in ours.split()}
    for name in sorted(names & elsewhere):
        return f"`{name}` has another name here, or none"
    return "private name"


def reason_of(name: str, case: str) -> str:
    for file, pattern, reason, _ in REASONS:
        if file == name and re.search(pattern, case):
            return reason
    return "unexplained"


def changed_as_the_page_says(name: str, text: str) -> str:
    for file, _, _, edits in REASONS:
        for old, new in edits if file == name else ():
            if old not in text:
                raise ValueError(f"{name} does not contain {old!r}; correct torchrl_reasons.py.")
            text = text.replace(old, new)
    return text


def run(text: str, source: Path, folder: Path, name: str, select: str) -> dict[str, tuple[str, str]]:
    """Run a file in a process of its own, and return the outcome and the last line of the error of each case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / "conftest.py").write_text((source / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\n")
    results = folder / f"{name}.json"
    results.unlink(missing_ok=True)
    places = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    hub = torchrl_hub.folder_of([file.read_text() for file in source.glob("*.py")], folder.parent)
    environment = os.environ | torchrl_hub.environment(hub) | {"PYTHONPATH": ":".join(places)}
    command = [sys.executable, "-m", "pytest", name, "-q", "-p", "torchrl_hub", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-k", select] if select else []
    deselected = [f"--deselect={name}::{case}" for file, case, _ in NOT_RUN if file == name]
    with (folder / f"{name}.log").open("w") as log:
        command += [*deselected, f"--results={results}", "--timeout=600"]
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if not results.exists():
        raise RuntimeError(f"pytest did not run {folder / name}; see {name}.log there.")
    return {case: tuple(found) for case, found in json.loads(results.read_text()).items()}


def print_tables(cases: dict[str, dict[str, str]], *, details: bool) -> None:
    rows = list(cases.items())
    everything = {f"{name}::{case}": outcome for name, found in rows for case, outcome in found.items()}
    print("| file, class | valid | unchanged | as the page says | of the others: reason (cases) |")
    print("|---|---|---|---|---|")
    for name, outcomes in rows:
        classes = dict.fromkeys(case.rpartition("::")[0] for case in map(function_of, outcomes))
        for one in classes:
            print_row(f"`{name}`: {one or 'functions'}", of_class(outcomes, one))
    print_row("all", everything)
    public = {case: outcome for case, outcome in everything.items() if outcome != "private name"}
    passed = sum(outcome == "unchanged" for outcome in public.values())
    told = sum(outcome.startswith("as the page says") for outcome in public.values())
    print(
        f"\nWithout private names: {len(public)} valid, {passed} unchanged ({passed / max(len(public), 1):.0%}), ",
        end="",
    )
    print(f"{told} as the page says ({(passed + told) / max(len(public), 1):.0%} of both).")
    if details:
        for case, outcome in everything.items():
            if outcome != "unchanged":
                print(f"{outcome}\t{case}")


def of_class(outcomes: dict[str, str], name: str) -> dict[str, str]:
    return {case: one for case, one in outcomes.items() if function_of(case).rpartition("::")[0] == name}


def print_row(label: str, outcomes: dict[str, str]) -> None:
    counts = Counter(outcomes.values())
    told = sum(count for outcome, count in counts.items() if outcome.startswith("as the page says"))
    rest = [
        f"{outcome} ({count})"
        for outcome, count in counts.most_common()
        if outcome != "unchanged" and not outcome.startswith("as the page says")
    ]
    print(f"| {label} | {len(outcomes)} | {counts['unchanged']} | {told} | {'; '.join(rest)} |")


if __name__ == "__main__":
    main()
