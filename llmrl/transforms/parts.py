"""The parts of an environment: the inner environment and its transforms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv


def environment_parts(env: EnvBase) -> list[EnvBase | Transform]:
    """Return the inner environment and its transforms, innermost first; a `Compose` follows its own.

    Example:
        >>> from llmrl.envs import ChatEnv
        >>> from torchrl.envs import StepCounter
        >>> env = ChatEnv().append_transform(StepCounter()).append_transform(Compose(StepCounter()))
        >>> [type(part).__name__ for part in environment_parts(env)]
        ['ChatEnv', 'StepCounter', 'StepCounter', 'Compose']
    """
    if isinstance(env, TransformedEnv):
        return [*environment_parts(env.base_env), *_flat(env.transform)]
    return [env]


def reads_turns(env: EnvBase) -> bool:
    """Return whether a part may read a turn's tensors: tokens, log-probs, masks, versions.

    Parts of llmrl declare this in an attribute `reads_turns`; other parts are assumed to read them.

    Example:
        >>> from llmrl.envs import ChatEnv
        >>> from torchrl.envs import StepCounter
        >>> reads_turns(ChatEnv()), reads_turns(ChatEnv().append_transform(StepCounter()))
        (False, True)
    """
    return _declares(env, "reads_turns")


def writes_reward(env: EnvBase) -> bool:
    """Return whether a part may write a reward; parts of other projects are assumed to."""
    return _declares(env, "writes_reward")


def is_reward_written_before(part: Transform) -> bool:
    """Return whether a part before this one may write a reward; true outside an environment."""
    earlier = _parts_before(part)
    return earlier is None or any(
        getattr(one, "writes_reward", False) if is_ours(one) else not type(one).__module__.startswith("torchrl.")
        for one in earlier
    )


def refuse_early_readers(writer: Transform) -> None:
    """Raise ValueError if TorchRL's transforms read the reward before `writer`, its first writer.

    Before `writer`, the reward of each step is the environment's 0, which such a transform would scale, sum or clip.
    """
    earlier = _parts_before(writer)
    if earlier is None or is_reward_written_before(writer):
        return
    early = [type(one).__name__ for one in earlier if _reads_reward(one)]
    if early:
        raise ValueError(
            f"{', '.join(early)} reads the reward before {type(writer).__name__} writes it, so it would read 0: append "
            f"{type(writer).__name__} first."
        )


def _parts_before(part: Transform) -> list[EnvBase | Transform] | None:
    """Return the parts before one, without containers; None outside an environment."""
    env = environment_around(part)
    if env is None:
        return None
    earlier = takewhile(lambda one: one is not part, environment_parts(env))
    return [one for one in earlier if type(one) is not Compose]


def _reads_reward(part: EnvBase | Transform) -> bool:
    if not isinstance(part, Transform) or is_ours(part):
        return False
    keys = [key if isinstance(key, tuple) else (key,) for key in part.in_keys or ()]
    return any(key[-1] == "reward" for key in keys)


def _declares(env: EnvBase, attribute: str) -> bool:
    parts = (part for part in environment_parts(env) if type(part) is not Compose)
    return any(getattr(part, attribute, not is_ours(part)) for part in parts)


def is_ours(part: EnvBase | Transform) -> bool:
    """Return whether the class of a part is llmrl's own; false for users' subclasses."""
    return type(part).__module__.startswith("llmrl.")


def environment_around(container: EnvBase | Transform | None) -> EnvBase | None:
    """Return the environment that a transform's container is or belongs to, or None."""
    while isinstance(container, Transform):
        reference = container.__dict__.get("_container")
        container = None if reference is None else reference()
    return container


def _flat(transform: Transform | None) -> Iterator[Transform]:
    if isinstance(transform, Compose):
        for held in transform:
            yield from _flat(held)
    if transform is not None:  # None while the environment is being constructed
        yield transform
