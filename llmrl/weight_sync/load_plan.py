"""Loading of a flat buffer of checkpoint weights into a model that vLLM has processed for its CPU kernels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmrl.engines.vllm.private import (
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    _get_original_loader,
    get_layerwise_info,
    is_deferred_attention_layer,
    restore_layer_on_meta,
)
from llmrl.weight_sync.buffers import PackedLayout
from llmrl.weight_sync.partial import NeededPages

STAYING = ("e_score_correction_bias", "expert_bias")
"""Router parameters of vLLM that are buffers in the trainer: not sent, they keep the checkpoint's values."""


TiedHeads = list[tuple[torch.nn.Module, torch.nn.Module]]
"""Pairs of an output head and the embedding that shares its weight."""


@dataclass(frozen=True, slots=True)
class Region:
    """A strided region of a parameter or of the buffer; the offset is in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_contiguous: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """Return the region of a view in its storage."""
        return cls(
            int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_contiguous()
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()

    def of_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the region of a flat buffer ([num_bytes] uint8), as a view."""
        num_bytes = buffer.numel() // self.dtype.itemsize * self.dtype.itemsize
        return buffer[:num_bytes].view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True)
class ParameterPlan:
    """A parameter in the checkpoint's format, and the copies that fill it."""

    layer: torch.nn.Module
    name: str
    shape: torch.Size
    dtype: torch.dtype
    copies: list[tuple[Region, Region | None]]
    """Pairs of target and source; a target without a source is filled with zeros."""

    @property
    def num_loaded(self) -> int:
        """Number of elements that the copies write."""
        return sum(target.numel for target, _ in self.copies)

    def as_one_view(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter as a view of the buffer; None if its parts are not contiguous there and in order."""
        copies = sorted(self.copies, key=lambda copy: copy[0].offset)
        first = copies[0][1]
        end = 0
        for target, source in copies:
            if (
                source is None
                or first is None
                or source.dtype != self.dtype
                or not (target.is_contiguous and source.is_contiguous)
                or target.offset != end
                or source.offset != first.offset + end
            ):
                return None
            end += target.numel
        assert first is not None
        stride = torch.empty(self.shape, device="meta").stride()
        whole = Region(first.offset, tuple(self.shape), stride, self.dtype, True)
        return whole.of_buffer(buffer)

    def fill(self, parameter: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the weights into a contiguous tensor of the parameter's shape, and return it."""
        for target, source in self.copies:
            part = parameter.as_strided(target.size, target.stride, target.offset + parameter.storage_offset())
            if source is None:
                part.zero_()
            else:
                part.copy_(source.of_buffer(buffer))
        return parameter


class LoadPlan:
    """Copies from the buffer into the model's parameters, recorded once and repeated at each update.

    vLLM's own loaders run on weights without data while their copies are recorded. This avoids the
    additional allocation and copies of vLLM's layerwise reload.
    """

    def __init__(self, parameters: list[ParameterPlan], heads: TiedHeads) -> None:
        self._parameters = parameters
        # A tied head also packs its weight for the embedding, so the embedding is not packed again.
        self._unpacked = {id(embedding) for _, embedding in heads}

    @torch.no_grad()
    def load(self, buffer: torch.Tensor) -> None:
        """Load the weights of `buffer` ([num_bytes] uint8), without keeping references to it."""
        for plan in self._parameters:
            layer = plan.layer
            method: QuantizeMethodBase = getattr(layer, "quant_method", None)
            own = layer._parameters[plan.name]
            assert own is not None
            is_weight = plan.name == "weight" and method is not None
            if own.shape == plan.shape:  # vLLM kept the unpacked weight
                plan.fill(own.data, buffer)
                if is_weight and id(layer) not in self._unpacked:
                    method.process_weights_after_loading(layer)
                continue
            # vLLM dropped the unpacked weight: put the loaded one in its place while vLLM packs it.
            loaded = plan.as_one_view(buffer)
            if loaded is None:  # fused parts are not contiguous in the buffer
                loaded = plan.fill(torch.empty(plan.shape, dtype=plan.dtype), buffer)
            layer._parameters[plan.name] = torch.nn.Parameter(loaded, requires_grad=False)
            method.process_weights_after_loading(layer)
            layer._parameters[plan.name] = own


def make_load_plan(
    model: torch.nn.Module, layout: PackedLayout, heads: TiedHeads
) -> tuple[LoadPlan | None, NeededPages | None]:
    """Return the plan for a model on CPU, and the pages of the buffer that loading reads.

    The plan is None if loaders do more than copy, or layers more than pack; the pages are None if
    all are needed, or unknown. Raises ValueError if the weights do not fit the model, or some are missing.
    """
    source = torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta")
    with _checkpoint_format(model) as parameters:
        recorder = _CopyRecorder(source, {_storage(tensor): plan for plan, tensor in parameters})
        try:
            with recorder:
                model.load_weights(layout.views(source))  # type: ignore[operator]  # of a model of vLLM
        except Exception as error:
            if isinstance(error, RuntimeError) and "meta" in str(error):
                return None, None  # a loader reads data, which meta tensors lack
            raise ValueError(f"the engine's model does not take these weights: {_first_line(error)}") from error
    if not recorder.is_copying_only:
        return None, None
    tied = {id(head) for head, _ in heads}
    plans = [plan for plan, _ in parameters]
    unread = _unread(layout, [plan for plan in plans if id(plan.layer) not in tied])
    if unread:
        raise ValueError(
            f"the engine's model has no place for {len(unread)} of the weights, among them {unread[:3]}; a head that "
            "the engine ties to its embedding must be left out, or tied in the trainer too."
        )
    missing = []
    wanted = []
    trained = trained_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    for plan in plans:
        if id(plan.layer) in tied or is_deferred_attention_layer(plan.layer):
            continue
        if not plan.copies and (plan.name in STAYING or id(plan.layer) not in trained):
            continue
        if plan.num_loaded < plan.shape.numel():
            missing.append(f"{names[id(plan.layer)]}.{plan.name}")
        wanted.append(plan)
    if missing:
        raise ValueError(f"the update lacks weights for {len(missing)} parameters, among them {missing[:3]}.")
    load_plan = LoadPlan(wanted, heads) if all(map(_is_plain, wanted)) else None
    return load_plan, _pages_of(layout, plans)


def trained_layers(model: torch.nn.Module) -> set[int]:
    """Return the ids of the language model's layers, which an update must fill; encoders keep their weights."""
    language_model = getattr(model, "get_language_model", lambda: model)()
    return {id(layer) for layer in language_model.modules()}


def _pages_of(layout: PackedLayout, plans: list[ParameterPlan]) -> NeededPages | None:
    pages = NeededPages(layout.num_bytes)
    for source in (source for plan in plans for _, source in plan.copies if source is not None):
        itemsize = source.dtype.itemsize
        pages.add(offset=source.offset * itemsize, size=source.size, stride=source.stride, itemsize=itemsize)
    return None if pages.is_all else pages


def _unread(layout: PackedLayout, plans: list[ParameterPlan]) -> list[str]:
    """Return the names of weights that fill no parameter, for example a head tied to the embedding."""
    starts = sorted(
        source.offset * source.dtype.itemsize
        for plan in plans
        for _, source in plan.copies
        if source is not None and source.numel
    )
    unread = []
    for place in layout.places:
        index = bisect_left(starts, place.offset)
        size = torch.Size(place.shape).numel() * place.dtype.itemsize
        if size and (index == len(starts) or starts[index] >= place.offset + size):
            unread.append(place.name)
    return unread


def _is_plain(plan: ParameterPlan) -> bool:
    own = plan.layer._parameters.get(plan.name)
    method = getattr(plan.layer, "quant_method", None)
    if own is None or own.device.type != "cpu" or type(method) not in _PLAIN_METHODS:
        return False
    if own.shape == plan.shape:
        return own.is_contiguous()
    return own.numel() == 0 and plan.name == "weight" and method is not None


_PLAIN_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@contextmanager
def _checkpoint_format(model: torch.nn.Module) -> Iterator[list[tuple[ParameterPlan, torch.Tensor]]]:
    """Give each layer its checkpoint parameters, without data, within the context; yield them with empty plans."""
    held: list[tuple[torch.nn.Module, dict, dict, set[str]]] = []
    parameters: list[tuple[ParameterPlan, torch.Tensor]] = []
    try:
        for layer in model.modules():
            non_persistent = set(layer._non_persistent_buffers_set)
            held.append((layer, dict(layer._parameters), dict(layer._buffers), non_persistent))
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    if hasattr(parameter, "weight_loader"):
                        parameter.weight_loader = _get_original_loader(parameter)
                    plan = ParameterPlan(layer, name, parameter.shape, parameter.dtype, [])
                    parameters.append((plan, parameter))
        yield parameters
    finally:
        for layer, own_parameters, own_buffers, non_persistent in held:
            layer._parameters.clear()
            layer._parameters.update(own_parameters)
            layer._buffers.clear()
            layer._buffers.update(own_buffers)
            layer._non_persistent_buffers_set = non_persistent


class _CopyRecorder(TorchDispatchMode):
    """Dispatch mode that records copies into parameters instead of making them."""

    def __init__(self, source: torch.Tensor, plans: dict[int, ParameterPlan]) -> None:
        super().__init__()
        self._source = _storage(source)
        self._plans = plans
        self.is_copying_only = True
        """Whether weights were only copied into parameters."""

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[torch.Tensor, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> torch.Tensor:
        plan = self._plans.get(_storage(args[0])) if args and isinstance(args[0], torch.Tensor) else None
        if plan is None or not function._schema.is_mutable:
            return function(*args, **(kwargs or {}))
        target = Region.of(args[0])
        if function is torch.ops.aten.copy_.default and _storage(args[1]) == self._source:
            if args[1].shape != args[0].shape:
                raise ValueError(f"{plan.name} takes {tuple(args[0].shape)}, got {tuple(args[1].shape)}")
            plan.copies.append((target, Region.of(args[1])))
        elif function is torch.ops.aten.zero_.default or (
            function is torch.ops.aten.fill_.Scalar and float(args[1]) == 0.0
        ):
            if target.numel:
                plan.copies.append((target, None))
        else:
            self.is_copying_only = False
        return args[0]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _first_line(error: Exception, limit: int = 300) -> str:
    text = f"{type(error).__name__} {error}".partition("\n")[0]
    return text if len(text) <= limit else f"{text[:limit]} […]"
