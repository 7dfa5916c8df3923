"""`load_rows`: the rows of a dataset, from files, the Hugging Face hub or memory."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase

from llmrl._utils.imports import require
from llmrl._utils.types import Row
from llmrl.data.tensordicts import plain

Source: TypeAlias = str | Path | Iterable[Any]
"""A source of `load_rows`."""


def load_rows(
    source: Source,
    *,
    split: str | None = None,
    subset: str | None = None,
    columns: Iterable[str] = (),
) -> Sequence[Row]:
    """Return the rows of a dataset as a sequence of mappings.

    Args:
        source: a file (JSON lines, JSON, CSV, Parquet), a folder of such files or one saved by `datasets`, a hub name
            (`"openai/gsm8k"`), a Hugging Face `Dataset` (which stays on disk), a data frame (pandas, polars), a
            mapping of splits to any of these or of column names to columns of equal length, or any finite iterable of
            mappings. A string is a path if it exists, has one of these suffixes, or starts with `.`, `~` or `/`.
        split: split of a source that has several; in a folder, a subfolder or the first word of the file names.
        subset: configuration of a hub dataset.
        columns: names that every row must have.

    Raises:
        FileNotFoundError: if the file does not exist, or if the folder has no readable file.
        ValueError: if a line is invalid, the split unknown, the dataset empty or a column missing,
            or if a hub dataset cannot be loaded.
        TypeError: if the source or a row has another type.

    Example:
        >>> load_rows([{"question": "1 + 1 ="}], columns=["question"])
        [{'question': '1 + 1 ='}]
        >>> load_rows([{"text": "1 + 1 ="}], columns=["question"])
        Traceback (most recent call last):
        ValueError: row 0 of the data set has no column 'question', only ['text'].
    """
    label = f"data set {str(source)!r}" if isinstance(source, str | Path) else "data set"
    rows = _rows_of(source, split, subset, label)
    if len(rows) == 0:
        raise ValueError(f"{label} is empty; at least one row is needed.")
    _check(rows, list(columns), label)
    return rows


def _rows_of(source: Any, split: str | None, subset: str | None, label: str) -> Sequence[Row]:
    if isinstance(source, str | Path):
        source = _open(source, split, subset, label)
    if isinstance(source, Mapping) and _is_columns(source, split):
        return _rows_of_columns(source, label)
    if isinstance(source, Mapping):  # splits by name, such as a `DatasetDict`
        return _rows_of(_choose(source, split, label), None, None, label)
    if hasattr(source, "iloc") and hasattr(source, "to_dict"):  # pandas has NaN for missing values
        return source.astype(object).where(source.notna(), None).to_dict("records")
    if hasattr(source, "to_dicts"):  # polars
        return source.to_dicts()
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return source
    if isinstance(source, Iterable):
        return list(source)
    raise TypeError(
        f"source must be a path, a hub name, a Hugging Face Dataset or an iterable of mappings, got "
        f"{type(source).__name__}."
    )


_SPLITS = frozenset(("train", "training", "validation", "valid", "val", "dev", "test", "eval"))


def _is_columns(source: Mapping[str, Any], split: str | None) -> bool:
    """Return whether a mapping contains columns rather than splits."""
    if not source or split in source or _SPLITS.issuperset(source):
        return False
    are_rows = all(len(values) and isinstance(values[0], Mapping) for values in source.values() if _is_column(values))
    return all(map(_is_column, source.values())) and not are_rows


def _rows_of_columns(columns: Mapping[str, Sequence[object]], label: str) -> list[Row]:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{label} has columns of different lengths: {lengths}.")
    return _rows_of_batch(columns)


def _choose(parts: Mapping[str, object], split: str | None, label: str) -> object:
    if split is None and len(parts) == 1:
        return next(iter(parts.values()))
    if split is None or split not in parts:
        raise ValueError(f"{label} has the splits {sorted(map(str, parts))}; split must be one of them, got {split!r}.")
    return parts[split]


def rows_to_check(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows; only the first one if they are read or generated on demand, so that the others are not."""
    return rows if isinstance(rows, list | tuple) else [rows[0]]


def _check(rows: Sequence[Row], columns: list[str], label: str) -> None:
    for index, row in enumerate(rows_to_check(rows)):
        if not isinstance(row, Mapping) and (columns or not isinstance(row, str)):
            raise TypeError(f"row {index} of the {label} must be a mapping from columns to values, got {row!r:.80}.")
        for column in columns:
            if column not in row:
                raise ValueError(f"row {index} of the {label} has no column {column!r}, only {sorted(map(str, row))}.")


def is_local(source: str | Path) -> bool:
    """Return whether `load_rows` reads a source as a file or folder, which need not exist, instead of a hub name.

    Example:
        >>> is_local("rows.jsonl"), is_local("openai/gsm8k")
        (True, False)
    """
    path = Path(source).expanduser()
    is_path = isinstance(source, Path) or path.suffix in _READERS or str(source)[:1] in ("/", ".", "~")
    return is_path or path.exists()


def _open(source: str | Path, split: str | None, subset: str | None, label: str) -> object:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, split)
    if path.is_file():
        return _read_file(path)
    if is_local(source):
        raise FileNotFoundError(f"no file or folder {str(path)!r}; the current folder is {Path.cwd()}.")
    datasets = require("datasets", extra="data")
    try:
        return datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        raise ValueError(
            f"{label} is neither a file nor a folder here, and could not be loaded from the hub (split {split!r}, "
            f"subset {subset!r}): {type(error).__name__}: {error}. Without access to the hub, pass a local path."
        ) from error


