"""Tests whether a way of computing rows reproduces the model's own log-probs."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llmrl._utils.model_parts import decoder_of, set_attention, text_config
from llmrl.trainer.head.log_probs import LogitTransform
from llmrl.trainer.head.output_head import OutputHead
from llmrl.trainer.model.checkpointing import set_scoring_mode
from llmrl.trainer.model.decoder import PACKABLE_LAYERS, decoder_hidden_states
from llmrl.trainer.packing.masks import FUSED_DEVICES, IMPLEMENTATION
from llmrl.trainer.packing.packed_rows import PackedRows, pack_rows
from llmrl.trainer.trained_model import half_dtype, trained_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

PROBE_WINDOW = 3
_NUM_SHARED = 6
_ROUGH = 0.05
_WRONG_MASK = 0.2
"""Error threshold: an incorrect mask changes logits by more, rounding in a mixture of experts by less."""
_WINDOW_NAMES = re.compile(r"(?<!max_)window|attention_chunk_size|chunk_length|local_attention|index_topk")
_SOFT_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALE_NAMES = (
    "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier",
)  # fmt: skip
_SHORTEST_SEGMENT = 2  # so that rows of a few tokens continue states


class ExactnessProbe:
    """Comparison of ways of computing rows, in scoring mode, with `eager` attention in eval mode, row by row.

    Of the four test rows, two share a prefix, one branches off earlier and one is separate. Both computations reduce
    windows to `PROBE_WINDOW` tokens, which all rows exceed. The model is changed in place and restored rather than
    copied, so it may be sharded; in this case all ranks must probe it together. The logits reveal a missing mask, state
    that leaks between rows, wrong positions and non-causal attention. If reducing a configured window has no effect,
    rows this short prove nothing about it, and the model counts as not packable.

    Raises:
        TypeError: if the logits computed from decoder, head and transform differ from the model's,
            or a forward pass changes the model's weights.
    """

    def __init__(self, model: PreTrainedModel, head: OutputHead) -> None:
        self.model = model
        self.head = head
        self.layer_types: set[str] = set(getattr(text_config(model), "layer_types", None) or ())
        dtype = trained_model(model).sharded_dtype or next(model.parameters()).dtype
        self.is_half = dtype in (torch.bfloat16, torch.float16)
        self.quantile = 0.75 if self.is_half else 1.0
        """Quantile of the tokens' errors to compare; in half precision some tokens are routed to other experts."""
        is_rough = self.is_half or torch.get_float32_matmul_precision() != "highest"
        self.tolerance = _ROUGH if is_rough else 1e-3
        self.rows = self._rows()
        versions = [parameter._version for parameter in model.parameters()]
        with torch.no_grad(), _changed(model, "eager"):
            if text_config(model)._attn_implementation != "eager":
                raise TypeError(
                    f"{type(model).__name__} cannot change its attention after loading, so it cannot be compared with "
                    "'eager': load it with attn_implementation='eager'."
                )
            try:
                (whole,) = self._logits(self.rows[:1])
            except Exception as error:  # any error of a model that needs more inputs than token ids
                raise TypeError(f"{type(model).__name__} cannot be called with token ids alone: {error}") from error
            self.transform = self._find_transform(whole)
            """The model's transform of its logits, without a temperature."""
            with _small_windows(model) as num_windows:
                self.expected = self._logits(self.rows[:1]) if num_windows else [whole]
                self.expected += self._logits(self.rows[1:])
        if versions != [parameter._version for parameter in model.parameters()]:
            raise TypeError(f"{type(model).__name__} changes its weights when it is called, so they cannot be trained.")
        first, second = (logits[:_NUM_SHARED] for logits in self.expected[:2])
        if _error_of(first, second, quantile=self.quantile) > self.tolerance:
            raise TypeError(
                f"{type(model).__name__} is not causal: a token's logits depend on later tokens, or are random."
            )
        # If `layer_types` names no sliding layers, the configured window belongs to no layer.
        is_window_needed = "sliding_attention" in self.layer_types or not self.layer_types
        self.has_hidden_window = is_window_needed and num_windows > 0 and torch.equal(whole, self.expected[0])

    @torch.no_grad()
    def check_adapted(self, adapted: PeftModel) -> None:
        """Raise TypeError if a peft model differs from its adapted base model, which is trained and sent to engines."""
        row = self.rows[0]
        adapted.eval()
        logits = [self._whole_logits(one, row) for one in (adapted, self.model)]
        if logits[0].shape != logits[1].shape or _error_of(*logits, quantile=self.quantile) > self.tolerance:
            kinds = ", ".join(
                sorted(str(getattr(config.peft_type, "value", "")) for config in adapted.peft_config.values())
            )
            raise TypeError(
                f"peft's {kinds} does more than adapt the layers of {type(self.model).__name__}, which engines cannot "
                "reproduce: train LoRA adapters (LoRAConfig), or all weights."
            )

    def packing_fault(self) -> str | None:
        """Return why rows cannot be packed with any attention, in a few words; None if no reason is known."""
        unknown = self.layer_types - PACKABLE_LAYERS
        if unknown:
            return f"layers of type {', '.join(sorted(unknown))}"
        return "a window that its configuration does not set" if self.has_hidden_window else None

    def fault(self, implementation: str, *, is_packed: bool) -> str | None:
        """Return why a way of computing rows is not exact, in a few words; None if it is exact."""
        if is_packed and implementation != IMPLEMENTATION and "flash" in implementation:
            return f"{implementation} takes no masks"
        try:
            error = self._error(implementation, self.expected, is_packed=is_packed, quantile=self.quantile)
            if error <= self.tolerance and is_packed and implementation == IMPLEMENTATION:
                error = max(error, self._fused_error())
            if error <= self.tolerance and self.head.device.type in FUSED_DEVICES:
                self._run_backward(implementation, is_packed=is_packed)
        except Exception as exception:  # any error of a model that does not support it
            first_line = (str(exception).splitlines() or [""])[0]
            return f"{type(exception).__name__}: {first_line}"
        return None if error <= self.tolerance else f"logits off by {error:.2g} of their size"

    @torch.no_grad()
    def _fused_error(self) -> float:
        """Return the half-precision error of the fused kernels at the median token, compared with `eager`."""
        device_type = self.head.device.type
        if device_type not in FUSED_DEVICES:
            return 0.0
        with torch.autocast(device_type, dtype=half_dtype()):
            try:
                with _changed(self.model, "eager"), _small_windows(self.model):
                    expected = self._logits(self.rows)
            except RuntimeError:  # the model does not support autocast
                return 0.0
            errors = [
                self._error(IMPLEMENTATION, expected, is_packed=True, quantile=0.5, share_prefixes=shares)
                for shares in (True, False)
            ]
        return 0.0 if max(errors) <= _WRONG_MASK else max(errors)

    def _run_backward(self, implementation: str, *, is_packed: bool) -> None:
        """Run one backward pass to the embeddings, as backward kernels have limits of their own."""
        embedded: list[torch.Tensor] = []

        def start(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        hook = self.model.get_input_embeddings().register_forward_hook(start)
        try:
            with (
                torch.autocast(self.head.device.type, dtype=half_dtype()),
                _changed(self.model, implementation),
            ):
                (packed, *_) = self._packed(is_packed=is_packed)
                hidden = _hidden_states(self.model, packed, is_packed=is_packed)
                torch.autograd.grad(hidden.float().square().sum(), embedded)
        finally:
            hook.remove()

    def _packed(self, *, is_packed: bool, share_prefixes: bool = True) -> list[PackedRows]:
        masks = [torch.ones_like(row, dtype=torch.bool) for row in self.rows]
        packed_rows = pack_rows(
            self.rows, masks, bin_length=256, share_prefixes=share_prefixes, one_row_per_bin=not is_packed
        )
        return [packed.to(self.head.device) for packed in packed_rows]

    @torch.no_grad()
    def _error(
        self,
        implementation: str,
        logits_of_rows: list[torch.Tensor],
        *,
        is_packed: bool,
        quantile: float,
        share_prefixes: bool = True,
    ) -> float:
        computed = [torch.zeros_like(expected) for expected in logits_of_rows]
        for packed in self._packed(is_packed=is_packed, share_prefixes=share_prefixes):
            with _changed(self.model, implementation), _small_windows(self.model):
                set_scoring_mode(self.model)
                hidden = _hidden_states(self.model, packed, is_packed=is_packed)
            logits = self._product(hidden.flatten(0, 1)[packed.predictors])
            for index in range(len(self.rows)):
                places = packed.token_index[packed.row_index == index] - 1
                computed[index][places] = self.transform.apply(logits[packed.row_index == index])[0]
        pairs = zip(computed, logits_of_rows, strict=True)
        return max(_error_of(one[:-1], expected[:-1], quantile=quantile) for one, expected in pairs)

    def _rows(self) -> list[torch.Tensor]:
        config = text_config(self.model)
        special = [value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index"))]
        is_plain = torch.ones(self.head.weight().shape[0], dtype=torch.bool)
        is_plain[[value for value in special if isinstance(value, int) and 0 <= value < len(is_plain)]] = False
        plain = is_plain.nonzero().flatten() if is_plain.any() else torch.arange(len(is_plain))
        generator = torch.Generator().manual_seed(0)

        def ids(num: int) -> torch.Tensor:
            return plain[torch.randint(len(plain), (num,), generator=generator)]

        prefix = ids(_NUM_SHARED)
        branch = ids(3)
        rows = [
            torch.cat([prefix, branch]),
            torch.cat([prefix, branch[:1], ids(3)]),
            torch.cat([prefix[:-2], ids(4)]),
            ids(6),
        ]
        return [row.to(self.head.device) for row in rows]

    def _logits(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the logits of each row, `[num_tokens, vocab_size]`, from one forward pass per row."""
        return [self._whole_logits(self.model, row) for row in rows]

    def _whole_logits(self, model: PreTrainedModel, row: torch.Tensor) -> torch.Tensor:
        with _whole_head(self.model, self.head):
            return model(input_ids=row[None], use_cache=False).logits[0].float()

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's output before the logit transform, `[num_tokens, vocab_size]`."""
        dtype = hidden.dtype
        return torch.nn.functional.linear(hidden, self.head.weight(dtype), self.head.bias(dtype)).float()

    def _find_transform(self, expected: torch.Tensor) -> LogitTransform:
        """Return the configured scale and soft cap that reproduce the model's logits."""
        name = type(self.model).__name__
        config = text_config(self.model)
        output = decoder_of(self.model)(input_ids=self.rows[0][None], use_cache=False)
        if getattr(output, "last_hidden_state", None) is None:
            raise TypeError(f"{name}'s decoder returns no last_hidden_state, but {type(output).__name__}.")
        product = self._product(output.last_hidden_state[0])
        scales, caps = ([getattr(config, key, None) for key in keys] for keys in (_SCALE_NAMES, _SOFT_CAP_NAMES))
        # The same option multiplies in one model family, divides in another, and is unused in a third.
        factors = [1.0, *itertools.chain(*((float(scale), 1 / scale) for scale in scales if scale))]
        caps = [None, *(cap for cap in caps if cap)]
        transforms = [LogitTransform(scale=factor, soft_cap=cap) for factor in factors for cap in caps]
        fits = product.shape == expected.shape
        errors = [float((t.apply(product)[0] - expected).abs().max()) if fits else math.inf for t in transforms]
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= (1e-2 if self.is_half else 1e-4) * float(expected.abs().max()):
            raise TypeError(
                f"{name} does more between its head and its logits than scale and soft cap: "
                "log-probs computed in chunks would be wrong."
            )
        return transforms[best]


def _error_of(logits: torch.Tensor, expected: torch.Tensor, *, quantile: float) -> float:
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (logits - expected).norm(dim=-1) / size.clamp(min=1e-12)
    return float(errors.quantile(quantile))


def _hidden_states(model: PreTrainedModel, packed: PackedRows, *, is_packed: bool) -> torch.Tensor:
    return decoder_hidden_states(model, packed, is_packed=is_packed, shortest_segment=_SHORTEST_SEGMENT)


@contextlib.contextmanager
def _changed(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Put a model into eval mode with another attention within the context."""
    before = text_config(model)._attn_implementation
    modes = [(module, module.training) for module in model.modules()]
    set_attention(model, implementation)
    model.eval()
    try:
        yield
    finally:
        set_attention(model, before)
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[int]:
    """Set every window to `PROBE_WINDOW` within the context; yield the number of windows in the configuration."""
    config = text_config(model)
    found = [
        (holder, name, value)
        for holder in [config, *decoder_of(model).modules()]
        for name, value in vars(holder).items()
        if _WINDOW_NAMES.search(name) and type(value) is int and value > PROBE_WINDOW
    ]
    for holder, name, _ in found:
        setattr(holder, name, PROBE_WINDOW)
    try:
        yield sum(holder is config for holder, *_ in found)
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)


@contextlib.contextmanager
def _whole_head(model: PreTrainedModel, head: OutputHead) -> Iterator[None]:
    """Gather the weights that a sharded model reads outside its decoder: embeddings, and a head tied to them."""
    decoder = decoder_of(model)
    if isinstance(decoder, FSDPModule):
        decoder.unshard()
    output = model.get_output_embeddings()
    weight = getattr(output, "weight", None)
    is_tied = isinstance(weight, DTensor) and not isinstance(output, FSDPModule)
    if is_tied:
        output.weight = torch.nn.Parameter(head.weight(trained_model(model).sharded_dtype), requires_grad=False)
    try:
        yield
    finally:
        if is_tied:
            output.weight = weight
