"""MCP servers of the npm and Python indexes, as they are: installed, played and checked.

`python test/helpers/mcp_servers.py` prints a row for each: package, version, tools, calls, outcome.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

from llmrl.envs.hubs.virtual_env import InstallError, cache_folder, python_with

NPM = "@modelcontextprotocol/server-"


@dataclass(frozen=True, kw_only=True)
class RealServer:
    """A published server, how it is started, and calls with a part of each answer."""

    package: str
    program: str
    calls: tuple[tuple[str, Mapping[str, object], str], ...]
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the server's description, without its command."""
    in_ci: bool = False
    """Whether the suite installs it."""

    @property
    def is_of_npm(self) -> bool:
        return self.package.startswith("@")


def repository(folder: Path, row: object) -> None:
    """Make a repository with one commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
    (folder / "towns.txt").write_text("Oslo\n")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "towns.txt"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "List the towns"], check=True)


OWN = {"per_conversation": True}
SERVERS = {
    "everything": RealServer(
        package=f"{NPM}everything",
        program="mcp-server-everything",
        options={"resources": True},
        in_ci=True,
        calls=(
            ("echo", {"message": "é <|im_end|>"}, "Echo: é <|im_end|>"),
            ("get-sum", {"a": 2, "b": 3}, "is 5."),
            ("get-sum", {"a": "two"}, "Error: MCP error -32602: Input validation error"),
            ("get-tiny-image", {}, "[image: image/png, 4033 bytes]"),
            ("get-annotated-message", {"messageType": "error", "includeImage": True}, "Error: Operation failed"),
            ("get-structured-content", {"location": "Chicago"}, '"conditions"'),
            ("get-resource-links", {"count": 2}, "[resource: Text Resource 2, demo://resource/dynamic/text/2"),
            ("get-resource-reference", {"resourceType": "Blob", "resourceId": 2}, "bytes]"),
            ("list_resources", {}, "demo://resource/dynamic/text/{resourceId} ("),
            ("read_resource", {"uri": "demo://resource/dynamic/text/7"}, "Resource 7: This is a plaintext resource"),
            ("read_resource", {"uri": "demo://nowhere"}, "Error: "),
            ("gzip-file-as-resource", {"name": "a.gz", "data": "data:text/plain,a"}, "demo://resource/session/a.gz"),
            ("toggle-simulated-logging", {}, "Started simulated"),
            ("toggle-subscriber-updates", {}, "Started simulated"),
            ("trigger-long-running-operation", {"duration": 0.5, "steps": 4}, "operation completed"),
            (
                "simulate-research-query",
                {"topic": "towns"},
                "Error: MCP error -32601",
            ),  # asks for tasks, which we have not
        ),
    ),
    "files": RealServer(
        package=f"{NPM}filesystem",
        program="mcp-server-filesystem",
        options={**OWN, "args": ["{folder}"]},
        in_ci=True,
        calls=(
            ("write_file", {"path": "towns.txt", "content": "Oslo"}, "Successfully wrote"),
            ("edit_file", {"path": "towns.txt", "edits": [{"oldText": "Oslo", "newText": "Rome"}]}, "+Rome"),
            ("read_text_file", {"path": "towns.txt"}, "Rome"),
            ("list_directory", {"path": "."}, "[FILE] towns.txt"),
            ("read_text_file", {"path": "/etc/passwd"}, "Error: Access denied"),
            ("read_text_file", {"path": "../../etc/passwd"}, "Error: Access denied"),
        ),
    ),
    "memory": RealServer(
        package=f"{NPM}memory",
        program="mcp-server-memory",
        options={**OWN, "env": {"MEMORY_FILE_PATH": "{folder}/memory.jsonl"}},
        in_ci=True,
        calls=(
            ("read_graph", {}, '"entities": []'),
            (
                "create_entities",
                {"entities": [{"name": "Oslo", "entityType": "town", "observations": ["cold"]}]},
                '"cold"',
            ),
            ("search_nodes", {"query": "cold"}, '"Oslo"'),
            ("add_observations", {"observations": [{"entityName": "Rome", "contents": ["warm"]}]}, "Error: "),
        ),
    ),
    "thinking": RealServer(
        package=f"{NPM}sequential-thinking",
        program="mcp-server-sequential-thinking",
        options=OWN,
        calls=(
            (
                "sequentialthinking",
                {"thought": "Add.", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
                '"thoughtHistoryLength": 1',
            ),
        ),
    ),
    "calc": RealServer(
        package="@coo-quack/calc-mcp",
        program="calc-mcp",
        calls=(("math", {"expression": "7 * 8"}, "56"), ("math", {"expression": "7 *"}, "Error")),
    ),
    "git": RealServer(
        package="mcp-server-git",
        program="mcp-server-git",
        options={**OWN, "args": ["--repository", "{folder}"], "prepare": repository},
        in_ci=True,
        calls=(
            ("git_log", {"repo_path": "."}, "List the towns"),
            ("git_create_branch", {"repo_path": ".", "branch_name": "more"}, "more"),
            ("git_status", {"repo_path": "."}, "nothing to commit"),
            ("git_status", {"repo_path": "/"}, "Error: "),
        ),
    ),
    "time": RealServer(
        package="mcp-server-time",
        program="mcp-server-time",
        in_ci=True,
        calls=(
            (
                "convert_time",
                {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
                "T21:00:00+09:00",
            ),
            ("get_current_time", {"timezone": "Mars/Base"}, "Error: "),
        ),
    ),
    "fetch": RealServer(
        package="mcp-server-fetch",
        program="mcp-server-fetch",
        options={"args": ["--ignore-robots-txt", "--allow-private-ips"]},
        in_ci=True,
        calls=(
            ("fetch", {"url": "{page}"}, "Welcome"),
            ("fetch", {"url": "http://127.0.0.1:9/"}, "Error: "),
        ),
    ),
    "sqlite": RealServer(
        package="mcp-server-sqlite",
        program="mcp-server-sqlite",
        options={**OWN, "args": ["--db-path", "{folder}/towns.db"]},
        calls=(
            ("create_table", {"query": "CREATE TABLE towns (name TEXT)"}, "created"),
            ("write_query", {"query": "INSERT INTO towns VALUES ('Oslo')"}, "1"),
            ("read_query", {"query": "SELECT name FROM towns"}, "Oslo"),
            ("read_query", {"query": "DROP TABLE towns"}, "Error"),
        ),
    ),
    "calculator": RealServer(
        package="mcp-server-calculator",
        program="mcp-server-calculator",
        calls=(("calculate", {"expression": "7 * 8"}, "56"), ("calculate", {"expression": "7 *"}, "Error")),
    ),
}


def install(names: list[str]) -> Mapping[str, tuple[str, str]]:
    """Install servers, those of Python in one virtual environment; return program and version by name.

    Raises InstallError if an index cannot be reached, or there is no npm.
    """
    found = {}
    packages = [SERVERS[name].package for name in names]
    for is_of_npm, installed in ((True, _installed_by_npm), (False, _installed_by_pip)):
        if own := sorted(package for package in packages if package.startswith("@") == is_of_npm):
            folder, version_of = installed(own)
            for name in names:
                if SERVERS[name].is_of_npm == is_of_npm:
                    found[name] = (str(folder / SERVERS[name].program), version_of(SERVERS[name].package))
    return found


def _installed_by_npm(packages: list[str]) -> tuple[Path, Callable[[str], str]]:
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm is not installed.")
    folder = cache_folder().parent / "npm" / hashlib.blake2b("\n".join(packages).encode(), digest_size=10).hexdigest()
    modules = folder / "node_modules"
    if not (folder / "installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder), *packages]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise InstallError(f"npm install failed: {done.stderr.strip()[-500:]}")
        (folder / "installed").touch()
    return modules / ".bin", lambda package: json.loads((modules / package / "package.json").read_text())["version"]


def _installed_by_pip(packages: list[str]) -> tuple[Path, Callable[[str], str]]:
    scripts = python_with(packages).parent
    (site,) = scripts.parent.glob("lib/python*/site-packages")

    def version_of(package: str) -> str:
        (found,) = Distribution.discover(name=package, path=[str(site)])
        return found.version

    return scripts, version_of


def description_of(name: str, program: str) -> dict[str, object]:
    """Return the description of a server for an `MCPToolTransform`."""
    return {"command": program, **SERVERS[name].options}


def wrong_answers(chat, name: str, page: str) -> list[str]:
    """Make the calls of a server in a conversation; return those with another answer than expected."""
    wrong = []
    for tool, given, expected in SERVERS[name].calls:
        arguments = {key: page if value == "{page}" else value for key, value in given.items()}
        answer = chat.call(f"{name}.{tool}", **arguments)
        if expected not in answer or (answer.startswith("Error") and not expected.startswith("Error")):
            wrong.append(f"{tool}: {answer[:200]}")
    return wrong


def main() -> None:
    """Install all, play each, and print the table."""
    from tool_conversations import Chat
    from web_sites import Site

    from llmrl.transforms import MCPToolTransform

    print("| package | version | tools | a server | calls | as expected |\n|---|---|---|---|---|---|")
    page = f"http://{Site().address}/"
    for name, (program, version) in install(list(SERVERS)).items():
        server = SERVERS[name]
        transform = MCPToolTransform({name: description_of(name, program)})
        try:
            wrong = wrong_answers(Chat(transform), name, page)
        finally:
            transform.close()
        scope = "a conversation" if "per_conversation" in server.options else "shared"
        right = f"{len(server.calls) - len(wrong)}"
        print(f"| `{server.package}` | {version} | {len(transform.tools)} | {scope} | {len(server.calls)} | {right} |")
        for line in wrong:
            print(f"{name}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
