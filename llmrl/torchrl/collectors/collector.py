"""Collector for TorchRL's calls, which also accepts a pool of environments."""

from __future__ import annotations

import inspect

from torchrl.envs import AsyncEnvPool, EnvBase

from llmrl import collectors


class LLMCollector(collectors.LLMCollector):
    """`llmrl.collectors.LLMCollector`, which also accepts an `AsyncEnvPool`.

    The collector plays the pool's first environment, with as many concurrent rollouts as the pool
    has environments. Completed trajectories and last steps of a pool are yielded one by one.
    """

    __signature__ = inspect.signature(collectors.LLMCollector.__init__)

    def __init__(self, env: object, *arguments: object, **options: object) -> None:
        if isinstance(env, AsyncEnvPool):
            options.setdefault("max_concurrent_rollouts", env.num_envs)
            if options.get("yield_completed_trajectories") or options.get("yield_only_last_steps"):
                options["dialog_turns_per_batch"] = 1
            env = first = env.env_makers[0]
            if not isinstance(first, EnvBase):
                env = first()
        super().__init__(env, *arguments, **options)  # type: ignore[arg-type]
