"""A pytest plugin: the hub's names are local, and the outcome of each case goes to a file."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from llmrl.data import templated_text
from llmrl.testing import make_tiny_model

_NAME = re.compile(r"""["']([\w.-]+/[\w.-]*\d[\w.-]*|[Gg][Pp][Tt]2)["']""")
# Their tokenizers have no chat template on the hub.
_BASE_MODELS = {
    "gpt2",
    "GPT2",
    "facebook/opt-125m",
    "microsoft/phi-2",
    "bigscience/bloom-560m",
    "EleutherAI/pythia-70m",
}
_GSM8K = [
    ("Natalia sold clips to 48 of her friends in April, and half as many in May. How many in all?", "48 / 2 = 24", 72),
    ("Mary saw 3 balls of 8 snakes and 6 pairs of snakes. How many snakes did she see?", "24 + 12 = 36", 36),
    ("A pen costs 2 dollars. How much do 9 pens cost?", "2 * 9 = 18", 18),
    ("Of 50 apples 20 are red. How many are not?", "50 - 20 = 30", 30),
]
SUMS = [(f"{a} + {b} =", "a sum", a + b) for a in range(10) for b in range(10)]
_IFEVAL = {
    "key": 1000,
    "prompt": "Write a riddle about a house that is not a house, in at least 400 words, with a title in <<brackets>>.",
    "instruction_id_list": ["length_constraints:number_words", "detectable_format:title"],
    "kwargs": [{"relation": "at least", "num_words": 200}, {}],
}


def folder_of(texts: Iterable[str], folder: Path) -> Path:
    """Make a cache of the hub in which each model that the texts name is the tiny one, and return its folder."""
    hub = folder / "hub"
    for name in sorted({name for text in texts for name in _NAME.findall(text)}):
        home = hub / ("models--" + name.replace("/", "--"))
        if not home.exists():
            (home / "snapshots").mkdir(parents=True)
            (home / "refs").mkdir()
            (home / "refs/main").write_text("0" * 40)
            model = _model(folder, has_template=name not in _BASE_MODELS)
            (home / "snapshots" / ("0" * 40)).symlink_to(model.resolve())
    return hub


def _model(folder: Path, *, has_template: bool) -> Path:
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model)
    base = folder / "base-model"
    if not has_template and not base.exists():
        shutil.copytree(model, base)
        (base / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((base / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (base / "tokenizer_config.json").write_text(json.dumps(config))
    return model if has_template else base


def environment(hub: Path) -> dict[str, str]:
    return {
        "HF_HUB_CACHE": str(hub.resolve()),
        "HF_HUB_OFFLINE": "1",
        "RAY_ADDRESS": "local",  # not one that happens to run on this machine
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `vllm.LLM` in the same process starts in seconds
        "TORCH_COMPILE_DISABLE": "1",
    }


def pytest_addoption(parser):
    parser.addoption("--results", help="file for the outcome of each case")


def pytest_configure(config):
    config.outcomes = {}
    import ray

    ray.init = functools.partial(ray.init, num_cpus=4, include_dashboard=False)
    serve_rows()


def serve_rows(problems: Sequence[tuple[str, str, int]] = _GSM8K) -> None:
    """Let `datasets.load_dataset` return a few rows for the names of the hub; problems of GSM8K are given."""
    import datasets

    def load_dataset(path, *arguments, split=None, **options):
        rows = [_IFEVAL] * 4
        if "gsm8k" in path.lower():
            rows = [{"question": question, "answer": f"{way}\n#### {answer}"} for question, way, answer in problems]
        data = datasets.Dataset.from_list(rows)
        return data if split else datasets.DatasetDict(train=data, test=data)

    datasets.load_dataset = load_dataset


def print_metrics() -> None:
    """Let TorchRL's scripts print what they log, a line of JSON each time."""
    from torchrl.record.loggers.wandb import WandbLogger

    log = WandbLogger.log_metrics

    def log_metrics(self, metrics, *arguments, **options):
        print("metrics", json.dumps({name: float(value) for name, value in metrics.items()}), flush=True)
        return log(self, metrics, *arguments, **options)

    WandbLogger.log_metrics = log_metrics


@pytest.fixture(autouse=True)
def _templates_of_one_case():
    """Forget the templates that a case registers, as the files do themselves through private names of TorchRL."""
    tables = [table for table in vars(templated_text).values() if isinstance(table, dict)]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


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
