"""`DatasetChatEnv`: conversations opened by the prompts of a dataset, each repeated for a group."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, NonTensor, TensorSpec, Unbounded

from llmrl._utils.types import Row, StateDict, Tokenizer
from llmrl.data.tensordicts import non_tensor, restacked, tensordict_of
from llmrl.envs.chat import ChatEnv, InputMode
from llmrl.envs.sources import StreamedRows, load_rows, rows_of_loader

RESERVED_ENTRIES = frozenset((
    "_reset", "action", "columns", "conversation", "done", "env_answer", "env_error", "env_info", "env_traceback",
    "finish_reason", "history", "log_probs", "masks", "message_env", "next", "policy_versions", "reward", "rollout",
    "terminated", "text", "tokens", "tools", "truncated",
))  # fmt: skip
"""Entries of a conversation that have a meaning of their own; columns of these names are kept apart."""
_MAX_HASHED = 1000
Drawn = tuple[Row, str, int]
"""An item, its group id and its index in the group."""


class EndOfData(Exception):
    """A dataset has fewer samples left than were to be drawn; none of them is drawn.

    Args:
        message: what has ended.
        num_left: samples that can still be drawn.
    """

    def __init__(self, message: str, *, num_left: int = 0) -> None:
        super().__init__(message)
        self.num_left = num_left


class PromptSampler:
    """Draws prompts from a dataset, each `num_samples` times in a row, epoch after epoch.

    The draws depend only on `seed` and the position, so that a saved position continues the very same sequence.

    Args:
        items: the dataset: a sequence of mappings.
        num_samples: how often a prompt is drawn in a row; its draws form a group.
        shuffle: whether each epoch has its own order.
        seed: of the shuffling.
        num_epochs: how often the dataset is gone through; None never ends.
        name: prefix of group ids; two samplers of a run need two names.

    Raises:
        ValueError: for an empty dataset, a number below 1, or `shuffle` of rows that are read as they are drawn.

    Example:
        >>> sampler = PromptSampler([{"query": "a"}], num_samples=2)
        >>> [sampler.draw()[1:] for _ in range(3)]
        [('train/0/0', 0), ('train/0/0', 1), ('train/1/0', 0)]
    """

    def __init__(
        self,
        items: Sequence[Row],
        *,
        num_samples: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int | None = None,
        name: str = "train",
    ) -> None:
        if len(items) == 0:
            raise ValueError("dataset is empty; at least one prompt is needed.")
        for argument, value in (("num_samples", num_samples), ("num_epochs", num_epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}.")
        self.items, self.num_samples, self.shuffle = items, num_samples, shuffle
        self.seed, self.num_epochs, self.name = seed, num_epochs, name
        if shuffle and isinstance(items, StreamedRows):
            raise ValueError("shuffle needs all rows, and the loader has no length; let the loader shuffle.")
        self._position = 0
        self._first_epoch = 0
        self._again: deque[int] = deque()
        self._order_epoch = -1
        self._order: list[int] = []

    @cached_property
    def _digest(self) -> str | None:
        """Of up to a thousand rows, evenly spaced; None where rows are made when they are drawn."""
        if not isinstance(self.items, list | tuple) and not hasattr(self.items, "features"):  # Hugging Face's
            return None
        rows = [self.items[index] for index in range(0, len(self.items), -(-len(self.items) // _MAX_HASHED))]
        # What JSON has not is known by its type: texts of objects have addresses, which differ from run to run.
        texts = (json.dumps(row, skipkeys=True, default=lambda value: type(value).__name__) for row in rows)
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()

    def upcoming(self, count: int) -> list[int]:
        """Positions of the next `count` draws, fewer where the data ends; nothing is drawn."""
        again = list(itertools.islice(self._again, count))
        stop = self._position + count - len(again)
        if isinstance(self.items, StreamedRows):
            self.items.read(-(-stop // self.num_samples))
        if self.num_epochs is not None:
            stop = min(stop, (self._first_epoch + self.num_epochs) * len(self.items) * self.num_samples)
        return again + list(range(self._position, stop))

    def draw(self) -> Drawn:
        """Return the next item, its group id and its index in the group.

        Raises:
            EndOfData: after the last epoch.
        """
        return self.draw_many(1)[0]

    def draw_many(self, count: int) -> list[Drawn]:
        """Return the next `count` draws, all of them or none.

        Raises:
            EndOfData: when there are fewer.
        """
        positions = self.upcoming(count)
        if len(positions) < count:
            epochs = f"the {self.num_epochs} epochs of {len(self.items)} prompts"
            raise EndOfData(
                f"{epochs} have {len(positions)} draws left, {count} were asked for.", num_left=len(positions)
            )
        num_new = max(0, count - len(self._again))
        for _ in range(count - num_new):
            self._again.popleft()
        self._position += num_new
        return [self.at(position) for position in positions]

    def at(self, position: int) -> Drawn:
        """Return what a draw at a position gives; nothing is drawn."""
        group, sample_index = divmod(position, self.num_samples)
        epoch, place = divmod(group, len(self.items))
        if self.shuffle and epoch != self._order_epoch:
            self._order = list(range(len(self.items)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        index = self._order[place] if self.shuffle else place
        return self.items[index], f"{self.name}/{epoch}/{index}", sample_index

    def skip_to_group(self) -> None:
        """Leave out what remains of groups that were begun, so that the next draw is the first of its group.

        Whoever draws groups calls it before: a single draw in between (a reset by hand, a check of specs) costs the
        rest of its group, and moves no other.

        Example:
            >>> sampler = PromptSampler([{"query": "a"}, {"query": "b"}], num_samples=2)
            >>> _ = sampler.draw()
            >>> sampler.skip_to_group()
            >>> sampler.draw()[1:]
            ('train/0/1', 0)
        """
        self._position += -self._position % self.num_samples
        num_left = Counter(position // self.num_samples for position in self._again)
        self._again = deque(one for one in self._again if num_left[one // self.num_samples] == self.num_samples)

    def begin_anew(self) -> None:
        """Go on with the beginning of the next epoch, and of `num_epochs` from there.

        Raises:
            ValueError: for rows of a loader without a length, before its end.

        Example:
            >>> sampler = PromptSampler([{"query": "a"}], num_epochs=1)
            >>> sampler.draw()[1], sampler.begin_anew(), sampler.draw()[1]
            ('train/0/0', None, 'train/1/0')
        """
        if isinstance(self.items, StreamedRows):
            self.items.read(self._position // self.num_samples + 1)
        size = len(self.items) * self.num_samples
        if size > sys.maxsize // 2 and self._position:
            raise ValueError("the loader has no length, and has not ended: there is no beginning to go back to.")
        self._again.clear()
        self._position += -self._position % size
        self._first_epoch = self._position // size

    def draw_next(self, positions: Iterable[int]) -> None:
        """Let the draws at these positions be the next ones, in place of others that were to be drawn again."""
        self._again = deque(positions)

    def state_dict(self, *, unfinished: Sequence[int] = ()) -> StateDict:
        """Return the position in samples drawn, the positions to be drawn again first, and what positions mean.

        `unfinished` are positions that were drawn and whose rollouts will not outlive this process.
        """
        state = {"position": self._position, "again": [*unfinished, *self._again], "order": self._meaning()}
        return {**state, "first_epoch": self._first_epoch}

    def _meaning(self) -> dict[str, object]:
        """Return what gives a position its prompt and its id: with another of these it would be another draw."""
        num_prompts = None if isinstance(self.items, StreamedRows) else len(self.items)
        order = {"num_prompts": num_prompts, "num_samples": self.num_samples, "shuffle": self.shuffle}
        return {**order, "seed": self.seed, "name": self.name, "digest": self._digest}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a saved position.

        Raises:
            ValueError: when it was saved with other prompts or samples, order, seed or name, with which its positions
                would be other draws.
        """
        saved, own = state.get("order", {}), self._meaning()
        differing = [
            f"{name}={saved.get(name)!r} there, {own[name]!r} here" for name in own if saved.get(name) != own[name]
        ]
        if differing:
            raise ValueError(
                f"the saved position is of other draws: {'; '.join(differing)} (num_samples are a dataset's repeats). "
                "Build the environment as it was when the state was saved, or begin anew without the state."
            )
        self._position, self._first_epoch = state["position"], state["first_epoch"]
        self._again = deque(state["again"])


