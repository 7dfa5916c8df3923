"""Failures planted on purpose: what the live view and the health log say of them, and at which step."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
import warnings

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from llmrl import DatasetChatEnv, RubricReward, TransformersEngine, train
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.collectors.groups import SIGNAL_PATIENCE
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.runs.evaluation import EvaluationReport, metrics_of_evaluation
from llmrl.scripts import grpo as loop
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform
from llmrl.trainer import train_step
from llmrl.watch.findings import HealthLog
from llmrl.watch.health import HealthJudge
from llmrl.watch.live_view import LiveView
from llmrl.watch.rollout_metrics import rollout_metrics


class Planted:
    """A run of a tiny random model, and what was said of it."""

    def __init__(self, path, printed):
        self.printed = printed
        self.steps = HealthLog(path / "health.jsonl").read()

    def first(self, name):
        """The step at which something was found first, and the worst verdict on it."""
        found = [(step, one["verdict"]) for step, line in self.steps.items() for one in line["findings"]
                 if one["name"] == name]  # fmt: skip
        return (found[0][0], min(verdict for _, verdict in found)) if found else None  # broken is before look


@pytest.fixture
def planted(tiny_model_path, tmp_path):
    def run(reward, *, engine=TransformersEngine, tools=(), num_steps=2, **options):
        env = DatasetChatEnv([{"query": f"{a} + 1 =", "place": a} for a in range(6)], repeats=4, name="train")
        if tools:
            env = env.append_transform(ToolTransform(tools))
        out = io.StringIO()
        served = engine(tiny_model_path)
        settings = {"path": tmp_path / "run", "groups_per_batch": 3, "max_new_tokens": 5, "learning_rate": 1e-2}
        settings |= {"engine": served, "console": Console(file=out, width=300), "num_steps": num_steps}
        try:
            train(tiny_model_path, env.append_transform(RubricReward(reward)), **{**settings, **options})
        finally:
            served.shutdown()
        return Planted(tmp_path / "run", out.getvalue())

    return run


def differs(completion):
    """Something that a random model's answers differ in."""
    return float(len(completion) % 7) / 7


class Stale(TransformersEngine):
    """Counts versions, and keeps the weights that it began with."""

    def load_weights(self, weights, *, version=None):
        """Lose the weights."""
        own = {name: parameter.detach().clone() for name, parameter in self.model.state_dict().items()}
        return super().load_weights(own, version=version)


class Rounded(TransformersEngine):
    """Serves in bfloat16 what is trained in float32."""

    def load_weights(self, weights, *, version=None):
        """Round the weights, as an engine of another dtype does."""
        rounded = {name: weight.to(torch.bfloat16).to(weight.dtype) for name, weight in weights.items()}
        return super().load_weights(rounded, version=version)


CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call><|im_end|>'


def search(query: str) -> str:
    """Search."""
    raise OSError("no route to host")


class Searching(ScriptedEngine):
    """Calls a tool, and answers with more or fewer words when it has read what came of that."""

    def __init__(self, model):
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._lengths = itertools.cycle(range(1, 6))
        super().__init__(self.say, encode=self._tokenizer.encode)

    def say(self, prompt_ids):
        if "no route to host" not in self._tokenizer.decode(prompt_ids):
            return CALL
        return "no " * next(self._lengths) + "<|im_end|>"

    def get_tokenizer(self):
        return self._tokenizer

    def load_weights(self, weights, *, version=None):
        """Say the same with all weights."""
        self.policy_version += 1
        return self.policy_version


def test_a_tool_that_always_fails_is_seen_at_the_first_step_of_a_run(planted, takes_long):
    run = planted(differs, engine=Searching, tools=[search], num_steps=1, max_turns=2, max_new_tokens=60)
    assert run.first("broken_tools") == (1, "broken")
    assert "100 % of the tool calls were not answered. Likely: the tool raises" in run.printed
    (finding,) = [one for one in run.steps[1]["findings"] if one["name"] == "broken_tools"]
    assert finding["rollouts"]


@pytest.mark.slow
def test_stale_weights_are_seen_at_the_second_step(planted):
    with pytest.warns(UserWarning, match="1. the engine does not hold the trainer's weights"):
        run = planted(differs, engine=Stale)
    step, _ = run.first("mismatched_weights")
    assert step == 2 and "mismatched_weights" in run.printed and "Likely: stale weights" in run.printed


@pytest.mark.slow
def test_mixed_dtypes_are_seen(planted):
    with pytest.warns(UserWarning, match="differ by"):
        run = planted(differs, engine=Rounded, learning_rate=1e-1)
    assert run.first("mismatched_weights")[0] <= 3
    assert "different dtypes" in str(run.steps)


