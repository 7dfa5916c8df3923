"""A token's version says which weights sampled it, whichever engines die or fail in whichever updates."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from fuzzing import fuzz_seeds
from waiting import wait_until
from weight_replicas import Labels, Replica, weights_of
from weight_sync_tools import make_sender

from llmrl.engines import EngineReplicas
from llmrl.engines.base import EngineError
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, channels
from llmrl.weight_sync.adapters import AdapterWeights
from llmrl.weight_sync.stream import StreamChannel

pytestmark = pytest.mark.usefixtures("takes_long")

WAYS = ["memory", "gloo", "gloo deltas", "files", "file deltas", "adapters", "stream"]
_BACKENDS = {"adapters": "adapters", "gloo": "far", "gloo deltas": "far", "stream": "stream"}


class _Streamed:
    """A transfer that changes the weights of the engines while it goes on."""

    def __init__(self, channel, client):
        self._channel, self._client = channel, client

    def send_weights(self):
        self._client.start_weight_update()
        number = int(next(iter(self._channel._source))[1].view(-1)[0])
        self._client.update_weights({"streamed": number})

    def shutdown(self):
        pass


class _Matrices(AdapterWeights):
    """One adapter with the number in its first matrix."""

    def _named(self):
        rows = self._model["norm"].view(-1)[:4].view(1, 4)
        return iter([("base_model.model.0.lora_A.weight", rows), ("base_model.model.0.lora_B.weight", rows.T)])


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts engines, as replicas or as a list, and a sender of weights by one of `WAYS`."""
    monkeypatch.setattr(StreamChannel, "connect", lambda channel, client: _Streamed(channel, client))
    monkeypatch.setattr("llmrl.weight_sync.scheme.AdapterWeights", _Matrices)
    monkeypatch.setattr(channels, "_MEETING_SECONDS", 60.0)
    ended = []

    def begin(way, labels, *, num_engines=2, version=0, is_list=False):
        backend = _BACKENDS.get(way, "llmrl")
        anchor_every = 3 if "deltas" in way else 1
        folder = tmp_path / f"{labels.seed}"
        if "file" in way:
            scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(folder), anchor_every=anchor_every)
        else:
            kind = "adapter" if way == "adapters" else "merged"
            scheme = VLLMWeightSyncScheme(anchor_every=anchor_every, lora=kind)
        model = weights_of(0)

        def restart(index):
            time.sleep(0.002)
            return Replica(labels, backend)

        replicas = [Replica(labels, backend) for _ in range(num_engines)]
        if not is_list:
            replicas = EngineReplicas(replicas, restart=restart, max_restarts=10**6, hang_timeout_seconds=120)
            replicas.policy_version = version
            ended.append(replicas)

        def renew():
            """Another sender in place of the one before, if there was one."""
            rate, labels.rate = labels.rate, 0.0
            sender = make_sender(scheme, model, replicas)
            labels.rate = rate
            ended.append(sender)
            return sender

        return replicas, renew, model

    yield begin
    for one in reversed(ended):
        one.shutdown()


def set_to(model, number):
    for tensor in model.values():
        tensor.fill_(number)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "stream"])
def test_engines_that_all_died_before_an_update_come_back_with_its_weights_or_those_before(start, way):
    """The weights of the update that met no engine are not those of the version before.

    What is streamed is not held for an engine that starts later than another: it serves after the next update.
    """
    labels = Labels(0, 0.0)
    replicas, renew, model = start(way, labels)
    sender = renew()
    set_to(model, 1)
    assert sender.update_weights() == 1
    labels.kill_all()
    replicas.refresh()
    set_to(model, 2)
    assert sender.update_weights() == 2, "it waits for the engines that are being started"
    wait_until(lambda: replicas.serving == {0, 1})
    labels.look()
    assert not labels.wrong
    assert labels.seen == {0: 0, 1: 1, 2: 2}
    assert [engine.held for engine in replicas] == [2, 2]


@pytest.mark.parametrize("is_replaced", [False, True], ids=["dead", "replaced"])
def test_another_sender_gives_no_version_of_a_dead_engine_to_other_weights(is_replaced):
    """One of two engines loads version 2 and dies, the other one fails to load it; then their trainer goes on."""
    labels = Labels(0, 0.0)
    engines = [Replica(labels, "llmrl"), Replica(labels, "llmrl")]
    model = weights_of(1)
    sender = make_sender(VLLMWeightSyncScheme(), model, engines)
    assert sender.update_weights() == 1
    set_to(model, 2)
    engines[1].finish_weight_update = refuse
    with pytest.raises(EngineError, match="mixture"):
        sender.update_weights()
    del engines[1].finish_weight_update
    sender.shutdown()
    engines[0].die()
    if is_replaced:
        engines[0] = Replica(labels, "llmrl")
    set_to(model, 3)
    sender = make_sender(VLLMWeightSyncScheme(), model, engines)
    sender.update_weights()
    sender.shutdown()
    labels.look()
    assert not labels.wrong
    assert labels.seen == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("way", ["memory", "files", "adapters"])
