"""`RayLLMCollector`, which collects on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack

from torchrl.envs import EnvBase

from llmrl._utils.arguments import check_least
from llmrl.collectors.collector import CollectorOptions, LLMCollector
from llmrl.collectors.ray_source import RayActors, RaySource
from llmrl.policies import LLMWrapperBase


class RayLLMCollector(LLMCollector):
    """Collector that plays rollouts in actors on a Ray cluster; used like `LLMCollector`.

    This process decides which groups are drawn, in flight, ready or too old. An actor receives a group's positions in
    the dataset and returns its rollouts. If an actor or its node dies, its groups are played again on another actor.

    Args:
        env: a function that builds a `DatasetChatEnv`, usually transformed; called here once, and in every actor.
        policy_factory: function that builds an actor's policy, with an engine that it starts or connects to.
        num_collectors: number of actors.
        engine: engine that `weight_sync_schemes` send to, if this process can reach it.
        remote_config: Ray options of each actor, such as `resources`; they override `num_cpus` and `num_gpus`.
        num_cpus: CPUs of each actor.
        num_gpus: GPUs of each actor.
        ray_init_config: arguments of `ray.init` if this process is not connected to Ray yet, such
            as `{"address": "auto"}` for an existing cluster.
        sync_iter: whether to collect only on demand; if false, the next batch is collected while
            the trainer uses the current one: groups and last steps with `max_staleness=1`, turns
            and trajectories with as many conversations in flight as a batch has turns.
        arguments: arguments of `LLMCollector` except `policy`.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: as `LLMCollector`; also if the environment has no dataset.
        TypeError: if an argument is unknown.
    """

    def __init__(
        self,
        env: Callable[[], EnvBase],
        *,
        policy_factory: Callable[[], LLMWrapperBase],
        num_collectors: int = 2,
        engine: object = None,
        remote_config: Mapping[str, object] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        ray_init_config: Mapping[str, object] | None = None,
        sync_iter: bool = True,
        **arguments: Unpack[CollectorOptions],
    ) -> None:
        if isinstance(env, EnvBase):
            raise ValueError("env must be a function that builds the environment: each actor has its own.")
        check_least(1, num_collectors=num_collectors)
        shares = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        given = {name: share for name, share in shares.items() if share is not None}
        actors = RayActors(
            make_env=env,
            number=num_collectors,
            options={**given, **(remote_config or {})},
            engine=engine,
            ray_init_config=ray_init_config,
        )
        super().__init__(actors, policy_factory=policy_factory, **(arguments if sync_iter else _ahead(arguments)))
        assert isinstance(self._source, RaySource)
        self.ray_source = self._source
        """Owner of the actors."""
        try:
            self._source.start()  # after all checks, since actors start engines
        except BaseException:
            self.shutdown()
            raise

    @property
    def num_restarts(self) -> int:
        """Number of actors that died and were replaced."""
        return self.ray_source.num_restarts

    def set_policy_version(self, version: int) -> None:
        """Record an update of the engines' weights that another component made."""
        self.ray_source.policy_version = version
        self._background.post(self._scheduler.notify)

    def increment_version(self) -> None:
        """Record one more update of the engines' weights that another component made."""
        self.set_policy_version(self.policy_version + 1)

    def _updated(self, version: int) -> None:
        self.set_policy_version(version)


def _ahead(arguments: CollectorOptions) -> CollectorOptions:
    """Return arguments that collect one batch ahead; raise ValueError if those given forbid it."""
    max_staleness = arguments.get("max_staleness")
    if max_staleness is not None:
        if max_staleness < 1:
            raise ValueError("sync_iter=False collects ahead, which max_staleness=0 forbids: pass one of them.")
        return arguments
    if arguments.get("tokens_per_batch") is not None:
        raise ValueError("sync_iter=False needs batches of a known size: pass groups_per_batch, not tokens_per_batch.")
    if arguments.get("groups_per_batch") is not None or arguments.get("yield_only_last_steps"):
        return {**arguments, "max_staleness": 1}
    if arguments.get("max_concurrent_rollouts") is not None:
        return arguments
    size = arguments.get("dialog_turns_per_batch")
    if size is None:
        raise ValueError(
            "sync_iter=False keeps as many conversations in flight as a batch has turns: pass dialog_turns_per_batch, "
            "or max_concurrent_rollouts."
        )
    return {**arguments, "max_concurrent_rollouts": size}
