"""Which rank of a process group computes what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def rank_and_size(process_group: torch.distributed.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in the group, and the number of ranks; (0, 1) without one."""
    if process_group is None:
        return 0, 1
    return torch.distributed.get_rank(process_group), torch.distributed.get_world_size(process_group)


def share_of(micro_batches: Sequence[T], rank: int, num_ranks: int) -> Iterator[tuple[T, bool]]:
    """Yield the micro-batches that a rank computes, and of each whether another rank counts it.

    Ranks that would run out first repeat one, so that all make the same number of passes and their collectives match.

    Example:
        >>> [list(share_of("abc", rank, 2)) for rank in (0, 1)]
        [[('a', False), ('c', False)], [('b', False), ('c', True)]]
    """
    for start in range(0, len(micro_batches), num_ranks):
        is_repeated = start + rank >= len(micro_batches)
        yield micro_batches[start if is_repeated else start + rank], is_repeated


def gather_or_fail(compute: Callable[[], T], process_group: torch.distributed.ProcessGroup | None) -> list[T]:
    """Return what each rank computes, of rank 0 first; a failure of one ends on all, which would wait for it.

    Raises:
        Exception: what `compute` raised on this rank.
        RuntimeError: what it raised on another one, as text.

    Example:
        >>> gather_or_fail(lambda: 3, None)
        [3]
    """
    if process_group is None:
        return [compute()]
    rank, num_ranks = rank_and_size(process_group)
    failure: Exception | None = None
    own: tuple[list[T], str] = ([], "")
    try:
        own = [compute()], ""
    except Exception as error:
        failure = error
        own = ([], f"{type(error).__name__}: {error}")
    parts: list[tuple[list[T], str]] = [own] * num_ranks
    torch.distributed.all_gather_object(parts, own, group=process_group)
    if failure is not None:
        raise failure
    for number, (_, why) in enumerate(parts):
        if why:
            raise RuntimeError(f"rank {number} failed, so rank {rank} ends, too: {why}")
    return [value for values, _ in parts for value in values]
