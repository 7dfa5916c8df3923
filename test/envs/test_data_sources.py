"""Data sets come from files, folders, saved data sets, mappings and loaders; what is wrong with them is said."""

from __future__ import annotations

import csv
import json

import numpy as np
import pandas as pd
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.envs.sources import load_rows, rows_of_batches

ROWS = [{"query": "1 + 1 =", "answer": "2"}, {"query": "1 + 2 =", "answer": "3"}]


def write_json_lines(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def write_csv(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["query", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "lines.json", "array.json", "rows.csv", "rows.parquet"])
def test_a_file_gives_its_rows(tmp_path, name):
    path = tmp_path / name
    if name == "array.json":
        path.write_text(json.dumps(ROWS))
    elif name == "rows.csv":
        write_csv(path)
    elif name == "rows.parquet":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    else:
        write_json_lines(path)
    assert list(load_rows(path)) == ROWS
    assert list(load_rows(str(path), columns=["query", "answer"])) == ROWS


def test_a_split_is_the_files_that_are_named_after_it(tmp_path):
    write_json_lines(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write_json_lines(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:])
    (tmp_path / "test").mkdir()
    write_json_lines(tmp_path / "test" / "part.jsonl", ROWS[:1])
    assert load_rows(tmp_path, split="train") == ROWS
    assert load_rows(tmp_path, split="test") == ROWS[:1]
    with pytest.raises(ValueError, match=r"no file of the split 'validation', only \["):
        load_rows(tmp_path, split="validation")


def test_saved_and_split_hugging_face_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    assert load_rows(data) is data
    parts = datasets.DatasetDict({"train": data, "test": data.select([0])})
    assert len(load_rows(parts, split="test")) == 1
    parts.save_to_disk(str(tmp_path / "saved"))
    assert list(load_rows(tmp_path / "saved", split="train")) == ROWS
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\]; split must be one of them, got None"):
        load_rows(parts)


def test_iterables_and_mappings_of_splits():
    assert load_rows(iter(ROWS)) == ROWS
    assert load_rows({"train": ROWS}) == ROWS


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("missing.jsonl", FileNotFoundError, "missing.jsonl"),
        ("./missing", FileNotFoundError, "no file or folder 'missing'"),
        ([], ValueError, "empty"),
        (iter(()), ValueError, "empty"),
        (7, TypeError, "got int"),
        ([{"text": "hi"}], ValueError, "no column 'query', only \\['text'\\]"),
        ([ROWS[0], {"answer": "3"}], ValueError, "row 1 of the data set has no column 'query'"),
        ([1, 2], TypeError, "row 0 of the data set must be a mapping"),
    ],
)
def test_a_bad_source_is_named(source, error, message):
    with pytest.raises(error, match=message):
        load_rows(source, columns=["query"])


