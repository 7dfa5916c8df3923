"""vLLM's executor of several worker processes, kept in step with them when one refuses an update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class InStepExecutor(MultiprocExecutor):
    """Hears every worker before it raises an error of one of them.

    vLLM 0.32 stops at the first error and takes what the other workers answered for their answers to the next call:
    once an update was refused, each later call fails or succeeds for what the one before it did.
    """

    response_mqs: list[Any]

    def _init_executor(self) -> None:
        super()._init_executor()
        self.response_mqs = _AllAnswers(self.response_mqs)


class _AllAnswers(list[Any]):
    """Queues that are read together as soon as the first of them is, when they are gone through."""

    def __iter__(self) -> Iterator[Any]:
        queues = list(super().__iter__())
        answers: list[Any] = []
        for index, queue in enumerate(queues):
            yield _Together(queue, index, queues, answers)


class _Together:
    """One queue of several; whatever else is asked of it goes to the queue itself."""

    def __init__(self, queue: Any, index: int, queues: list[Any], answers: list[Any]) -> None:
        self._queue, self._index, self._queues, self._answers = queue, index, queues, answers

    def dequeue(self, timeout: float | None = None) -> Any:
        """This queue's answer, once all of them are there."""
        if not self._answers:
            self._answers += [queue.dequeue(timeout=timeout) for queue in self._queues]
        return self._answers[self._index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
