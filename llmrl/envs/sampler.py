"""`PromptSampler`: draws the prompts of a dataset in order."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypedDict

from llmrl._utils.arguments import check_least
from llmrl._utils.types import Row, StateDict
from llmrl.data.message import copied
from llmrl.envs.sources import StreamedRows, rows_to_check

_MAX_HASHED = 1000
Drawn = tuple[Row, str, int]
"""An item, its group id and its index in the group."""


class OrderOptions(TypedDict, total=False):
    """Order in which prompts are drawn; see `PromptSampler`."""

    shuffle: bool
    seed: int
    num_epochs: int | None
    name: str


class DrawOptions(OrderOptions, total=False):
    """How prompts are drawn; `repeats` is the group size (default 1)."""

    repeats: int


class EndOfData(Exception):
    """A dataset has only `num_left` samples, fewer than requested; none of them is drawn."""

    def __init__(self, message: str, *, num_left: int = 0) -> None:
        super().__init__(message)
        self.num_left = num_left


class PromptSampler:
    """Draws prompts from a dataset, each `num_samples` times in a row, epoch after epoch.

    The sequence depends only on `seed` and the position, so a restored position continues it exactly.

    Args:
        items: the dataset, a sequence of mappings.
        num_samples: group size, the number of consecutive draws of a prompt.
        shuffle: whether to shuffle each epoch.
        num_epochs: number of passes over the dataset; None for no end.
        name: prefix of group ids; must be unique in a run.

    Raises ValueError if the dataset is empty, a number is no whole number from 1, `name` is no text, or `shuffle` is
    set for rows that are streamed.

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
        check_least(1, num_samples=num_samples, num_epochs=num_epochs)
        if not isinstance(name, str):
            raise ValueError(f"name must be text, the prefix of group ids, got {name!r}.")
        self.items = items
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.num_epochs = num_epochs
        self.name = name
        if shuffle and isinstance(items, StreamedRows):
            raise ValueError("shuffle needs all rows, but the loader has no length; let the loader shuffle.")
        self._position = 0
        self._first_epoch = 0
        self._again: deque[int] = deque()
        self._order_epoch = -1
        self._order: list[int] = []

    @cached_property
    def _digest(self) -> str | None:
        """Hash of at most 1000 evenly spaced rows; None if rows are generated on demand."""
        if not isinstance(self.items, list | tuple) and not hasattr(self.items, "features"):  # Hugging Face's
            return None
        rows = [self.items[index] for index in range(0, len(self.items), -(-len(self.items) // _MAX_HASHED))]
        # Only the type of other values is hashed, because their repr may contain addresses, which differ between runs.
        texts = (json.dumps(row, skipkeys=True, default=lambda value: type(value).__name__) for row in rows)
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()

    def upcoming(self, count: int) -> list[int]:
        """Return the positions of the next `count` draws without drawing; fewer if the data ends."""
        again = list(itertools.islice(self._again, count))
        stop = self._position + count - len(again)
        if isinstance(self.items, StreamedRows):
            self.items.read(-(-stop // self.num_samples))
        return again + list(range(self._position, int(min(stop, self._end))))

    @property
    def _end(self) -> float:
        """Position after the last draw; infinite without `num_epochs`."""
        if self.num_epochs is None:
            return math.inf
        return (self._first_epoch + self.num_epochs) * len(self.items) * self.num_samples

    @property
    def num_surely_left(self) -> float:
        """Minimum number of draws before the data ends; 0 for streamed rows."""
        return 0 if isinstance(self.items, StreamedRows) else self._end - self._position

    def draw(self) -> Drawn:
        """Return the next item, its group id and its index in the group; raise `EndOfData` after the last epoch."""
        return self.draw_many(1)[0]

    def draw_many(self, count: int) -> list[Drawn]:
        """Return the next `count` draws; raise `EndOfData`, without drawing, if fewer are left."""
        positions = self.upcoming(count)
        if len(positions) < count:
            epochs = f"the {self.num_epochs} epochs of {len(self.items)} prompts"
            raise EndOfData(
                f"{epochs} have {len(positions)} draws left, {count} were requested.", num_left=len(positions)
            )
        num_new = max(0, count - len(self._again))
        for _ in range(count - num_new):
            self._again.popleft()
        self._position += num_new
        return [self.at(position) for position in positions]

    def at(self, position: int) -> Drawn:
        """Return the draw at a position, without drawing."""
        group, sample_index = divmod(position, self.num_samples)
        epoch, index = divmod(group, len(self.items))
        if self.shuffle:
            if epoch != self._order_epoch:
                self._order = list(range(len(self.items)))
                random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
                self._order_epoch = epoch
            index = self._order[index]
        return copied(self.items[index]), f"{self.name}/{epoch}/{index}", sample_index

    def item_of(self, group_id: str) -> Row:
        """Return the item of a group id.

        Example:
            >>> PromptSampler([{"query": "a"}, {"query": "b"}]).item_of("train/3/1")
            {'query': 'b'}
        """
        return self.items[index_of(group_id)]

    def skip_to_group(self) -> None:
        """Skip the rest of partly drawn groups, so that single draws do not shift later groups.

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
        """Continue at the beginning of the next epoch, and count `num_epochs` from there.

        ValueError is raised if the rows are streamed and their end has not been read.
        """
        if isinstance(self.items, StreamedRows):
            self.items.read(self._position // self.num_samples + 1)
            if self._position and not self.items.has_ended:
                raise ValueError(
                    "the rows come from a loader without a length, which has not ended, so they cannot be restarted."
                )
        size = len(self.items) * self.num_samples
        self._again.clear()
        self._position += -self._position % size
        self._first_epoch = self._position // size

    def draw_next(self, positions: Iterable[int]) -> None:
        """Draw these positions next; they replace positions that were waiting to be drawn again."""
        self._again = deque(positions)

    def state_dict(self, *, unfinished: Sequence[int] = ()) -> StateDict:
        """Return the position; `unfinished` lists drawn positions that must be drawn again after a restart."""
        state = {"position": self._position, "again": [*unfinished, *self._again], "order": self._meaning()}
        return {**state, "first_epoch": self._first_epoch}

    def _meaning(self) -> dict[str, object]:
        """Return all values that determine the prompt and the group id of a position."""
        num_prompts = None if isinstance(self.items, StreamedRows) else len(self.items)
        order = {"num_prompts": num_prompts, "num_samples": self.num_samples, "shuffle": self.shuffle}
        return {**order, "seed": self.seed, "name": self.name, "digest": self._digest}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a position; raise ValueError if it was saved with other prompts, order, seed, name or group size."""
        saved = state.get("order", {})
        own = self._meaning()
        differing = [
            f"{name}={saved.get(name)!r} there, {own[name]!r} here" for name in own if saved.get(name) != own[name]
        ]
        if differing:
            raise ValueError(
                f"the saved position belongs to another order of draws: {'; '.join(differing)} (num_samples "
                "is the argument repeats). Build the environment as it was when the state was saved, or "
                "start without the state."
            )
        self._position = state["position"]
        self._first_epoch = state["first_epoch"]
        self._again = deque(state["again"])


def index_of(group_id: str) -> int:
    """Return the index of a group's item.

    Example:
        >>> index_of("train/3/17")
        17
    """
    return int(group_id.rpartition("/")[2])


def columns_of(items: Sequence[Row]) -> tuple[str, ...]:
    """Return the column names of a dataset; those of the first row if rows are read on demand.

    Raises TypeError if a name is no text.
    """
    names = tuple(dict.fromkeys(name for row in rows_to_check(items) for name in row))
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the dataset has a column named {name!r}; names must be texts: rename the column.")
    return names


def with_columns(item: Row, columns: Sequence[str]) -> Row:
    """Return a row with all columns, None for missing ones; raise ValueError if it has a further column."""
    if len(item) == len(columns) and all(name in item for name in columns):
        return item
    further = [name for name in item if name not in columns]
    if further:
        raise ValueError(
            f"a row of the dataset has the columns {further}, but the first row only {list(columns)}; give every row "
            "the same columns, with None for a missing value."
        )
    return {name: item.get(name) for name in columns}
