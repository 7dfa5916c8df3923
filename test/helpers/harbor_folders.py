"""Tasks in the forms of Harbor and terminal-bench, written into folders: what `harbor task init` makes, filled in."""

from __future__ import annotations

import tomllib
from pathlib import Path

TOML = """schema_version = "1.4"
artifacts = {artifacts}

[task]
name = "towns/{name}"
version = "1.0.0"

[verifier]
timeout_sec = {verifier_seconds}
environment_mode = "{mode}"
{verifier}

[verifier.env]
EXPECTED = "${{LLMRL_TEST_TOWN:-Oslo}}"

[agent]
timeout_sec = {agent_seconds}

[environment]
network_mode = "public"
os = "linux"
{environment}

[environment.env]
LEVEL = "easy"

[solution.env]
TOWN = "Oslo"
"""
DOCKERFILE = """FROM ubuntu:24.04

# Files that the agent finds.
COPY towns.txt ./data/
WORKDIR /app
COPY towns.txt .
"""
TEST = """#!/bin/bash
if [ "$(cat answer.txt 2>/dev/null)" = "$EXPECTED" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SOLVE = '#!/bin/bash\ngrep "$TOWN" towns.txt > answer.txt\n'
PYTEST = """import os

def test_answer():
    assert os.getcwd() != "/" and open("/app/answer.txt").read().strip() == "Oslo"

def test_nothing_else():
    assert True
"""


def write(path: Path, text: str, *, is_program: bool = False) -> None:
    """Write a file, and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if is_program:
        path.chmod(0o755)


def harbor_task(
    folder: Path,
    name: str,
    *,
    test: str = TEST,
    solve: str | None = SOLVE,
    dockerfile: str | None = DOCKERFILE,
    tests_dockerfile: str | None = None,
    instruction: str = "Write the name of the northern town, one of towns.txt, into answer.txt.",
    mode: str = "shared",
    artifacts: str = "[]",
    agent_seconds: float = 60.0,
    verifier_seconds: float = 60.0,
    verifier: str = "",
    environment: str = "",
) -> Path:
    """Write a task of Harbor, and return its folder."""
    root = folder / name
    toml = TOML.format(**locals())
    tomllib.loads(toml)
    write(root / "task.toml", toml)
    write(root / "instruction.md", instruction)
    write(root / "environment" / "towns.txt", "Rome\nOslo\n")
    write(root / "tests" / "test.sh", test)
    if dockerfile is not None:
        write(root / "environment" / "Dockerfile", dockerfile)
    if tests_dockerfile is not None:
        write(root / "tests" / "Dockerfile", tests_dockerfile)
    if solve is not None:
        write(root / "solution" / "solve.sh", solve)
    return root


def terminal_bench_task(folder: Path, name: str, *, run_tests: str = "pytest $TEST_DIR/test_outputs.py -rA\n") -> Path:
    """Write a task of terminal-bench, and return its folder."""
    root = folder / name
    write(root / "task.yaml", "instruction: |-\n  Write Oslo into answer.txt.\ndifficulty: easy\nparser_name: pytest\n")
    write(root / "Dockerfile", "FROM python:3.11-slim\nWORKDIR /app\n")
    write(root / "run-tests.sh", f"#!/bin/bash\n{run_tests}")
    write(root / "tests" / "test_outputs.py", PYTEST)
    write(root / "solution.sh", "#!/bin/bash\necho Oslo > answer.txt\n")
    return root