def columns_of(items: Sequence[Row]) -> tuple[str, ...]:
    """Names of all columns of a dataset's rows; where rows are made or read when drawn, those of the first.

    Example:
        >>> columns_of([{"query": "a"}, {"query": "b", "answer": "1"}])
        ('query', 'answer')
    """
    rows = items if isinstance(items, list | tuple) else [items[0]]
    return tuple(dict.fromkeys(name for row in rows for name in row))


def with_columns(item: Row, columns: Sequence[str]) -> Row:
    """Return a row with all columns, None for those it lacks: stacked conversations keep only what all have.

    Raises:
        ValueError: for a row with a further column.

    Example:
        >>> with_columns({"query": "a"}, ["query", "answer"])
        {'query': 'a', 'answer': None}
    """
    if len(item) == len(columns) and all(name in item for name in columns):
        return item
    further = [name for name in item if name not in columns]
    if further:
        raise ValueError(
            f"a row of the dataset has the columns {further}, and its first row only {list(columns)}; give every row "
            "the same columns, None where there is nothing."
        )
    return {name: item.get(name) for name in columns}


class DatasetChatEnv(ChatEnv):
    """A `ChatEnv` whose reset draws the next prompt of a dataset.

    The dataset's columns travel with the conversation (non-tensor entries at the root, under `"columns"` where the name
    is one of `RESERVED_ENTRIES`; None for one that its row lacks), for rewards to read by their names, and
    `("rollout", "group_id" | "sample_index" | "group_size")` say which group a conversation belongs to.

    Args:
        dataset: a hub name, a file or folder, a Hugging Face `Dataset`, or an iterable of mappings or of strings; see
            `load_rows`.
        split: which part of the dataset, where it has several.
        data_key: column with the query.
        repeats: conversations per prompt: the group size.
        shuffle, seed, num_epochs, name: see `PromptSampler`.
        prepare: turns an item into the query (a string or messages) when the column is not one already.
        input_mode, batch_size, system_prompt, tokenizer, template_kwargs, device: see `ChatEnv`.

    Raises:
        FileNotFoundError: for a dataset that is not there.
        ValueError: for an empty dataset or a missing column.

    Example:
        >>> env = DatasetChatEnv([{"query": "1 + 1 =", "answer": "2"}], repeats=2)
        >>> data = env.reset()
        >>> data["answer"], data["rollout", "group_id"], int(data["rollout", "sample_index"])
        ('2', 'train/0/0', 0)
    """

    def __init__(
        self,
        dataset: str | Path | Iterable[Row | str],
        *,
        split: str | None = None,
        data_key: str = "query",
        repeats: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int | None = None,
        name: str = "train",
        prepare: Callable[[Row], object] | None = None,
        input_mode: InputMode = "history",
        batch_size: Sequence[int] | int | None = None,
        system_prompt: str | None = None,
        tokenizer: Tokenizer | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        device: torch.device | None = None,
    ) -> None:
        items = load_rows(dataset, split=split)
        if isinstance(items[0], str):
            items = [{data_key: item} for item in items]
        self.columns = columns_of(items)
        """Names of the dataset's columns; in a row that lacks one it is None."""
        if prepare is None and data_key not in self.columns:
            raise ValueError(f"dataset has no column {data_key!r}, only {list(self.columns)}; name it with data_key.")
        if prepare is None and isinstance(items, list | tuple):
            without = [index for index, item in enumerate(items) if item.get(data_key) is None]
            if without:
                raise ValueError(
                    f"dataset has {len(without)} rows without {data_key!r}, the first is row {without[0]}."
                )
        self.prompts = PromptSampler(
            items, num_samples=repeats, shuffle=shuffle, seed=seed, num_epochs=num_epochs, name=name
        )
        self._prepare, self._query_column = prepare, data_key
        super().__init__(
            input_mode=input_mode,
            batch_size=batch_size,
            system_prompt=system_prompt,
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
            data_key=f"{data_key}_query" if data_key in RESERVED_ENTRIES else data_key,
            device=device,
        )

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[object], **kwargs: Any) -> DatasetChatEnv:
        """Return an environment over everything that a `DataLoader` yields in one pass, in its order.

        A loader without a length may be endless: its batches are read when they are drawn.

        Args:
            dataloader: its batches are columns of equal length, rows, or TensorDicts.
            kwargs: see the class.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> loader = DataLoader([{"query": "1 + 1 ="}, {"query": "1 + 2 ="}], batch_size=2)
            >>> DatasetChatEnv.from_dataloader(loader, repeats=4).reset()["query"]
            '1 + 1 ='
        """
        return cls(rows_of_loader(dataloader), **kwargs)

    def reset_dataloader(self) -> Self:
        """Begin the dataset anew, one that has ended, too; groups get new ids. Return the environment."""
        self.prompts.begin_anew()
        return self

    def _make_specs(self, shape: torch.Size) -> None:
        super()._make_specs(shape)
        columns, apart = (
            {name: NonTensor(shape=tuple(shape), example_data=None) for name in sorted(names)}
            for names in ({*self.columns, self.data_key} - RESERVED_ENTRIES, RESERVED_ENTRIES & {*self.columns})
        )
        if apart:
            columns["columns"] = Composite(apart, shape=shape)
        rollout: dict[str, TensorSpec] = {"group_id": NonTensor(shape=tuple(shape), example_data="")}
        for key in ("sample_index", "group_size"):
            rollout[key] = Unbounded(shape, dtype=torch.int64)
        self.state_spec = Composite(
            {
                **columns,
                "rollout": Composite(rollout, shape=shape),
            },
            shape=shape,
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        shape = self.batch_size if tensordict is None or self.batch_locked else tensordict.batch_size
        # A partial reset keeps the running conversations: only the marked ones draw a new prompt.
        mask = None if tensordict is None else tensordict.get("_reset", None)
        is_drawn = [True] * shape.numel() if mask is None else mask.reshape(-1).tolist()
        drawn = iter(self.prompts.draw_many(sum(is_drawn)))
        return self._moved(restacked(self._open_all([next(drawn) if is_new else None for is_new in is_drawn]), shape))

    def _open_all(self, drawn: Sequence[Drawn | None]) -> list[TensorDictBase]:
        """Open a conversation for each draw; where there is none, the place of one that goes on."""
        placeholder = (self.prompts.items[0], "", 0)
        return [
            self._opened(*(placeholder if one is None else one), query="" if one is None else self._query(one[0]))
            for one in drawn
        ]

    def _query(self, item: Row) -> object:
        return item[self._query_column] if self._prepare is None else self._prepare(item)

    def _opened(self, item: Row, group_id: str, sample_index: int, *, query: object) -> TensorDictBase:
        # Non-tensor wrapping keeps lists, numbers and None columns as they are.
        entries = {key: non_tensor(value) for key, value in with_columns(item, self.columns).items()}
        apart = {key: entries.pop(key) for key in RESERVED_ENTRIES.intersection(entries)}
        step = tensordict_of({**entries, "columns": tensordict_of(apart)} if apart else entries)
        step.set(self.data_key, non_tensor(query))
        rollout = {
            "group_id": non_tensor(group_id),
            "sample_index": torch.tensor(sample_index),
            "group_size": torch.tensor(self.prompts.num_samples),
        }
        step.set("rollout", tensordict_of(rollout))
        return step.update(self._open(step, step.batch_size))

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the position in the dataset."""
        return {"prompts": self.prompts.state_dict()}

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Continue from a saved position in the dataset."""
        self.prompts.load_state_dict(state_dict["prompts"])
