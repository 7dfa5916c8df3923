"""Every Python example in the README and in docs/ runs as written.

Blocks marked `python` are run, those of one page in order and in one namespace, so a later block may use what an
earlier one made. Blocks in another language (`bash`, `text`, `yaml` …) are not.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import llmrl
from llmrl._utils.arguments import keywords_of, refuse_unknown

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_CONTRIBUTORS = [ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, int, str]]:
    """Language, number of its first line and text of every fenced block."""
    text = page.read_text()
    return [(m[1], text[: m.start(2)].count("\n") + 1, m[2]) for m in BLOCK.finditer(text)]


def source_of(page: Path) -> str:
    """The Python of a page, each line at its place, so that a traceback shows the line of the page."""
    source = ""
    for language, line, text in blocks(page):
        if language == "python":
            source += "\n" * (line - 1 - source.count("\n")) + text
    return source


SOURCES = {page.name: (page, source) for page in PAGES if (source := source_of(page))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "train_step(" in source else [])
        for name, (_, source) in SOURCES.items()
        if "AsyncVLLM" not in source
    ],
)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, source = SOURCES[name]
    exec(compile(source, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", [name for name, (_, source) in SOURCES.items() if "AsyncVLLM" in source])
def test_examples_run_on_a_real_engine(name, tmp_path, monkeypatch, example_engine):
    monkeypatch.chdir(tmp_path)
    signature = inspect.signature(type(example_engine).from_pretrained)

    def started_before(*arguments, **options):
        signature.bind(*arguments, **options)
        return example_engine

    monkeypatch.setattr(type(example_engine), "from_pretrained", started_before)
    monkeypatch.setattr(example_engine, "shutdown", lambda: None)
    known = keywords_of(llmrl.train)
    # Tests of `train` and an example train.
    monkeypatch.setattr(llmrl, "train", lambda *arguments, **options: refuse_unknown("train", options, known))
    page, source = SOURCES[name]
    exec(compile(source, str(page), "exec"), {"__name__": "__main__"})


def test_the_readme_prints_the_loop_of_the_script():
    (loop,) = [text for language, _, text in blocks(ROOT / "README.md") if language == "py"]
    assert textwrap.indent(loop, " " * 4) in (ROOT / "sota-implementations/grpo/grpo.py").read_text()


def test_the_site_builds_without_a_warning(tmp_path, own_programs):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    index = (tmp_path / "site/api/collectors/index.html").read_text()
    assert 'id="llmrl.collectors.LLMCollector.play"' in index
    pages = [(tmp_path / "site" / page).read_text() for page in ("index.html", "concepts/data-flow/index.html")]
    assert not any("fonts.googleapis" in page for page in pages)
    listed = (tmp_path / "site/llms.txt").read_text()
    links = re.findall(r"^- \[.+?\]\((.+?)\)", listed, re.MULTILINE)
    navigated = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(re.sub(r"/$", ".md", link) for link in links) == sorted(navigated)
    assert all((tmp_path / "site" / link).exists() for link in links)
    assert "(how-to/reward.md): A reward is a function that returns a finite number\n" in listed


def test_links_to_files_lead_somewhere():
    broken = []
    for page in [*PAGES, *FOR_CONTRIBUTORS]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} links to {target}")
    assert not broken, "\n".join(broken)


def test_every_path_that_a_table_of_checks_names_exists():
    table = "".join(re.findall(r"^\|.*\n", (ROOT / "AGENTS.md").read_text(), re.MULTILINE))
    named = set(re.findall(r"\b(?:test|sota-implementations)/[\w./-]*\w", table))
    assert len(named) > 8
    assert not [name for name in named if "NAME" not in name and not (ROOT / name).exists()]


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, *FOR_CONTRIBUTORS]:
        named = set(re.findall(r"`make ([\w-]+)", page.read_text()))
        named |= set(re.findall(r"^make ([\w-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name} names {named - targets}"


def test_every_metric_that_a_run_logs_is_in_the_table():
    from llmrl.collectors import CollectionReport
    from llmrl.data import Rollout
    from llmrl.engines import EngineLoad
    from llmrl.objectives import DistillationLossOutput, GRPOLossOutput, SFTLossOutput
    from llmrl.runs.evaluation import EvaluationReport, metrics_of_evaluation
    from llmrl.tools.session import OUTCOMES
    from llmrl.trainer import TrainStepReport
    from llmrl.watch.rollout_metrics import rollout_metrics
    from llmrl.watch.step_metrics import StepMeter

    text = (ROOT / "docs/metrics.md").read_text()
    documented = {
        name for cell in re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE) for name in re.findall("`(.*?)`", cell)
    }
    rollouts = [
        Rollout(
            rollout_id="", group_id=group, sample_index=0, group_size=2, is_scored=True, reward=reward,
            breakdown={"PART": reward}, tool_calls=dict.fromkeys(OUTCOMES, 1),
            messages=({"role": "assistant", "content": "1"},),
        )
        for group in "ab" for reward in (0.0, 1.0)
    ]  # fmt: skip
    logged = {*CollectionReport.of(rollouts, seconds=1.0).to_metrics(), *rollout_metrics(rollouts)}
    logged |= {
        *StepMeter({}).metrics({"num_trained_tokens": 1.0}),
        *EngineLoad(num_prompt_tokens=1, num_drafted_tokens=1).to_metrics(),
    }
    logged |= {*TrainStepReport(loss=0.0, grad_norm=0.0).to_metrics()}
    of_evaluation = metrics_of_evaluation({"NAME": EvaluationReport.of(rollouts[::2])})
    logged |= {name for name in of_evaluation if name.removeprefix("eval/NAME/") not in documented}
    for output in (GRPOLossOutput, SFTLossOutput, DistillationLossOutput):
        logged |= set(output.__dataclass_fields__)
    for source in (ROOT / "llmrl/runs/run.py", *(ROOT / "sota-implementations").rglob("*.py")):
        text = source.read_text()
        logged |= set(re.findall(r'"((?:num_\w+_rows|policy_version|(?:\w+_)?seconds))"', text))
        logged |= {f"{name}_seconds" for name in re.findall(r'run\.timer\("(\w+)"\)', text)}
    assert {"reward_mean", "ESS", "sync_seconds", "num_kept_rows", "policy_version"} <= logged
    assert not logged - documented, f"docs/metrics.md lacks {sorted(logged - documented)}"


def test_the_page_of_names_has_every_public_name():
    import llmrl

    rows = re.findall(r"^\| \[`(\w+)`\]\(", (ROOT / "docs/api/index.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted({*llmrl.__all__} - {"__version__"})


def test_the_first_page_names_every_example():
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs/index.md").read_text(), re.MULTILINE)) == files