def test_a_bad_line_is_named_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a"}\n{"query": \n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2 is not a line of JSON"):
        load_rows(path)
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(ValueError, match="must end in one of"):
        load_rows(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no file with one of the suffixes"):
        load_rows(tmp_path / "empty")


def test_a_hub_that_cannot_be_reached_is_said_with_the_way_out(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"ConnectionError: no network.*pass a local path"):
        load_rows("owner/name", split="train")


def test_dataset_env_takes_a_path_and_a_split(tmp_path):
    write_json_lines(tmp_path / "train.jsonl")
    write_json_lines(tmp_path / "test.jsonl", ROWS[1:])
    env = DatasetChatEnv(tmp_path, split="test", repeats=2)
    assert env.reset()["answer"] == "3"
    with pytest.raises(ValueError, match="name it with data_key"):
        DatasetChatEnv(tmp_path, split="test", data_key="question")


class Asked(MessageEnv):
    """Asks the question of its row."""

    def __init__(self, row):
        self.row = row

    async def init(self):
        return [{"role": "user", "content": self.row["query"]}]

    async def step(self, message):
        return MessageStep(is_done=True)


@pytest.mark.parametrize("convert", [str, lambda path: path], ids=["str", "path"])
def test_an_environment_of_messages_takes_a_path(tmp_path, convert):
    path = convert(write_json_lines(tmp_path / "rows.jsonl"))
    env = MessageChatEnv(Asked, path, num_epochs=1)
    opened = [env.reset() for _ in ROWS]
    assert [data["history"].prompt.content for data in opened] == [[row["query"]] for row in ROWS]
    assert [data["answer"] for data in opened] == ["2", "3"]
    env.close()
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        MessageChatEnv(Asked, "missing.jsonl")


def test_batches_of_a_loader_become_rows_again():
    numbered = [{**row, "index": index} for index, row in enumerate(ROWS)]
    assert rows_of_batches(DataLoader(numbered, batch_size=2)) == numbered
    assert rows_of_batches(DataLoader(numbered, batch_size=None)) == numbered
    assert rows_of_batches(DataLoader(numbered, batch_size=2, collate_fn=list)) == numbered
    batch = TensorDict(query=["a", "b"], index=[1, 2], batch_size=[2])
    assert rows_of_batches([batch]) == [{"query": "a", "index": 1}, {"query": "b", "index": 2}]
    assert rows_of_batches(DataLoader(["a", "b"])) == [{"query": "a"}, {"query": "b"}]
    with pytest.raises(TypeError, match="got int"):
        rows_of_batches([1])


class Frame:
    """As much of a polars data frame as is read."""

    def to_dicts(self):
        return TABLE


TABLE = [{"question": "a", "answer": "1"}, {"question": "b", "answer": None}]
TABLE_COLUMNS = {"question": ["a", "b"], "answer": ["1", None]}


@pytest.mark.parametrize(
    "source",
    [
        TABLE_COLUMNS,
        {name: tuple(values) for name, values in TABLE_COLUMNS.items()},
        pd.DataFrame(TABLE_COLUMNS),
        Frame(),
    ],
    ids=["lists", "tuples", "pandas", "polars"],
)
@pytest.mark.parametrize("split", [None, "train"])
def test_columns_and_data_frames_are_rows(source, split):
    assert list(load_rows(source, split=split, columns=["question"])) == TABLE


def test_files_of_columns_and_of_rows_in_one_folder_are_rows(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(TABLE_COLUMNS))
    (tmp_path / "b.json").write_text(json.dumps(TABLE))
    assert load_rows(tmp_path) == TABLE * 2
    assert DatasetChatEnv(tmp_path, data_key="question").columns == ("question", "answer")
    (tmp_path / "b.json").write_text(json.dumps({"question": ["a", "b"], "answer": ["1"]}))
    with pytest.raises(ValueError, match=r"b.json has columns of different lengths"):
        load_rows(tmp_path)


def test_numbers_in_columns_stay_numbers_and_what_a_data_frame_lacks_is_none():
    rows = load_rows(pd.DataFrame([{"question": "a", "level": 1}, {"question": "b"}]))
    assert rows == [{"question": "a", "level": 1.0}, {"question": "b", "level": None}]
    assert load_rows({"n": np.arange(2), "x": torch.tensor([0.5, 1.5])}) == [{"n": 0, "x": 0.5}, {"n": 1, "x": 1.5}]


def test_splits_are_still_splits():
    splits = {"train": ["a", "b"], "test": ["c", "d"]}
    assert load_rows(splits, split="test") == ["c", "d"]
    assert load_rows({"mine": TABLE, "other": TABLE[:1]}, split="other") == TABLE[:1]
    with pytest.raises(ValueError, match="split must be one of them"):
        load_rows({"mine": TABLE, "other": TABLE})
    with pytest.raises(ValueError, match=r"different lengths: \{'question': 2, 'answer': 1\}"):
        load_rows({"question": ["a", "b"], "answer": ["1"]})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_and_unusual_line_separators_are_read(tmp_path, name):
    lines = [json.dumps({**row, "note": "a\u2028b"}, ensure_ascii=False) for row in TABLE]
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8-sig")
    assert [row["question"] for row in load_rows(tmp_path / name)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("rows.csv", 'query,answer\n1 + 1,2\nOne, two,3\n', r"rows.csv:3 .*has 3 cells, but the header has 2 columns"),
        ("rows.csv", 'query,answer\n"a\nb",2\n\nalone\n', r"rows.csv:5 .*has 1 cells, but the header has 2 columns"),
        ("rows.csv", 'query,answer\n"a,2\nb,3\n', r"rows.csv:2 .*unexpected end of data"),
        ("rows.csv", "query,answer,query\n1,2,3\n", r"rows.csv:1 .*\['query'\] more than once"),
        ("rows.jsonl", '{"query": "a"}\n\n["b"]\n', r"rows.jsonl:3 must be an object, .*got '\[\"b\"\]'"),
        ("rows.jsonl", '{"query": "a"}\n"b"\n', r"rows.jsonl:2 must be an object"),
        ("rows.jsonl", '{"query": "a", "query": "b"}\n', r"rows.jsonl:1 .*\['query'\] more than once"),
        ("rows.json", '[{"query": "a", "query": "b"}]', r"rows.json cannot be read: .*\['query'\] more than once"),
    ],
)  # fmt: skip
def test_a_file_whose_values_would_be_lost_or_shifted_is_refused_with_the_line(tmp_path, name, content, error):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=error):
        load_rows(tmp_path / name)
