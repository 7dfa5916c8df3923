"""Competition problems of DAPO-Math-17k, in English, to train on, and those of AIME 2024 held out."""

from __future__ import annotations

from datasets import load_dataset

from llmrl.envs import MATHEnv

SOURCES = {"train": ("open-r1/DAPO-Math-17k-Processed", "en"), "test": ("HuggingFaceH4/aime_2024", None)}


def env(split: str = "train", repeats: int = 16, seed: int = 0, data: str | None = None) -> MATHEnv:
    """Make the environment; `data` is a JSON file in the form of the training problems, in place of both splits."""
    name, subset = SOURCES[split]
    rows = load_dataset(name, subset, split="train") if data is None else load_dataset("json", data_files=data)["train"]
    if "prompt" in rows.column_names:  # DAPO's `solution` is the answer, AIME's the way to its `answer`
        rows = rows.select_columns(["prompt", "solution"]).rename_columns({"prompt": "problem", "solution": "answer"})
    return MATHEnv(rows, reasoning=False, repeats=repeats, name=split, shuffle=True, seed=seed)
