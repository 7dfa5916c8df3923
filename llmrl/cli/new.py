"""`llmrl new`: a new folder to start from, made of the project's tested examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_STARTERS = Path(__file__).parent / "starters"
KINDS = ("task", "env", "agent", "loop")


def make_project(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a project into a new folder, and return its files, the one to edit first.

    Args:
        kind: `task` (prompts and a reward), `env` (several turns), `agent` (a program that calls a
            URL) or `loop` (the training script itself).
        name: name of the folder and of its module.
        folder: folder to create it in.

    Raises:
        ValueError: if the kind is unknown, or if the name is not a module name, or that of an installed module.
        FileExistsError: if the folder exists.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    target = folder / name
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another name.")
    if not name.isidentifier() or importlib.util.find_spec(name) is not None:
        raise ValueError(
            f"{name!r} is not a valid and unused name of a Python module; use letters, digits and _, as in my_{kind}."
        )
    target.mkdir(parents=True)
    files = [_write(source, target / place, kind, name) for place, source in _files_of(kind).items()]
    return sorted(files, key=lambda path: path.name != f"{name}.py")


def _files_of(kind: str) -> dict[str, Path]:
    """Return the source files of a kind of project, by their paths in the new folder."""
    files = {"README.md": _STARTERS / "README.md"}
    if kind == "loop":
        files["loop.py"] = _PACKAGE / "scripts/grpo.py"
        tasks = ("task/addition.yaml", "task/gsm8k.yaml")
        for part in ("grpo.yaml", "common.yaml", *tasks, "hardware/cpu.yaml", "hardware/gpu1.yaml"):
            files[f"config/{part}"] = _PACKAGE / "config" / part
    else:
        files["conftest.py"] = _STARTERS / "conftest.py"
    return files | {path.name: path for path in (_STARTERS / kind).iterdir() if path.is_file()}


def _write(source: Path, path: Path, kind: str, name: str) -> Path:
    """Copy a file; the project's name replaces the kind in imports and in the file's name, and NAME in the README."""
    text = source.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = text.replace("NAME", name)
    text = re.sub(rf"^from {kind} import", f"from {name} import", text, flags=re.MULTILINE)
    if source.name == "grpo.py":
        text = text.replace("../config/grpo.yaml", "config/grpo.yaml")
    path = path.with_name(re.sub(rf"^(test_)?{kind}\.", rf"\g<1>{name}.", path.name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
