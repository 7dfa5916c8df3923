"""The description for an index: the README, with links that work elsewhere. All else is in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE_URL = os.environ.get("SOURCE_URL", "").rstrip("/")
"""Address of the repository, such as https://github.com/OWNER/llmrl; without it relative links become their words."""


def described(readme: str, version: str) -> str:
    """Return the README with absolute links to files of this version."""

    def replaced(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        if not SOURCE_URL:
            return "" if mark else words
        place = f"README.md{target}" if target.startswith("#") else target
        return f"{mark}[{words}]({SOURCE_URL}/{'raw' if mark else 'blob'}/v{version}/{place})"

    return re.sub(r"(!?)\[([^\[\]]*)\]\((?!https?:)([^)\s]+)\)", replaced, readme)


version = re.search(r'^__version__ = "(.+)"', (ROOT / "llmrl/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
setup(
    long_description=described((ROOT / "README.md").read_text(encoding="utf-8"), version),
    long_description_content_type="text/markdown",
)
