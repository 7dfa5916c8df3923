"""On real vLLM, what is trained on is what was sampled: multi-turn rows are as exact as single-turn ones."""

from __future__ import annotations

import pytest
import torch

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.envs import MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import vLLMWrapper
from llmrl.trainer import TransformersWrapper

NUM_TURNS = 6
READINGS = ("14 degrees, light rain", "naïve café 東京 🌧", "", "21 degrees", '{"celsius": 9}', "no reading")


class Weather(MessageEnv):
    """Every answer is met with a tool's result and the next question, whatever it says."""

    def __init__(self, item):
        self.turn = 0

    async def init(self):
        return [
            {"role": "system", "content": "You report the weather in a few words."},
            {"role": "user", "content": "How is Paris?"},
            {"role": "assistant", "content": "Sunny, 20 degrees."},
            {"role": "user", "content": "And Oslo?"},
        ]

    async def step(self, message):
        reading = READINGS[self.turn % len(READINGS)]
        self.turn += 1
        messages = [{"role": "tool", "content": reading}, {"role": "user", "content": f"Station {self.turn}?"}]
        return MessageStep(messages, reward=1.0)


@pytest.fixture(scope="module")
def rows(vllm_engine, renderer):
    """Rows of eight conversations of six turns; short budgets, so that some answers are cut and most end."""
    policy = vLLMWrapper(vllm_engine, renderer=renderer, generate_kwargs={"max_new_tokens": 24, "stop": ["."]})
    env = MessageChatEnv(Weather, repeats=8)
    limits = RolloutLimits(max_turns=NUM_TURNS, end_at_length=False)  # or few conversations have all turns
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        yield collector.play(8)


def test_every_trained_token_of_a_multi_turn_row_is_what_the_engine_sampled(rows):
    from llmrl.collectors import rollout_rows

    assert [rollout.num_turns for rollout in rows] == [NUM_TURNS] * 8
    for rollout in rows:
        (row,) = rollout_rows(rollout)
        trained = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert trained == [token for turn in rollout.conversation.turns for token in turn.completion_ids]
        assert row["tokens", "full"].tolist() == rollout.conversation.turns[-1].token_ids()


def test_multi_turn_log_probs_agree_with_transformers_as_closely_as_single_turn_ones(rows, model_path):
    from llmrl.collectors import batch_rows

    batch = batch_rows([rows])
    actor = TransformersWrapper(model_path, generate=False)
    with torch.no_grad():
        recomputed = actor(batch.copy())
    first_turn, later_turns = [], []
    for rollout, row, scored in zip(rows, batch.unbind(0), recomputed.unbind(0), strict=True):
        difference = (row["log_probs", "full"] - scored["log_probs", "full"]).abs()
        num_first = rollout.conversation.turns[0].num_tokens
        mask = row["masks", "all_assistant_mask"]
        first_turn.append(difference[:num_first][mask[:num_first]])
        later_turns.append(difference[num_first:][mask[num_first:]])
    first, later = torch.cat(first_turn), torch.cat(later_turns)
    assert len(later) > len(first) > 10
    # Engine and trainer compute in float32: in any turn nothing but its rounding is left.
    assert first.mean() < 0.001 and later.mean() < 0.001
    assert later.max() < 0.02
