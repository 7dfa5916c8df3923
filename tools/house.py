"""Count what makes the library large or hard to read: `python tools/house.py [--list WHAT]`.

Prints one table: size, options without users, wording, density, tests that reach into private state, imports between
packages. `--list WHAT` prints the places that a row counts; `--root DIR` counts another checkout, such as an older
commit.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

# Words that replace a precise noun or verb.
ODD_WORDS = re.compile(
    r"\b(?:whoever|nobody|somebody|is told|are told|mends?|mended|whose|hears?|falls? between|is good no more|"
    r"cannot be had|there (?:is|are) none of)\b",
    re.IGNORECASE,
)
GENITIVE_ARGUMENT = re.compile(r"^\s+\w+(?:, \w+)*: of ")
GENITIVE_HELP = re.compile(r"help=[\"'](?:Of|Where a|By which|What is)\b")
TEXT_FOLDERS = ("llmrl", "docs", "sota-implementations", "examples", "test", "benchmarks", "tools")
MAX_LINES = 500
MAX_FILES = 20


class House:
    """A checkout, read once.

    Args:
        root: folder of the checkout.
    """

    def __init__(self, root: Path):
        self.root = root
        self.sources = {path: path.read_text() for path in sorted((root / "llmrl").rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.sources.items()}

    @property
    def num_lines(self) -> int:
        """Number of lines of the library."""
        return sum(len(text.splitlines()) for text in self.sources.values())

    def place(self, path: Path, line: int) -> str:
        """Return `file:line` below the root."""
        return f"{path.relative_to(self.root)}:{line}"

    def nodes(self, *kinds: type) -> Iterator[tuple[Path, ast.AST]]:
        """Yield every node of these kinds in the library."""
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, kinds):
                    yield path, node

    def long_files(self) -> list[str]:
        """Return files of more than 500 lines."""
        return [self.place(path, 1) for path, text in self.sources.items() if len(text.splitlines()) > MAX_LINES]

    def full_folders(self) -> list[str]:
        """Return folders of more than 20 Python files."""
        files = Counter(path.parent for path in self.sources if path.name != "__init__.py")
        return [f"{self.place(path, 0)[:-2]} ({number})" for path, number in files.items() if number > MAX_FILES]

    def public_names(self) -> list[str]:
        """Return the names in `__all__` of all packages."""
        names = set()
        for tree in self.trees.values():
            for node in tree.body:
                if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
                    names.update(e.value for e in ast.walk(node.value) if isinstance(e, ast.Constant))
        return sorted(map(str, names))

    @cached_property
    def words_of_users(self) -> set[str]:
        """Words by which an option may be used outside the tests: keywords of calls, and words of documents."""
        words: set[str] = set()
        for folder in ("llmrl", "sota-implementations", "examples", "benchmarks", "tools"):
            for path in (self.root / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.keyword) and node.arg:
                        words.add(node.arg)
        documents = [*self.root.glob("*.md"), *(self.root / "docs").rglob("*.md")]
        documents += [*(self.root / "sota-implementations").rglob("*.yaml")]
        documents += [*(self.root / "sota-implementations").rglob("*.md")]
        for path in documents:
            words.update(re.findall(r"\w+", path.read_text()))
        return words

    def options_without_users(self) -> list[str]:
        """Return keyword-only options that no call, configuration or document outside the tests uses."""
        found = []
        for path, node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if node.name.startswith("_") and node.name != "__init__":
                continue
            found += [
                f"{self.place(path, node.lineno)} {argument.arg}"
                for argument in node.args.kwonlyargs
                if argument.arg not in self.words_of_users
            ]
        return found

    def wide_signatures(self) -> list[str]:
        """Return functions of more than 12 arguments."""
        found = []
        for path, node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            number = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            if number > 12:
                found.append(f"{self.place(path, node.lineno)} {node.name} ({number})")
        return found

    def lines_like(self, pattern: re.Pattern[str], folders: tuple[str, ...]) -> list[str]:
        """Return the places in Python, Markdown and YAML files of these folders that match, one for each match."""
        found = []
        paths = [path for folder in folders for path in sorted((self.root / folder).rglob("*"))]
        for path in [*paths, *self.root.glob("*.md")]:
            if path.suffix in (".py", ".md", ".yaml") and path.name not in ("CHANGELOG.md", "house.py"):
                for number, line in enumerate(path.read_text().splitlines(), start=1):
                    found += [f"{self.place(path, number)} {line.strip()}" for _ in pattern.finditer(line)]
        return found

    def long_docstrings(self) -> list[str]:
        """Return functions whose docstring has more lines than their body."""
        found = []
        for path, node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if ast.get_docstring(node) and len(node.body) > 1:
                text, first, last = node.body[0], node.body[1], node.body[-1]
                of_text = (text.end_lineno or 0) - text.lineno + 1
                of_body = (last.end_lineno or 0) - first.lineno + 1
                if of_text > of_body and of_text > 1:
                    found.append(f"{self.place(path, node.lineno)} {node.name}")
        return found

    def tuple_assignments(self) -> list[str]:
        """Return assignments of several attributes, or of several values, in one statement."""
        found = []
        for path, node in self.nodes(ast.Assign):
            assert isinstance(node, ast.Assign)
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                found.append(self.place(path, node.lineno))
        return found

    def long_lines(self) -> list[str]:
        """Return lines of more than 100 characters."""
        return [
            self.place(path, number)
            for path, text in self.sources.items()
            for number, line in enumerate(text.splitlines(), start=1)
            if len(line) > 100
        ]

    def ternaries(self) -> list[str]:
        """Return conditional expressions."""
        return [self.place(path, node.lineno) for path, node in self.nodes(ast.IfExp)]  # type: ignore[attr-defined]

    def private_reaches(self) -> list[str]:
        """Return places in the tests that use a private attribute of an object, or import a private name of llmrl.

        Private names of other modules (`os._exit`, `torch._dynamo`) are not counted.
        """
        found = []
        for path in sorted((self.root / "test").rglob("*.py")):
            tree = ast.parse(path.read_text())
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            modules = {(name.asname or name.name).partition(".")[0] for node in imports for name in node.names}
            ours = {
                name.asname or name.name
                for node in imports
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmrl")
                for name in node.names
            }
            for node in ast.walk(tree):
                names = []
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmrl"):
                    names = [name.name for name in node.names]
                owner = getattr(getattr(node, "value", None), "id", "")
                if isinstance(node, ast.Attribute) and owner not in {"self", "cls"} | (modules - ours - {"llmrl"}):
                    names = [node.attr]
                found += [f"{self.place(path, node.lineno)} {name}" for name in names if re.match(r"_[a-z]", name)]
        return found

    def import_arrows(self) -> list[str]:
        """Return the pairs of packages in which the first imports the second."""
        arrows = set()
        for path, node in self.nodes(ast.ImportFrom):
            assert isinstance(node, ast.ImportFrom)
            here = path.relative_to(self.root / "llmrl").parts[0]
            match = re.match(r"llmrl\.(\w+)", node.module or "")
            if match and match[1] != here:
                arrows.add(f"{here} -> {match[1]}")
        return sorted(arrows)


def counts(house: House) -> dict[str, Callable[[], list[str]]]:
    """Return each row's name and the function that lists its places."""
    return {
        "files over 500 lines": house.long_files,
        "folders over 20 files": house.full_folders,
        "public names": house.public_names,
        "options without users": house.options_without_users,
        "functions of over 12 arguments": house.wide_signatures,
        "docstrings longer than the body": house.long_docstrings,
        "arguments that begin with 'of'": lambda: house.lines_like(GENITIVE_ARGUMENT, ("llmrl",)),
        "odd words": lambda: house.lines_like(ODD_WORDS, TEXT_FOLDERS),
        "help texts without a subject": lambda: house.lines_like(GENITIVE_HELP, ("llmrl",)),
        "tuple assignments": house.tuple_assignments,
        "lines over 100 characters": house.long_lines,
        "conditional expressions": house.ternaries,
        "reaches into private state": house.private_reaches,
        "imports between packages": house.import_arrows,
    }


def main() -> None:
    """Print the table, or the places of one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", dest="row", help="Print the places that one row counts.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="Checkout to count.")
    arguments = parser.parse_args()
    house = House(arguments.root)
    rows = counts(house)
    if arguments.row:
        if arguments.row not in rows:
            parser.error(f"--list {arguments.row!r} is not a row; the rows are: {', '.join(rows)}")
        print(*rows[arguments.row](), sep="\n")
        return
    print(f"{'lines':36}{house.num_lines:>8}")
    print(f"{'files':36}{len(house.sources):>8}")
    for name, places in rows.items():
        number = len(places())
        print(f"{name:36}{number:>8}{1000 * number / house.num_lines:>10.1f} per 1,000 lines")


if __name__ == "__main__":
    main()
