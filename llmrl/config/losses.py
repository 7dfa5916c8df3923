"""Losses that the entry `loss` of a GRPO configuration can name, and the entries of `train` that each accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmrl._utils.arguments import nearest
from llmrl.config.entries import EntryError
from llmrl.objectives import DAPO, CISPOLoss, DPPOLoss, DrGRPOLoss, GRPOLoss, GSPOLoss, RLOOLoss
from llmrl.objectives.advantages.normalization import Normalization
from llmrl.trainer import TransformersWrapper

_CLIP = ("clip_epsilon", "clip_epsilon_high")


@dataclass(frozen=True, slots=True)
class LossChoice:
    """A loss in a configuration."""

    kind: Callable[..., GRPOLoss]
    entries: tuple[str, ...] = (*_CLIP, "dual_clip", "aggregation")
    """Entries of `train` that the loss accepts, in addition to `COMMON`."""
    normalization: Normalization = "std"
    """Normalisation of advantages for the loss (`group_advantages`)."""
    has_ratio: bool = True
    """Whether the loss has a ratio to the policy before the step, so that a batch may have several updates."""


LOSSES: Mapping[str, LossChoice] = {
    "grpo": LossChoice(GRPOLoss),
    "dr_grpo": LossChoice(DrGRPOLoss, (*_CLIP, "dual_clip", "fixed_length"), normalization="mean"),
    "dapo": LossChoice(DAPO),
    "cispo": LossChoice(CISPOLoss, (*_CLIP, "aggregation")),
    "gspo": LossChoice(GSPOLoss),
    "rloo": LossChoice(RLOOLoss, ("aggregation",), normalization="leave_one_out", has_ratio=False),
    "dppo": LossChoice(DPPOLoss, ("max_divergence", "divergence", "aggregation")),
}
COMMON = ("importance_cap", "kl_to_ref_coeff")
"""Entries of `train` that every loss accepts."""
OWN = tuple(dict.fromkeys(entry for choice in LOSSES.values() for entry in choice.entries))
"""Entries of `train` that only some losses accept; None keeps the loss's default."""


def own_entries(train: object) -> dict[str, object]:
    """Return the entries of a `train` section that only some losses accept and that are not None."""
    given = {entry: getattr(train, entry, None) for entry in OWN}
    return {entry: value for entry, value in given.items() if value is not None}


def check_loss_entries(loss: str, train: object) -> None:
    """Raise EntryError, with a suggestion, if a `train` section sets an entry that the loss does not accept."""
    taken = (*LOSSES[loss].entries, *COMMON)
    for entry, value in own_entries(train).items():
        if entry in taken:
            continue
        near = nearest(entry, taken)
        hint = f"Did you mean train.{near}?" if near else f"It takes {', '.join(f'train.{one}' for one in taken)}."
        others = ", ".join(name for name, choice in LOSSES.items() if entry in choice.entries)
        raise EntryError(
            f"train.{entry}", f"is not an option of loss={loss}, got {value!r}; losses that take it: {others}. {hint}"
        )


def check_num_updates(loss: str, *, num_epochs: int, num_minibatches: int) -> None:
    """Raise EntryError if a batch has several updates and the loss has no ratio to correct all but the first."""
    if LOSSES[loss].has_ratio:
        return
    for entry, value in (("num_epochs", num_epochs), ("num_minibatches", num_minibatches)):
        if value > 1:
            raise EntryError(
                f"train.{entry}",
                f"must be 1 with loss={loss}, got {value}: this loss has no ratio to correct and bound the updates "
                f"after the first one of a batch. Leave train.{entry}=1, or use loss=grpo.",
            )


def build_loss(loss: str, train: object, actor: TransformersWrapper, *, budget: int | None = None) -> GRPOLoss:
    """Build a loss from the entries of a `train` section; None or a missing entry keeps the loss's default.

    `budget` is the maximum number of tokens of a conversation, the default of `fixed_length`.
    """
    choice = LOSSES[loss]
    options = own_entries(train) | {entry: getattr(train, entry) for entry in COMMON if hasattr(train, entry)}
    if "fixed_length" in choice.entries:
        options.setdefault("fixed_length", budget)
    built = choice.kind(actor, **{entry: value for entry, value in options.items() if entry not in _CLIP})
    low, high = (getattr(train, entry) for entry in _CLIP)
    if high is None and built.clip_epsilon_low == built.clip_epsilon_high:  # the loss has one bound for both sides
        high = low
    if low is not None:
        built.clip_epsilon_low = low
    if high is not None:
        built.clip_epsilon_high = high
    return built
