"""Recorded conversations in formats of other tools: messages, data sets, OpenTelemetry spans."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Literal, cast

from llmrl._utils.files import open_file
from llmrl._utils.json_values import finite
from llmrl._utils.spans import span
from llmrl.data import Message
from llmrl.endpoint.chat_logs import as_openai, read_chat_log
from llmrl.envs.sources import load_rows
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rewards import group_of
from llmrl.viewer.run_data import Record

Form = Literal["messages", "sft", "preferences"]
"""Kind of rows: all conversations; those with a reward above the mean of their group; the best and worst of a group.

Rollouts of other roles in a game are another group."""

_FINISH_REASONS = {"completed": "stop", "truncated": "length"}
"""Finish reasons of the GenAI conventions by status of a rollout."""


def conversations_of(record: Record) -> list[list[Message]]:
    """Return the conversations of a rollout: one, or one per branch of an agent's requests.

    Example:
        >>> said = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes"))]
        >>> turns = [{"parent": None, "messages": said}, {"parent": 0, "messages": said}, {"parent": 0, "messages": []}]
        >>> [len(messages) for messages in conversations_of({"messages": said, "turns": turns})]
        [4, 2]
    """
    turns = record.get("turns") or []
    if not turns:
        return [list(record["messages"])]
    told: list[list[Message]] = []
    parents = [cast("dict[str, int | None]", turn).get("parent") for turn in turns]
    for turn, parent in zip(turns, parents, strict=True):
        before = [] if parent is None else told[parent]
        told.append([*before, *turn["messages"]])
    return [messages for place, messages in enumerate(told) if place not in parents]


def write_conversations(run: RecordedRun, path: str | Path, form: Form = "messages", *, split: str = "train") -> int:
    """Write the conversations of a run as JSON lines in OpenAI's format, and return their number.

    Args:
        path: the new file.
        form: `messages` writes every conversation with its reward and columns. `sft` writes the conversations with a
            reward above the mean of their group, in the format of the SFT script. `preferences`
            writes `prompt`, `chosen` and `rejected` from the best and the worst rollout of each
            group with different rewards. Tool schemas are not recorded, and so not written.
        split: `train`, or the name of an evaluation, such as `eval/sums`.

    Raises:
        FileExistsError: if the file exists.
        ValueError: if there is nothing to write.
    """
    records = [record for record in run.all_records if record["split"] == split]
    groups: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.get("is_scored", True):
            groups[record["step"], *group_of(record)].append(record)
    rows: Iterator[dict[str, object]]
    if form == "messages":
        told = ((record, messages) for record in records for messages in conversations_of(record))
        rows = (_described(record, messages) for record, messages in told if messages)
    elif form == "sft":
        rows = ({"messages": as_openai(said)} for group in groups.values() for said in _better(group))
    else:
        rows = (pair for group in groups.values() if (pair := _pair(group)) is not None)
    lines = [json.dumps(finite(row), ensure_ascii=False, default=str) for row in rows]  # other readers refuse NaN
    if not lines:
        raise ValueError(f"{run.path} has no conversations of split={split!r} to write as {form!r}.")
    if Path(path).exists():
        raise FileExistsError(f"{path} exists already; name another file.")
    with open_file(Path(path), "w", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in lines)
    return len(lines)


def _described(record: Record, messages: Sequence[Message]) -> dict[str, object]:
    named = {name: record.get(name) for name in ("step", "group_id", "rollout_id", "status", "reward", "is_scored")}
    if record.get("role"):
        named["role"] = record["role"]  # a file is grouped by it, too
    return {"messages": as_openai(messages), **(record.get("columns") or {}), **named}


def _better(group: Sequence[Record]) -> Iterator[list[Message]]:
    baseline = mean(record["reward"] for record in group)  # exact, so that equal rewards are not above it
    for record in group:
        if record["reward"] > baseline:
            yield from conversations_of(record)


def _pair(group: Sequence[Record]) -> dict[str, object] | None:
    """Return the best and the worst answer after a common prompt; None without a pair."""
    whole = [record for record in group if not record.get("turns")]  # a rollout with branches has no single answer
    if not whole:
        return None
    best, worst = max(whole, key=lambda one: one["reward"]), min(whole, key=lambda one: one["reward"])
    sides = as_openai(best["messages"]), as_openai(worst["messages"])
    num_shared = 0
    for ours, theirs in zip(*sides, strict=False):
        if ours != theirs:
            break
        num_shared += 1
    answers = [side[num_shared:] for side in sides]
    if best["reward"] == worst["reward"] or not num_shared or not all(answers):
        return None
    return {"prompt": sides[0][:num_shared], "chosen": answers[0], "rejected": answers[1]}


def send_conversations(run: RecordedRun, *, split: str = "train") -> int:
    """Send a span with the text of each conversation, by the GenAI conventions, and return the number of spans.

    Spans must be enabled (`llmrl._utils.spans.trace_spans`). They have the time of this call,
    because only the duration of a rollout is recorded.
    """
    num_sent = 0
    for record in run.all_records:
        if record["split"] != split:
            continue
        for messages in filter(None, conversations_of(record)):  # a rollout that ended before its prompt has none
            with span("invoke_agent", split) as current:
                if current is None:
                    continue
                *before, last = messages
                answer = {**_with_parts(last), "finish_reason": _FINISH_REASONS.get(record["status"], "error")}
                texts = {"input": [_with_parts(one) for one in before], "output": [answer]}
                current.set_attributes(
                    {f"gen_ai.{name}.messages": json.dumps(said, ensure_ascii=False) for name, said in texts.items()}
                )
                current.set_attribute("gen_ai.conversation.id", record["rollout_id"])
                for name, value in (record.get("reward_breakdown") or {"reward": record["reward"]}).items():
                    score: dict[str, str | float] = {
                        "gen_ai.evaluation.name": name,
                        "gen_ai.evaluation.score.value": value,
                    }
                    current.add_event("gen_ai.evaluation.result", score)
                num_sent += 1
    return num_sent


def _with_parts(message: Message) -> dict[str, object]:
    """Return a message in the format of the GenAI conventions."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": "tool", "parts": [part]}
    parts: list[dict[str, object]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        parts.append({"type": "tool_call", "id": call.get("id"), **call["function"]})
    return {"role": message["role"], "parts": parts}


def records_of_log(path: str | Path) -> list[Record]:
    """Return the conversations of a file as records to score; further entries are columns for the reward function.

    `reward`, `group_id`, `role` and `rollout_id` have the meaning of `write_conversations`. A
    record without a `reward` is not scored.

    Raises FileNotFoundError if the file does not exist, and ValueError if a row has no conversation.
    """
    records = []
    for place, row in enumerate(load_rows(path)):
        try:
            columns = dict(read_chat_log(row))
        except ValueError as error:
            raise ValueError(f"row {place} of {path} cannot be scored: {error}") from error
        messages = columns.pop("messages")
        reward = columns.pop("reward", None)
        record: dict[str, object] = {
            "step": columns.pop("step", 0),
            "split": "train",
            "rollout_id": columns.pop("rollout_id", f"row {place}"),
            "group_id": columns.pop("group_id", f"row {place}"),
            "role": str(columns.get("role") or ""),  # also a column, because other files may mean something else by it
            "status": columns.pop("status", "completed"),
            "reason": "",
            "reward": 0.0 if reward is None else reward,
            "is_scored": columns.pop("is_scored", reward is not None) and reward is not None,
            "messages": messages,
            "columns": columns,
            "num_turns": sum(message["role"] == "assistant" for message in messages),
        }
        records.append(cast(Record, record))
    return records
