"""Distribution of work over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from llmrl._utils.failure import describe

T = TypeVar("T")


def rank_and_size(process_group: torch.distributed.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a group."""
    if process_group is None:
        return 0, 1
    return torch.distributed.get_rank(process_group), torch.distributed.get_world_size(process_group)


def share_of(micro_batches: Sequence[T], rank: int, num_ranks: int) -> Iterator[tuple[T, bool]]:
    """Yield a rank's micro-batches, each with a flag: whether another rank already counts it.

    A rank without a micro-batch repeats another rank's, so that all ranks make the same number of
    passes and collective calls.

    Example:
        >>> [list(share_of("abc", rank, 2)) for rank in (0, 1)]
        [[('a', False), ('c', False)], [('b', False), ('c', True)]]
    """
    for start in range(0, len(micro_batches), num_ranks):
        is_repeated = start + rank >= len(micro_batches)
        yield micro_batches[start if is_repeated else start + rank], is_repeated


def gathered(value: T, process_group: torch.distributed.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks by rank, which are pickled; only this value without a group."""
    _, num_ranks = rank_and_size(process_group)
    values = [value] * num_ranks
    if process_group is not None:
        torch.distributed.all_gather_object(values, value, group=process_group)
    return values


def gather_or_fail(compute: Callable[[], T], process_group: torch.distributed.ProcessGroup | None) -> list[T]:
    """Return the results of all ranks by rank. Raises this rank's error, or RuntimeError if another rank failed."""
    if process_group is None:
        return [compute()]
    failure: Exception | None = None
    try:
        own: tuple[list[T], str] = ([compute()], "")
    except Exception as error:
        failure = error
        own = ([], describe(error))
    parts = gathered(own, process_group)
    if failure is not None:
        raise failure
    rank, _ = rank_and_size(process_group)
    for number, (_, why) in enumerate(parts):
        if why:
            raise RuntimeError(f"rank {number} failed, so rank {rank} ends, too: {why}")
    return [value for values, _ in parts for value in values]
