"""Layers with a state (recurrent, linear, convolutional) over packed rows.

Such a layer reads tokens in order, so it cannot compute a trie in one pass. The trie is cut into segments; the state at
the end of a segment is computed once, and each segment that continues it starts from that state, gradients included.
All other layers, and the operations of these layers before and after the state, compute the packed tokens as they are.

Two groups of rows, `a b c`, `a b d e` and `f g`, with `shortest=2`:

    step 0    [f g]                 ends without branches
    step 1    [a b]                 the state after `b` is kept
    step 2    [d e] [c]             both continue this state; `c` is padded on the right, which affects no output

Continued segments have multiples of `shortest` tokens, so that those of several prompts often have
equal lengths and are computed together. Shared tokens that remain before a branch, fewer than
`shortest`, are computed again in each branch, in these layers only.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from llmrl.engines.transformers.expert_routers import hook_once
from llmrl.trainer.packing.packed_rows import PackedRows, shared_length

BRANCHES = "branches"
"""Name of the argument in which decoders without a dictionary of masks receive `Branches`."""
SHORTEST_SEGMENT = 16
"""Number of tokens that rows must share after one kept state for another state to be kept."""
_MASK = "attention_mask"
_MOST_PADDING = 0.25
"""Largest fraction of padding in a step; segments with lengths that would need more are separate steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """Segments that a layer computes together."""

    positions: torch.Tensor
    """[num_segments, length] int64: flat positions of the tokens, padded by repeating the last."""
    own: torch.Tensor
    """[num_own] int64: indices into the flat `positions` of the tokens with outputs taken from this step."""
    parent: int | None
    """Index of the step with the states that the segments continue; None if they continue none."""
    parent_rows: torch.Tensor
    """[num_segments] int64: index in that step of the segment that each segment continues; 0 without a parent."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    path: np.ndarray
    parent: _Segment | None
    is_continued: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Branches:
    """Segments of a micro-batch, ordered so that each state is computed before it is continued."""

    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, packed: PackedRows, *, shortest: int = SHORTEST_SEGMENT) -> Branches:
        """Cut the tries of a micro-batch into segments; `shortest` is at least 2."""
        lengths = packed.row_lengths.tolist()
        paths = np.split(packed.token_positions.cpu().numpy(), np.cumsum(lengths)[:-1])
        steps: list[_Step] = []
        # The step of each segment and its row there; a segment without a parent continues none.
        place_of: dict[_Segment | None, tuple[int | None, int]] = {None: (None, 0)}
        seen = np.zeros(packed.num_packed_tokens, dtype=bool)
        waiting = list(_segments(paths, shortest))
        while waiting:
            ready = [one for one in waiting if one.parent in place_of]
            waiting = [one for one in waiting if one.parent not in place_of]
            for parent, held in _steps(ready, place_of):
                for row, segment in enumerate(held):
                    place_of[segment] = (len(steps), row)
                rows = [place_of[segment.parent][1] for segment in held]
                steps.append(_step_of(held, parent, rows, seen, packed.input_ids.device))
        return cls(tuple(steps))


def _segments(paths: list[np.ndarray], shortest: int) -> Iterator[_Segment]:
    """Yield segments, each after the segment that it continues; `paths` are in the order of a trie."""
    paths = [path for row, path in enumerate(paths) if not row or not np.array_equal(path, paths[row - 1])]
    shared = [0, *(shared_length(before, path) for before, path in itertools.pairwise(paths))]
    groups: list[tuple[int, int, int, _Segment | None]] = [(0, len(paths), 0, None)]
    while groups:
        first, end, start, parent = groups.pop()
        if end - first == 1:
            if len(paths[first]) > start:
                yield _Segment(paths[first][start:], parent, is_continued=False)
            continue
        common = min(shared[first + 1 : end])
        length = (common - start) // shortest * shortest
        if length:
            parent = _Segment(paths[first][start : start + length], parent, is_continued=True)
            yield parent
            start += length
        bounds = [first, *(row for row in range(first + 1, end) if shared[row] == common), end]
        groups += [(one, next_one, start, parent) for one, next_one in itertools.pairwise(bounds)]


def _steps(
    ready: list[_Segment], place_of: Mapping[_Segment | None, tuple[int | None, int]]
) -> Iterator[tuple[int | None, list[_Segment]]]:
    """Yield segments to compute together: they have the same parent step and, if continued, the same length."""
    by_kind: dict[tuple[int | None, int], list[_Segment]] = {}
    for segment in ready:
        parent, _ = place_of[segment.parent]
        # Padding would change the state at the end of a segment, so continued segments must not be padded.
        by_kind.setdefault((parent, len(segment.path) if segment.is_continued else 0), []).append(segment)
    for (parent, _), held in by_kind.items():
        held.sort(key=lambda segment: -len(segment.path))
        num_tokens = start = 0
        for end, segment in enumerate(held):
            size = (end + 1 - start) * len(held[start].path)
            if size - num_tokens - len(segment.path) > _MOST_PADDING * size:
                yield parent, held[start:end]
                start = end
                num_tokens = 0
            num_tokens += len(segment.path)
        yield parent, held[start:]


def _step_of(
    held: list[_Segment], parent: int | None, rows: list[int], seen: np.ndarray, device: torch.device
) -> _Step:
    # For a single token, most of these layers use their generation code, so the length is at least 2.
    length = max(2, len(held[0].path))
    positions = np.stack([np.pad(one.path, (0, length - len(one.path)), mode="edge") for one in held])
    own: list[np.ndarray] = []
    for row, segment in enumerate(held):
        own.append(row * length + np.flatnonzero(~seen[segment.path]))
        seen[segment.path] = True
    return _Step(
        torch.from_numpy(positions).to(device),
        torch.from_numpy(np.concatenate(own)).to(device),
        parent,
        torch.tensor(rows, device=device),
    )


class _States:
    """Cache of one layer in one step, with the interface of transformers' caches that layers with a state use.

    transformers' own caches write states in place, which autograd forbids for tensors of the backward pass.
    """

    record_past = True  # otherwise a layer may write its states in place, as in generation

    def __init__(self, continued: _States | None = None, rows: torch.Tensor | None = None) -> None:
        self.conv_states: dict[int, torch.Tensor] = {}
        self.recurrent_states: dict[int, torch.Tensor] = {}
        if continued is not None:
            self.conv_states = {name: state[rows] for name, state in continued.conv_states.items()}
            self.recurrent_states = {name: state[rows] for name, state in continued.recurrent_states.items()}
        self._is_continuing = continued is not None
        self.layers = _Always(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._is_continuing

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: object,
    ) -> torch.Tensor:
        if state_idx in self.conv_states:
            conv_states = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        self.conv_states[state_idx] = conv_states if conv_kernel_size is None else conv_states[..., -conv_kernel_size:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **options: object
    ) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _Always:
    """List of a cache's layers, with the same states at every index."""

    def __init__(self, states: _States) -> None:
        self._states = states

    def __getitem__(self, layer_idx: int) -> _States:
        return self._states


