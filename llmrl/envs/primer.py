"""`DataLoadingPrimer`: opens an environment's conversations with the rows of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader
from torchrl.data import Composite
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments, check_least
from llmrl._utils.imports import require
from llmrl._utils.types import Row, StateDict
from llmrl.data.tensordicts import RESERVED_ENTRIES, batch_elements, non_tensor, restacked
from llmrl.envs.dataset import DatasetChatEnv, columns_spec, rollout_entries, rollout_spec
from llmrl.envs.sampler import Drawn, DrawOptions, EndOfData, PromptSampler, columns_of, with_columns
from llmrl.envs.sources import Source, load_rows, rows_of_loader
from llmrl.transforms import environment_parts

_READ_BY_ENVIRONMENTS = {"text", "tokens"}


class PrimerOptions(DrawOptions, total=False):
    """Keyword arguments of `DataLoadingPrimer`."""

    dataloader_factory: Callable[[], Source] | None


class DataLoadingPrimer(KnownArguments, Transform):
    """Draws a row at each reset and writes its columns, which stay in the conversation.

    Use it for environments that read a column at reset; for conversations, `DatasetChatEnv` does the same without a
    transform. A reset draws nothing if its tensordict already has the first column.

    Args:
        dataloader: a `DataLoader`, which may be endless, or any source of `load_rows`. It is read once.
        dataloader_factory: function that creates the source, instead of `dataloader`.
        repeats: group size, the number of consecutive draws of a row.
        shuffle, seed, num_epochs, name: see `PromptSampler`.

    Raises ValueError unless exactly one source is given, if it or its rows are empty, or if a column name is reserved.

    Example:
        >>> from llmrl.envs import ChatEnv
        >>> env = ChatEnv().append_transform(DataLoadingPrimer([{"query": "1 + 1 =", "answer": "2"}], repeats=2))
        >>> data = env.reset()
        >>> data["history"].prompt.content, data["answer"], data["rollout", "group_id"]
        (['1 + 1 ='], '2', 'train/0/0')
    """

    is_shared = False
    """Whether several primers share the position in the data."""

    def __init__(
        self,
        dataloader: Source | None = None,
        *,
        dataloader_factory: Callable[[], Source] | None = None,
        repeats: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int | None = None,
        name: str = "train",
    ) -> None:
        super().__init__()
        check_least(1, repeats=repeats)
        if (dataloader is None) == (dataloader_factory is None):
            raise ValueError("exactly one of dataloader and dataloader_factory is needed.")

        def make_prompts() -> PromptSampler:
            source = dataloader_factory() if dataloader_factory is not None else dataloader
            assert source is not None
            return PromptSampler(
                _rows(source), num_samples=repeats, shuffle=shuffle, seed=seed, num_epochs=num_epochs, name=name
            )

        self.group_size = repeats
        self._start(make_prompts)
        if not self.columns:
            raise ValueError("the rows of the dataloader have no columns; give each row at least one.")
        reserved = sorted(RESERVED_ENTRIES.intersection(self.columns) - _READ_BY_ENVIRONMENTS)
        if reserved:
            raise ValueError(
                f"the columns {reserved} have names that a conversation uses itself; rename them, or use "
                "DatasetChatEnv, which keeps them apart."
            )

    def _start(self, make_prompts: Callable[[], PromptSampler]) -> None:
        self.prompts = make_prompts()
        self.columns = columns_of(self.prompts.items)

    def draw(self, count: int) -> list[Drawn]:
        """Return the next `count` rows; raise `EndOfData`, without drawing, if fewer are left."""
        return self.prompts.draw_many(count)

    def reset_dataloader(self) -> None:
        """Restart the data, also after its end, with new group ids."""
        self.prompts.begin_anew()

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        parent = self.parent
        assert parent is not None
        if tensordict is None:
            tensordict = TensorDict(batch_size=parent.batch_size)
        shape = tensordict.batch_size
        mask = tensordict.get("_reset", None)
        if mask is None:
            if tensordict.get(self.columns[0], None) is not None:
                return tensordict
            mask = torch.ones(shape, dtype=torch.bool)
        is_drawn = mask.reshape(-1).tolist()
        drawn = iter(self.draw(sum(is_drawn)))
        elements = [
            self._written(element, next(drawn)) if is_new else element
            for element, is_new in zip(batch_elements(tensordict), is_drawn, strict=True)
        ]
        return restacked(elements, shape)

    def _written(self, element: TensorDictBase, drawn: Drawn) -> TensorDictBase:
        row, group_id, sample_index = drawn
        element = element.copy()
        for key, value in with_columns(row, self.columns).items():
            element.set(key, non_tensor(value))
        return element.set("rollout", rollout_entries(group_id, sample_index, self.group_size))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset.update(tensordict.select(*self.columns, "rollout", strict=False))

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Add the columns and the group entries that a reset reads."""
        state_spec = input_spec["full_state_spec"]
        state_spec.update(columns_spec(self.columns, input_spec.shape))
        state_spec["rollout"] = rollout_spec(input_spec.shape)
        return input_spec

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the position in the data."""
        return {"prompts": self.prompts.state_dict()}

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Restore a saved position."""
        self.prompts.load_state_dict(state_dict["prompts"])


