"""Packages that are built and installed as people's are, into a folder that a test puts on `sys.path`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution of one module."""

    name: str
    module: str
    source: str
    environments: Mapping[str, str] = field(default_factory=dict)
    """Entry points of `llmrl.environments`."""

    def write(self, folder: Path) -> Path:
        """Write the source; return its folder."""
        root = folder / self.name
        root.mkdir(parents=True)
        (root / f"{self.module}.py").write_text(self.source)
        points = "".join(f'{name} = "{value}"\n' for name, value in self.environments.items())
        (root / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "{self.name}"\nversion = "0.3"\n[tool.setuptools]\npy-modules = ["{self.module}"]\n'
            f'[project.entry-points."llmrl.environments"]\n{points}'
        )
        return root


def install(packages: list[Package], folder: Path) -> Path:
    """Build wheels and install them; return the folder that holds them."""
    sources = [str(package.write(folder / "sources")) for package in packages]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    target = folder / "installed"
    words = [*pip, "--no-deps", "--no-build-isolation", "--no-cache-dir", "--target", str(target), *sources]
    subprocess.run(words, check=True)
    return target
