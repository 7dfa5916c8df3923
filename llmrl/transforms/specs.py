"""What transforms do to specs alike."""

from __future__ import annotations

from tensordict.utils import NestedKey
from torchrl.data import Composite
from torchrl.data.tensor_specs import TensorSpec


def replace_input(input_spec: Composite, inner: NestedKey, outer: NestedKey, spec: TensorSpec) -> None:
    """What a policy writes to `outer` stands for the entry `inner`, which the environment reads, in place.

    Raises:
        KeyError: if the environment reads no such entry.

    Example:
        >>> from torchrl.data import NonTensor, Unbounded
        >>> text = NonTensor(shape=(), example_data="")
        >>> specs = Composite(full_action_spec=Composite(text=text), full_state_spec=Composite())
        >>> replace_input(specs, "text", "tokens", Unbounded((-1,)))
        >>> list(specs["full_action_spec"].keys())
        ['tokens']
    """
    parts = [input_spec[name] for name in ("full_action_spec", "full_state_spec") if name in input_spec]
    for part in parts:
        if inner in part.keys(True):
            del part[inner]
            if not isinstance(inner, str) and len(inner) > 1 and part[inner[:-1]].is_empty():
                del part[inner[:-1]]
            part[outer] = spec
            return
    known = sorted(str(key) for part in parts for key in part.keys(True, True))
    raise KeyError(f"the environment reads no {inner!r}, only {known}; name one of them in in_keys_inv.")
