"""A pytest plugin: the hub's names are local, and the outcome of each case goes to a file."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from llmrl.testing import make_tiny_model

_NAME = re.compile(r"""["']([\w.-]+/[\w.-]*\d[\w.-]*|[Gg][Pp][Tt]2)["']""")
_GSM8K = [
    ("Natalia sold clips to 48 of her friends in April, and half as many in May. How many in all?", "48 / 2 = 24", 72),
    ("Mary saw 3 balls of 8 snakes and 6 pairs of snakes. How many snakes did she see?", "24 + 12 = 36", 36),
    ("A pen costs 2 dollars. How much do 9 pens cost?", "2 * 9 = 18", 18),
    ("Of 50 apples 20 are red. How many are not?", "50 - 20 = 30", 30),
]
_IFEVAL = {
    "key": 1000,
    "prompt": "Write a riddle about a house that is not a house, in at least 400 words, with a title in <<brackets>>.",
    "instruction_id_list": ["length_constraints:number_words", "detectable_format:title"],
    "kwargs": [{"relation": "at least", "num_words": 200}, {}],
}


def folder_of(tests: Path, folder: Path) -> Path:
    """Make a cache of the hub in which each model that the tests name is the tiny one, and return its folder."""
    hub = folder / "hub"
    if not hub.exists():
        model = make_tiny_model(folder / "model")
        for name in {name for file in tests.glob("*.py") for name in _NAME.findall(file.read_text())}:
            home = hub / ("models--" + name.replace("/", "--"))
            (home / "snapshots").mkdir(parents=True, exist_ok=True)
            (home / "refs").mkdir(exist_ok=True)
            (home / "refs/main").write_text("0" * 40)
            (home / "snapshots" / ("0" * 40)).symlink_to(Path(model).resolve())
    return hub


def environment(hub: Path) -> dict[str, str]:
    return {
        "HF_HUB_CACHE": str(hub.resolve()),
        "HF_HUB_OFFLINE": "1",
        "RAY_ADDRESS": "local",  # not one that happens to run on this machine
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def pytest_addoption(parser):
    parser.addoption("--results", help="file for the outcome of each case")


def pytest_configure(config):
    config.outcomes = {}
    import datasets
    import ray

    ray.init = functools.partial(ray.init, num_cpus=4, include_dashboard=False)

    def load_dataset(path, *arguments, split=None, **options):
        rows = [_IFEVAL] * 4
        if "gsm8k" in path.lower():
            rows = [{"question": question, "answer": f"{way}\n#### {answer}"} for question, way, answer in _GSM8K]
        data = datasets.Dataset.from_list(rows)
        return data if split else datasets.DatasetDict(train=data, test=data)

    datasets.load_dataset = load_dataset


def pytest_runtest_makereport(item, call):
    outcomes, case = item.config.outcomes, item.nodeid.partition("::")[2]
    if call.excinfo is None:
        outcomes.setdefault(case, ("passed", ""))
    elif call.excinfo.typename == "Skipped":
        outcomes[case] = ("skipped", str(call.excinfo.value))
    else:
        outcomes[case] = ("failed", call.excinfo.exconly()[:300])


def pytest_sessionfinish(session):
    Path(session.config.getoption("results")).write_text(json.dumps(session.config.outcomes, indent=1))