class RayDataLoadingPrimer(DataLoadingPrimer):
    """A `DataLoadingPrimer` with its data and position in a Ray actor, so that many processes share one pass.

    Primers with the same `actor_name` share the actor, as does a pickled copy. The actor ends with its last handle.
    Collectors stop at the end of the data but do not form groups, since other processes draw in
    between. `RayLLMCollector` does not need this class, because it distributes positions itself.

    Args:
        dataloader, **options: see `DataLoadingPrimer`; only those of the first primer of an `actor_name` are used.
        num_cpus: CPU cores that the actor reserves.
        actor_name: name in Ray's namespace; None creates a new actor.

    Example:
        >>> from llmrl.envs import ChatEnv
        >>> primer = RayDataLoadingPrimer([{"query": "1 + 1 ="}], actor_name="prompts")  # doctest: +SKIP
        >>> env = ChatEnv().append_transform(primer)  # doctest: +SKIP
    """

    is_shared = True

    def __init__(
        self,
        dataloader: Source | None = None,
        *,
        num_cpus: float = 0,
        actor_name: str | None = None,
        **options: Unpack[PrimerOptions],
    ) -> None:
        self._actor_options = {"num_cpus": num_cpus, "name": actor_name, "get_if_exists": actor_name is not None}
        super().__init__(dataloader, **options)

    def _start(self, make_prompts: Callable[[], PromptSampler]) -> None:
        ray = require("ray", extra="ray")
        self._actor = ray.remote(_SharedPrompts).options(**self._actor_options).remote(make_prompts)
        self.columns, self.group_size = ray.get(self._actor.facts.remote())

    def _ask(self, method: str, *arguments: object) -> Any:
        answer = require("ray", extra="ray").get(self._actor.call.remote(method, *arguments))
        if isinstance(answer, EndOfData):
            raise answer
        return answer

    def draw(self, count: int) -> list[Drawn]:
        """Return the next rows; no other primer of the actor gets them."""
        return self._ask("draw_many", count)

    def reset_dataloader(self) -> None:
        """Restart the data for all primers that share it."""
        self._ask("begin_anew")

    def state_dict(self, *args: object, **kwargs: object) -> StateDict:
        """Return the shared position in the data."""
        return {"prompts": self._ask("state_dict")}

    def load_state_dict(self, state_dict: StateDict, *args: object, **kwargs: object) -> None:
        """Restore a saved position for all primers that share it."""
        self._ask("load_state_dict", state_dict["prompts"])


class _SharedPrompts:
    """The sampler inside the Ray actor."""

    def __init__(self, make_prompts: Callable[[], PromptSampler]) -> None:
        self._prompts = make_prompts()

    def facts(self) -> tuple[tuple[str, ...], int]:
        return columns_of(self._prompts.items), self._prompts.num_samples

    def call(self, method: str, *arguments: object) -> object:
        try:
            return getattr(self._prompts, method)(*arguments)
        except EndOfData as end:  # returned, because Ray wraps exceptions
            return end


def _rows(source: Source) -> Sequence[Row]:
    """Return the rows of a source, or the batches of a loader as rows."""
    if isinstance(source, DataLoader):
        source = rows_of_loader(source)
    rows = load_rows(source)
    return [{"query": row} for row in rows] if isinstance(rows[0], str) else rows


def dataset_env_of(env: object) -> DatasetChatEnv | DataLoadingPrimer | None:
    """Return the part of an environment that draws prompts from its own dataset, or None."""
    for part in environment_parts(env):
        if isinstance(part, DatasetChatEnv) or (isinstance(part, DataLoadingPrimer) and not part.is_shared):
            return part
    return None
