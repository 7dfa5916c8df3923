"""Routing replay: forward passes of a mixture of experts with the experts that the engine chose.

Rounding lets engine and trainer choose different experts for some tokens, which changes log-probs. "Rollout Routing
Replay" (R3, arXiv:2510.11370) takes the choice from the engine and the experts' weights from the trained router, so
that gradients still reach the router. The router's own code runs with a replaced `topk`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.overrides import TorchFunctionMode

from llmrl._utils.model_parts import decoder_of, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTED_EXPERTS = "routed_experts"
"""Name of the entry in rows and decoder layers; repeated here because a worker cannot import `llmrl.data`."""

Choices = list[tuple[torch.Tensor, torch.Tensor]]
"""Per router, two `[num_tokens, top_k]` tensors: its own choice, and the experts used."""


class _Router(Protocol):
    num_experts: int
    top_k: int

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]: ...


class _Pass(threading.local):
    """Input and output of a forward pass, per thread, because several threads may use the same model."""

    forced: torch.Tensor | None = None
    choices: Choices | None = None


_PASS = _Pass()


class Routers:
    """The expert routers of a transformers model, which report their choices or use given ones.

    A router is a module of a decoder layer that has `top_k`, `num_experts` and a weight, and
    returns logits, weights and ids, as in Qwen3-MoE, Mixtral, OLMoE, gpt-oss and DeepSeek-V3.

    Example:
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> config = Qwen3MoeConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, head_dim=4,
        ...                         num_key_value_heads=2, moe_intermediate_size=4, num_experts=4,
        ...                         num_experts_per_tok=2)
        >>> model = Qwen3MoeForCausalLM(config).eval()
        >>> routers = Routers(model)
        >>> with routers.telling() as choices:
        ...     _ = model(input_ids=torch.tensor([[1, 2, 3]]))
        >>> len(choices), choices[0][1].shape
        (2, torch.Size([3, 2]))
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__
        config = text_config(model)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self._has_experts = any((getattr(config, name, None) or 0) > 1 for name in names)
        self.num_layers = self.num_experts = self.top_k = 0
        layers = getattr(decoder_of(model), "layers", ())
        self._num_decoder_layers = len(layers)
        self._places: list[int] = []
        for place, layer in enumerate(layers):
            router = next(filter(_is_router, layer.modules()), None)
            index = None
            if router is not None:
                index = self.num_layers
                self.num_layers += 1
                self.num_experts = router.num_experts
                self.top_k = router.top_k
                self._places.append(place)
                hook_once(router.register_forward_hook, router._forward_hooks, _after_router)
            hook_once(layer.register_forward_pre_hook, layer._forward_pre_hooks, _before_layer, index)

    def checked(self, routed_experts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Return each row's experts, `[num_tokens, num_layers, top_k]`, for the routers; None if there are none.

        Raises TypeError if the model's routers are not recognised, and ValueError if the shapes do not match.
        """
        if not self.num_layers and not self._has_experts:
            return None
        if not self.num_layers:
            raise TypeError(
                f"The rows contain {ROUTED_EXPERTS!r}, and the routers of {self._name} are not known: drop "
                f"{ROUTED_EXPERTS!r} from the rows to let the model choose its experts."
            )
        if all(experts.shape[1] == self._num_decoder_layers for experts in routed_experts):
            routed_experts = [experts[:, self._places] for experts in routed_experts]
        shape = (self.num_layers, self.top_k)
        for row, experts in enumerate(routed_experts):
            largest = int(experts.max()) if experts.numel() else 0
            if experts.shape[1:] != shape or largest >= self.num_experts:
                raise ValueError(
                    f"{ROUTED_EXPERTS!r} of row {row} has shape {tuple(experts.shape)} and ids up to {largest}; the "
                    f"{shape[0]} routers of {self._name} choose {shape[1]} of {self.num_experts} experts. Drop it from "
                    "rows that another model sampled."
                )
        return routed_experts

    @contextlib.contextmanager
    def telling(self) -> Iterator[Choices]:
        """Collect each router's choices in this thread's forward passes, in the order of layers."""
        outer = _PASS.choices
        _PASS.choices = []
        try:
            yield _PASS.choices
        finally:
            _PASS.choices = outer

    def check_told(self, choices: Choices) -> None:
        """Raise TypeError unless each router ran exactly once."""
        if len(choices) != self.num_layers:
            raise TypeError(
                f"{self._name} has {self.num_layers} routers, and {len(choices)} results with logits, weights and ids "
                "were recorded; one per router is needed to set the experts. "
                f"Drop {ROUTED_EXPERTS!r} from the rows to let the model choose its experts."
            )


def _is_router(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    top_k = getattr(module, "top_k", None)
    num_experts = getattr(module, "num_experts", None)
    is_sized = isinstance(top_k, int) and isinstance(num_experts, int) and isinstance(weight, torch.Tensor)
    return is_sized and "router" in type(module).__name__.lower()


def hook_once(
    register: Callable[..., object], hooks: Mapping[int, object], hook: Callable[..., object], *bound: object
) -> None:
    """Add a hook unless the module has it already, as a copy of a module with the hook does."""
    if not any(isinstance(one, functools.partial) and one.func is hook for one in hooks.values()):
        register(functools.partial(hook, *bound), with_kwargs=True)


def _before_layer(
    index: int | None, layer: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]
) -> tuple[tuple[object, ...], dict[str, torch.Tensor]] | None:
    """Take the layer's extra argument, `[num_tokens, num_layers, top_k]` experts; -1 lets the router choose."""
    if torch.compiler.is_compiling():
        return None
    routed_experts = kwargs.pop(ROUTED_EXPERTS, None)
    _PASS.forced = None if index is None or routed_experts is None else routed_experts[:, index].long()
    return args, kwargs


def _after_router(
    router: _Router, args: tuple[object, ...], kwargs: dict[str, object], output: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | None:
    """Recompute with the given experts, if any, and report the choice."""
    if torch.compiler.is_compiling():
        return None
    forced = _PASS.forced
    _PASS.forced = None
    if not isinstance(output, tuple) or len(output) != 3 or output[2].shape[-1:] != (router.top_k,):
        return None  # another kind of module: it reports nothing, so that `check_told` raises
    own = output[2]
    if forced is not None:
        with _Chosen(forced, router.num_experts) as chosen:
            output = router.forward(*args, **kwargs)
        # `equal` synchronises with the device; it is needed only if ids were copied.
        is_taken = output[2] is chosen.token_experts or torch.equal(output[2], chosen.token_experts)
        if chosen.num_choices != 1 or not is_taken:
            raise TypeError(
                f"{type(router).__name__} does not choose experts by one topk, so its choice cannot be replaced."
            )
    if _PASS.choices is not None:
        _PASS.choices.append((own.detach(), output[2].detach()))
    return output


class _Chosen(TorchFunctionMode):
    """Mode that replaces the result of the `topk` over experts by given ids and their scores."""

    def __init__(self, forced: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self._forced = forced
        self._num_experts = num_experts
        self.num_choices = 0
        self.token_experts = forced

    def __torch_function__(
        self,
        func: Callable[..., torch.return_types.topk],
        types: object,
        args: Sequence[torch.Tensor] = (),
        kwargs: dict[str, torch.Tensor] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._num_experts or result.indices.shape != self._forced.shape:
            return result
        self.num_choices += 1
        self.token_experts = torch.where(self._forced >= 0, self._forced, result.indices)
        return torch.return_types.topk((scores.gather(-1, self.token_experts), self.token_experts))
