"""Sum of several losses from one forward pass, each with its own tokens, weights and denominator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.objectives.common import LossModule

from llmrl.data.keys import LOSS_MASK_KEY
from llmrl.data.ragged import flat_batch, has_entry, ragged_column
from llmrl.objectives.losses.base import LLMLoss, MicroLoss
from llmrl.objectives.losses.inputs import LossInputs, TokenInputs, read_inputs
from llmrl.objectives.losses.outputs import LossOutput

LOSS_WEIGHTS = "loss_weights"
"""Parent key of the token weights of each stream."""


def trained_tokens(row: TensorDictBase) -> torch.Tensor:
    """Return 1 at the tokens of the loss mask, `[num_tokens]` float32."""
    return row.get(LOSS_MASK_KEY).float()


def observed_tokens(row: TensorDictBase) -> torch.Tensor:
    """Return 1 at all tokens outside the loss mask after its first token, `[num_tokens]` float32."""
    # These are the environment's messages after the first answer, including the template's text around them.
    mask = row.get(LOSS_MASK_KEY).bool()
    return (~mask & (mask.cumsum(0) > 0)).float()


def write_loss_weights(batch: TensorDictBase, **streams: Callable[[TensorDictBase], torch.Tensor]) -> TensorDictBase:
    """Write `("loss_weights", NAME)` into the rows of a batch, in place, for `StreamsLoss`; return the batch.

    Each stream's function returns the weights of a row, `[num_tokens]`; raises ValueError if they are not finite.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> row = TensorDict({"tokens": {"full": torch.tensor([5, 6])},
        ...                   "masks": {"all_assistant_mask": torch.tensor([False, True])}})
        >>> write_loss_weights(lazy_stack([row]), policy=trained_tokens)[0]["loss_weights", "policy"]
        tensor([0., 1.])
    """
    for row in flat_batch(batch).unbind(0):
        for name, weigh in streams.items():
            weights = weigh(row)
            num_tokens = len(row.get(("tokens", "full")))
            if weights.shape != (num_tokens,) or not bool(weights.isfinite().all()):
                raise ValueError(
                    f"the weights of {name!r} must be {num_tokens} finite numbers, one per token, got "
                    f"{tuple(weights.shape)}, {weights}."
                )
            row.set((LOSS_WEIGHTS, name), weights.float())
    return batch


@dataclass(slots=True)
class StreamsMicroLoss(MicroLoss):
    """Contribution of one micro-batch to the loss of each stream."""

    streams: dict[str, MicroLoss] = field(default_factory=dict)
    """Only streams that have tokens in the micro-batch."""

    def total(self) -> torch.Tensor:
        """Return the scalar to call `backward` on."""
        total = torch.stack([micro.total() for micro in self.streams.values()]).sum()
        return total * 0.0 if self.is_repeated else total

    def detached(self) -> StreamsMicroLoss:
        """Return a copy without the graph."""
        return replace(self, streams={name: micro.detached() for name, micro in self.streams.items()})

    def to(self, device: torch.device | str) -> StreamsMicroLoss:
        """Return a copy on `device`."""
        moved = {name: micro.to(device) for name, micro in self.streams.items()}
        return replace(MicroLoss.to(self, device), streams=moved)


@dataclass(slots=True)
class StreamsLossOutput:
    """Output of `StreamsLoss`."""

    streams: dict[str, LossOutput]
    """Outputs of the streams that have tokens in the batch."""
    num_tokens: dict[str, int]
    """Number of tokens of every stream."""

    def total_loss(self) -> torch.Tensor:
        """Return the sum of all loss terms, to call `backward` on."""
        return torch.stack([output.total_loss() for output in self.streams.values()]).sum()

    def measurements(self) -> dict[str, float]:
        """Return the measurements of all streams; names have the prefix `NAME_`, except those of the first stream."""
        first = next(iter(self.num_tokens))
        measured = {f"{name}_num_tokens": float(number) for name, number in self.num_tokens.items()}
        for stream, output in self.streams.items():
            prefix = "" if stream == first else f"{stream}_"
            measured |= {f"{prefix}{name}": value for name, value in output.measurements().items()}
        return measured


class StreamsLoss(LLMLoss):
    """Weighted sum of several losses from one forward pass, each on its own tokens.

    A row belongs to a stream if it has `("loss_weights", NAME)`, `[num_tokens]` (`write_loss_weights`). Tokens with a
    nonzero weight are trained, and their losses are multiplied by it. Each stream is aggregated
    over its own tokens of the whole batch, so the denominators are independent. Typical uses:

    - cross-entropy on environment messages (ECHO, arXiv:2605.24517): `SFTLoss` on `observed_tokens`;
    - demonstrations: `SFTLoss` on rows that have only that stream, stacked with the rollouts' rows;
    - a KL with its own denominator: `DistillationLoss` with the reference's entry as `teacher_log_prob`.

    Args:
        actor_network: policy, as for `GRPOLoss`.
        streams: distinct scalar losses by name, without a policy or `teacher`, and with `masking_strategy="rlhf"`.
        coeffs: factor of each stream's loss, 1 by default.

    Example:
        >>> from llmrl.objectives import GRPOLoss, SFTLoss
        >>> observations = SFTLoss(reduction="token_mean")
        >>> loss = StreamsLoss(streams={"policy": GRPOLoss(), "observations": observations},
        ...                    coeffs={"observations": 0.05})
        >>> observations.tensor_keys.assistant_mask
        ('loss_weights', 'observations')
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Entries that `set_keys` can rename."""

        action: NestedKey = ("tokens", "full")

    aggregation = "token_mean"

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        streams: Mapping[str, LLMLoss],
        coeffs: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if not streams or len({id(loss) for loss in streams.values()}) < len(streams):
            raise ValueError(f"streams must be at least one loss, each an object of its own; got {list(streams)}.")
        if unknown := sorted((coeffs or {}).keys() - streams.keys()):
            raise ValueError(f"coeffs names {unknown}, which are no streams; streams are {list(streams)}.")
        for name, loss in streams.items():
            is_whole = getattr(loss, "teacher", None) is not None
            checks = {
                "has a policy of its own: pass actor_network only to StreamsLoss": loss.actor_network is not None,
                "must have masking_strategy='rlhf': loss weights select its tokens": loss.masking_strategy != "rlhf",
                "must be one number: its aggregation or reduction is 'none'": not loss.is_scalar,
                "compares whole distributions (teacher=), which needs its own pass: train on it separately": is_whole,
            }
            if broken := [what for what, is_wrong in checks.items() if is_wrong]:
                raise ValueError(f"the stream {name!r} {broken[0]}.")
            loss.set_keys(assistant_mask=(LOSS_WEIGHTS, name))
        self.actor_network = actor_network
        self.streams = dict(streams)
        self.coeffs = {name: (coeffs or {}).get(name, 1.0) for name in streams}
        self.needs_entropy = any(loss.needs_entropy for loss in streams.values())

    @property
    def policy_version(self) -> int | None:
        """Version being trained, for `max_staleness` of the streams; setting it sets that of each stream."""
        return next((loss.policy_version for loss in self.streams.values() if hasattr(loss, "policy_version")), None)

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        for loss in self.streams.values():
            if hasattr(loss, "policy_version"):
                loss.policy_version = version

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from the rows, of all streams."""
        return list(dict.fromkeys(key for loss in self.streams.values() for key in loss.in_keys))

    @property
    def _log_probs_key(self) -> NestedKey:
        return next(iter(self.streams.values()))._log_probs_key

    def prepare(self, tensordict: TensorDictBase) -> LossInputs:
        """Read a whole batch; each stream reads the rows that belong to it."""
        device = self._device()
        # This gives ids and indices. Each stream adds its own columns and its mask.
        inputs = read_inputs(
            tensordict,
            tokens_key=self.tensor_keys.action,
            masking_strategy="generic",
            mask_key=(LOSS_WEIGHTS, ""),  # no row has it
            token_columns={},
            device=device,
        )
        rows = flat_batch(tensordict).unbind(0)
        lengths = [len(ids) for ids in inputs.token_ids]
        for name, loss in self.streams.items():
            places = [index for index, row in enumerate(rows) if has_entry(row, (LOSS_WEIGHTS, name))]
            is_here = torch.cat([torch.full((num,), index in places) for index, num in enumerate(lengths)])
            columns = {"is_scored": is_here.clone(), "factor": torch.zeros(len(is_here))}
            if places:
                part = lazy_stack([rows[index] for index in places])
                read = loss.prepare(part)
                assert read.weights is not None
                columns["is_scored"][is_here] = read.is_scored.cpu()
                weights = torch.cat(ragged_column(part, (LOSS_WEIGHTS, name))).cpu()
                found = {"factor": self.coeffs[name] * weights, "weight": read.weights}
                found |= {"sequence_index": read.sequence_index}
                found |= {f"column:{column}": values for column, values in read.columns.items()}
                for column, values in found.items():
                    columns[column] = torch.zeros(len(is_here), *values.shape[1:], dtype=values.dtype)
                    columns[column][is_here] = values.cpu()
            inputs.columns |= {f"{name}:{column}": values.to(device) for column, values in columns.items()}
        inputs.weights = torch.ones(sum(lengths), device=device)
        self._join_masks(inputs)
        return inputs

    def _join_masks(self, inputs: LossInputs) -> None:
        """Mark the tokens of any stream as scored."""
        is_scored = torch.stack([inputs.columns[f"{name}:is_scored"] for name in self.streams]).any(0)
        inputs.scored_masks = list(is_scored.cpu().split([len(ids) for ids in inputs.token_ids]))

    def leave_out_idle_rows(self, inputs: LossInputs) -> None:
        """Exclude rows without gradient from each stream."""
        lengths = [len(ids) for ids in inputs.token_ids]
        for name, loss in self.streams.items():
            own = _below(f"{name}:", inputs.columns)
            if "weight" in own:
                masks = list(own["is_scored"].split(lengths))
                read = replace(inputs, columns=_below("column:", own), scored_masks=masks)
                loss.leave_out_idle_rows(read)
                inputs.columns[f"{name}:is_scored"] = torch.cat(read.scored_masks)
        self._join_masks(inputs)

    def token_loss(
        self, tokens: TokenInputs, log_probs: torch.Tensor, entropy: torch.Tensor | None, flat_index: torch.Tensor
    ) -> StreamsMicroLoss:
        """Return the loss of each stream at `[num_tokens]` tokens of any stream."""
        streams = {}
        for name, loss in self.streams.items():
            chosen = tokens[f"{name}:is_scored"]
            if not bool(chosen.any()):
                continue
            own = {key: column[chosen] for key, column in _below(f"{name}:", tokens.columns).items()}
            part = TokenInputs(
                columns=_below("column:", own),
                weight=own["weight"],
                row_index=tokens.row_index[chosen],
                sequence_index=own["sequence_index"],
                flat_index=flat_index[chosen],
            )
            entropies = None if entropy is None else entropy[chosen]
            micro = loss._micro_loss(part, log_probs[chosen], entropies)
            losses = {key: values * own["factor"] for key, values in micro.losses.items()}
            streams[name] = replace(micro, losses=losses)
        return StreamsMicroLoss({}, {}, flat_index, tokens.sequence_index, streams=streams)

    def collect(self, micro_losses: Sequence[MicroLoss]) -> StreamsLossOutput:  # type: ignore[override]
        """Combine the micro-batches of one batch."""
        if not micro_losses:
            raise ValueError("The batch has no trained token: there is nothing to compute a loss from.")
        outputs = {}
        num_tokens = {}
        found = [micro.streams for micro in micro_losses if isinstance(micro, StreamsMicroLoss)]
        for name, loss in self.streams.items():
            parts = [streams[name] for streams in found if name in streams]
            num_tokens[name] = sum(len(part.flat_index) for part in parts)
            if parts:
                outputs[name] = loss.collect(parts)
        return StreamsLossOutput(outputs, num_tokens)

    def output(self, losses: dict[str, torch.Tensor], measured: dict[str, torch.Tensor]) -> LossOutput:
        """Raise NotImplementedError, as `collect` returns the output of each stream."""
        raise NotImplementedError("use StreamsLoss.collect, which returns the output of each stream.")


def _below(prefix: str, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the columns with names that begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}
