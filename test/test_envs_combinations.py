"""Specs are right whatever transforms an environment has, in whatever order they may stand."""

from __future__ import annotations

import itertools

import pytest
from torchrl.envs import StepCounter, check_env_specs

from llmrl.envs import ChatEnv, DataLoadingPrimer, DatasetChatEnv
from llmrl.transforms import AddThinkingPrompt, IncrementalTokenizer, PolicyVersion, RubricReward, TemplateTransform

ROWS = [{"query": "1 + 1 =", "answer": "2"}, {"query": "1 + 2 =", "answer": "3"}]


def exact(completion, answer):
    return float(completion == answer)


# Name -> what makes it, in the order in which they have to be appended.
TRANSFORMS = {
    "turns": lambda renderer: StepCounter(max_steps=2),
    "reward": lambda renderer: RubricReward(exact),
    "thinking": lambda renderer: AddThinkingPrompt(lambda step: step["reward"].sum() < 1),
    "version": lambda renderer: PolicyVersion(),
    "uuid": lambda renderer: PolicyVersion("uuid"),
    "tokens": lambda renderer: IncrementalTokenizer(renderer=renderer),
    "text": lambda renderer: TemplateTransform(renderer=renderer),
}
COMBINATIONS = [names for size in (1, 2, 6) for names in itertools.combinations(TRANSFORMS, size)]


@pytest.mark.parametrize("names", [n for n in COMBINATIONS if not {"version", "uuid"} <= set(n)], ids="+".join)
@pytest.mark.parametrize("is_primed", [False, True])
def test_specs_hold(renderer, names, is_primed):
    if is_primed:
        env = ChatEnv(batch_size=(2,)).append_transform(DataLoadingPrimer(ROWS, repeats=2))
    else:
        env = DatasetChatEnv(ROWS, repeats=2, batch_size=(2,))
    for name in names:
        env = env.append_transform(TRANSFORMS[name](renderer))
    check_env_specs(env)
