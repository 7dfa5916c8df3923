"""Histories that are rewritten: what is trained, and that reports and the live view say so."""

from __future__ import annotations

import io
import pickle
from array import array

import torch
from rendering_families import family_renderer
from rich.console import Console
from torchrl.envs import Transform

from llmrl.collectors import LLMCollector, rollout_rows
from llmrl.collectors.rows import rollout_row_bytes
from llmrl.data import History, Rollout, RolloutStatus
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import Conversation
from llmrl.testing import ScriptedEngine
from llmrl.watch.live_view import LiveView


class Editor(Transform):
    """Cuts the last word of the first answer, puts another in the place of the second, ends after the third."""

    def _step(self, tensordict, next_tensordict):
        for element in next_tensordict.unbind(0) if next_tensordict.batch_size else [next_tensordict]:
            *before, last = element["history"].prompt.chats
            num_answers = len(before) // 2
            edited = (last["content"].rsplit(" ", 1)[0], "something else", last["content"])[num_answers]
            chats = [*before, {**last, "content": edited}, {"role": "user", "content": "and?"}]
            element["history"].prompt = History.from_chats(chats)
            if num_answers == 2:
                element["done"] = element["terminated"] = torch.ones(1, dtype=torch.bool)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


def test_reports_count_forks_and_the_tokens_that_a_realign_took(renderer):
    engine = ScriptedEngine(["one two three four five<|im_end|>"], encode=renderer.encode)
    env = DatasetChatEnv(["go"], repeats=2).append_transform(Editor())
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1) as collector:
        batch = next(iter(collector))
        report = collector.report
    # Each of two rollouts: " five" and the end of the turn went, then one answer was replaced by another.
    assert (report.num_forks, report.num_realigned_tokens) == (2, 4)
    assert {"num_forks": 2.0, "num_realigned_tokens": 4.0}.items() <= report.to_metrics().items()
    assert "2 forks" in str(report) and "4 sampled tokens realigned and not trained" in str(report)
    num_trained = sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0))
    assert num_trained == report.num_completion_tokens - 4 and len(batch) == 4
    for rollout in collector.rollouts:
        counts = rollout.conversation.reconcile().counts
        expected = counts["num_forked_turns"], counts["num_realigned_tokens"]
        assert (rollout.num_forks, rollout.num_realigned_tokens) == expected


def test_a_template_that_drops_reasoning_trains_every_sampled_token(model_path):
    renderer = family_renderer(model_path, "qwen3")
    text = "<think>\nIt is one, I think, or two; no, one.\n</think>\n\nOne.<|im_end|>"
    engine = ScriptedEngine([text], encode=renderer.encode)

    class Ask(Editor):
        def _step(self, tensordict, next_tensordict):
            for element in next_tensordict.unbind(0) if next_tensordict.batch_size else [next_tensordict]:
                prompt = element["history"].prompt
                element["history"].prompt = prompt.append({"role": "user", "content": "and?"})
                if len(prompt.chats) == 8:
                    element["done"] = element["terminated"] = torch.ones(1, dtype=torch.bool)
            return next_tensordict

    env = DatasetChatEnv(["go"]).append_transform(Ask())
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=1) as collector:
        batch = next(iter(collector))
    trained = [row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist() for row in batch.unbind(0)]
    assert trained == [renderer.encode(text)] * 4
    assert (collector.report.num_forks, collector.report.num_realigned_tokens) == (3, 0)
    for row in batch.unbind(0):  # a row is what the engine was given, and what it gave
        num_prompt = int(row["masks", "all_assistant_mask"].int().argmax())
        assert row["tokens", "full"][:num_prompt].tolist() in [prompt for prompt, _, _ in engine.requests]


def test_the_live_view_shows_them_once_there_are_any():
    output = io.StringIO()
    view = LiveView(3, console=Console(file=output, width=200))
    with view:
        view.show_step(1, {"reward_mean": 0.5, "num_forks": 0.0, "num_realigned_tokens": 0.0})
        assert "forks" not in output.getvalue() and "realigned" not in output.getvalue()
        view.show_step(2, {"reward_mean": 0.5, "num_forks": 3.0, "num_realigned_tokens": 12.0})
    assert "forks 3  realigned tokens 12" in output.getvalue()
    table = io.StringIO()
    Console(file=table, width=200).print(view._render())
    assert "forks" in table.getvalue() and "12" in table.getvalue()


def test_rows_of_a_rollout_that_travelled_have_what_was_sampled_and_memory_of_their_own():
    conversation = Conversation.start(None, fork_threshold_tokens=1).with_prompt_ids([1, 2])
    kept = [array("i", [3, 4]), None]
    conversation = conversation.with_completion([3, 5], log_probs=[-0.5, -1.5], versions=[6, 7], sampling_mask=kept)
    conversation = conversation.with_prompt_ids([9, 8]).with_completion([7], log_probs=[-0.25], versions=[8])
    sent = Rollout(
        rollout_id="g/0", group_id="g", sample_index=0, group_size=1, conversation=conversation, is_scored=True,
        status=RolloutStatus.COMPLETED, num_turns=2, reward=2.0, turn_rewards=[0.5, 1.5],
    )  # fmt: skip
    sent.row_bytes, sent.conversation = rollout_row_bytes(sent), None
    rows = rollout_rows(pickle.loads(pickle.dumps(sent)))
    assert [row["tokens", "full"].tolist() for row in rows] == [[1, 2, 3, 5], [9, 8, 7]]
    assert [row["masks", "all_assistant_mask"].tolist() for row in rows] == [
        [False, False, True, True],
        [False, False, True],
    ]
    assert [row["log_probs", "full"].tolist() for row in rows] == [[0.0, 0.0, -0.5, -1.5], [0.0, 0.0, -0.25]]
    assert [row["policy_versions", "full"].tolist() for row in rows] == [[-1, -1, 6, 7], [-1, -1, 8]]
    assert [row["turns", "start"].tolist() for row in rows] == [[2, -1], [-1, 2]]
    assert rows[0]["sampling_mask", "counts"].tolist() == [0, 0, 2, 0] and "sampling_mask" not in rows[1]
    assert [(row["next", "reward"].item(), row["rollout", "num_rows"].item()) for row in rows] == [(2.0, 2)] * 2
    assert rows[0]["rollout", "is_scored"].dtype == torch.bool and rows[0]["rollout", "status"].dtype == torch.int64
    for tensor in (tensor for row in rows for tensor in row.values(True, True) if isinstance(tensor, torch.Tensor)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()  # nothing of it is read-only
