"""Deltas by gloo: every engine holds the bits that the trainer has, whichever of them missed, lost or damaged what."""

from __future__ import annotations

import gc
import logging
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import wait_until
from weight_sync_tools import FakeEngine, TakingEngine

from llmrl.engines.base import EngineError
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSyncError, channels
from llmrl.weight_sync.buffers import UNREACHABLE, PackedLayout, read_tag
from llmrl.weight_sync.gloo import Receiver, open_group

STEPS = ["reached", "group", "start", "broadcast", "taken", "finish"]


class FarEngine(FakeEngine):
    """Takes broadcasts as vLLM's worker does, of which it has no model; leaves its group at a step, as the dead do."""

    weight_transfer_backend = "llmrl"
    receiver: Receiver | None = None
    held: dict[str, torch.Tensor] | None = None
    dies_in: str | None = None

    def _die(self, step):
        if self.dies_in != step:
            return
        self.is_alive = False
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None  # only now are its connections closed
        raise EngineError(f"died: {step}")

    def init_weight_transfer_engine(self, info):
        super().init_weight_transfer_engine(info)
        self.receiver = None
        if info.get("path"):
            self._die("reached")
            raise EngineError(f"{UNREACHABLE}: another host")
        if info.get("master_address"):
            group = open_group(info["master_address"], info["master_port"], rank=1, world_size=info["world_size"])
            self.receiver = Receiver(group)
            self._die("group")

    def start_weight_update(self):
        super().start_weight_update()
        self._die("start")

    def update_weights(self, info):
        self.taken = None
        if info.get("is_discarded"):
            return
        layout = PackedLayout.from_plain(info["names"], info["dtype_names"], info["shapes"])
        self._die("broadcast")
        try:
            if num_delta_bytes := info.get("num_delta_bytes"):
                buffer = self.receiver.receive_delta(num_delta_bytes)
            else:
                buffer = self.receiver.receive(layout.num_bytes, pages=None, checksum=info["checksum"])
        except (ValueError, RuntimeError) as error:
            raise EngineError(f"a worker: {error}") from error
        assert read_tag(buffer) == info["tag"]
        self.taken = {name: tensor.clone() for name, tensor in layout.views(buffer)}
        super().update_weights(info)
        self._die("taken")

    def finish_weight_update(self, version):
        self._die("finish")
        super().finish_weight_update(version)
        if self.taken is not None:
            self.held, self.taken = self.taken, None


class NearEngine(TakingEngine):
    is_keeping = True

    @property
    def held(self):
        return self.taken


@pytest.fixture
def sent(monkeypatch):
    """Sizes of what was broadcast, in bytes."""
    sizes, broadcast = [], channels.broadcast

    def noted(group, data):
        sizes.append(len(data))
        broadcast(group, data)

    monkeypatch.setattr(channels, "broadcast", noted)
    return sizes


def make_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(1 << 12, generator=generator).to(torch.bfloat16),
        "b": torch.randn(33, 65, generator=generator).to(torch.bfloat16),
        "c": torch.randint(0, 1 << 40, (7,), generator=generator),
    }


def change(weights, generator, share):
    """Other bits in a share of the elements."""
    for tensor in weights.values():
        words = tensor.view(-1).view(torch.int16).numpy()
        places = np.flatnonzero(generator.random(len(words)) < share)
        words[places] ^= generator.integers(-(1 << 15), 1 << 15, len(places), dtype=np.int16)


