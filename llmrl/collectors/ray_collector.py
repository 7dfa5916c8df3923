"""`RayLLMCollector`: many collectors on a Ray cluster, one trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from llmrl.collectors.base import BatchCollector, dataset_env_of
from llmrl.collectors.groups import GroupRules
from llmrl.collectors.player import RolloutLimits
from llmrl.collectors.ray_source import RaySource
from llmrl.collectors.shape import BatchShape
from llmrl.collectors.staleness import LatePolicy
from llmrl.policies import LLMWrapperBase
from llmrl.transforms.reward import find_rubric_reward


class RayLLMCollector(BatchCollector):
    """Batches of training rows from collector actors on a Ray cluster; used like `LLMCollector`.

    The books stay in this process: which groups are drawn, in flight, ready, too old. An actor is given a group's
    place in the dataset and returns its rollouts, rows cloned to their own size. An actor that dies, or its node,
    costs its groups another try on another actor, and nothing else.

    Args:
        env: a function that builds a `DatasetChatEnv`, usually transformed; called here once, and in every actor.
        policy_factory: builds an actor's policy, over an engine that it starts or, with engines as Ray actors, reaches.
        num_collectors: actors.
        engine: what `weight_sync_schemes` send to, where engines are reached from here.
        num_actor_retries: how often a group is played again because its actor died.
        actor_options: of each actor, by Ray's names: `num_cpus`, `num_gpus`, `resources`, ...
        ray_init_config: arguments of `ray.init` where Ray is not running yet, such as `address`.
        groups_per_batch, tokens_per_batch, total_dialog_turns, postproc, replay_buffer, max_concurrent_rollouts,
        max_staleness, late_groups, num_extra_groups, group_rules, limits, step_timeout_seconds, weight_sync_schemes:
            as of `LLMCollector`.

    Raises:
        ImportError: without Ray, naming the extra to install.
        ValueError: when it is not clear what a batch is, or the environment has no dataset.
    """

    def __init__(
        self,
        env: Callable[[], EnvBase],
        *,
        policy_factory: Callable[[], LLMWrapperBase],
        num_collectors: int = 2,
        engine: Any = None,
        num_actor_retries: int = 3,
        actor_options: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        groups_per_batch: int | None = None,
        tokens_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: Any = None,
        max_concurrent_rollouts: int | None = None,
        max_staleness: int | None = None,
        late_groups: LatePolicy = "wait",
        num_extra_groups: int = 0,
        group_rules: GroupRules | None = None,
        limits: RolloutLimits | None = None,
        step_timeout_seconds: float | None = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("RayLLMCollector needs Ray: pip install 'llmrl[ray]'.") from error
        if num_collectors < 1:
            raise ValueError(f"num_collectors must be at least 1, got {num_collectors}.")
        shape = BatchShape.of(groups_per_batch=groups_per_batch, tokens_per_batch=tokens_per_batch)
        dataset_env = dataset_env_of(own_env := env())
        if dataset_env is None:
            raise ValueError("env must build a DatasetChatEnv, whose repeats give the size of a group.")
        rubric_reward = find_rubric_reward(own_env)
        is_group_scored = rubric_reward is not None and rubric_reward.rubric.is_group_scored
        if not ray.is_initialized():
            ray.init(**{"include_dashboard": False, "log_to_driver": False, **(ray_init_config or {})})
        group_size = dataset_env.prompts.num_samples
        num_in_flight = max_concurrent_rollouts or (groups_per_batch or 8) * group_size * (1 + (max_staleness or 0))
        self._ray_source = RaySource(
            actor_options=actor_options or {},
            num_collectors=num_collectors,
            actor_arguments=(env, policy_factory, limits or RolloutLimits(), step_timeout_seconds),
            prompts=dataset_env.prompts,
            max_concurrent_rollouts=num_in_flight,
            num_retries=num_actor_retries,
        )
        super().__init__(
            self._ray_source,
            dataset_env=dataset_env,
            engine=engine,
            shape=shape,
            rules=group_rules or GroupRules(is_failure_shared=is_group_scored),
            max_concurrent_rollouts=num_in_flight,
            num_extra_groups=num_extra_groups,
            max_staleness=max_staleness,
            late_groups=late_groups,
            total_dialog_turns=total_dialog_turns,
            postproc=postproc,
            replay_buffer=replay_buffer,
            weight_sync_schemes=weight_sync_schemes,
        )

    @property
    def num_restarts(self) -> int:
        """Actors that died and were replaced."""
        return self._ray_source.num_restarts

    def set_policy_version(self, version: int) -> None:
        """Tell the collector of an update of the engines' weights that it did not make itself."""
        self._ray_source.version = version
        self._background.loop.call_soon_threadsafe(self._scheduler.notify)

    def update_policy_weights_(self, policy_or_weights: Any = None) -> int:
        """Send the trainer's weights to the engines by the schemes; the new policy version."""
        version = super().update_policy_weights_(policy_or_weights)
        self.set_policy_version(version)
        return version

    def shutdown(self) -> None:
        """End collection and the actors; Ray itself goes on. May be called twice."""
        super().shutdown()
        self._ray_source.shutdown()
