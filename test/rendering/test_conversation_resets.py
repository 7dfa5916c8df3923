"""Episode after episode in one TensorDict: a conversation's tokens end with it."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import Transform

from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.transforms import IncrementalTokenizer

ANSWER = "2<|im_end|>"


class EndAfter(Transform):
    """Answers with a question, and ends each conversation after its own number of turns."""

    def _step(self, tensordict, next_tensordict):
        for element in next_tensordict.unbind(0) if next_tensordict.batch_size else [next_tensordict]:
            prompt = element["history"].prompt
            num_answers = [message["role"] for message in prompt.chats].count("assistant")
            if num_answers - element["conversation"].messages[0]["content"].count("!") >= 2:
                element["done"] = element["terminated"] = torch.ones(1, dtype=torch.bool)
            element["history"].prompt = prompt.append({"role": "user", "content": "and?"})
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize("batch_size", [None, (2,)])
@pytest.mark.parametrize("is_tokenized_by_env", [False, True])
def test_an_automatic_reset_begins_a_new_conversation(renderer, batch_size, is_tokenized_by_env):
    # The second prompt begins with what the first conversation held: its answer is an example there, and not sampled.
    example = [user("1+1?"), {"role": "assistant", "content": "2"}, user("and?")]
    queries = [[user("1+1?")], example, [user("!! long")]]
    env = DatasetChatEnv([{"query": query} for query in queries], batch_size=batch_size).append_transform(EndAfter())
    if is_tokenized_by_env:
        env = env.append_transform(IncrementalTokenizer(renderer=renderer))
    policy = LLMWrapperBase(ScriptedEngine([ANSWER], encode=renderer.encode), renderer=renderer)
    steps = env.rollout(8, policy, break_when_any_done=False)
    num_turns = [0] * (batch_size or (1,))[0]
    for step in steps.reshape(len(num_turns), -1).unbind(1):
        for row, element in enumerate(step.unbind(0)):
            num_turns[row] += 1
            loss_mask = element["masks", "all_assistant_mask"]
            trained = renderer.decode(element["tokens", "full"][loss_mask].tolist())
            assert trained == ANSWER * num_turns[row] and element["conversation"].num_turns == num_turns[row]
            if element["next", "done"].item():
                num_turns[row] = 0
    assert steps["next", "done"].any() and not steps["next", "done"].all()
