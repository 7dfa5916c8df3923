"""The model card of an export: base model, data, command, configuration and results."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from llmrl._utils.json_values import without_references
from llmrl.config.sections import ScriptConfig
from llmrl.runs.report import RunResults, shown_results

_EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"


def run_card(cfg: ScriptConfig, step: int, metrics: Mapping[str, float], summary: RunResults) -> str:
    """Return a model card in Markdown, with the metadata that the hub reads."""
    from huggingface_hub import ModelCardData
    from omegaconf import OmegaConf

    base = _EMBEDDED if cfg.model.path == "embedded" else cfg.model.path
    # The hub rejects a card if its base model is not the name of a repository.
    is_on_hub = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base)) and not Path(base).exists()
    head = ModelCardData(
        library_name="transformers",
        base_model=base if is_on_hub else None,
        tags=["llmrl", "reinforcement-learning", cfg.algorithm or "grpo"],
    )
    lora = cfg.model.lora
    facts = {
        "Trained from": f"`{base}`",
        "Algorithm": cfg.algorithm or "GRPO",
        "Weights": "all" if lora.rank is None else f"LoRA adapters of rank {lora.rank}, merged into the model",
        "Environment": f"`{cfg.env.name}`" + (f", data `{cfg.env.data}`" if cfg.env.data else ""),
        "Batch": f"{cfg.collect.groups_per_batch} prompts, {cfg.collect.group_size} answers to each, of at most "
        f"{cfg.collect.max_turns} × {cfg.collect.max_new_tokens} tokens",
        "Learning rate": f"{cfg.train.learning_rate:g}, {cfg.train.schedule}",
        "Steps": f"{step} of {cfg.train.num_steps}",
    }
    before = summary.get("before", {})
    after = summary.get("after", {})
    evaluated = [f"| {name} | {old} | {new} |" for name, old, new in shown_results(before, after)]
    measured = [f"| {name} | {value:.6g} |" for name, value in sorted(metrics.items())]
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {Path(cfg.export.push_to_hub or cfg.run.path).name}",
        f"The model after step {step} of a run of [llmrl](https://pypi.org/project/llmrl/).",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]),
        *_section("Held-out problems", ["| | before | last |", "|---|---|---|"], evaluated),
        *_section(f"Metrics of step {step}", ["| | |", "|---|---|"], measured),
        f"## Command\n\n```bash\n{shlex.join(['python', *sys.argv])}\n```",
        f"## Configuration\n\n```yaml\n{OmegaConf.to_yaml(OmegaConf.create(without_references(asdict(cfg))))}```",
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, head: list[str], lines: list[str]) -> list[str]:
    if not lines:
        return []
    return ["\n".join([f"## {title}", "", *head, *lines])]
