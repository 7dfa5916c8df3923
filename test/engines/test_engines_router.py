"""The router's books stay right, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from llmrl.engines import router as router_module
from llmrl.engines.router import NoReplicaError, Router

KEYS = st.one_of(st.none(), st.sampled_from("pqrs"))


class RouterMachine(RuleBasedStateMachine):
    """Against a model that counts by looking at everything."""

    requests = Bundle("requests")

    @initialize(num_replicas=st.integers(1, 4), max_imbalance=st.integers(0, 3))
    def start(self, num_replicas, max_imbalance):
        self.router = Router(num_replicas, max_imbalance=max_imbalance)
        self.num_replicas, self.max_imbalance = num_replicas, max_imbalance
        self.where, self.affinity, self.open, self.num_ids = {}, {}, set(range(num_replicas)), 0

    @rule(target=requests, key=KEYS, avoid=st.sets(st.integers(0, 3)))
    def assign(self, key, avoid):
        name, self.num_ids = f"request-{self.num_ids}", self.num_ids + 1
        allowed = (self.open - avoid) or self.open
        if not allowed:
            with pytest.raises(NoReplicaError):
                self.router.assign(name, key, avoid=avoid)
            return name
        loads = [list(self.where.values()).count(index) for index in range(self.num_replicas)]
        least = min(allowed, key=lambda index: (loads[index], index))
        home = self.affinity.get(key)
        is_home_fit = home in allowed and loads[home] - loads[least] <= self.max_imbalance
        expected = home if is_home_fit else least
        assert self.router.assign(name, key, avoid=avoid) == expected
        self.where[name] = expected
        if key is not None:
            self.affinity[key] = expected
        return name

    @rule(name=consumes(requests))
    def release(self, name):
        if name in self.where:
            self.router.release(name)
            del self.where[name]
        else:
            with pytest.raises(KeyError):
                self.router.release(name)

    @rule(name=requests)
    def assign_again_is_refused(self, name):
        if name in self.where:
            with pytest.raises(ValueError, match="in flight"):
                self.router.assign(name)

    @rule(replica=st.integers(0, 3))
    def close(self, replica):
        if replica < self.num_replicas:
            self.router.close_replica(replica)
            self.open.discard(replica)

    @rule(replica=st.integers(0, 3))
    def open_again(self, replica):
        if replica < self.num_replicas:
            self.router.open_replica(replica)
            self.open.add(replica)

    @rule(replica=st.integers(0, 3))
    def die_and_move(self, replica):
        """What a death does: closed, homes forgotten, its requests released and assigned elsewhere under new ids."""
        if replica >= self.num_replicas:
            return
        self.close(replica)
        self.router.forget_affinity(replica)
        self.affinity = {key: home for key, home in self.affinity.items() if home != replica}
        for name in sorted(name for name, home in self.where.items() if home == replica):
            self.router.release(name)
            del self.where[name]
            if self.open:
                self.where[f"{name}+"] = self.router.assign(f"{name}+", avoid={replica})

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "router"):
            return
        loads = [list(self.where.values()).count(index) for index in range(self.num_replicas)]
        assert list(self.router.loads) == loads
        assert self.router.open_replicas == self.open
        assert len(self.router._heap) <= 8 * self.num_replicas + 64


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=50)


def test_a_thousand_choices_among_many_replicas_spread_evenly():
    router = Router(500)
    for index in range(1000):
        router.assign(str(index))
    assert set(router.loads) == {2}


def test_siblings_stay_together_until_their_replica_is_overloaded():
    router = Router(2, max_imbalance=2)
    assert [router.assign(str(index), "group") for index in range(4)] == [0, 0, 0, 1]


def test_the_oldest_keys_are_forgotten(monkeypatch):
    monkeypatch.setattr(router_module, "MAX_REMEMBERED_KEYS", 2)
    router = Router(2)
    assert [router.assign(str(number), key) for number, key in enumerate("abac")] == [0, 1, 0, 1]
    for number in range(4):
        router.release(str(number))
    # `c` and `a` go where they were, though another replica has less to do; `b` goes where there is least.
    keys = ["c", None, None, "a", None, None, "b"]
    assert [router.assign(f"later {number}", key) for number, key in enumerate(keys)] == [1, 0, 0, 0, 1, 1, 0]


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="num_replicas"):
        Router(0)
    with pytest.raises(ValueError, match="max_imbalance"):
        Router(1, max_imbalance=-1)