def test_a_version_is_that_of_the_same_weights_in_a_list_in_which_dead_engines_are_replaced(start, way):
    """As below, but nothing restarts engines; a new sender comes where the last version's engines are in the list."""
    for seed in fuzz_seeds(10):
        chance = random.Random(seed)
        labels = Labels(seed, chance.choice([0.0, 0.02, 0.1, 0.3]))
        engines, renew, model = start(way, labels, num_engines=chance.choice([1, 2, 3]), is_list=True)
        sender = renew()
        for number in range(1, 9):
            set_to(model, number)
            for _ in range(chance.randrange(2)):
                chance.choice(engines).die()
            try:
                labels.expect(sender.update_weights(), number, "the update")
            except EngineError as error:
                labels.log.append(str(error))
            labels.look()
            for place, engine in enumerate(engines):
                if not engine.is_alive and chance.random() < 0.5:
                    engines[place] = Replica(labels, engine.weight_transfer_backend)
                    if chance.random() < 0.5:
                        with contextlib.suppress(EngineError):
                            sender.bring_up_to_date(engines[place])
            labels.look()
            assert not labels.wrong, (seed, labels.wrong, labels.log)
            is_known = max(engine.policy_version for engine in engines) >= max(labels.seen)
            if chance.random() < 0.3 and is_known and any(engine.is_alive for engine in engines):
                sender.shutdown()
                sender = renew()


def refuse(version):
    raise EngineError(f"refuses version {version}")


def test_a_replica_that_starts_again_reads_the_double_buffer_without_another_write(tmp_path):
    labels = Labels(0, 0.0)
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path))
    writer = scheme.create_sender()
    model = weights_of(7)
    writer.register_model(model)
    writer.init_all_workers_group()
    restart = lambda index: Replica(labels, "llmrl")  # noqa: E731
    with EngineReplicas([Replica(labels, "llmrl") for _ in range(2)], restart=restart) as replicas:
        reader = scheme.create_receiver(replicas)
        version = writer.update_weights()
        assert reader.poll_and_apply() == version
        replicas[0].die()
        replicas.refresh()
        wait_until(lambda: replicas.serving == {0, 1})
        assert [(engine.policy_version, engine.held) for engine in replicas] == [(version, 7)] * 2
        assert reader.poll_and_apply() is None
        reader.shutdown()
    writer.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_a_version_is_that_of_the_same_weights_whichever_engines_die_when(start, way):
    """Random updates, deaths, refusals and half loads; afterwards one update reaches every engine."""
    for seed in fuzz_seeds(4):
        chance = random.Random(seed)
        labels = Labels(seed, chance.choice([0.0, 0.02, 0.1, 0.3]))
        num_engines, version = chance.choice([1, 2, 3]), chance.choice([0, 5])
        replicas, renew, model = start(way, labels, num_engines=num_engines, version=version)
        sender = renew()
        for number in range(1, chance.randrange(2, 9)):
            if chance.random() < 0.1:
                sender.shutdown()
                sender = renew()
            update_at_random(chance, labels, replicas, sender, model, number)
        labels.rate = 0.0
        replicas.refresh()
        wait_until(lambda replicas=replicas: not replicas.recovering)  # what is streamed is not held for later ones
        set_to(model, 100)
        version = sender.update_weights()
        wait_until(lambda replicas=replicas: len(replicas.serving) == len(replicas))
        labels.look()
        assert not labels.wrong, (seed, labels.wrong, labels.log)
        assert {(engine.policy_version, engine.held) for engine in replicas} == {(version, 100)}, (seed, labels.log)


def update_at_random(chance, labels, replicas, sender, model, number):
    """Kill some engines, all or none, and send the weights of that number, which may fail."""
    set_to(model, number)
    for _ in range(chance.randrange(3)):
        chance.choice(labels.engines).die()
    if chance.random() < 0.2:
        labels.kill_all()
    if chance.random() < 0.5:
        replicas.refresh()
    try:
        version = sender.update_weights()
    except EngineError as error:
        labels.log.append(str(error))
    else:
        labels.expect(version, number, "the update")
    if chance.random() < 0.5:
        wait_until(lambda: not replicas.recovering)
    labels.look()
    assert not labels.wrong, (labels.seed, labels.wrong, labels.log)