def assert_same(engine, weights):
    assert engine.held.keys() == weights.keys()
    for name, tensor in weights.items():
        own = engine.held[name]
        assert own.dtype == tensor.dtype
        assert torch.equal(own.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def make_sender(weights, engines, **options):
    sender = VLLMWeightSyncScheme(master_address="127.0.0.1", **options).create_sender()
    sender.register_model(weights)
    sender.init_all_workers_group(None, engines)
    return sender


def test_a_small_change_is_a_small_broadcast_and_all_comes_every_so_often(sent):
    weights, engine = make_weights(), FarEngine()
    sender = make_sender(weights, [engine], anchor_every=4)
    for step in range(9):
        weights["a"][step * 7] += 1
        sender.update_weights()
        assert_same(engine, weights)
    whole = PackedLayout.of((name, tensor.dtype, tensor.shape) for name, tensor in weights.items()).num_bytes
    assert [size == whole for size in sent] == [step % 4 == 0 for step in range(9)]
    assert max(size for size in sent if size != whole) < whole / 20
    sender.shutdown()


@pytest.mark.slow
def test_engines_near_and_far_hold_the_bits_through_any_history(sent, caplog):
    """Random changes, engines that die at a random step, refuse, come new or come late; plain tensors are the truth.

    Nothing of the dead stays behind: the short form of `python -m benchmarks soak_deaths`.
    """
    caplog.set_level(logging.ERROR)  # pytest would keep each error, and what it came from
    choose, generator = random.Random(1), np.random.default_rng(1)
    weights, engines = make_weights(), [NearEngine(), FarEngine(), FarEngine()]
    sender = make_sender(weights, engines, anchor_every=5)
    num_failed, used = 0, None

    def in_use():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for turn in range(60):
        change(weights, generator, choose.choice([0.0, 0.002, 0.002, 0.01, 0.9]))
        event, victim = choose.random(), choose.choice(engines[1:])
        if event < 0.15:
            victim.dies_in = choose.choice(STEPS[2:])
        elif event < 0.25:
            victim.fails_at = choose.choice(["start", "update"])
        try:
            version = sender.update_weights()
        except WeightSyncError:
            num_failed += 1
            victim.fails_at = None
            version = sender.update_weights()
        for place, engine in enumerate(engines):
            if not engine.is_alive:
                engines[place] = FarEngine()
                if choose.random() < 0.5:
                    sender.bring_up_to_date(engines[place])
                    assert_same(engines[place], weights)
                continue
            assert engine.policy_version == version
            assert_same(engine, weights)
        if turn in (29, 59):
            sender.update_weights()
            before, used = used, in_use()
    num_small = sum(size < 8000 for size in sent)
    assert num_failed > 2 and 30 < num_small < len(sent) - 10
    wait_until(lambda: in_use() <= before)  # what ends is not waited for elsewhere
    sender.shutdown()


@pytest.mark.parametrize("damage", ["a byte", "its end", "another delta"])
def test_a_damaged_delta_makes_the_sender_send_all(monkeypatch, damage):
    weights, engines = make_weights(), [FarEngine(), FarEngine()]
    sender = make_sender(weights, engines, anchor_every=8)
    broadcast, sizes = channels.broadcast, []

    def damaged(group, data):
        sizes.append(len(data))
        if len(sizes) == 1:
            data = data.clone()
            if damage == "a byte":
                data[-9] ^= 1
            elif damage == "its end":
                data[-20:] = 0
            else:
                data[:] = torch.frombuffer(bytearray(b"{}\n".ljust(len(data))), dtype=torch.uint8)
        broadcast(group, data)

    sender.update_weights()
    weights["a"][::50] += 1
    with monkeypatch.context() as patch:
        patch.setattr(channels, "broadcast", damaged)
        assert sender.update_weights() == 2
        small, large = sorted(set(sizes))
        assert sorted(sizes) == [small, small, large]
        for engine in engines:
            assert_same(engine, weights)
        weights["a"][::60] += 1
        sender.update_weights()
        assert len(sizes) == 5 and max(sizes[3:]) < large / 10, "deltas lead on from there"
    for engine in engines:
        assert_same(engine, weights)
    sender.shutdown()


def test_a_whole_that_is_damaged_on_the_way_is_refused(monkeypatch):
    weights, engine = make_weights(), FarEngine()
    sender = make_sender(weights, [engine], anchor_every=8)
    sender.update_weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    broadcast = channels.broadcast

    def damaged(group, data):
        data = data.clone()
        data[len(data) // 2] ^= 1
        broadcast(group, data)

    for tensor in weights.values():
        tensor.view(-1).view(torch.int16)[:] ^= 77
    with monkeypatch.context() as patch:
        patch.setattr(channels, "broadcast", damaged)
        with pytest.raises(WeightSyncError, match=r"the checksum differs.*version 1 as before"):
            sender.update_weights()
    assert_same(engine, before)
    sender.update_weights()
    assert_same(engine, weights)
    sender.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_small", [True, False], ids=["a delta", "the whole"])
def test_an_engine_that_dies_at_any_step_is_left_out_and_its_successor_is_sent_all(sent, step, is_small):
    weights, engines = make_weights(), [FarEngine(), FarEngine()]
    sender = make_sender(weights, engines, anchor_every=8 if is_small else 2)
    for _ in range(2):
        weights["b"][3, ::9] += 1
        sender.update_weights()
    if step in STEPS[:2]:  # of a new engine
        engines[1].is_alive = False
        engines[1] = FarEngine()
    engines[1].dies_in = step
    weights["a"][::100] -= 1
    version = sender.update_weights()
    assert version == 3 == engines[0].policy_version and not engines[1].is_alive
    assert_same(engines[0], weights)
    engines[1] = FarEngine()
    sender.bring_up_to_date(engines[1])
    assert engines[1].policy_version == 3
    assert_same(engines[1], weights)
    sent.clear()
    weights["a"][::100] -= 1
    sender.update_weights()
    assert (len(sent) == 2 and (max(sent) < 2000) == is_small) or not is_small
    for engine in engines:
        assert_same(engine, weights)
    sender.shutdown()


def test_workers_that_come_to_a_group_and_die_are_not_waited_for(monkeypatch):
    class GoneEngine(FarEngine):
        def init_weight_transfer_engine(self, info):
            if "master_address" not in info:
                super().init_weight_transfer_engine(info)

    monkeypatch.setattr(channels, "_MEETING_SECONDS", 0.1)
    with pytest.raises(EngineError, match="joined the group and left it again"):
        make_sender(make_weights(), [GoneEngine()])


def test_weights_of_another_shape_or_a_failed_packing_are_no_base(sent):
    weights, engine = make_weights(), FarEngine()
    sender = make_sender(weights, [engine], anchor_every=8)
    sender.update_weights()
    other = {**make_weights(3), "d": torch.ones(5).to(torch.bfloat16)}
    sender.update_weights(other)
    assert_same(engine, other)
    sender.update_weights()
    assert_same(engine, weights)
    assert min(sent) > 8000
    weights["a"][5] += 1
    broken = {**weights, "c": weights["c"].to(torch.int32)}
    sender.update_weights(broken)
    assert_same(engine, broken)
    weights["a"][6] += 1
    sender.update_weights()
    assert_same(engine, weights)
    assert min(sent) > 8000
    sender.shutdown()


def test_anchors_are_refused_where_all_weights_are_sent():
    with pytest.raises(ValueError, match="anchor_every must be at least 1, got 0"):
        VLLMWeightSyncScheme(anchor_every=0)
    with pytest.raises(ValueError, match="anchor_every=3 is for full weights"):
        VLLMWeightSyncScheme(anchor_every=3, lora="adapter")
    with pytest.raises(ValueError, match="anchor_every=3: an engine with weight_transfer='nccl' is sent all"):
        make_sender(torch.nn.Linear(3, 2), FakeEngine(), anchor_every=3)
