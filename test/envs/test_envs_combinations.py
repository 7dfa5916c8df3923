"""Environments with transforms, beside each other and with TensorDict's lists as stacks: what goes together."""

from __future__ import annotations

import functools
import itertools

import pytest
from tensordict import set_list_to_stack
from torchrl.data import Composite, Unbounded
from torchrl.envs import (
    AsyncEnvPool,
    Compose,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    check_env_specs,
)

from llmrl.data import ChatHistory
from llmrl.data.chats import flatten
from llmrl.data.tensordicts import batch_elements, restacked
from llmrl.envs import (
    ChatEnv,
    CountdownEnv,
    DataLoadingPrimer,
    DatasetChatEnv,
    GameEnv,
    GSM8KEnv,
    IFEvalEnv,
    MATHEnv,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    ToolEnv,
    make_addition_env,
    make_guess_env,
    make_search_env,
    make_sum_of_digits_env,
)
from llmrl.envs import game as rules
from llmrl.transforms import AddThinkingPrompt, IncrementalTokenizer, PolicyVersion, RubricReward, TemplateTransform

ROWS = [{"query": "1 + 1 =", "answer": "2"}, {"query": "1 + 2 =", "answer": "3"}]


def exact(completion, answer):
    return float(completion == answer)


# Name -> what makes it, in the order in which they have to be appended.
TRANSFORMS = {
    "turns": lambda renderer: StepCounter(max_steps=2),
    "reward": lambda renderer: RubricReward(exact),
    "thinking": lambda renderer: AddThinkingPrompt(
        lambda step: "5" not in "".join(step["history"].prompt.content[-1:])
    ),
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


INSTRUCTIONS = [{"prompt": "Say 5.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]


class Game(MessageEnv):
    def __init__(self, item):
        self.num_turns = 0

    async def init(self):
        return [{"role": "user", "content": "Go on."}]

    async def step(self, message):
        self.num_turns += 1
        return MessageStep([{"role": "user", "content": "And?"}], reward=1.0, is_done=self.num_turns >= 2)


class Counter:
    def reset(self, **row):
        return None

    def count(self, number: int) -> str:
        """Count to a number.

        Args:
            number: the last.
        """
        return "1, ..."

    def get_reward(self) -> float:
        return 1.0


class Pennies(rules.Game):
    roles = ("even", "odd")

    def __init__(self):
        self.shown = []

    def observe(self):
        return self.roles[len(self.shown) % 2], "Five or six?"

    def act(self, text):
        self.shown.append(text)

    def rewards(self):
        return {"even": float(self.shown[-1] == "5"), "odd": 0.0} if len(self.shown) == 4 else None


ENVIRONMENTS = {
    "chat": lambda **shape: ChatEnv(**shape).append_transform(DataLoadingPrimer(ROWS)),
    "dataset": lambda **shape: DatasetChatEnv(ROWS, **shape),
    "addition": lambda **shape: make_addition_env("train", **shape),
    "sum of digits": lambda **shape: make_sum_of_digits_env("train", **shape),
    "countdown": lambda **shape: CountdownEnv(num_problems=4, **shape),
    "math": lambda **shape: MATHEnv([{"problem": "1 + 1", "solution": r"\boxed{2}"}], **shape),
    "gsm8k": lambda **shape: GSM8KEnv([{"question": "1 + 1?", "answer": "#### 2"}], max_steps=2, **shape),
    "ifeval": lambda **shape: IFEvalEnv(INSTRUCTIONS, **shape),
    "search": lambda **shape: make_search_env("train", **shape),
    "guess": lambda **shape: make_guess_env("train", **shape),
    # These are of any shape.
    "message": lambda: MessageChatEnv(Game),
    "tools": lambda: ToolEnv(Counter, ROWS),
    "game": lambda: GameEnv(lambda row: Pennies(), roles=Pennies.roles, opponents={"odd": lambda messages: "5"}),
}
ANY_SHAPE = ("message", "tools", "game")


def answer(tensordict):
    elements = batch_elements(tensordict)
    for element in elements:
        prompt = element["history"].prompt
        full = prompt.append({"role": "assistant", "content": "5"})
        element["history"] = ChatHistory(prompt=prompt, full=full)
    return restacked(elements, tensordict.batch_size)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_torchrls_transforms_and_batches_of_environments_go_with_each(name):
    make, shape = ENVIRONMENTS[name], () if name in ANY_SHAPE else (2,)
    with set_list_to_stack(True):
        memory = TensorDictPrimer(Composite({"memory": Unbounded((*shape, 4))}, shape=shape))
        env = make(batch_size=shape) if shape else make()
        env = TransformedEnv(env, Compose(StepCounter(3), RewardSum(), memory))
        check_env_specs(env)
        played = env.rollout(4, answer, break_when_any_done=False)
        assert played["memory"].shape == (*shape, 4, 4) and played["next", "step_count"].max() <= 3
        reward, so_far = played["next", "reward"].flatten(), played["next", "episode_reward"].flatten()
        assert so_far[0] == reward[0] and len(so_far) == len(reward)
        # A step of TorchRL's pool numbers its environments in a batch of one dimension.
        single = make if name in ("chat", "dataset", *ANY_SHAPE) else functools.partial(make, num_envs=None)
        for together in (SerialEnv(2, make), AsyncEnvPool([single, single], backend="threading")):
            try:
                stepped = together.step(answer(together.reset()))
                for chat in flatten(stepped["next", "history"].prompt.chats):
                    assert "5" in [message["content"] for message in chat]
            finally:
                together.close()
