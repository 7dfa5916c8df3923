"""Metrics of runs that are healthy, with the noise that batches of few prompts have: nothing is to be found in them."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from llmrl.data import Rollout, RolloutStatus, StopReason
from llmrl.runs.evaluation import EvaluationReport, metrics_of_evaluation
from llmrl.watch.rollout_metrics import rollout_metrics


def simulated_run(seed, *, is_rising, num_steps=60):
    """A run with a skill that stays or rises; its properties are drawn with the seed.

    Gives the steps' metrics, and of each the share of prompts that are to be expected without signal.
    """
    rng = np.random.default_rng(seed)
    world = {
        "groups": int(rng.choice([4, 8, 16, 32])),
        "answers": int(rng.choice([4, 8])),
        "spread": rng.uniform(0.5, 2.0),  # of the problems' difficulties
        "scale": float(rng.choice([0.1, 1.0, 10.0])),
        "is_binary": rng.random() < 0.6,
        "cut": rng.uniform(0.0, 0.12),
        "failed": rng.uniform(0.0, 0.015),
        "tools": rng.uniform(0.05, 0.35),
        "common": rng.uniform(0.02, 0.3),
        "length": rng.uniform(20, 300),
        "length_spread": rng.uniform(0.2, 0.7),
        "entropy": rng.uniform(0.2, 2.0),
        "grad": rng.uniform(0.2, 0.6),  # spread of its logarithm
        "ess": rng.uniform(0.7, 0.99),
        "every": int(rng.choice([5, 10])),
        "problems": int(rng.choice([20, 50, 200])),
        "rate": rng.uniform(2e-7, 1e-5),
    }
    start = rng.uniform(-1.5, 0.5) if is_rising else rng.uniform(-4.0, 1.0)
    end = start + rng.uniform(1.0, 3.5) if is_rising else start
    held_out = rng.normal(0, world["spread"], world["problems"])
    grown = rng.uniform(0.6, 2.0) if is_rising else 1.0
    steps, without_signal = [], []
    for step in range(num_steps):
        progress = min(1.0, step / (0.8 * num_steps))
        skill = start + (end - start) * progress
        length = world["length"] * grown**progress
        metrics = _played(rng, world, skill, length)
        # Who learns becomes surer; the entropy falls as the reward rises.
        entropy = world["entropy"] * np.exp(-0.8 * (skill - start)) * rng.lognormal(0, 0.06)
        metrics |= {
            "entropy": float(entropy),
            "grad_norm": float(rng.lognormal(-1, world["grad"])),
            "ESS": float(np.clip(rng.normal(world["ess"], 0.03), 0.0, 1.0)),
            "clip_fraction": float(np.clip(rng.normal(0.05, 0.03), 0.0, 1.0)),
            "on_policy_difference": float(abs(rng.normal(2e-4, 1e-4))),
            "on_policy_difference_bound": 0.001,
            "staleness_max": 0.0,
            "is_skipped": 0.0,
            "kl_to_ref": float(0.02 * progress + abs(rng.normal(0, 2e-3))),
            "learning_rate": world["rate"],
            "weight_change": float(rng.lognormal(np.log(50 * world["rate"]), 0.2)),
            "policy_version": step + 1.0,
        }
        if step % world["every"] == 0:
            report = EvaluationReport.of(_answers(rng, world, held_out, skill, length, 2))
            metrics |= metrics_of_evaluation({"held": report})
        steps.append(metrics)
        without_signal.append(_share_without_signal(world, skill))
    return steps, without_signal


def _share_without_signal(world, skill):
    difficulties = world["spread"] * np.array([NormalDist().inv_cdf((place + 0.5) / 50) for place in range(50)])
    chances = 1 / (1 + np.exp(difficulties - skill))
    if not world["is_binary"]:  # noise of 0.2, cut at both ends
        right = np.array([1 - NormalDist(chance, 0.2).cdf(1) for chance in chances])
        wrong = np.array([NormalDist(chance, 0.2).cdf(0) for chance in chances])
    else:
        right, wrong = chances, 1 - chances
    return float(np.mean(right ** world["answers"] + wrong ** world["answers"]))


def _played(rng, world, skill, length):
    rollouts = []
    while True:  # a batch without signal is collected anew
        problems = rng.normal(0, world["spread"], world["groups"])
        rollouts += _answers(rng, world, problems, skill, length, world["answers"], first=len(rollouts))
        if rollout_metrics(rollouts)["groups_all_equal"] < 1:
            break
    scored = [one.reward for one in rollouts if one.is_scored]
    return {
        "num_rollouts": float(len(rollouts)),
        "num_error": float(sum(one.status is RolloutStatus.ERROR for one in rollouts)),
        "completion_tokens_mean": float(np.mean([one.num_completion_tokens for one in rollouts])),
        **({"reward_mean": float(np.mean(scored))} if scored else {}),
        **rollout_metrics(rollouts),
    }


def _answers(rng, world, problems, skill, length, num_answers, *, first=0):
    rollouts = []
    for place, difficulty in enumerate(problems, first):
        chance = 1 / (1 + np.exp(difficulty - skill))
        common = "the same" if rng.random() < world["common"] else f"answer {place}"
        for sample in range(num_answers):
            has_failed, is_cut = rng.random() < world["failed"], rng.random() < world["cut"]
            is_right = rng.random() < chance
            part = float(is_right) if world["is_binary"] else float(np.clip(chance + rng.normal(0, 0.2), 0, 1))
            calls = int(rng.integers(0, 3))
            failed_calls = int(rng.binomial(calls, world["tools"]))
            rollouts.append(
                Rollout(
                    rollout_id=f"{place}/{sample}",
                    group_id=str(place),
                    sample_index=sample,
                    group_size=num_answers,
                    status=RolloutStatus.ERROR if has_failed else RolloutStatus.COMPLETED,
                    reason=StopReason.LENGTH if is_cut and not has_failed else "",
                    reward=0.0 if has_failed else world["scale"] * part,
                    breakdown={} if has_failed else {"right": world["scale"] * part},
                    is_scored=not has_failed,
                    num_completion_tokens=max(1, int(length * rng.lognormal(0, world["length_spread"]))),
                    tool_calls={"answered": calls - failed_calls, "failed": failed_calls} if calls else {},
                    messages=({"role": "assistant", "content": common},),
                )
            )
    return rollouts