@pytest.mark.slow
def test_rewards_that_are_mostly_equal_carry_no_signal(planted):
    def dull(completion, place):
        return differs(completion) if place == 0 else 0.5

    run = planted(dull, num_steps=5, groups_per_batch=6)  # 15 of 18 prompts, which is more than chance
    assert run.first("no_signal")[0] in (3, 4, 5) and "no_signal" in run.printed
    step, verdict = run.first("answers_cut")  # a random model does not end
    assert (step in (3, 4, 5), verdict) == (True, "broken") and "answers_cut" in run.printed
    assert all(one["rollouts"] for one in run.steps[step]["findings"] if one["name"] in ("no_signal", "answers_cut"))


def test_a_learning_rate_that_changes_nothing_is_seen_at_the_third_step(planted, takes_long):
    run = planted(differs, num_steps=3, learning_rate=1e-2 * 1e-6)
    assert run.first("idle_updates") == (3, "broken") and "In 3 steps no update changed the weights" in run.printed


def test_a_learning_rate_that_is_far_too_high_is_seen_at_the_first_step(planted, takes_long):
    run = planted(differs, num_steps=1, learning_rate=1e-2 * 100)
    assert run.first("large_updates") == (1, "broken")


def test_a_penalty_that_is_a_thousand_times_too_large_is_seen_at_the_second_step(planted, takes_long):
    run = planted(differs, kl_to_ref_coeff=0.04 * 1000)
    assert run.first("kl_penalty") == (2, "broken") and "kl_to_ref_coeff is too large" in run.printed


def test_a_gradient_that_grows_tenfold_a_step_is_seen_at_the_third_step(planted, monkeypatch, takes_long):
    updates = []

    def growing(loss, batch, optimizer, **options):
        updates.append(batch)
        for row in batch.unbind(0):
            row["advantage"] *= 10.0 ** len(updates)
        return train_step(loss, batch, optimizer, **options)

    monkeypatch.setattr(loop, "train_step", growing)
    run = planted(differs, num_steps=3)
    assert run.first("gradient_explosion")[0] == 3 and "gradient_explosion" in run.printed


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_an_entropy_that_collapses_is_seen_at_any_scale_of_the_reward(planted, monkeypatch, takes_long, scale):
    updates = []

    def sharpening(loss, batch, optimizer, **options):
        report = train_step(loss, batch, optimizer, **options)
        updates.append(report)
        if len(updates) == 4:  # the logits are as much larger as the last layer's norm
            with torch.no_grad():
                loss.actor_network.model.model.norm.weight *= 100
        return report

    def scaled(completion):
        return scale * differs(completion)

    monkeypatch.setattr(loop, "train_step", sharpening)
    run = planted(scaled, num_steps=5, learning_rate=1e-4)
    assert run.first("entropy_collapse")[0] == 5 and "entropy_collapse" in run.printed


@pytest.fixture
def judged(renderer, tmp_path):
    """Judges steps of a run with a scripted model: `answers` is a function of step and prompt."""

    def judge(env, answers, *, num_steps=1, held_out=None, num_rollouts=16):
        step, said = 0, []
        limits, whole = RolloutLimits(max_turns=3), {"yield_completed_trajectories": True}

        def answer(prompt_ids):
            return answers(step, renderer.decode(prompt_ids))

        policy = LLMWrapperBase(
            ScriptedEngine(answer, encode=renderer.encode), renderer=renderer, generate_kwargs={"max_new_tokens": 60}
        )
        judge = HealthJudge(HealthLog(tmp_path / "health.jsonl"), {})
        view = LiveView(num_steps, console=Console(file=io.StringIO(), width=300))
        with contextlib.ExitStack() as exits:
            collector, other = (
                one and exits.enter_context(LLMCollector(one, policy=policy, limits=limits, **whole))
                for one in (env, held_out)
            )
            for step in range(1, num_steps + 1):
                rollouts = collector.play(num_rollouts)
                metrics = collector.report.to_metrics() | rollout_metrics(rollouts)
                if other is not None:
                    metrics |= metrics_of_evaluation({"held": EvaluationReport.of(other.play(num_rollouts))})
                findings = judge.judge(step, metrics, [rollout.to_record() for rollout in rollouts])
                view.show_health(step, findings, [rollout.to_record() for rollout in rollouts])
                said.append({finding.name: finding.verdict for finding in findings})
        return said, view.console.file.getvalue()

    return judge


def sums(reward, **options):
    rows = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(1, 5)]
    return DatasetChatEnv(rows, repeats=2, **options).append_transform(RubricReward(reward))


def right(completion, answer):
    return float(completion == answer)


def paid(scale):
    """Pays a wrong answer a fifth, and says apart from that which is right."""

    def pays(completion, answer):
        return scale * (1.0 if completion == answer else 0.2)

    return Rubric(RewardFn(pays), RewardFn(right, name="success", weight=0))


def sum_in(prompt):
    return str(sum(map(int, re.findall(r"\d", prompt.rpartition("user")[2]))))


