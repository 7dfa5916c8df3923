"""Play an agent in each of other people's frameworks, and compare what the engine sampled with what is trained.

    python test/helpers/agent_frameworks.py FOLDER [NAME ...] [--install] [--jobs N]

Each framework has an environment of its own in FOLDER, which `--install` makes. The engine is scripted. A line is
printed for each framework: version, modes that ran, answers, and how many of these are missing in the rows or there
more than once. Answers of `policy:aside` count as neither.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent_framework_programs import FRAMEWORKS, Framework
from agent_framework_scripts import HEADER, JAVASCRIPT_HEADER
from endpoint_agents import LoggingEngine, trained_spans
from rendering_families import family_renderer

from llmrl.collectors import LLMCollector
from llmrl.envs import AgentEnv, command
from llmrl.policies import LLMWrapperBase
from llmrl.testing.embedded_model import ensure_embedded_model

QUERY = "What is 7 + 8?"


def folder_of(folder: Path, name: str) -> Path:
    return folder / re.sub(r"\W+", "-", name.lower()).strip("-")


def install(framework: Framework, place: Path) -> None:
    """Make the environment of a framework."""
    is_node = (
        framework.kind == "node" or framework.packages[0].startswith("@") or framework.packages[0] == "opencode-ai"
    )
    place.mkdir(parents=True, exist_ok=True)
    if is_node:
        subprocess.run(["npm", "init", "-y"], cwd=place, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["npm", "install", "--silent", "--no-audit", *framework.packages], cwd=place, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin/python", "-m", "pip", "install", "-q", *framework.packages], check=True)


def version_of(framework: Framework, place: Path) -> str:
    package = framework.packages[0]
    modules = place / "node_modules"
    if modules.is_dir():
        return json.loads((modules / package / "package.json").read_text())["version"]
    name = package.partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([place / "bin/python", "-c", code], capture_output=True, text=True).stdout.strip()


def program_of(framework: Framework, place: Path, mode: str) -> tuple[str, dict[str, str]]:
    """The command line that plays a mode, and its files."""
    if framework.kind == "python":
        return f"{place}/bin/python agent.py {{query}} {shlex.quote(mode)}", {"agent.py": HEADER + framework.source}
    if framework.kind == "node":  # modules are found beside the program
        script = place / "agent.mjs"
        script.write_text(JAVASCRIPT_HEADER + framework.source)
        return f"node {script} {{query}} {shlex.quote(mode)}", {}
    programs = place / "node_modules/.bin" if (place / "node_modules").is_dir() else place / "bin"
    return f"bash agent.sh {{query}} {shlex.quote(mode)}", {"agent.sh": f"BIN={programs}\n{framework.source}"}


def play(framework: Framework, place: Path, mode: str, model_path: str) -> tuple[Counter, str]:
    """Counts of answers that were sampled, trained, missing and extra; and what went wrong, if anything did."""
    renderer = family_renderer(model_path, "qwen25")
    called = f'<tool_call>\n{{"name": "{framework.call}", "arguments": {framework.arguments}}}\n</tool_call><|im_end|>'

    def answer(prompt_ids: list[int]) -> str:
        is_called = "<tool_response>" in renderer.decode(prompt_ids)
        if "tools" in mode.split() and not is_called:
            return called
        return ('{"answer": 15}' if "schema" in mode.split() else framework.final) + "<|im_end|>"

    # Tokens come one after the other, so that streams are read early.
    engine = LoggingEngine(answer, encode=renderer.encode, decode=renderer.decode, latency_s=0.2, max_model_len=200_000)
    text, files = program_of(framework, place, mode)
    env = dict(framework.env)
    agent = command(
        text, files=files, env=env, timeout_seconds=180, score=lambda row, result: float("15" in result.output)
    )
    env_of_agents = AgentEnv(agent, [{"query": QUERY}])
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(env_of_agents, policy=policy, groups_per_batch=1) as collector:
        (rollout,) = collector.play(1)
    log = Counter(engine.log)
    spans = trained_spans(rollout.conversation.reconcile()) if rollout.conversation.turns else Counter()
    requests = rollout.info.get("requests", {})
    num_aside = requests.get("num_aside", 0)
    counts = Counter(
        answers=log.total() - num_aside,
        asides=num_aside,
        missing=(log - spans).total() - num_aside,
        extra=(spans - log).total(),
    )
    is_right = rollout.reward == 1 and counts["answers"] > 0
    why = (
        ""
        if is_right
        else f"{rollout.status.name} {rollout.reward} {requests} {rollout.info.get('output', '')[-1500:]}"
    )
    return counts, why


def count(name: str, place: Path, model_path: str) -> Counter:
    """Play all modes of a framework, and print a line."""
    framework = FRAMEWORKS[name]
    done, counts = [], Counter()
    for mode in framework.modes:
        one, why = play(framework, place, mode, model_path)
        if why:
            print(f"FAILED {name}, {mode}: {why}", flush=True)
            continue
        done.append(mode)
        counts += one
        counts["runs"] += 1
    numbers = " ".join(f"{key}={counts[key]}" for key in ("runs", "answers", "missing", "extra", "asides"))
    print(f"{name} {version_of(framework, place)} | {', '.join(done)} | {numbers}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    model_path = str(ensure_embedded_model())
    family_renderer(model_path, "qwen25")  # threads must not import transformers at once
    places = {name: folder_of(options.folder.absolute(), name) for name in options.names or FRAMEWORKS}
    for name, place in places.items():
        if options.install and not place.exists():
            install(FRAMEWORKS[name], place)
    with ThreadPoolExecutor(options.jobs) as pool:
        counted = [pool.submit(count, name, place, model_path) for name, place in places.items() if place.exists()]
    total: Counter = Counter()
    for one in counted:
        total += one.result()
    print(dict(total))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        shutil.os.environ["TMPDIR"] = temporary
        main()
