"""`Router`: assignment of requests to replicas."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable

from llmrl._utils.arguments import check_least
from llmrl.engines.base import check_unique

MAX_REMEMBERED_KEYS = 65536
"""Maximum number of routing keys with a known replica; the least recently used are dropped first."""


class NoReplicaError(LookupError):
    """Raised if no replica accepts requests."""


class Router:
    """Assignment of requests to the replica of their routing key, for its prefix cache, or to the least loaded one.

    Args:
        num_replicas: number of replicas, numbered from 0; all are open at first.
        max_imbalance: number of requests by which a key's replica may exceed the least loaded one;
            beyond, the key moves.

    Raises ValueError if `num_replicas` is below 1 or `max_imbalance` is negative.

    Example:
        >>> router = Router(2)
        >>> [router.assign(name, key) for name, key in (("a", "group"), ("b", None), ("c", "group"))]
        [0, 1, 0]
        >>> router.loads
        (2, 1)
        >>> router.close_replica(0)
        >>> router.assign("d", "group")
        1
    """

    def __init__(self, num_replicas: int, *, max_imbalance: int = 32) -> None:
        check_least(1, num_replicas=num_replicas)
        check_least(0, max_imbalance=max_imbalance)
        self._max_imbalance = max_imbalance
        self._loads = [0] * num_replicas
        self._where: dict[str, int] = {}
        self._affinity: OrderedDict[str, int] = OrderedDict()
        self._open = set(range(num_replicas))
        # Lazy heap of (load, replica): entries with an outdated load are skipped, so that
        # choosing among hundreds of replicas is cheap.
        self._heap = [(0, replica) for replica in range(num_replicas)]

    @property
    def open_replicas(self) -> frozenset[int]:
        """Replicas that accept requests."""
        return frozenset(self._open)

    @property
    def loads(self) -> tuple[int, ...]:
        """Number of requests per replica."""
        return tuple(self._loads)

    def open_replica(self, replica: int) -> None:
        """Let a replica accept requests."""
        if replica not in self._open:
            self._open.add(replica)
            self._push(replica)

    def close_replica(self, replica: int) -> None:
        """Stop assigning requests to a replica; its current requests stay until they are released."""
        self._open.discard(replica)

    def forget_affinity(self, replica: int) -> None:
        """Forget the routing keys of a replica, because its prefix cache is gone."""
        for key in [key for key, home in self._affinity.items() if home == replica]:
            del self._affinity[key]

    def assign(self, request_id: str, routing_key: str | None = None, *, avoid: Collection[int] = ()) -> int:
        """Assign the request to a replica until `release`, and return it; one of `avoid` only if no other is open.

        Raises ValueError if the id is in flight, and NoReplicaError if no replica is open.
        """
        check_unique(request_id, self._where)
        replica = self._choose(routing_key, avoid)
        if routing_key is not None:
            self._affinity[routing_key] = replica
            self._affinity.move_to_end(routing_key)
            if len(self._affinity) > MAX_REMEMBERED_KEYS:
                self._affinity.popitem(last=False)
        self._where[request_id] = replica
        self._loads[replica] += 1
        self._push(replica)
        return replica

    def release(self, request_id: str) -> None:
        """Remove a request. Raises KeyError if it is unknown."""
        replica = self._where.pop(request_id)
        self._loads[replica] -= 1
        self._push(replica)

    def _choose(self, routing_key: str | None, avoid: Collection[int]) -> int:
        least = self._least_loaded(self._open.difference(avoid)) if avoid else None
        if least is None:
            least = self._least_loaded_open()
            avoid = ()
        home = None if routing_key is None else self._affinity.get(routing_key)
        if home is None or home not in self._open or home in avoid:
            return least
        is_overloaded = self._loads[home] - self._loads[least] > self._max_imbalance
        return least if is_overloaded else home

    def _least_loaded(self, replicas: Iterable[int]) -> int | None:
        return min(replicas, key=lambda replica: (self._loads[replica], replica), default=None)

    def _least_loaded_open(self) -> int:
        heap = self._heap
        while heap:
            load, replica = heap[0]
            if replica in self._open and load == self._loads[replica]:
                return replica
            heapq.heappop(heap)
        raise NoReplicaError(f"None of the {len(self._loads)} replicas accepts requests.")

    def _push(self, replica: int) -> None:
        if replica not in self._open:
            return
        heapq.heappush(self._heap, (self._loads[replica], replica))
        if len(self._heap) > 8 * len(self._loads) + 64:
            self._heap = [(self._loads[one], one) for one in self._open]
            heapq.heapify(self._heap)
