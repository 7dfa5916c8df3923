"""The trainer's weights packed for sending, in memory that workers of this host can map."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from llmrl.weight_sync.packing import PackedLayout, write_tag
from llmrl.weight_sync.shared_memory import SharedBuffer


class StagedWeights(WeightSource):
    """A snapshot of a `WeightSource`: cast, packed, and kept until the next one.

    It is the one copy of the whole model that the trainer makes: sharded weights are gathered into it one by one, and
    an engine that missed the update is given them from it.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._shared: SharedBuffer | None = None
        self._layout: PackedLayout | None = None
        self._tag = ""

    @property
    def layout(self) -> PackedLayout:
        """Where each weight lies."""
        if self._layout is None:
            self._layout = PackedLayout.of((meta.name, meta.dtype, meta.shape) for meta in self._source.metadata())
        return self._layout

    @property
    def buffer(self) -> torch.Tensor:
        """The staged bytes, `[num_bytes]` of uint8.

        Raises:
            RuntimeError: before the first `stage`, or when it failed.
        """
        if self._shared is None or self._shared.tensor is None or not self._tag:
            raise RuntimeError("no weights are staged.")
        return self._shared.tensor

    @property
    def has_staged(self) -> bool:
        """Whether there are weights to send."""
        return bool(self._tag)

    def rollback(self) -> None:
        """Hold none."""
        self._tag = ""

    @torch.no_grad()
    def stage(self, version: int | None) -> None:
        """Copy the weights, as they are now, to where they are sent from; the version stays with the engines.

        Raises:
            ValueError: when the source yields others than it announces.
        """
        self._tag = ""
        self._layout = None
        layout = self.layout
        if self._shared is None or self._shared.num_bytes != layout.num_bytes:
            self.close()
            self._layout, self._shared = layout, SharedBuffer(layout.num_bytes)
        buffer = self._shared.tensor
        assert buffer is not None
        write_tag(buffer, "being written")
        views = layout.views(buffer)
        for given_name, tensor in self._source.uncast():
            name, view = next(views)
            if name != given_name or view.shape != tensor.shape:
                raise ValueError(f"the source announced {name!r} {tuple(view.shape)} and yielded {given_name!r}.")
            view.copy_(tensor)
        self._tag = uuid.uuid4().hex
        write_tag(buffer, self._tag)

    def describe(self) -> dict[str, Any]:
        """What a worker needs to know of the weights, in plain types."""
        return {"num_bytes": self.layout.num_bytes, "tag": self._tag, **self.layout.to_plain()}

    @property
    def path(self) -> str:
        """Where processes of this host open the buffer."""
        assert self._shared is not None
        return self._shared.path

    def metadata(self) -> list[ParamMeta]:
        """Of the staged weights."""
        layout = self.layout
        return [ParamMeta(*meta) for meta in zip(layout.names, layout.dtypes, layout.shapes, strict=True)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.layout.views(self.buffer)

    def close(self) -> None:
        """Give the memory back."""
        if self._shared is not None:
            self._shared.close()
        self._shared, self._tag = None, ""


class StreamedWeights(WeightSource):
    """A `WeightSource` that is read while it is sent: nothing is staged, nothing held."""

    has_staged = False

    def __init__(self, source: Any) -> None:
        self._source = source

    def stage(self, version: int | None) -> None:
        """Nothing to do before."""

    def rollback(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to give back."""

    def metadata(self) -> list[ParamMeta]:
        """Of the weights as they will be sent."""
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)
