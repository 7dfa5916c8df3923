"""`History` and the containers of a step."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from llmrl.data import History, Tokens, check_messages
from llmrl.data.state_file import load_state, save_state

USER = {"role": "user", "content": "7 + 8 ="}
ASSISTANT = {"role": "assistant", "content": "15"}


def test_append_returns_a_new_history_and_leaves_the_old_one():
    history = History.from_chats([USER])
    longer = history.append(ASSISTANT)
    assert history.role == ["user"]
    assert longer.role == ["user", "assistant"]
    assert longer.chats[0] is history.chats[0]


def test_batches_keep_ragged_conversations_apart():
    batch = History.from_chats([[USER], [USER, ASSISTANT]])
    assert batch.batch_size == torch.Size([2])
    assert batch.role == [["user"], ["user", "assistant"]]
    assert batch[1].content == ["7 + 8 =", "15"]
    assert [len(chat) for chat in batch.append(ASSISTANT).chats] == [2, 3]
    assert History.from_chats(batch.to_chats()).to_chats() == batch.to_chats()


def test_histories_survive_stacking_pickling_and_tensordicts():
    history = History.from_chats([USER])
    stacked = lazy_stack([TensorDict({"h": history}), TensorDict({"h": history.append(ASSISTANT)})], 0)
    assert [len(chat) for chat in stacked["h"].chats] == [1, 2]
    assert pickle.loads(pickle.dumps(history)).chats == history.chats
    assert torch.stack([history, history]).role == [["user"], ["user"]]


def test_multi_modal_content_is_carried_untouched_and_read_as_text():
    content = [{"type": "text", "text": "look"}, {"type": "image", "url": "cat.png"}]
    history = History.from_chats([{"role": "user", "content": content}])
    assert history.chats[0]["content"] == content
    assert history.content == ["look"]


def test_a_history_is_saved_as_it_is(tmp_path):
    for history in (History(role=["user", "assistant"], content=["a", "b"]), History(role="user", content="a")):
        save_state(tmp_path / "state", {"history": history})
        again = load_state(tmp_path / "state", advice="")["history"]
        assert (again.role, again.content, again.shape) == (history.role, history.content, history.shape)
    message = {**USER, "weight": np.int64(0), "scores": {1: (2, 3)}, "image": np.eye(2), "x": {"$tensor": "0"}}
    save_state(tmp_path / "state", {"history": History.from_chats([message])})
    [again] = load_state(tmp_path / "state", advice="")["history"].to_chats()
    assert again["weight"] == 0 and again["scores"] == {1: (2, 3)} and again["x"] == {"$tensor": "0"}
    assert (again["image"] == np.eye(2)).all() and again["content"] == USER["content"]
    with pytest.raises(TypeError, match="cannot hold the object at"):
        save_state(tmp_path / "state", {"history": History.from_chats([{**USER, "x": object()}])})
    path = tmp_path / "chats.jsonl"
    History(role=["user"], content=["a\ud800"]).save(path)
    assert json.loads(path.read_text())["messages"][0]["content"] == "a\ud800"


def test_arguments_of_any_depth_are_saved(tmp_path):
    nested = 0
    for depth in range(1, 301):
        nested = {"a": [nested]} if depth % 2 else [nested]
        if depth in (60, 120, 300):
            history = History.from_chats([USER, {**ASSISTANT, "tool_calls": [nested]}])
            save_state(tmp_path / "state", {"history": history})
            again = load_state(tmp_path / "state", advice="")["history"]
            assert again.content == history.content and (again.to_chats() == history.to_chats()) == (depth < 100)


def test_tool_calls_their_answers_and_completeness_are_read_by_message():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": 8}}}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "15"}]
    batch = History.from_chats([chat, [USER]])
    assert batch.tool_calls == [[[], [call], []], [[]]]
    assert batch.tool_responses == [[None, None, "15"], [None]]
    assert batch.is_complete == [[True] * 3, [True]]
    cited = History.from_text("[INST] List them [/INST] See [1, 2] and [3].</s>[INST] More [/INST]")
    assert [one["content"] for one in cited.to_chats()] == ["List them", "See [1, 2] and [3].", "More"]
    cut = History.from_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel")
    assert cut.is_complete == [True, False] and cut.content == ["Hi", "Hel"]


@pytest.mark.parametrize(
    ("messages", "error", "named"),
    [
        ([{"content": "no role"}], ValueError, "messages[0] has no 'role'"),
        ([USER, {"role": "assistant"}], ValueError, "messages[1]"),
        (["text"], TypeError, "messages[0] must be a dict"),
        ("text", TypeError, "must be a sequence"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, error, named):
    with pytest.raises(error, match=named.replace("[", r"\[").replace("]", r"\]")):
        check_messages(messages)


def test_ragged_tokens_are_padded_only_when_asked():
    rows = [Tokens(full=torch.arange(1, n)) for n in (3, 5)]
    batch = lazy_stack([TensorDict({"tokens": row}) for row in rows], 0)["tokens"]
    assert batch.as_padded_tensor("full", padding_value=-1).tolist() == [[1, 2, -1, -1], [1, 2, 3, 4]]
    assert batch.as_padded_tensor("full", padding_side="left").tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert [t.tolist() for t in batch.as_nested_tensor("full").unbind()] == [[1, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b\u0085c", "line\nbreak", "\ufeffmark", "\x0b\x0c\x1c"])
def test_saved_chats_come_back_whatever_they_say(tmp_path, text):
    history = History.from_chats([[{"role": "user", "content": text}], [{"role": "user", "content": "b"}]])
    history.save(tmp_path / "chats.jsonl")
    assert History.load(tmp_path / "chats.jsonl").to_chats() == history.to_chats()
    (tmp_path / "marked.jsonl").write_text((tmp_path / "chats.jsonl").read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert History.load(tmp_path / "marked.jsonl").to_chats() == history.to_chats()


def test_a_file_without_conversations_is_refused(tmp_path):
    (tmp_path / "chats.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="conversation in each line"):
        History.load(tmp_path / "chats.jsonl")


@pytest.mark.parametrize("way", ["save", "memmap", "pickle"])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_batch_with_histories_is_saved_and_loaded(tmp_path, way, is_stacked):
    chats = [
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": (1, 2)}}}],
            },
        ],
        [],
    ]
    histories = [History.from_chats(chat) for chat in chats]
    rows = [
        TensorDict({"history": {"full": history}, "ids": torch.arange(n)}) for n, history in enumerate(histories, 1)
    ]
    batch = (
        TensorDict({"history": {"full": History.from_chats(chats)}}, batch_size=[3]) if is_stacked else lazy_stack(rows)
    )
    if way == "pickle":
        torch.save(batch, tmp_path / "batch.pt")
        loaded = torch.load(tmp_path / "batch.pt", weights_only=False)
    else:
        kept = batch.save(tmp_path) if way == "save" else batch.memmap(tmp_path)
        assert (kept if kept is not None else batch)["history", "full"][1].chats == tuple(chats[1])
        loaded = TensorDict.load_memmap(tmp_path)
    for row, chat in zip(loaded.unbind(0), chats, strict=True):
        assert row["history", "full"].chats == tuple(chat)
        assert len(row["history", "full"].append({"role": "user", "content": "more"}).chats) == len(chat) + 1
