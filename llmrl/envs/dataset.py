"""`DatasetChatEnv`: conversations opened by the prompts of a dataset, each repeated to form a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded

from llmrl._utils.arguments import check_least
from llmrl._utils.types import InputMode, Row, StateDict, Tokenizer
from llmrl.data.message import copied
from llmrl.data.tensordicts import RESERVED_ENTRIES, non_tensor, restacked, tensordict_of
from llmrl.envs.chat import ChatEnv
from llmrl.envs.sampler import Drawn, PromptSampler, columns_of, with_columns
from llmrl.envs.sources import load_rows, rows_of_loader


class DatasetChatEnv(ChatEnv):
    """A `ChatEnv` that draws the next prompt of a dataset at each reset.

    The dataset's columns are non-tensor entries of the conversation, which reward functions read by name. They are at
    the root, or under `"columns"` if the name is in `RESERVED_ENTRIES`; missing values are None.
    `("rollout", "group_id" | "sample_index" | "group_size")` identify the group of a conversation.

    Args:
        dataset, split: a hub name, a file or folder, or an iterable of mappings or strings; see `load_rows`.
        data_key: column with the query.
        repeats: group size, the number of conversations per prompt.
        shuffle, seed, num_epochs, name: see `PromptSampler`.
        prepare: converts an item to the query (a string or messages) in place of the column.
        num_envs: alternative to `batch_size`, for the batch shape `[num_envs]`.
        input_mode, batch_size, system_prompt, tokenizer, template_kwargs, device: see `ChatEnv`.

    Raises:
        FileNotFoundError: if the dataset does not exist.
        ValueError: if the dataset is empty, a column is missing or queries need a `tokenizer`.
        TypeError: if a column's name is no text.

    Example:
        >>> env = DatasetChatEnv([{"query": "1 + 1 =", "answer": "2"}], repeats=2)
        >>> data = env.reset()
        >>> data["answer"], data["rollout", "group_id"], int(data["rollout", "sample_index"])
        ('2', 'train/0/0', 0)
    """

    roles: tuple[str, ...] = ("",)
    """Roles of the rollouts of a group, in order; in a game, the roles that the policy plays."""

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
        num_envs: int | None = None,
        system_prompt: str | None = None,
        tokenizer: Tokenizer | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        device: torch.device | None = None,
    ) -> None:
        check_least(1, repeats=repeats)
        if repeats % len(self.roles):
            raise ValueError(f"repeats must be a multiple of the {len(self.roles)} roles {self.roles}, got {repeats}.")
        if batch_size is not None and num_envs is not None:
            raise ValueError(
                f"batch_size={batch_size!r} and num_envs={num_envs} both set the batch shape: pass one of them."
            )
        items = load_rows(dataset, split=split)
        if isinstance(items[0], str):
            items = [{data_key: item} for item in items]
        self.columns = columns_of(items)
        """Names of the dataset's columns."""
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
        # Without messages in the conversation, rewards read the prepared query, so that it needs an entry of its own.
        has_raw_column = prepare is not None and data_key in self.columns and input_mode != "history"
        self._prepare = prepare
        self._query_column = data_key
        super().__init__(
            input_mode=input_mode,
            batch_size=num_envs if batch_size is None else batch_size,
            system_prompt=system_prompt,
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
            data_key=f"{data_key}_query" if has_raw_column or data_key in RESERVED_ENTRIES else data_key,
            device=device,
        )
        if prepare is None and tokenizer is None and input_mode != "history":
            first = tensordict_of({self.data_key: non_tensor(items[0][data_key])})
            self._open(first, first.batch_size)  # raises now what each reset would

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[object], **kwargs: Any) -> DatasetChatEnv:
        """Return an environment over one pass over a `DataLoader`; a loader without a length is read on demand.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> loader = DataLoader([{"query": "1 + 1 ="}, {"query": "1 + 2 ="}], batch_size=2)
            >>> DatasetChatEnv.from_dataloader(loader, repeats=4).reset()["query"]
            '1 + 1 ='
        """
        return cls(rows_of_loader(dataloader), **kwargs)

    def reset_dataloader(self) -> Self:
        """Restart the dataset, also after its end, with new group ids; return the environment."""
        self.prompts.begin_anew()
        return self

    def _make_specs(self, shape: torch.Size) -> None:
        super()._make_specs(shape)
        state_spec = columns_spec({*self.columns, self.data_key} - RESERVED_ENTRIES, shape)
        if apart := RESERVED_ENTRIES.intersection(self.columns):
            state_spec["columns"] = columns_spec(apart, shape)
        state_spec["rollout"] = rollout_spec(shape)
        self.state_spec = state_spec

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if tensordict is None:
            tensordict = TensorDict(batch_size=self.batch_size)
        shape = self.batch_size if self.batch_locked else tensordict.batch_size
        # In a partial reset, only the marked conversations draw a new prompt.
        is_drawn = tensordict.get("_reset", torch.ones(shape, dtype=torch.bool)).reshape(-1).tolist()
        drawn = iter(self.prompts.draw_many(sum(is_drawn)))
        return self._moved(restacked(self._open_all([next(drawn) if is_new else None for is_new in is_drawn]), shape))

    def _open_all(self, drawn: Sequence[Drawn | None]) -> list[TensorDictBase]:
        """Open a conversation for each draw; for None, return a placeholder."""
        return [self._placeholder() if one is None else self._opened(*one, query=self._query(one[0])) for one in drawn]

    def _placeholder(self) -> TensorDictBase:
        """Return a conversation for a place of a batch that a partial reset does not open."""
        blank: object = torch.zeros(0) if self.input_mode == "tokens" else ""
        return self._opened(self.prompts.items[0], "", 0, query=blank)

    def _query(self, item: Row) -> object:
        return item[self._query_column] if self._prepare is None else self._prepare(copied(item))

    def _opened(self, item: Row, group_id: str, sample_index: int, *, query: object) -> TensorDictBase:
        # Non-tensor wrapping preserves lists, numbers and None.
        entries: dict[str, object] = {key: non_tensor(value) for key, value in with_columns(item, self.columns).items()}
        apart = {key: entries.pop(key) for key in RESERVED_ENTRIES.intersection(entries)}
        entries.setdefault(self.data_key, non_tensor(query))  # keep a column of the same name
        if apart:
            entries["columns"] = tensordict_of(apart)
        entries["rollout"] = rollout_entries(group_id, sample_index, self.prompts.num_samples)
        opened = self._open(tensordict_of({self.data_key: non_tensor(query)}), torch.Size())
        return tensordict_of(entries).update(opened)

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the position in the dataset."""
        return {"prompts": self.prompts.state_dict()}

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Restore a saved position in the dataset."""
        self.prompts.load_state_dict(state_dict["prompts"])


def columns_spec(names: Iterable[str], shape: torch.Size) -> Composite:
    """Return the spec of columns of a dataset."""
    return Composite({name: NonTensor(shape=tuple(shape), example_data=None) for name in sorted(names)}, shape=shape)


def rollout_spec(shape: torch.Size) -> Composite:
    """Return the spec of `rollout_entries`."""
    numbers = {key: Unbounded(shape, dtype=torch.int64) for key in ("sample_index", "group_size")}
    return Composite({"group_id": NonTensor(shape=tuple(shape), example_data=""), **numbers}, shape=shape)


def rollout_entries(group_id: str, sample_index: int, group_size: int) -> TensorDictBase:
    """Return the entries below `"rollout"`, which identify a conversation's place in its group."""
    return tensordict_of(
        {
            "group_id": non_tensor(group_id),
            "sample_index": torch.tensor(sample_index),
            "group_size": torch.tensor(group_size),
        }
    )


ChatEnv.dataset_class = DatasetChatEnv
