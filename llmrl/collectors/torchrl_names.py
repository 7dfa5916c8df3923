"""Names of TorchRL's collectors that have no meaning here, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

ARGUMENTS: Mapping[str, str] = {
    "weight_updater": "pass weight_sync_schemes={'policy': VLLMWeightSyncScheme()} and call update_policy_weights_",
}
"""Arguments of TorchRL's `LLMCollector` and `RayLLMCollector`."""

ALWAYS_TRUE: Mapping[str, str] = {
    "async_envs": "no conversation waits for another; for one at a time pass max_concurrent_rollouts=1",
    "flatten_data": (
        "conversations differ in length, and batches have one dimension; "
        "for one conversation a batch pass yield_completed_trajectories=True"
    ),
}
"""Arguments that ask for what is so anyway."""

ATTRIBUTES: Mapping[str, str] = {
    "as_remote": "use RayLLMCollector",
    "get_policy_model": "the engine is policy.engine",
    "init_updater": "pass weight_sync_schemes=",
    "iterator": "iterate the collector itself",
    "rollout": "call next() for a batch, or play() for whole rollouts",
    "set_seed": "the environment's seed orders the prompts, the engine's and a request's draw the tokens",
    "set_weight_updater": "pass weight_sync_schemes=",
    "weight_updater": "pass weight_sync_schemes= and call update_policy_weights_",
}
"""Methods and properties of TorchRL's collectors."""


def refuse_values(**values: bool | None) -> None:
    """Refuse to be told not to do what is always done.

    Raises:
        ValueError: for a false value, naming what to do instead.

    Example:
        >>> refuse_values(async_envs=None, flatten_data=True)
    """
    for name, value in values.items():
        if value is False:
            raise ValueError(f"{name}=False cannot be had: {ALWAYS_TRUE[name]}.")


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that a collector has not."""
    mend = f": {ATTRIBUTES[name]}." if name in ATTRIBUTES else "."
    return AttributeError(f"{type(owner).__name__} has no {name!r}{mend}", name=name, obj=owner)