def _read_folder(path: Path, split: str | None) -> Any:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return require("datasets", extra="data").load_from_disk(str(path))
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in _READERS)
    if not files:
        raise FileNotFoundError(f"folder {str(path)!r} has no file with one of the suffixes {sorted(_READERS)}.")
    chosen = [file for file in files if split is None or split in _names(file.relative_to(path))]
    if not chosen:
        raise ValueError(
            f"folder {str(path)!r} has no file of the split {split!r}, only "
            f"{[str(file.relative_to(path)) for file in files[:20]]}."
        )
    parts = [_read_file(file) for file in chosen]
    if len(parts) == 1:
        return parts[0]
    return [row for file, part in zip(chosen, parts, strict=True) for row in _rows_of(part, None, None, str(file))]


def _names(relative: Path) -> set[str]:
    """Return the splits that a path may belong to: `train-00000-of-00001.parquet`, `train/part-0.jsonl`."""
    return {*relative.parts[:-1], relative.stem, relative.stem.split("-")[0], relative.stem.split("_")[0]}


def _read_file(path: Path) -> Any:
    if path.suffix not in _READERS:
        raise ValueError(f"file {str(path)!r} must end in one of {sorted(_READERS)}.")
    return _READERS[path.suffix](path)


def _read_json_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig") as file:  # with or without a byte order mark
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_once_each)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not a line of JSON: {error}.") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}:{number} must be an object, from columns to values, got {line.strip()!r:.80}."
                )
            rows.append(row)
    return rows


def _read_json(path: Path) -> object:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once_each)
    except _DoubledName as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    except ValueError:
        return _read_json_lines(path)  # JSON lines in a .json file
    is_row = isinstance(content, Mapping) and not all(isinstance(part, list) for part in content.values())
    return [content] if is_row else content


class _DoubledName(ValueError):
    """A duplicate name in a JSON object or a table header."""


def _once_each(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        _refuse_doubled([name for name, _ in pairs])
    return made


def _refuse_doubled(names: Sequence[str]) -> None:
    doubled = sorted(name for name, count in Counter(names).items() if count > 1)
    if doubled:
        raise _DoubledName(f"it has the names {doubled} more than once, and only one value of each would be kept")


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        start = 1
        header: list[str] = []
        rows: list[Row] = []
        try:
            for cells in reader:
                if not header:
                    header = cells
                    _refuse_doubled(header)
                elif cells and len(cells) != len(header):
                    raise ValueError(
                        f"it has {len(cells)} cells, but the header has {len(header)} columns, {header}; put a cell "
                        "with a comma, a quote or a line break in double quotes"
                    )
                elif cells:
                    rows.append(dict(zip(header, cells, strict=True)))
                start = reader.line_num + 1
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}:{start} is not a line of this table: {error}.") from None
    return rows


def _read_parquet(path: Path) -> object:
    return require("datasets", extra="data").Dataset.from_parquet(str(path))


_READERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def rows_of_batches(batches: Iterable[object]) -> list[Row]:
    """Return the rows of batches, each of which is columns of equal length, a list, a TensorDict or a single row.

    Example:
        >>> rows_of_batches([{"query": ["a", "b"], "answer": ["1", "2"]}, [{"query": "c", "answer": "3"}]])
        [{'query': 'a', 'answer': '1'}, {'query': 'b', 'answer': '2'}, {'query': 'c', 'answer': '3'}]
    """
    return [row for batch in batches for row in _rows_of_batch(batch)]


def rows_of_loader(loader: Iterable[object]) -> Sequence[Row]:
    """Return the rows of one pass over a loader; a loader without a length is read on demand.

    Example:
        >>> import itertools
        >>> rows_of_loader({"query": [str(number)]} for number in itertools.count())[2]
        {'query': '2'}
    """
    try:
        len(loader)  # type: ignore[arg-type]
    except TypeError:
        return StreamedRows(loader)
    return rows_of_batches(loader)


class StreamedRows(Sequence[Row]):
    """Rows of an iterable of batches (see `rows_of_batches`), read on demand and kept in memory.

    Its length is `sys.maxsize` until the end has been read.
    """

    def __init__(self, batches: Iterable[object]) -> None:
        self._batches = iter(batches)
        self._rows: list[Row] = []
        self.has_ended = False
        """Whether all rows have been read."""

    def read(self, num_rows: int) -> None:
        """Read until there are `num_rows` rows or the end is reached."""
        while len(self._rows) < num_rows and not self.has_ended:
            try:
                self._rows += _rows_of_batch(next(self._batches))
            except StopIteration:
                self.has_ended = True

    def __len__(self) -> int:
        self.read(1)
        return len(self._rows) if self.has_ended else sys.maxsize

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        self.read(index + 1)
        return self._rows[index]


def _rows_of_batch(batch: object) -> list[Row]:
    if isinstance(batch, str):
        return [{"query": batch}]
    if isinstance(batch, TensorDictBase):
        elements = batch.unbind(0) if batch.batch_size else [batch]
        return [{str(key): _uncollated(value) for key, value in element.items()} for element in elements]
    if isinstance(batch, Mapping):
        if not all(_is_column(values) for values in batch.values()):
            return [batch]
        return [dict(zip(batch, map(_uncollated, row), strict=True)) for row in zip(*batch.values(), strict=True)]
    if isinstance(batch, Iterable):
        return [row for element in batch for row in _rows_of_batch(element)]
    raise TypeError(f"a batch must be a mapping of columns, rows or a TensorDict, got {type(batch).__name__}.")


def _is_column(values: object) -> bool:
    return isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0


def _uncollated(value: object) -> object:
    """Return a scalar tensor as a number, as it was before collation."""
    value = plain(value)
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
