"""Credit by turn against plain loops in float64: returns, baselines of a turn, and the tokens that they land on."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs import Transform

from llmrl.collectors import GroupRules, LLMCollector
from llmrl.collectors.rows import batch_rows
from llmrl.data import Rollout, RolloutStatus
from llmrl.envs import MessageChatEnv, MessageEnv, MessageStep
from llmrl.objectives import KLPenalty, MCAdvantage
from llmrl.objectives.advantages.turn_credit import returns_to_go
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import Conversation
from llmrl.testing import ScriptedEngine


def expected(groups, gamma, normalization):
    """The advantage of each turn, `{(group, rollout): [of each turn]}`, from the rewards of turns."""
    advantages = {}
    for group, rollouts in groups.items():
        returns = {}
        for name, rewards in rollouts.items():
            of_turns = []
            for turn in range(len(rewards)):
                total = 0.0
                for later in range(turn, len(rewards)):
                    total += gamma ** (later - turn) * rewards[later]
                of_turns.append(total)
            returns[name] = of_turns
        for name, of_turns in returns.items():
            advantages[group, name] = []
            for turn, value in enumerate(of_turns):
                others = [one[turn] for one in returns.values() if len(one) > turn]
                if normalization == "none":
                    advantage = value
                elif len(others) < 2 or max(others) == min(others):
                    advantage = 0.0
                elif normalization == "mean":
                    advantage = value - fmean(others)
                elif normalization == "std":
                    advantage = (value - fmean(others)) / stdev(others)
                else:
                    advantage = value - (sum(others) - value) / (len(others) - 1)
                advantages[group, name].append(advantage)
    return advantages


def played(rng, group, name, num_turns):
    """A rollout with sampled tokens from 100 times their turn on; its history is rewritten now and then."""
    conversation, rewards = Conversation.start(None, fork_threshold_tokens=rng.choice((0, 3))), []
    prompt = [1, 2, 3]
    for turn in range(num_turns):
        answer = [100 * (turn + 1) + index for index in range(rng.randint(1, 4))]
        conversation = conversation.with_prompt_ids(prompt)
        conversation = conversation.with_completion(answer, log_probs=[-1.0] * len(answer), versions=[0] * len(answer))
        kept = [*prompt, *answer]
        cut = rng.choice((0, 0, 1, 2, len(kept) - 2))  # clean, the end edited, or all but the beginning
        prompt = [*kept[: len(kept) - cut], *([9] * cut), 4, 5]
        rewards.append(rng.choice((0.0, 0.25, 1.0, -0.5)))
    rollout = Rollout(
        rollout_id=f"{group}/{name}", group_id=group, sample_index=name, group_size=4, conversation=conversation,
        status=RolloutStatus.COMPLETED, is_scored=True, num_turns=num_turns,
    )  # fmt: skip
    rollout.turn_rewards, rollout.reward = rewards, sum(rewards)
    return rollout


def test_in_a_tree_a_reward_is_credited_to_the_turns_that_lead_to_it():
    rng = random.Random(7)
    for _ in range(50):
        num_turns = rng.randint(1, 7)
        parents = [rng.randint(-1, turn - 1) for turn in range(num_turns)]
        rewards = [rng.choice((0.0, 0.25, 1.0, -0.5)) for _ in parents]
        expected_returns = [0.7 ** (num_turns - 1 - turn) * rewards[-1] for turn in range(num_turns)]
        for later, reward in enumerate(rewards[:-1]):
            turn, share = later, reward
            while turn >= 0:
                expected_returns[turn] += share
                turn, share = parents[turn], 0.7 * share
        assert returns_to_go(rewards, 0.7, parents) == pytest.approx(expected_returns)
        assert returns_to_go(rewards, 0.7, range(-1, num_turns - 1)) == pytest.approx(returns_to_go(rewards, 0.7))


@pytest.mark.parametrize("normalization", ["std", "mean", "leave_one_out", "none"])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_each_token_has_the_advantage_of_the_turn_that_sampled_it(gamma, normalization):
    rng = random.Random(f"{gamma} {normalization}")
    for _ in range(8):
        groups = [[played(rng, group, name, rng.randint(1, 5)) for name in range(4)] for group in ("a", "b")]
        rewards = {group[0].group_id: {one.sample_index: one.turn_rewards for one in group} for group in groups}
        by_turn = expected(rewards, gamma, normalization)
        advantages = MCAdvantage(gamma=gamma, normalization=normalization, drop_constant_groups=False)
        batch = advantages(batch_rows(groups))
        seen = set()
        for row in batch.unbind(0):
            ids, mask, written = row["tokens", "full"], row["masks", "all_assistant_mask"], row["advantage"]
            assert written.shape == ids.shape and written.dtype == torch.float32
            of_turns = by_turn[row["rollout", "group_id"], int(row["rollout", "sample_index"])]
            for token, is_trained, advantage in zip(ids.tolist(), mask.tolist(), written.tolist(), strict=True):
                assert advantage == pytest.approx(of_turns[token // 100 - 1] if is_trained else 0.0, abs=1e-5)
                seen.add(token // 100)
        assert len(seen) > 3


@pytest.mark.parametrize("normalization", ["std", "mean", "leave_one_out", "none"])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_of_a_dense_reward_a_token_is_credited_with_what_follows_it(gamma, normalization):
    rng = random.Random(f"{gamma} {normalization}")
    seen = 0
    for _ in range(8):
        group = [played(rng, "a", name, rng.randint(1, 4)) for name in range(4)]
        for rollout in group:
            answers = [turn.completion_ids for turn in rollout.conversation.turns]
            for place in rng.sample(range(len(answers)), rng.randint(0, len(answers))):
                dense = [rng.choice((0.0, 0.5, -0.25)) for _ in answers[place]]
                rollout.token_rewards[place] = dense
                rollout.turn_rewards[place] = sum(dense)
            rollout.reward = sum(rollout.turn_rewards)
        by_turn = expected({"a": {one.sample_index: one.turn_rewards for one in group}}, gamma, normalization)
        returns = {
            one.sample_index: [
                sum(gamma**later * reward for later, reward in enumerate(one.turn_rewards[turn:]))
                for turn in range(one.num_turns)
            ]
            for one in group
        }
        rewards = {one.sample_index: one.token_rewards for one in group}
        batch = MCAdvantage(gamma=gamma, normalization=normalization, drop_constant_groups=False)(batch_rows([group]))
        for row in batch.unbind(0):
            name = int(row["rollout", "sample_index"])
            for token, is_trained, advantage in zip(
                row["tokens", "full"].tolist(), row["masks", "all_assistant_mask"].tolist(), row["advantage"].tolist(),
                strict=True,
            ):  # fmt: skip
                turn, index = token // 100 - 1, token % 100
                if not is_trained:
                    assert advantage == 0.0
                    continue
                others = [one[turn] for one in returns.values() if len(one) > turn]
                before = sum(rewards[name].get(turn, [])[:index])
                if normalization == "std":
                    before /= stdev(others) if len(set(others)) > 1 else math.inf
                elif normalization != "none" and len(set(others)) < 2:
                    before = 0.0
                assert advantage == pytest.approx(by_turn["a", name][turn] - before, abs=1e-5)
                seen += before != 0.0
    assert seen > 10


class OfTokens(Transform):
    """Pays for each token of the answer, later ones more; the first answer of a conversation alone."""

    reads_turns = True

    def _step(self, tensordict, next_tensordict):
        num_tokens, is_first = len(tensordict["tokens", "full"]), tensordict["history"].prompt.shape[-1] == 1
        dense = torch.arange(num_tokens).float().unsqueeze(-1)
        return next_tensordict.set("reward", dense if is_first else torch.zeros(1, 1))


def test_dense_rewards_of_a_turn_come_from_the_environment(renderer):
    answers = iter(["11", "0", "3", "0"])
    policy = LLMWrapperBase(
        ScriptedEngine(lambda prompt_ids: renderer.encode(next(answers) + "<|im_end|>")), renderer=renderer
    )
    env = MessageChatEnv(lambda item: Paying(), repeats=2).append_transform(OfTokens())
    with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=1,
                      postproc=MCAdvantage(gamma=0.0, normalization="none")) as collector:  # fmt: skip
        batch = collector.next()
    assert len(batch) == 2
    for row in batch.unbind(0):
        mask, advantage = row["masks", "all_assistant_mask"], row["advantage"]
        first, start = int(row["turns", "start"][0]), int(row["turns", "start"][1])
        answer = [place for place in range(first, start) if mask[place]]
        total = sum(range(answer[-1] + 1))  # what its prompt's tokens were given counts at the turn
        for place in answer:
            assert advantage[place] == total - sum(range(first, place))
        assert not advantage[start:].any() and row["next", "reward"] == total


class Paying(MessageEnv):
    """Pays the given rewards, turn by turn."""

    async def init(self):
        return [{"role": "user", "content": "begin"}]

    async def step(self, message):
        amount = float(message["content"])
        return MessageStep([{"role": "user", "content": "go on"}], amount, is_done=amount == 0)


def test_rewards_of_turns_come_from_the_environment_and_have_signal(renderer):
    # Both rollouts have the same sum, in another order.
    said = {}

    def answer(prompt_ids):
        text = renderer.decode(prompt_ids)
        place = text.count("go on")
        taken = said.setdefault(place, iter({0: ("1", "3"), 1: ("3", "1"), 2: ("0", "0")}[place]))
        return renderer.encode(next(taken) + "<|im_end|>")

    policy = LLMWrapperBase(ScriptedEngine(answer), renderer=renderer)
    by_turn, by_sum = MCAdvantage(gamma=1.0, normalization="mean"), MCAdvantage(normalization="mean")
    env = MessageChatEnv(lambda item: Paying(), repeats=2)
    with LLMCollector(env, policy=policy, groups_per_batch=1, group_rules=GroupRules(group_filter=by_turn.has_signal),
                      postproc=by_turn) as collector:  # fmt: skip
        batch, rollouts = collector.next(), collector.rollouts
    assert sorted(one.turn_rewards for one in rollouts) == [[1.0, 3.0, 0.0], [3.0, 1.0, 0.0]]
    assert [one.reward for one in rollouts] == [4.0, 4.0] and not by_sum.has_signal(rollouts)
    for row in batch.unbind(0):
        first = float(row["turns", "reward"][0])
        mask = row["masks", "all_assistant_mask"]
        written = row["advantage"][mask].tolist()
        # Returns: 4, 3, 0 and 4, 1, 0; each answer is a digit and the end of its turn.
        second = 1.0 if first == 1.0 else -1.0
        assert written == pytest.approx([0.0, 0.0, second, second, 0.0, 0.0])


def test_what_gamma_cannot_be_is_refused():
    for gamma in (-0.1, 1.1):
        with pytest.raises(ValueError, match="gamma must be from 0 to 1"):
            MCAdvantage(gamma=gamma)
    for name, value in (
        ("normalize_batch", True), ("component_weights", {"a": 1.0}), ("trajectory_return", "sum"),
        ("keep_return_bounds", (0.0, 1.0)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"gamma compares turns, and {name}"):
            MCAdvantage(gamma=0.9, **{name: value})
    with pytest.raises(ValueError, match="gamma compares turns, and normalize_batch"):
        MCAdvantage(gamma=0.9, normalize_batch=True, kl_penalty=KLPenalty(0.1))
    rows = [TensorDict({"rollout": {"group_id": "g", "rollout_id": "a"}, "next": {"reward": [[1.0]]}})]
    with pytest.raises(KeyError, match="turns"):
        MCAdvantage(gamma=0.9)(lazy_stack(rows))
    turn = TensorDict({"query": "q", "next": {"reward": [[1.0]], "done": [True]}})
    with pytest.raises(ValueError, match="gamma applies to training rows"):
        MCAdvantage(gamma=0.9)(lazy_stack([turn]))
