"""Recorded conversations as files of others, and files of others as demonstrations and as answers to score."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest
from recorded_runs import edit_jsonl
from typer.testing import CliRunner

from llmrl import RubricReward
from llmrl._utils.spans import stop_spans, trace_spans
from llmrl.cli.app import app
from llmrl.collectors import Demonstrations, LLMCollector
from llmrl.config.model import ModelConfig
from llmrl.config.resumed import save_config
from llmrl.config.sections import EnvConfig, GRPOCollectConfig, GRPOConfig, GRPOTrainConfig, RunConfig
from llmrl.endpoint.chat_logs import read_chat_log
from llmrl.envs import AgentEnv, DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.replay.conversations import conversations_of, send_conversations
from llmrl.replay.recorded import RecordedRun
from llmrl.runs.run_folder import RunFolder
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def length(completion):
    return len(completion) / 8


def record(path, env, renderer, answers):
    """Write the folder of a run with one step, as a training run does."""
    cfg = GRPOConfig(
        run=RunConfig(path=str(path)),
        model=ModelConfig(path="embedded"),
        env=EnvConfig(name="train"),
        collect=GRPOCollectConfig(groups_per_batch=2, group_size=2, max_new_tokens=64),
        train=GRPOTrainConfig(num_steps=1, learning_rate=1e-3),
    )
    folder = RunFolder(path, trackers=[])
    engine = ScriptedEngine([f"{answer}<|im_end|>" for answer in answers], encode=renderer.encode)
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=2) as collector:
        next(iter(collector))
        folder.log_rollouts(1, "train", [rollout.to_record() for rollout in collector.rollouts])
    folder.log_metrics(1, {"policy_version": 1.0})
    folder.close()
    save_config(cfg, path)
    return path


@pytest.fixture
def run(tmp_path, renderer):
    problems = [{"query": f"{number} + 2 =", "answer": number + 2} for number in (1, 2)]
    env = DatasetChatEnv(problems, repeats=2).append_transform(ToolTransform([add]))
    env = env.append_transform(RubricReward(length))
    return record(tmp_path / "run", env, renderer, [CALL, CALL, "3", "It is 3"] * 2)


def call(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_messages_of_a_run_are_demonstrations_and_answers_to_score(run, tmp_path, renderer):
    """A function that gives the recorded rewards gives them to the file, too, with its calls and columns."""
    called = call("conversations", run, tmp_path / "said.jsonl", "--json")
    assert called.exit_code == 0 and json.loads(called.output)["num_conversations"] == 4
    rows, recorded = rows_of(tmp_path / "said.jsonl"), RecordedRun(run).records(1)
    texts = [message["content"] for row in rows for message in row["messages"]]
    assert all(isinstance(text, str) for text in texts)  # beside calls, too: SmolLM2's template concatenates it
    assert [row["reward"] for row in rows] == [one["reward"] for one in recorded]
    calls = [
        message["tool_calls"][0]["function"] for row in rows for message in row["messages"] if "tool_calls" in message
    ]
    assert calls and all(json.loads(one["arguments"]) == {"a": 1, "b": 2} for one in calls)
    (tmp_path / "reward.py").write_text(
        "def length(completion, answer):\n    return len(completion) / 8 + 0 * answer\n"
    )
    scored = call("rescore", tmp_path / "said.jsonl", "--reward", f"{tmp_path}/reward.py:length", "--json")
    assert json.loads(scored.output)["rewards"] == {one["rollout_id"]: one["reward"] for one in recorded}
    shown = Demonstrations(tmp_path / "said.jsonl", renderer, conversations_per_batch=4).all_rows()
    direct = [{"messages": one["messages"]} for one in recorded]
    expected = Demonstrations(direct, renderer, conversations_per_batch=4).all_rows()
    assert [row["tokens", "full"].tolist() for row in shown] == [row["tokens", "full"].tolist() for row in expected]
    assert call("conversations", run, tmp_path / "said.jsonl").exit_code == 2  # not written over


def test_better_answers_are_a_data_set_and_pairs_have_the_best_beside_the_worst(run, tmp_path, renderer):
    groups = defaultdict(list)
    for one in RecordedRun(run).records(1):
        groups[one["group_id"]].append(one)
    assert all(len({one["reward"] for one in group}) == 2 for group in groups.values())
    call("conversations", run, tmp_path / "sft.jsonl", "--as", "sft")
    better = [max(group, key=lambda one: one["reward"])["messages"][-1]["content"] for group in groups.values()]
    assert [row["messages"][-1]["content"] for row in rows_of(tmp_path / "sft.jsonl")] == better
    assert Demonstrations(tmp_path / "sft.jsonl", renderer, conversations_per_batch=1).all_rows().shape == (2,)
    call("conversations", run, tmp_path / "pairs.jsonl", "--as", "preferences")
    pairs = rows_of(tmp_path / "pairs.jsonl")
    assert len(pairs) == 2
    for pair in pairs:
        assert length(pair["chosen"][-1]["content"]) > length(pair["rejected"][-1]["content"])
        assert pair["prompt"][0]["role"] in ("system", "user") and pair["chosen"][0] != pair["rejected"][0]


def test_equal_rewards_are_not_above_their_mean(run, tmp_path):
    """The sum of three times 0.7 is below 2.1 in floating point."""
    edit_jsonl(run / "rollouts.jsonl", lambda one: {**one, "group_id": "g", "reward": 0.7})
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    (run / "rollouts.jsonl").write_text("\n".join(lines[:3]) + "\n")
    called = call("conversations", run, tmp_path / "sft.jsonl", "--as", "sft")
    assert called.exit_code == 2 and "no conversations" in called.output


def test_a_rollout_without_messages_is_in_no_file(run, tmp_path):
    names = iter("abcd")
    edit_jsonl(run / "rollouts.jsonl", lambda one: {**one, "messages": [] if next(names) == "b" else one["messages"]})
    assert json.loads(call("conversations", run, tmp_path / "said.jsonl", "--json").output)["num_conversations"] == 3
    assert all(row["messages"] for row in rows_of(tmp_path / "said.jsonl"))


def test_a_file_that_spans_would_not_be_written_to_is_refused(run, tmp_path):
    called = call("conversations", run, tmp_path / "said.jsonl", "--as", "spans")
    assert called.exit_code == 2 and "FILE must be left out" in " ".join(called.output.split())


def test_each_role_of_a_game_has_its_own_better_answer_and_its_own_pair(run, tmp_path):
    """The first player wins each game: compared with the second, all of its answers would be the better ones."""
    games = iter([("first", 1.0), ("second", 0.2), ("first", 0.8), ("second", 0.0)])

    def play(one):
        role, reward = next(games)
        asked = {"role": "user", "content": f"You are {role}."}
        said = [asked, {"role": "assistant", "content": f"{role} {reward}"}]
        return {**one, "group_id": "game", "role": role, "reward": reward, "messages": said}

    edit_jsonl(run / "rollouts.jsonl", play)
    call("conversations", run, tmp_path / "sft.jsonl", "--as", "sft")
    better = [row["messages"][-1]["content"] for row in rows_of(tmp_path / "sft.jsonl")]
    assert better == ["first 1.0", "second 0.2"]
    call("conversations", run, tmp_path / "pairs.jsonl", "--as", "preferences")
    pairs = [
        (row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows_of(tmp_path / "pairs.jsonl")
    ]
    assert pairs == [("first 1.0", "first 0.8"), ("second 0.2", "second 0.0")]
    # The new reward is equal within a role; the run and its file of conversations say so.
    (tmp_path / "reward.py").write_text("def side(completion):\n    return float(completion.startswith('first'))\n")
    call("conversations", run, tmp_path / "said.jsonl")
    for source in (run, tmp_path / "said.jsonl"):
        called = call("rescore", source, "--reward", f"{tmp_path}/reward.py:side", "--json")
        assert json.loads(called.output)["signal_share"] == [1.0, 0.0], source


def branch(row, model):
    import httpx

    said = [{"role": "user", "content": row["query"]}]
    headers = {"Authorization": f"Bearer {model.api_key}"}
    with httpx.Client(base_url=model.base_url, headers=headers, timeout=600) as client:
        for question in ("Why?", "Sure?"):
            asked = {"model": model.name, "messages": [*said, {"role": "user", "content": question}]}
            client.post("/chat/completions", json=asked).raise_for_status()
    return float(row["query"] == "a")


def test_each_branch_of_an_agent_is_a_conversation(tmp_path, renderer):
    env = AgentEnv(branch, [{"query": "a"}, {"query": "b"}], repeats=2)
    run = RecordedRun(record(tmp_path / "run", env, renderer, ["yes"]))
    for one in run.records(1):
        told = conversations_of(one)
        assert sorted(messages[-2]["content"] for messages in told) == ["Sure?", "Why?"]
        assert all(messages[0]["content"] == one["columns"]["query"] for messages in told)


def test_spans_have_the_text_and_the_rewards(run):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_spans(provider)
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    silent = json.dumps({**json.loads(lines[0]), "rollout_id": "silent", "messages": []})  # it ended before its prompt
    (run / "rollouts.jsonl").write_text("\n".join([*lines, silent]) + "\n")
    try:
        assert send_conversations(RecordedRun(run)) == 4
    finally:
        stop_spans()
    recorded = RecordedRun(run).records(1)[:4]
    for span, one in zip(exporter.get_finished_spans(), recorded, strict=True):
        assert span.attributes["gen_ai.conversation.id"] == one["rollout_id"]
        [output] = json.loads(span.attributes["gen_ai.output.messages"])
        assert output["parts"][-1]["content"] == one["messages"][-1]["content"] and output["finish_reason"] == "stop"
        [event] = span.events
        assert event.attributes["gen_ai.evaluation.score.value"] == one["reward"]


def test_a_file_of_logs_without_rewards_is_scored_and_a_bad_line_is_named(tmp_path):
    logged = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x" * n}]} for n in (1, 3)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in logged))
    (tmp_path / "reward.py").write_text("def size(completion):\n    return len(completion)\n")
    called = call("rescore", path, "--reward", f"{tmp_path}/reward.py:size", "--json")
    assert json.loads(called.output)["rewards"] == {"row 0": 1.0, "row 1": 3.0}
    assert "mean of the 2 new rewards is 2" in call("rescore", path, "--reward", f"{tmp_path}/reward.py:size").output
    path.write_text(json.dumps({"prompt": "Hi"}) + "\n")
    called = call("rescore", path, "--reward", f"{tmp_path}/reward.py:size")
    assert called.exit_code == 2 and "row 0" in called.output and "'messages'" in called.output


ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}]
CALLED = {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
PLAIN = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    TOLD,
    {"role": "assistant", "content": "It is 3."},
]
WRITTEN = {**CALLED, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
ABSENT = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
COMPLETIONS = {
    "request": {
        "model": "gpt",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Add"}, {"type": "text", "text": "."}]},
            {"role": "user", "content": "1 + 2 =", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [WRITTEN], **ABSENT},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
        ],
    },
    "response": {
        "id": "chatcmpl-1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "It is 3.", "tool_calls": None, **ABSENT}}
        ],
    },
}
RESPONSES = {
    "request": {
        "model": "gpt",
        "instructions": "Add.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2 ="}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "call_1",
                "name": "add",
                "status": "completed",
                "arguments": '{"a": 1, "b": 2}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        ],
        "previous_response_id": None,
    },
    "response": {
        "id": "resp_1",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "It is 3.", "annotations": []}],
            }
        ],
    },
}


@pytest.mark.parametrize("logged", [COMPLETIONS, RESPONSES], ids=["completions", "responses"])
def test_logs_of_agents_are_what_their_messages_are(logged, tmp_path, renderer):
    shown = Demonstrations([logged], renderer, conversations_per_batch=1).all_rows()
    expected = Demonstrations([{"messages": PLAIN}], renderer, conversations_per_batch=1).all_rows()
    assert [row["tokens", "full"].tolist() for row in shown] == [row["tokens", "full"].tolist() for row in expected]
    (tmp_path / "log.jsonl").write_text(json.dumps(logged) + "\n")
    (tmp_path / "reward.py").write_text("def size(completion):\n    return len(completion)\n")
    called = call("rescore", tmp_path / "log.jsonl", "--reward", f"{tmp_path}/reward.py:size", "--json")
    assert json.loads(called.output)["rewards"] == {"row 0": len("It is 3.")}


def test_other_shapes_of_logs_are_read():
    said = read_chat_log({"messages": [
        {"role": "user", "content": "1 + 2 ="},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "3"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "reasoning": "Hm.", "content": [{"type": "refusal", "refusal": "No."}]},
    ]})["messages"]  # fmt: skip
    assert said[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}} and said[2]["role"] == "tool"
    assert said[3] == {"role": "assistant", "content": "No."}
    assert (said[4]["reasoning_content"], said[4]["content"]) == ("Hm.", "No.")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    row = read_chat_log(
        {"request": {"input": "Hi", "tools": [tool, {"type": "web_search"}]}, "response": {"output": []}}
    )
    assert row["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def calling(arguments):
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (calling("{"), "'f', is not valid JSON"),
        (calling("[" * 100_000), "'f', is not valid JSON"),
        (calling("[1]"), "must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "a tool call must be"),
        ({"request": {"messages": []}, "response": {"choices": []}}, "no choices[0].message"),
        ({"request": {"input": "Hi"}, "response": "Hi"}, "no list of 'output' items"),
        ({"request": {"input": "Hi", "previous_response_id": "resp_1"}, "response": {"output": []}}, "resp_1"),
        ({"request": {"input": [{"type": "item_reference", "id": "1"}]}, "response": {"output": []}}, "item_reference"),
        ({"request": {"input": "Hi"}, "response": {"output": [{"type": "mcp_call"}]}}, "'mcp_call'"),
        ({"request": {"input": [7]}, "response": {"output": []}}, "must be an object"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_by_what_is_wrong(row, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        read_chat_log(row)
