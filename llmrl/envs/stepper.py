"""Environment steps in batches of the conversations that are ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from tensordict import TensorDictBase, lazy_stack
from torchrl.envs import EnvBase

from llmrl._utils.failure import as_exception
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl._utils.threads import WorkerThread, run_in_thread
from llmrl.data.tensordicts import tensordict_of
from llmrl.envs.chat import WRITTEN_BY_POLICIES, ChatEnv, unlock_batch_size
from llmrl.envs.sampler import Drawn, PromptSampler
from llmrl.transforms import environment_parts, is_ours, reads_turns

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Argument = TypeVar("Argument")
Result = TypeVar("Result")

Stepped: TypeAlias = tuple[TensorDictBase, TensorDictBase]
"""A stepped conversation, and the root of its next turn."""

_RELEASE_SECONDS = 30.0
_MAX_BATCH = 256  # larger batches are no faster per turn, and keep all old turns in memory until they are done

Opening: TypeAlias = TensorDictBase | Drawn | Exception
"""Beginning of a conversation: its reset, the row to open it from, or the error of its reset."""

_TURN_KEYS = frozenset(("next", *WRITTEN_BY_POLICIES))


class EnvStepper:
    """Runs one environment in its own thread and steps all ready conversations as one batch.

    While a batch is stepped, ready conversations are collected for the next one, so Python's cost
    per turn falls under load.

    Slow work of a step (tools, services) belongs in `async def before_step(element)` of an
    environment or a transform, which is awaited for all conversations in parallel before the
    batched step. Likewise, `async def before_reset(drawn)` of a dataset's environment returns the
    tensordict for `reset`. Methods of users' classes run on a separate event loop, where they may
    block. `release(element)` is called in a thread when a conversation ends.

    An exception in any of these methods fails only the conversation that it was called for.

    Args:
        env: a `ChatEnv` or a transformed one; its batch size is unlocked.
        timeout_seconds: limit of each `before_step`, batched step, `before_reset` and `release` (30
            s for `release` by default). After a timeout the step fails and a new thread takes over.
        keep_steps: whether the caller keeps and reads stepped conversations.

    Raises ValueError if the environment has a fixed batch size and is not a `ChatEnv`.
    """

    def __init__(self, env: EnvBase, *, timeout_seconds: float | None = None, keep_steps: bool = False) -> None:
        unlock_batch_size(env)
        self.env = env
        self.timeout_seconds = timeout_seconds
        self.keep_steps = keep_steps
        for part in environment_parts(env):
            if hasattr(part, "step_timeout_seconds"):  # only the part knows which waiting time does not count
                part.step_timeout_seconds = timeout_seconds
        self.are_turns_read = keep_steps or reads_turns(env)
        """Whether the tensors of a turn may be read while it is stepped, or afterwards."""
        self._before_reset = next(iter(_parts(env, "before_reset")), None)
        self._slow_parts = _parts(env, "before_step")
        self._releases = [
            release for release in _parts(env, "release") if getattr(release, "__func__", None) is not ChatEnv.release
        ]
        self.slow_loop = ReplaceableLoop("llmrl-slow-steps")
        """Event loop for slow steps of users' classes."""
        self._waiting: list[tuple[TensorDictBase, asyncio.Future[Stepped]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = WorkerThread("llmrl-env")

    async def call(
        self, function: Callable[Parameters, Result], *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> Result:
        """Run a function in the environment's thread, so that nothing else uses the environment meanwhile."""
        return await self._thread.call(function, *arguments, **keywords)

    @property
    def is_opened_alone(self) -> bool:
        """Whether conversations are opened one by one from their drawn rows, because opening may be slow."""
        return self._before_reset is not None

    async def draw(self, prompts: PromptSampler, position: int | None = None) -> Opening:
        """Draw the next problem of the environment's dataset, or the one at a position, and begin its conversation."""

        def draw() -> Opening:
            if position is not None:
                prompts.draw_next([position])
            return prompts.draw() if self.is_opened_alone else self.env.reset()

        return await self.call(draw)

    async def open(self, opening: Opening) -> TensorDictBase:
        """Open a conversation; raise TimeoutError if it takes too long, or the environment's error."""
        if isinstance(opening, TensorDictBase):
            return opening
        if isinstance(opening, Exception):
            raise opening
        assert self._before_reset is not None
        opened = await self._before(self._before_reset, opening)
        try:
            return await self.call(self.env.reset, opened)
        except BaseException:
            await self.release(opened)
            raise

    async def _before(
        self, slow_part: Callable[[Argument], Coroutine[None, None, Result]], argument: Argument
    ) -> Result:
        part = slow_part.__self__  # type: ignore[attr-defined]
        timeout_seconds = None if hasattr(part, "step_timeout_seconds") else self.timeout_seconds
        if not is_ours(part):
            return await self.slow_loop.wait(slow_part(argument), timeout_seconds)
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                return await slow_part(argument)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"it took more than {self.timeout_seconds:g} s.") from None

    async def step(self, element: TensorDictBase) -> Stepped:
        """Step one conversation; return it with its `next`, and the root of its next turn.

        Raises:
            Exception: the environment's error for this conversation, converted by `as_exception`.
            TimeoutError: if the step took too long.
        """
        for before_step in self._slow_parts:
            await self._before(before_step, element)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((element, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def release(self, element: TensorDictBase) -> None:
        """Release what the environment and its transforms hold for an ended conversation; errors are logged."""
        for release in self._releases:
            try:
                async with asyncio.timeout(self.timeout_seconds or _RELEASE_SECONDS):
                    await run_in_thread(release, element)
            except Exception as error:
                logger.warning("%s failed for one conversation", release.__qualname__, exc_info=error)

    async def _work(self) -> None:
        # Everything that became ready in this turn of the loop joins the first batch.
        await asyncio.sleep(0)
        while self._waiting:
            batch = self._waiting[:_MAX_BATCH]
            self._waiting = self._waiting[_MAX_BATCH:]
            results: Sequence[Stepped | Exception]
            try:
                results = await self._step_within_time([element for element, _ in batch])
            except Exception as error:
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # the rollout was cancelled meanwhile
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _step_within_time(self, elements: list[TensorDictBase]) -> list[Stepped | Exception]:
        call = asyncio.ensure_future(self.call(self._step_batch, elements))
        # `wait_for` would lose a result that came in time, but while this loop was blocked.
        await asyncio.wait([call], timeout=self.timeout_seconds)
        if call.done():
            return call.result()
        call.cancel()
        self._thread.leave_behind()  # the thread cannot be interrupted: a new one replaces it
        error = TimeoutError(f"the environment's step took more than {self.timeout_seconds} s.")
        return [error] * len(elements)

    def _step_batch(self, elements: list[TensorDictBase]) -> list[Stepped | Exception]:
        if len(elements) == 1:
            return [self._step_one(elements[0])]
        for element in elements:
            element.pop("next", None)
        try:
            self.env.step(lazy_stack(elements, 0))  # writes `next` into the elements themselves
        except BaseException:
            # The failure of one conversation must not fail the others.
            return [self._step_one(element) for element in elements]
        return [(element, self._next_root(element)) for element in elements]

    def _step_one(self, element: TensorDictBase) -> Stepped | Exception:
        try:
            element.pop("next", None)
            self.env.step(element)
            return element, self._next_root(element)
        except BaseException as error:
            return as_exception(error)

    @staticmethod
    def _next_root(element: TensorDictBase) -> TensorDictBase:
        """Return the result of `step_mdp` as a new object that shares its entries, without checks."""
        root = {key: value for key, value in element.items() if key not in _TURN_KEYS}
        return tensordict_of(root | {key: value for key, value in element.get("next").items() if key != "reward"})

    def shutdown(self) -> None:
        """Stop the environment's threads."""
        self._thread.close()
        self.slow_loop.close()


def _parts(env: EnvBase, name: str) -> list[Callable[[TensorDictBase], Any]]:
    """Return the methods of this name of the environment and its transforms, innermost first."""
    return [method for part in environment_parts(env) if (method := getattr(part, name, None)) is not None]
