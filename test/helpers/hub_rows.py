"""Plays environments of other libraries and compares the rows with what the engine sampled, for the table of hubs.

    python test/helpers/hub_rows.py [NAME …]

Those of verifiers are in `verifiers_environments.py`, which needs a checkout. *Inexact* counts the requests in the
engine's log that no row holds as they were sampled, and the spans of rows with anything else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import re
import subprocess
import sys
from pathlib import Path

from endpoint_agents import LoggingEngine
from rendering_families import family_renderer
from tool_classes import Increment
from verifiers_environments import call, num_inexact

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import GymnasiumTextEnv, MessageChatEnv, OpenEnvChatEnv, ReasoningGymEnv, ToolEnv
from llmrl.envs.hubs.virtual_env import python_with
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ensure_embedded_model

REASONING_GYM = ("chain_sum", "spell_backward", "letter_counting", "word_sorting")


class Steps:
    """A text environment of gymnasium's interface, with three steps."""

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return "Three steps.", {}

    def step(self, action):
        self.left -= 1
        return f"{self.left} left after {action}.", 1.0, not self.left, False, {}

    def close(self):
        pass


@contextlib.contextmanager
def openenv_server():
    """The address of a server of the package openenv."""
    python = python_with(["openenv>=0.10,<0.11"])
    server = Path(__file__).with_name("openenv_real_server.py")
    with subprocess.Popen([python, server], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def examples(stack: contextlib.ExitStack) -> dict:
    """A function that makes each environment, what answers a prompt, and the reward of each rollout."""
    guesses = itertools.cycle(["1", "9", "3", "4", "5"])
    found = {
        "OpenEnv": (
            lambda: OpenEnvChatEnv(stack.enter_context(openenv_server()), [{"seed": n} for n in range(4)], repeats=2),
            lambda prompt: next(guesses),
            None,
        ),
        "gymnasium": (
            lambda: MessageChatEnv(lambda row: GymnasiumTextEnv(Steps()), [{}] * 4, repeats=2),
            lambda prompt: "go",
            3.0,
        ),
        "TRL": (
            lambda: ToolEnv(Increment, repeats=2),
            lambda prompt: "Done." if "<tool_response>" in prompt else call("guess", number=4),
            1.0,
        ),
    }
    for name in REASONING_GYM:
        found[f"reasoning-gym {name}"] = (
            lambda name=name: ReasoningGymEnv(name, repeats=2),
            lambda prompt: f"It is {len(prompt)}.",
            None,
        )
    return found


def play(env, answer, num_rollouts=8, *, at_once=4, max_model_len=4096, max_turns=12):
    """Play rollouts; return them and the engine."""
    renderer = family_renderer(str(ensure_embedded_model()), "qwen25")
    engine = LoggingEngine(
        lambda prompt_ids: f"{answer(renderer.decode(prompt_ids))}<|im_end|>",
        encode=renderer.encode,
        decode=renderer.decode,
        max_model_len=max_model_len,
    )
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": 256})
    limits = RolloutLimits(max_turns=max_turns)
    with LLMCollector(
        env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=at_once, limits=limits
    ) as collector:
        return collector.play(num_rollouts), engine


def main() -> None:
    """Print a row for each environment."""
    versions = {name: importlib.metadata.version(name) for name in ("gymnasium", "trl", "reasoning_gym")}
    print(f"{versions}; openenv 0.10\n| environment | rollouts | turns | completed | paid as expected | inexact |")
    with contextlib.ExitStack() as stack:
        for name, (make, answer, reward) in examples(stack).items():
            if len(sys.argv) > 1 and not any(re.search(word, name) for word in sys.argv[1:]):
                continue
            rollouts, engine = play(make(), answer)
            done = [one for one in rollouts if one.status is RolloutStatus.COMPLETED and one.is_scored]
            paid = len(done) if reward is None else sum(one.reward == reward for one in done)
            counts = (len(rollouts), sum(one.num_turns for one in rollouts), len(done), paid)
            print(f"| {name} | {' | '.join(map(str, counts))} | {num_inexact(rollouts, engine)} |", flush=True)
            for rollout in rollouts:
                if rollout.error:
                    print(f"    {rollout.error}")


if __name__ == "__main__":
    main()