class _FirstStates(_States):
    """States of the first step, with what the other steps need."""

    def __init__(self, branches: Branches, hidden: torch.Tensor) -> None:
        super().__init__()
        self.branches = branches
        self.hidden = hidden


def compute_in_branches(decoder: torch.nn.Module) -> None:
    """Hook the layers with a state of a decoder so that they compute `Branches` passed in place of a mask."""
    for layer in getattr(decoder, "layers", ()):
        inner: dict[torch.nn.Module, tuple[str, str]] = {}
        for module in layer.modules():
            if (names := _names(module.forward)) is not None:
                inner = {one: its for one, its in inner.items() if all(module is not part for part in one.modules())}
                inner[module] = names
        for module, names in inner.items():
            hook_once(module.register_forward_pre_hook, module._forward_pre_hooks, _before, *names)
            hook_once(module.register_forward_hook, module._forward_hooks, _after, *names)


def _names(forward: Callable[..., object]) -> tuple[str, str] | None:
    """Return the names of hidden states and cache; None if a module's forward takes no cache or no mask."""
    parameters = list(inspect.signature(forward).parameters)
    cache = next((name for name in ("cache_params", "past_key_values") if name in parameters), None)
    if cache is None or _MASK not in parameters:
        return None
    return parameters[0], cache


def _before(
    hidden_name: str, cache_name: str, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Replace the packed tokens by the segments of the first step."""
    branches = kwargs.get(BRANCHES, kwargs.get(_MASK))
    if not isinstance(branches, Branches):
        return None
    given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    given.pop(BRANCHES, None)
    hidden = given[hidden_name]
    assert isinstance(hidden, torch.Tensor)
    first = hidden.flatten(0, 1)[branches.steps[0].positions]
    return (), given | {hidden_name: first, cache_name: _FirstStates(branches, hidden), _MASK: None}


def _after(
    hidden_name: str,
    cache_name: str,
    module: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    output: torch.Tensor,
) -> torch.Tensor | None:
    """Compute the other steps, and return the output of each token at its packed position."""
    cache = kwargs.get(cache_name)
    if not isinstance(cache, _FirstStates):
        return None
    flat = cache.hidden.flatten(0, 1)
    steps = cache.branches.steps
    states: list[_States] = [cache]
    outputs = [output.flatten(0, 1)[steps[0].own]]
    for step in steps[1:]:
        states.append(_States(None if step.parent is None else states[step.parent], step.parent_rows))
        given = kwargs | {hidden_name: flat[step.positions], cache_name: states[-1]}
        outputs.append(module.forward(**given).flatten(0, 1)[step.own])
    places = torch.cat([step.positions.flatten()[step.own] for step in steps])
    computed = torch.cat(outputs)
    scattered = computed.new_zeros(flat.shape[0], computed.shape[-1]).index_put((places,), computed)
    return scattered.view(*cache.hidden.shape[:-1], -1)
