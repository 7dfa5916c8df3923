"""Packs the GPU kit for a machine without a network: `python tools/gpu/pack.py FOLDER`; see README.md beside it.

The folder contains llmrl, this kit, and wheels of the packages that the machine lacks. The machine must have torch,
transformers and their requirements, in any version: the wheels are installed separately, without dependencies.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import recipe_settings

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ("causal_types", "engine_checkpoints", "engine_halves", "warm_processes", "weight_sync_tools")
COPIED = ("llmrl", "tools/gpu", *(f"test/helpers/{name}.py" for name in HELPERS), "pyproject.toml", "LICENSE")
WHEELS = ("tensordict", "torchrl", "pyvers", "orjson", "importlib_metadata", "zipp", "cloudpickle", "packaging")
"""Packages to include, in the installed versions; their dependencies are in the list or come with torch."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 24, 17)] + ["manylinux2014_x86_64", "any"]
PART_BYTES = 60_000_000
START = """#!/bin/sh
# Installs the wheels into the folder `site`, and runs the kit.
cd "$(dirname "$0")" || exit
for first in wheels/*.part-000; do
    [ -e "$first" ] && cat "${first%-000}"-* > "${first%.part-000}" && rm "${first%-000}"-*
done
python3 -m pip install --quiet --no-index --no-deps --upgrade --target site wheels/*.whl || exit
PYTHONPATH="$PWD/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" exec python3 tools/gpu/run.py "$@"
"""


def liger() -> str:
    """Return the requirement of liger-kernel in the extra `gpu`, which is not installed on a machine without a GPU."""
    found = re.search(r'"(liger-kernel)>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return f"{found[1]}=={found[2]}"


def requirements() -> list[str]:
    return [f"{name}=={version(name)}" for name in WHEELS] + [liger()]


def copy_sources(folder: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    (folder / "tools/gpu" / recipe_settings.FILE.name).write_text(json.dumps(recipe_settings.composed()))
    start = folder / "start.sh"
    start.write_text(START)
    start.chmod(0o755)


def download_wheels(folder: Path, python_version: str, wanted: list[str], *options: str) -> None:
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, "--only-binary=:all:", "--implementation",
         "cp", "--python-version", python_version, *platforms, "--dest", str(folder / "wheels"), *wanted],
        check=True,
    )  # fmt: skip


def split(folder: Path, num_bytes: int = PART_BYTES) -> None:
    """Split files of more than `num_bytes` into parts, which `start.sh` joins."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > num_bytes:
            with path.open("rb") as file:
                for number, part in enumerate(iter(lambda file=file: file.read(num_bytes), b"")):
                    path.with_name(f"{path.name}.part-{number:03}").write_bytes(part)
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine")
    parser.add_argument(
        "--no-wheels", action="store_true", help="pack only the sources, for a machine that has the packages"
    )
    parser.add_argument("--vllm", action="store_true", help="also pack vLLM with its dependencies")
    given = parser.parse_args()
    copy_sources(given.folder)
    if not given.no_wheels:
        download_wheels(given.folder, given.python, requirements(), "--no-deps")
    if given.vllm:
        download_wheels(given.folder, given.python, [f"vllm=={version('vllm').partition('+')[0]}"])
    split(given.folder)
    sizes = {path.name: path.stat().st_size for path in given.folder.rglob("*") if path.is_file()}
    print(json.dumps({"folder": str(given.folder), "num_files": len(sizes), "megabytes": sum(sizes.values()) / 1e6}))


if __name__ == "__main__":
    main()
