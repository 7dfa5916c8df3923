"""Environment steps, batched by readiness: conversations that answer together are stepped as one TensorDict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import step_mdp

from llmrl.envs import ChatEnv


class EnvStepper:
    """Runs one environment in a thread of its own and steps whatever is ready, as one batch.

    While a batch is stepped, further conversations gather for the next: Python's cost per turn falls as load grows,
    and the event loop goes on serving the engine. The environment must not be batch-locked.

    Args:
        env: a `ChatEnv` or a transformed one, without a fixed batch size.
        timeout_seconds: limit of one batched step; past it the batch fails and a fresh thread takes over.

    Raises:
        ValueError: when the environment is batch-locked.
    """

    def __init__(self, env: EnvBase, *, timeout_seconds: float | None = None) -> None:
        if env.batch_locked:
            raise ValueError(
                f"env has the fixed batch size {tuple(env.batch_size)}; a collector plays any number of conversations: "
                "build the environment without batch_size."
            )
        self.env, self.timeout_seconds = env, timeout_seconds
        self._waiting: list[tuple[TensorDictBase, asyncio.Future[Any]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = self._new_thread()

    @staticmethod
    def _new_thread() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmrl-env")

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the environment's thread, so that nothing else touches the environment meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def reset(self, count: int) -> list[TensorDictBase]:
        """Open `count` conversations, each of batch shape `[]`."""

        def reset() -> list[TensorDictBase]:
            return list(self.env.reset(TensorDict(batch_size=[count])).unbind(0))

        return await self.call(reset)

    async def step(self, element: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step one conversation: it with its `next`, and the root of its next turn.

        Raises:
            Exception: whatever the environment raised for this conversation.
            TimeoutError: when the step took too long.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((element, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def release(self, element: TensorDictBase) -> None:
        """Let the environment let go of a conversation that has ended."""
        base_env = self.env
        while isinstance(base_env, TransformedEnv):
            base_env = base_env.base_env
        if type(base_env).release is not ChatEnv.release:
            await self.call(base_env.release, element)

    async def _work(self) -> None:
        # Everything that became ready in this turn of the loop joins the first batch.
        await asyncio.sleep(0)
        while self._waiting:
            batch, self._waiting = self._waiting, []
            results = await self._step_within_time([element for element, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # the rollout was cancelled meanwhile
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _step_within_time(self, elements: list[TensorDictBase]) -> list[Any]:
        stepping = asyncio.get_running_loop().run_in_executor(self._thread, self._step_batch, elements)
        try:
            return await asyncio.wait_for(asyncio.shield(stepping), self.timeout_seconds)
        except TimeoutError:
            # The thread cannot be interrupted: it is left behind and a new one serves the rest.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = self._new_thread()
            error = TimeoutError(f"the environment's step took more than {self.timeout_seconds} s.")
            return [error] * len(elements)

    def _step_batch(self, elements: list[TensorDictBase]) -> list[Any]:
        if len(elements) == 1:
            return [self._step_one(elements[0])]
        try:
            stepped = self.env.step(lazy_stack([element.copy() for element in elements], 0))
            roots = step_mdp(stepped)
        except Exception:
            # One conversation's failure must not take the others along.
            return [self._step_one(element) for element in elements]
        return list(zip(stepped.unbind(0), roots.unbind(0), strict=True))

    def _step_one(self, element: TensorDictBase) -> Any:
        try:
            stepped = self.env.step(element.copy())
            return stepped, step_mdp(stepped)
        except Exception as error:
            return error

    def shutdown(self) -> None:
        """Let the environment's thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
