"""Competition problems in English: DAPO-Math-17k for training, and AIME 2024 held out."""

from __future__ import annotations

from datasets import load_dataset

from llmrl.envs import MATHEnv

SOURCES = {"train": ("open-r1/DAPO-Math-17k-Processed", "en"), "test": ("HuggingFaceH4/aime_2024", None)}


def env(split: str = "train", repeats: int = 16, seed: int = 0, data: str | None = None) -> MATHEnv:
    """Return the environment; `data` is a JSON file that replaces both splits (columns `prompt` and `solution`)."""
    name, subset = SOURCES[split]
    rows = load_dataset(name, subset, split="train") if data is None else load_dataset("json", data_files=data)["train"]
    if "prompt" in rows.column_names:  # in DAPO, `solution` is the final answer; AIME has `answer`
        rows = rows.select_columns(["prompt", "solution"]).rename_columns({"prompt": "problem", "solution": "answer"})
    return MATHEnv(rows, reasoning=False, repeats=repeats, name=split, shuffle=True, seed=seed)
