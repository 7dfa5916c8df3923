"""Plays registered environments of gymnasium by name, and compares the rewards with those of a plain loop.

    python test/helpers/gymnasium_registry.py [MODULE …]

A module, such as `minigrid`, registers more; it is installed into an environment of its own. Each environment is played
with two seeds and random actions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections import Counter

import gymnasium
from hub_rows import play
from verifiers_environments import num_inexact

from llmrl.envs import make_task_env
from llmrl.envs.hubs.virtual_env import python_with

NUM_SEEDS = 2
MAX_TURNS = 12
FIRST_TEST_SEED = 1_000_000


def plain(env_id, actions, seed):
    """The sum of the rewards of a plain loop, and how many steps it took."""
    env = gymnasium.make(env_id)
    env.reset(seed=seed)
    total, steps = 0.0, 0
    for action in actions:
        _, reward, is_terminated, is_truncated, _ = env.step(action)
        total, steps = total + float(reward), steps + 1
        if is_terminated or is_truncated:
            break
    env.close()
    return total, steps


def drawn_actions(env_id, number=MAX_TURNS):
    """Random actions of an environment."""
    space = gymnasium.make(env_id).action_space
    space.seed(7)
    return [space.sample() for _ in range(number)]


def written(space, action):
    """An action as a policy writes it."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return f"My action is {action}."
    return action if isinstance(action, str) else json.dumps(space.to_jsonable([action])[0])


def played(env_id, actions, seeds=NUM_SEEDS):
    """The rollouts of an environment with these actions, and the number of inexact rows."""
    space = gymnasium.make(env_id).action_space
    env = make_task_env(f"gymnasium:{env_id}", "test", num_problems=seeds)

    def answer(prompt):
        return written(space, actions[prompt.count("<|im_start|>assistant\n") - 1])

    rollouts, engine = play(env, answer, seeds, at_once=1, max_model_len=262144, max_turns=len(actions))
    env.close()
    return rollouts, num_inexact(rollouts, engine)


def is_same(env_id, rollouts, actions):
    """Whether rollouts have the rewards of plain loops."""
    loops = [plain(env_id, actions, FIRST_TEST_SEED + number) for number in range(len(rollouts))]
    return [(round(one.reward, 4), one.num_turns) for one in rollouts] == [(round(r, 4), n) for r, n in loops]


def registered():
    """The names in gymnasium's registry, of each its last version."""
    last = {}
    for spec in gymnasium.registry.values():
        known = last.get((spec.namespace, spec.name))
        if known is None or (spec.version or 0) > (known.version or 0):
            last[spec.namespace, spec.name] = spec
    return sorted(spec.id for spec in last.values())


def main() -> None:
    """Print what each environment did, and counts."""
    for module in sys.argv[1:]:
        python = python_with([module])
        sys.path += map(str, python.parent.parent.glob("lib/python*/site-packages"))  # behind the suite's packages
        importlib.import_module(module)
    counts = Counter()
    for env_id in registered():
        began = time.monotonic()
        with contextlib.redirect_stdout(None):
            try:
                gymnasium.make(env_id).reset()
            except Exception as error:
                why = f"not made: {type(error).__name__}"
                print(f"{env_id}: {why} {str(error)[:80]!r}", file=sys.stderr)
                counts[why] += 1
                continue
        try:
            actions = drawn_actions(env_id)
            rollouts, inexact = played(env_id, actions)
            what = "same" if is_same(env_id, rollouts, actions) else f"other rewards {[one.error for one in rollouts]}"
            counts[f"{what}, {inexact} inexact"] += 1
        except (TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            counts[f"refused: {type(error).__name__}"] += 1
        print(f"{env_id}: {what} ({time.monotonic() - began:.0f} s)", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