def test_a_reward_that_is_hacked_is_one_answer_and_falls_where_it_is_held_out(judged):
    def answers(step, prompt):  # from the sum to what is paid for
        return "sevens<|im_end|>" if int(sum_in(prompt)) < 2 * step - 1 else f"{sum_in(prompt)}<|im_end|>"

    def hackable(completion):
        return float("s" in completion)

    said, printed = judged(sums(hackable, name="a"), answers, num_steps=8, held_out=sums(right, name="held"))
    assert not {"reward_hacking", "one_answer"} & said[0].keys()
    assert (said[-1]["reward_hacking"], said[-1]["one_answer"]) == ("broken", "broken"), printed
    assert "step 3: broken reward_hacking: eval/held/pass@1 fell from 1 to 0.12 while the training reward" in printed


def test_a_template_that_is_not_the_models_is_all_wrong_and_cut_at_the_first_step(judged, tmp_path):
    """A model that was trained with other marks does not end its turns, and goes on with the user's."""
    said, printed = judged(sums(right), lambda step, prompt: "user: and " * 60, num_rollouts=2 * SIGNAL_PATIENCE)
    assert said == [{"answers_cut": "broken", "no_signal": "broken"}]
    assert "the template or the prompt" in str(HealthLog(tmp_path / "health.jsonl").read())
    assert "all rewards are 0. Likely: the answers are cut" in printed


def test_a_tool_that_always_fails_is_seen_at_the_first_step(judged):
    env = DatasetChatEnv([{"query": "Who?", "answer": "me"}], repeats=2).append_transform(ToolTransform([search]))
    said, printed = judged(env.append_transform(RubricReward(right)), lambda step, prompt: CALL, num_rollouts=4)
    assert said[0]["broken_tools"] == "broken"
    assert "100 % of the tool calls were not answered. Likely: the tool raises" in printed


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_success_says_what_is_right_whatever_the_reward_pays(judged, scale):
    said, printed = judged(sums(paid(scale)), lambda step, prompt: f"{sum_in(prompt)}<|im_end|>")
    assert said == [{"learned": "fine"}] and "100 % of the prompts are all right" in printed
    said, printed = judged(sums(paid(scale)), lambda step, prompt: "no<|im_end|>", num_rollouts=2 * SIGNAL_PATIENCE)
    assert said == [{"no_signal": "broken"}], printed


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_an_evaluation_reads_success_too(renderer, scale):
    def answer(prompt_ids):  # 0..3 + 1..4: six of the sixteen sums are at most 3
        total = sum_in(renderer.decode(prompt_ids))
        return f"{total if int(total) <= 3 else 'no'}<|im_end|>"

    policy = LLMWrapperBase(
        ScriptedEngine(answer, encode=renderer.encode), renderer=renderer, generate_kwargs={"max_new_tokens": 60}
    )
    env = sums(paid(scale), shuffle=False)
    with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
        rollouts = collector.play(32)
    metrics = rollout_metrics(rollouts)
    assert EvaluationReport.of(rollouts).pass_at[1].mean == pytest.approx(6 / 16)
    assert (metrics["groups_all_right"], metrics["groups_all_wrong"]) == (6 / 16, 10 / 16)


def larger_than_1(completion):
    return 10 * differs(completion)


@pytest.fixture
def run_with_rewards_up_to_10(planted, tmp_path):
    """Trains with a rubric, evaluates with it; gives all metrics' names, and what records say of being right."""

    def run(*reward_fns):
        held_out = DatasetChatEnv(["8 + 1 =", "9 + 1 ="], repeats=4, name="held")
        held_out = held_out.append_transform(RubricReward(Rubric(*reward_fns)))
        planted(Rubric(*reward_fns), num_steps=1, eval_envs={"held": held_out})
        with (tmp_path / "run/metrics.csv").open() as file:
            names = next(csv.reader(file))
        records = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
        return set(names), [(one["is_right"], one["reward_breakdown"]) for one in records]

    return run


NEED_RIGHT = {"groups_all_right", "groups_all_wrong", "completion_tokens_wrong", "eval/held/pass@1"}


@pytest.mark.slow
def test_rewards_above_1_do_not_say_what_is_right(run_with_rewards_up_to_10):
    with pytest.warns(UserWarning, match="which answers are right is not known"):
        names, said = run_with_rewards_up_to_10(larger_than_1)
    assert "eval/held/reward" in names and not NEED_RIGHT & names
    assert said and all(is_right is None for is_right, _ in said)


@pytest.mark.slow
def test_a_function_named_success_says_what_is_right_of_rewards_above_1(run_with_rewards_up_to_10):
    def is_long(completion):
        return len(completion) > 20

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Rewards are larger")
        names, said = run_with_rewards_up_to_10(larger_than_1, RewardFn(is_long, name="success", weight=0))
    assert names >= {"groups_all_right", "groups_all_wrong", "eval/held/pass@1"}
    assert said and all(is_right is (breakdown["success"] == 1) for is_right, breakdown in said)
