"""Compares the train and test problems of each data set of reasoning-gym, as `llmrl audit` does, and prints counts.

python test/helpers/reasoning_gym_splits.py [NUM_PROBLEMS]
"""

from __future__ import annotations

import sys
from collections import defaultdict

from reasoning_gym.factory import DATASETS

from llmrl.audit.checks import Splits
from llmrl.envs.tasks.reasoning_gym import ReasoningGymProblems

MIX = "composite"  # of others, which `tasks=` of llmrl names


def problems(name, split, number):
    """The first problems of a split."""
    drawn = ReasoningGymProblems(name, num_problems=number, split=split)
    return [drawn[index] for index in range(number)]


def main() -> None:
    """Print how many data sets share how much."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    found = defaultdict(list)
    for name in sorted(DATASETS):
        if name == MIX:
            continue
        splits = Splits.of({split: problems(name, split, number) for split in ("train", "test")}, "query")
        if splits is None:
            what = "all problems ask the same"
        else:
            shared = len(set(splits.train) & set(splits.test))
            repeated = number - len(set(splits.train))
            what = f"{'share' if shared else 'share no'} question, train {'repeats' if repeated else 'repeats none'}"
            print(f"{name}: {shared} shared, {repeated} repeated in train", file=sys.stderr, flush=True)
        found[what].append(name)
    for what, names in sorted(found.items()):
        print(f"{what}: {len(names)} {names if len(names) < 30 else ''}")


if __name__ == "__main__":
    main()
