"""The house rules that a program can check: who imports whom, what is imported when, how long files are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrl.engines.vllm.private import _MODULES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "llmrl").rglob("*.py"))
MAX_LINES = 500
# Uses of `Any` in a thousand lines, by room: these bounds only fall.
MAX_ANY = {
    "_utils": 3, "audit": 0, "cli": 1, "collectors": 3, "config": 5, "data": 6, "endpoint": 0, "engines": 4,
    "envs": 3, "objectives": 3, "policies": 4, "recipes": 0, "rendering": 2, "replay": 3, "rewards": 1, "runs": 5,
    "sandbox": 3, "scripts": 5, "testing": 1, "tools": 3, "torchrl": 2, "trainer": 3, "transforms": 1, "viewer": 5,
    "watch": 5, "weight_sync": 2,
}  # fmt: skip
# What every room may use: it knows nothing of ours.
COMMON = "_utils"
# Imported inside the function or class that uses them.
LAZY = {
    "accelerate", "datasets", "daytona", "e2b", "gguf", "hydra", "matplotlib", "mcp", "mlflow", "modal",
    "omegaconf", "opentelemetry", "playwright", "ray", "reasoning_gym", "tensorboard", "trackio", "transformers",
    "vllm", "wandb",
}  # fmt: skip
VLLM_NAMES = "llmrl.engines.vllm.private"


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "llmrl").parts
    return parts[0] if len(parts) > 1 else "*.py"


def rooms_table() -> dict[str, set[str]]:
    """Room -> the rooms it may import, read from the table in docs/design.md."""
    allowed: dict[str, set[str]] = {}
    rows = re.findall(
        r"^\| `llmrl/([\w*.]+)/?` \|.*\| ([^|]+) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE
    )
    for room, cell in rows:
        if cell == "nothing of ours":
            allowed[room] = set()
        elif cell == "all above":
            allowed[room] = set(allowed)
        else:
            allowed[room] = set(cell.split(", "))
    return allowed


def imported_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module or member imported anywhere in a file, functions included, as a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def imported_at_load(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Modules imported when the file is: not in functions, not for type checkers only."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_at_load(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from imported_at_load(getattr(node, field, None) or [])
            for handler in getattr(node, "handlers", []):
                yield from imported_at_load(handler.body)


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_the_rooms_table_names_every_package():
    packages = {path.parent.name for path in (ROOT / "llmrl").glob("*/__init__.py")}
    assert packages and packages == set(rooms_table())
    assert {path.name for path in (ROOT / "llmrl").glob("*.py")} == {"__init__.py", "__main__.py"}


def test_only_the_rooms_of_a_run_may_import_everything():
    cells = re.findall(r"^\| `llmrl/(\w+)/` \|.*\| all above \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert cells == ["watch", "config", "runs", "scripts", "viewer", "replay", "audit", "recipes", "cli"]


@pytest.mark.slow
def test_imports_point_up_the_rooms_table():
    table, broken = rooms_table(), []
    for path in SOURCES:
        if (room := room_of(path)) == "*.py":
            continue
        tree = ast.parse(path.read_text())
        # A package may hand on names from below, which type checkers see and which it imports when asked for.
        names = imported_at_load(tree.body) if path.name == "__init__.py" else imported_names(tree)
        for name, line in names:
            where = f"{path.relative_to(ROOT)}:{line}"
            if name.startswith("."):
                broken.append(f"{where} imports {name} relatively; write the whole name")
            if not name.startswith("llmrl."):
                continue
            target = name.split(".")[1]
            if target in (COMMON, "__version__"):
                continue
            if target != room and target not in table[room]:
                broken.append(f"{where} imports {name}, but {room} may import only {sorted(table[room])}")
    assert not broken, "\n".join(broken)


def defining_module(module: str, name: str, modules: dict[str, Path]) -> str:
    """The file that defines what is imported by name: a package's `__init__` only hands it on."""
    if f"{module}.{name}" in modules:
        return f"{module}.{name}"
    if module in modules and modules[module].name == "__init__.py":
        for node in ast.parse(modules[module].read_text()).body:
            if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
                return defining_module(node.module or "", name, modules)
    return module


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of names that reach each other, once what lies on no circle is taken away."""
    left = {name: set(targets) for name, targets in edges.items()}
    while True:
        targets = set().union(*left.values()) if left else set()
        loose = [name for name, out in left.items() if not out & left.keys() or name not in targets]
        if not loose:
            return [set(left)] if left else []
        for name in loose:
            del left[name]


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    # Imports inside functions and for type checkers count, too: a circle is one wherever it is closed.
    modules = {module_of(path): path for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        if path.name == "__init__.py":
            continue
        edges[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmrl."):
                names = {defining_module(node.module or "", alias.name, modules) for alias in node.names}
                edges[module] |= names - {module}
    assert len(edges) > 100 and circles(edges) == []


def test_the_circle_check_finds_circles():
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_the_import_check_sees_imports_inside_functions():
    tree = ast.parse("def f():\n    from llmrl.envs import ChatEnv\n")
    assert list(imported_names(tree)) == [("llmrl.envs.ChatEnv", 2)]
    assert list(imported_at_load(tree.body)) == []


@pytest.mark.slow
def test_nothing_of_ours_builds_on_torchrls_llm_modules():
    broken = []
    for path in SOURCES:
        for name, line in imported_names(ast.parse(path.read_text())):
            if name.startswith("torchrl.") and "llm" in name.split("."):
                broken.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_one_file_knows_vllm_beyond_its_top_level_names():
    inner = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if module_of(path) != VLLM_NAMES
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("vllm.") for alias in node.names))
    ]
    assert not inner, f"import from {VLLM_NAMES} instead: {inner}"


@pytest.mark.slow
def test_optional_packages_are_imported_where_they_are_used():
    # A module may subclass an optional package's classes if only modules that do so too load it along with themselves.
    loads = {module_of(path): dict(imported_at_load(ast.parse(path.read_text()).body)) for path in SOURCES}
    optional = {
        module: {
            name: line
            for name, line in names.items()
            # Names that this module hands on are looked for in vLLM when they are asked for.
            if name.split(".")[0] in LAZY or name.removeprefix(f"{VLLM_NAMES}.") in _MODULES
        }
        for module, names in loads.items()
    }
    broken = []
    for module, names in optional.items():
        loaders = [loader for loader, loaded in loads.items() if module in loaded and not optional[loader]]
        is_package = any(path.name == "__init__.py" and module_of(path) == module for path in SOURCES)
        if names and (loaders or is_package):
            broken.append(f"{module} imports {names} when it is loaded, and {loaders or 'its package'} loads it")
    assert not broken, "\n".join(broken)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.slow
def test_modules_have_a_docstring_and_postponed_annotations():
    broken = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            broken.append(f"{path.relative_to(ROOT)} has no docstring")
        if path.name != "__init__.py" and "from __future__ import annotations" not in path.read_text():
            broken.append(f"{path.relative_to(ROOT)} lacks `from __future__ import annotations`")
    assert not broken, "\n".join(broken)


def uses_of_any(path: Path) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(path.read_text())))


def test_a_modules_logger_has_its_name():
    made = {}
    for path in (ROOT / "llmrl").rglob("*.py"):
        for line in path.read_text().splitlines():
            if line[:1].strip() and "getLogger(" in line:  # at the top of the module
                made[path] = line
    assert made and set(made.values()) == {"logger = logging.getLogger(__name__)"}


@pytest.mark.slow
def test_annotations_say_more_than_any():
    lines, uses = Counter(), Counter()
    for path in SOURCES:
        lines[room_of(path)] += len(path.read_text().splitlines())
        uses[room_of(path)] += uses_of_any(path)
    per_thousand = {room: 1000 * uses[room] / lines[room] for room in lines if room != "*.py"}
    assert per_thousand.keys() == MAX_ANY.keys()
    above = {room: round(share, 1) for room, share in per_thousand.items() if share > MAX_ANY[room]}
    assert not above, f"uses of Any in 1000 lines; name the type, or take `object`: {above}"


def test_the_count_of_any_leaves_imports_and_strings_out(tmp_path):
    source = tmp_path / "module.py"
    source.write_text("from typing import Any\n'Any'\ndef f(a: Any, b: dict[str, Any]) -> object: ...\n")
    assert uses_of_any(source) == 2


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines; one idea a file: {long}"


def test_nothing_names_the_machine_it_was_made_on():
    # In pieces, so that this file does not hold what it forbids.
    words = ["/" + "work/", "/" + "tmp/exp", "/" + "opt/", "/" + "root/", "DESIGN" + ".md", "pyenv"]
    broken = []
    for path in tracked_files():
        if path == Path(__file__) or path.suffix in {".png", ".gz", ".safetensors"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            broken += [f"{path.relative_to(ROOT)}:{number} says {word!r}" for word in words if word in line]
    assert not broken, "\n".join(broken)


def test_top_level_names_are_the_ones_that_type_checkers_see():
    import llmrl

    tree = ast.parse((ROOT / "llmrl/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == llmrl._EXPORTS
    assert sorted(llmrl.__all__) == sorted([*llmrl._EXPORTS, "__version__"])
    for name in llmrl.__all__:
        assert getattr(llmrl, name) is not None and name in dir(llmrl)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        llmrl.no_such_name  # noqa: B018


def test_importing_llmrl_imports_no_engine():
    code = (
        "import sys, llmrl; heavy = [n for n in sys.modules if n.split('.')[0] in ('vllm', 'ray', 'torch')"
        " or n.startswith('transformers.models')]; print(heavy[:5]); sys.exit(bool(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_package_imports_without_vllm_ray_and_transformers(own_programs):
    packages = sorted({f"llmrl.{path.parent.name}" for path in (ROOT / "llmrl").glob("*/__init__.py")})
    # torchrl's own parts are imported first: its `envs` imports ray where that is installed, which llmrl cannot change.
    code = (
        "import sys, importlib, torchrl.data, torchrl.envs, torchrl.objectives; before = set(sys.modules);"
        f" [importlib.import_module(n) for n in {packages!r}];"
        " heavy = [n for n in set(sys.modules) - before if n.split('.')[0] in ('vllm', 'ray', 'transformers')];"
        " print(sorted(heavy)[:5]); sys.exit(bool(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_workers_end_needs_torch_and_vllm_only(own_programs):
    """A vLLM in an environment of its own has none of what the trainer needs."""
    code = (
        "import sys; import torch; from_torch = set(sys.modules);"
        " import llmrl.weight_sync.plugin, llmrl.engines.vllm.arguments, llmrl.weight_sync.buffers,"
        " llmrl.weight_sync.double_buffer, llmrl.weight_sync.gloo, llmrl.weight_sync.deadline;"
        " print(*{name.split('.')[0] for name in set(sys.modules) - from_torch} - set(sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) - {"numpy"} == {"llmrl"}  # torch imports numpy, with some builds later than here
