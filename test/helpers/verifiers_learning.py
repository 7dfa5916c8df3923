"""Trains SmolLM2-135M-Instruct in three environments that come with verifiers, unmodified: SFT first, then GRPO.

    python test/helpers/verifiers_learning.py CHECKOUT NAME FOLDER [ENTRY=VALUE …]

`CHECKOUT` is one of https://github.com/PrimeIntellect-ai/verifiers, `NAME` is `reverse_text`,
`alphabet_sort` or `scratchpad`. Data and runs go to `FOLDER`; entries change the configuration of GRPO. It takes up to
half an hour on two cores. The data sets of the hub are replaced by small ones that suit a model of this size: five
letters with spaces between them, two names or four. Of scratchpad's 20 words 15 are trained on. The curves
are in `docs/how-to/other-environments.md`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from llmrl.envs import VerifiersEnv

ROOT = Path(__file__).parents[2]
NUM_TRAIN, NUM_TEST, NUM_DEMONSTRATIONS = 400, 40, 96
FIRST = ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Frances", "Grace", "Hedy", "John", "Ken", "Leslie", "Tony")
LAST = ("Adams", "Berger", "Clark", "Dumas", "Evans", "Fermi", "Gauss", "Hilbert", "Jacobi", "Kepler", "Moser")
# Entries that both stages have, by environment.
ENTRIES = {
    "reverse_text": ["model.max_model_len=256", "collect.max_new_tokens=40"],
    "alphabet_sort": ["model.max_model_len=512", "collect.max_new_tokens=64"],
    "scratchpad": [
        "model.max_model_len=512",
        "collect.max_new_tokens=40",
        "eval.num_problems=5",
        "eval.num_samples=16",
    ],
}
SFT_STEPS = {"reverse_text": 6, "alphabet_sort": 9, "scratchpad": 3}
GRPO_ENTRIES = {
    "reverse_text": ["collect.groups_per_batch=8", "collect.group_size=8", "train.num_steps=12", "eval.every=4"],
    "alphabet_sort": ["collect.groups_per_batch=6", "collect.group_size=6", "train.num_steps=10", "eval.every=5"],
    "scratchpad": ["collect.groups_per_batch=8", "collect.group_size=8", "train.num_steps=9", "eval.every=3"],
}


def write_data(folder: Path) -> None:
    """Write the data sets where the packages look for them, seen from the folder."""
    generator = random.Random(0)

    def write(path: str, rows: list[object]) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    words = sorted({" ".join(generator.sample("abcdefghijklmnopqrstuvwxyz", 5)) for _ in range(NUM_TRAIN + NUM_TEST)})
    generator.shuffle(words)
    write("reverse/train.jsonl", [{"prompt": word} for word in words[:NUM_TRAIN]])
    write("reverse/test.jsonl", [{"prompt": word} for word in words[NUM_TRAIN:]])
    names = [
        [f"{generator.choice(FIRST)}{generator.choice(LAST)}" for _ in range(8)] for _ in range(NUM_TRAIN + NUM_TEST)
    ]
    write("kalomaze/alphabetic-arxiv-authors-it1/train.jsonl", [{"names": row} for row in names])


def reverse_text(split: str = "train", repeats: int = 8) -> VerifiersEnv:
    """Reverse five letters; the reward is the similarity."""
    return VerifiersEnv(
        "reverse-text",
        requirements=[f"{os.environ['VERIFIERS_CHECKOUT']}/environments/reverse_text"],
        config={"taskset": {"dataset_name": "reverse"}},
        split=split,
        repeats=repeats,
    )


def alphabet_sort(split: str = "train", repeats: int = 8) -> VerifiersEnv:
    """Sort two names, and in half of the episodes four in a second turn; the fourth power of the similarity."""
    config = {"min_turns": 1, "max_turns": 2, "min_names_per_turn": 2, "max_names_per_turn": 2}
    first, last = (0, NUM_TRAIN) if split == "train" else (NUM_TRAIN, NUM_TRAIN + NUM_TEST)
    return VerifiersEnv(
        "alphabet-sort",
        requirements=[f"{os.environ['VERIFIERS_CHECKOUT']}/environments/alphabet_sort"],
        config={"taskset": config},
        select={"include": {"idx": [f"{first}:{last}"]}},
        repeats=repeats,
        name=split,
    )


def scratchpad(split: str = "train", repeats: int = 8) -> VerifiersEnv:
    """Put a word into a tool that all episodes share, and repeat what it gives back."""
    return VerifiersEnv(
        "scratchpad",
        requirements=[f"{os.environ['VERIFIERS_CHECKOUT']}/environments/scratchpad"],
        select={"include": {"idx": ["0:15" if split == "train" else "15:20"]}},
        repeats=repeats,
        name=split,
    )


def tool_conversation(row: dict) -> dict:
    """The right call and answer of scratchpad."""
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    tool = {"name": "scratchpad_roundtrip", "parameters": parameters}
    call = {"type": "function", "function": {"name": "scratchpad_roundtrip", "arguments": {"word": row["word"]}}}
    return {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": row["word"], "name": "scratchpad_roundtrip"},
            {"role": "assistant", "content": row["word"]},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


def conversation(row: dict) -> dict:
    """The right answers to a row."""
    if "word" in row:
        return tool_conversation(row)
    if "answer" in row:
        questions, answers = [row["prompt"]], [f"<reversed_text>{row['answer']}</reversed_text>"]
    else:
        info, tags = row["info"], ["alphabetical_sorted", "combined_alphabetical_sorted"]
        questions = info["user_turns"]
        answers = [
            f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"
            for tag, lines in zip(tags, info["ground_truths"], strict=False)
        ]
    messages = [{"role": "system", "content": row["system_prompt"]}] if row.get("system_prompt") else []
    for question, answer in zip(questions, answers, strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def main() -> None:
    """Train, and print the curve."""
    checkout, name, target, *entries = sys.argv[1:]
    folder = Path(target).absolute()
    write_data(folder)
    os.environ |= {"VERIFIERS_CHECKOUT": str(Path(checkout).absolute()), "HF_HUB_OFFLINE": "1"}
    os.chdir(folder)
    env = {"reverse_text": reverse_text, "alphabet_sort": alphabet_sort, "scratchpad": scratchpad}[name]()
    shown = [conversation(row) for row in itertools.islice(itertools.cycle(env.prompts.items), NUM_DEMONSTRATIONS)]
    env.close()
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in shown))
    shared = ["task=own", f"env.name={Path(__file__).absolute()}:{name}", "train.token_budget=2048"]
    shared += [f"eval.num_problems={NUM_TEST}", "eval.num_samples=2", *ENTRIES[name]]
    sft = [f"conversations.path={name}.jsonl", "conversations.held_out=null", "collect.groups_per_batch=16"]
    sft += [f"train.num_steps={SFT_STEPS[name]}", "train.learning_rate=2.0e-5", f"run.path={name}-sft"]
    grpo = [f"model.path={name}-sft/model", f"run.path={name}", *GRPO_ENTRIES[name]]
    grpo += ["train.target_reward=null", "train.learning_rate=1.0e-5", *entries]
    scripts = ROOT / "sota-implementations"
    for script, words in (("sft/sft.py", sft), ("grpo/grpo-sync.py", grpo)):
        subprocess.run([sys.executable, str(scripts / script), *shared, *words], check=True)


if __name__ == "__main__":
    main()
