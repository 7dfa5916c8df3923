"""The parts of weight sync that need no engine: packing, shared memory, names, the fan-out of a group of engines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import wait_until
from weight_sync_tools import FakeEngine, TakingEngine, make_sender

from llmrl.collectors.weights import WeightSenders
from llmrl.engines import EngineReplicas
from llmrl.engines.base import EngineError
from llmrl.trainer import TransformersWrapper
from llmrl.weight_sync import (
    EngineGroup,
    MemoryChannel,
    StreamChannel,
    VLLMWeightSyncScheme,
    WeightSyncError,
    engine_group,
    get_model_metadata,
)
from llmrl.weight_sync.buffers import ALIGNMENT, PackedLayout, SharedBuffer, open_shared, read_tag, write_tag
from llmrl.weight_sync.member import Member
from llmrl.weight_sync.source import ModelWeights, checkpoint_name, named_weights

pytestmark = pytest.mark.usefixtures("takes_long")


def test_packed_tensors_come_back_and_lie_apart():
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }
    layout = PackedLayout.of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    write_tag(buffer, "tag")
    for name, view in layout.views(buffer):
        view.copy_(tensors[name])
    for name, view in layout.views(buffer):
        assert torch.equal(view, tensors[name])
    assert all(place.offset % ALIGNMENT == 0 for place in layout.places)
    assert read_tag(buffer) == "tag"


def test_a_layout_refuses_nothing_and_twice():
    with pytest.raises(ValueError, match="no weights"):
        PackedLayout.of([])
    with pytest.raises(ValueError, match="twice"):
        PackedLayout.of([("a", torch.float32, (1,))] * 2)


def test_another_process_reads_the_buffer_and_writes_only_its_own_copy(own_programs):
    shared = SharedBuffer(256)
    shared.tensor.copy_(torch.arange(256, dtype=torch.uint8))
    code = (
        "from llmrl.weight_sync.buffers import open_shared\n"
        f"tensor = open_shared({shared.path!r}, 256)\n"
        "print(int(tensor.sum())); tensor.zero_()"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) == sum(range(256))
    assert shared.tensor[255] == 255
    shared.close()
    shared.close()


def test_a_buffer_that_is_gone_or_short_is_refused():
    shared = SharedBuffer(64)
    with pytest.raises(ValueError, match="64 bytes"):
        open_shared(shared.path, 65)
    path = shared.path
    shared.close()
    with pytest.raises(OSError):
        open_shared(path, 64)


def test_a_dropped_buffer_closes_its_descriptor():
    shared = SharedBuffer(64)
    path = shared.path
    del shared
    assert not os.path.exists(path)  # noqa: PTH110


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.w", "model.layers.0.mlp.w"),
        ("model.submodule.module.weight", "model.submodule.module.weight"),
        ("module._orig_mod.base_model.model.model.norm.weight", "model.norm.weight"),
    ],
)
def test_wrappers_leave_no_trace_in_names(name, expected):
    assert checkpoint_name(name) == expected


def test_tied_weights_come_once_and_floats_are_cast():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    assert get_model_metadata(model, torch.bfloat16) == {"0.weight": (torch.bfloat16, torch.Size([4, 3]))}
    assert get_model_metadata(model)["0.weight"][0] is torch.float32


def test_sharded_weights_are_gathered():
    class Shard(torch.nn.Parameter):
        def full_tensor(self):
            return torch.cat([self.data, self.data])

    model = torch.nn.Linear(2, 2, bias=False)
    model.weight = Shard(torch.ones(1, 2))
    assert dict(named_weights(model))["weight"].shape == (2, 2)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="list"):
        get_model_metadata([1])


def test_workers_of_each_engine_follow_those_of_the_one_before():
    engines = [FakeEngine(num_workers=2), FakeEngine(num_workers=1), FakeEngine(num_workers=4)]
    group, num_workers = EngineGroup(engines), []

    class Channel(StreamChannel):
        def connect(self, client):
            num_workers.append(client.num_workers)
            client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 8})

    group.connect(group.members(), Channel(ModelWeights({}), "nccl", lambda: ("", 0)))
    assert [engine.calls[0][1]["rank_offset"] for engine in engines] == [1, 3, 4]
    assert num_workers == [7]


def test_several_engines_get_one_version():
    engines = [FakeEngine(version=3), FakeEngine(version=5)]
    group = EngineGroup(engines)
    assert (group.policy_version, group.last_version) == (3, 5)
    members = group.members()
    group.each(members, Member.start_weight_update)
    group.commit(members, group.last_version + 1)
    assert [engine.policy_version for engine in engines] == [6, 6]


def test_an_engine_that_took_no_weights_does_not_get_their_version():
    """A server that was out of reach when the others took them may be back when they load."""
    engine = FakeEngine(version=5)
    group = EngineGroup(engine)
    with pytest.raises(EngineError, match="received no weights"):
        group.commit(group.members(), 6)
    assert (engine.policy_version, engine.calls) == (5, [])


def test_engines_resume_after_an_error():
    engine = FakeEngine()
    group = EngineGroup(engine, pause_mode="abort")
    with pytest.raises(KeyError), group.paused(group.members()):
        raise KeyError
    assert engine.names == ["pause", "resume"]
    assert engine.calls[0][1] == "abort"


def test_an_engine_that_dies_is_left_out_and_one_in_its_place_comes_in():
    engines = [FakeEngine(), FakeEngine(dies_at="finish")]
    group = EngineGroup(engines)
    members = group.members()
    with group.paused(members):
        group.each(members, Member.start_weight_update)
        group.commit(members, 1)
    assert engines[0].policy_version == 1
    assert engines[0].names == ["pause", "start", "finish", "reset_prefix_cache", "resume"]
    assert [member.engine for member in group.members()] == [engines[0]]
    engines[1] = FakeEngine()
    assert [member.engine for member in group.members()] == engines
    engines[0].is_alive = engines[1].is_alive = False
    with pytest.raises(EngineError, match="start new ones"):
        group.members()


def test_an_engine_that_fails_while_loading_stays_paused_and_the_others_go_on():
    engines = [FakeEngine(), FakeEngine(fails_at="finish")]
    group = EngineGroup(engines)
    members = group.members()
    with pytest.raises(EngineError, match="finish refused"), group.paused(members):
        group.each(members, Member.start_weight_update)
        group.commit(members, 1)
    assert [engine.policy_version for engine in engines] == [1, 0]
    assert ["resume" in engine.names for engine in engines] == [True, False]
    engines[1].fails_at = None
    with group.paused(members):
        group.each(members, Member.start_weight_update)
        group.commit(members, 2)
    assert engines[1].names[-1] == "resume"


PHASES = ("init", "pause", "start", "update", "finish", "reset_prefix_cache", "resume")


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_that_hangs_in_an_update_is_replaced_and_the_others_go_on(phase):
    """Alive, no request in flight, and no answer: in every phase there is a deadline."""
    started = []

    def restart(index):
        started.append(TakingEngine())
        return started[-1]

    model = torch.nn.Linear(3, 2)
    engines = [TakingEngine(), TakingEngine(hangs_at=phase)]
    replicas = EngineReplicas(engines, restart=restart, hang_timeout_seconds=0.2)
    sender = make_sender(VLLMWeightSyncScheme(), model, replicas)
    assert sender.update_weights() == 1
    assert not engines[1].is_alive
    wait_until(lambda: replicas.serving == {0, 1})
    assert (replicas.num_hangs, replicas.num_deaths, replicas.num_restarts) == (1, 1, 1)
    assert [engine.policy_version for engine in replicas] == [1, 1]
    assert list(replicas) == [engines[0], started[0]]
    assert started[0].names[-1] == "resume"
    assert sender.update_weights() == 2
    sender.shutdown()


@pytest.mark.parametrize("phase", PHASES[1:])
def test_the_only_engine_that_hangs_in_an_update_ends_it_with_an_error(phase, monkeypatch):
    monkeypatch.setattr(engine_group, "DEFAULT_HANG_TIMEOUT_SECONDS", 0.2)
    engine = TakingEngine(hangs_at=phase)
    sender = make_sender(VLLMWeightSyncScheme(), torch.nn.Linear(3, 2), engine)
    with pytest.raises((WeightSyncError, EngineError), match=r"did not answer for 0\.2 s and was ended"):
        sender.update_weights()
    assert not engine.is_alive
    sender.shutdown()


def test_an_engine_that_finishes_long_requests_before_it_pauses_does_not_hang():
    class BusyEngine(TakingEngine):
        num_tokens = 0

        def pause(self, mode, *, clear_cache):
            super().pause(mode, clear_cache=clear_cache)
            assert not self._is_ended.wait(1.0)

        async def progress(self):
            self.num_tokens += 1
            return self.num_tokens

    engine = BusyEngine()
    replicas = EngineReplicas([engine], hang_timeout_seconds=0.1)
    sender = make_sender(VLLMWeightSyncScheme(pause_mode="wait"), torch.nn.Linear(3, 2), replicas)
    assert sender.update_weights() == 1
    assert engine.num_tokens > 1 and replicas.num_hangs == 0
    sender.shutdown()


def test_engines_that_may_take_for_ever_are_updated():
    engine = TakingEngine()
    replicas = EngineReplicas([engine], hang_timeout_seconds=None)
    sender = make_sender(VLLMWeightSyncScheme(), torch.nn.Linear(3, 2), replicas)
    assert (sender.update_weights(), engine.policy_version) == (1, 1)
    sender.shutdown()


def test_a_worker_in_another_container_does_not_take_a_file_of_the_same_size_for_the_trainers_memory(
    tmp_path, imports_vllm
):
    """`/proc/PID/fd/N` names something there, too, of whichever process has that id."""
    from llmrl.weight_sync.worker import WorkerEngine, WorkerInitInfo

    stranger = tmp_path / "of-another-process"
    stranger.write_bytes(bytes(4096))

    class Client:
        def __init__(self):
            self.worker = WorkerEngine.__new__(WorkerEngine)
            self.tags = []

        def init_weight_transfer_engine(self, info):
            self.tags.append(read_tag(open_shared(info["path"], info["num_bytes"])))
            with pytest.raises(ValueError, match=r"cannot open the trainer's memory.*another process's file"):
                self.worker.init_transfer_engine(WorkerInitInfo(**{**info, "layout": None, "path": str(stranger)}))
            self.worker.init_transfer_engine(WorkerInitInfo(**{**info, "layout": None}))

    channel = MemoryChannel(ModelWeights(torch.nn.Linear(3, 2), torch.float32), lambda: ("", 0))
    client = Client()
    for _ in range(2):
        channel.connect(client)
    assert len(set(client.tags)) == 2 and all(client.tags)


def test_what_an_engine_took_is_discarded_when_the_update_is_abandoned():
    engine = FakeEngine(version=4)
    member = Member(engine)
    member.abandon(can_discard=True)
    assert engine.calls == []
    member.start_weight_update()
    member.update_weights({"tag": "x"})
    member.abandon(can_discard=True)
    assert engine.calls[-2:] == [("update", {"is_discarded": True}), ("finish", 4)]


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("weight_transfer_backend", None, "weight_transfer=True"),
        ("quantization", "fp8", "quantised \\(fp8,"),
        ("model_dtype", torch.float32, "one dtype, got torch.float32 and torch.bfloat16"),
        ("weight_transfer_backend", "ipc", "one weight-transfer backend"),
    ],
)
def test_engines_that_cannot_take_the_weights_are_refused(attribute, value, message):
    odd = FakeEngine()
    setattr(odd, attribute, value)
    with pytest.raises(ValueError, match=message):
        EngineGroup([FakeEngine(), odd])


def test_no_engine_is_refused():
    with pytest.raises(ValueError, match="empty"):
        EngineGroup([])


def test_a_sender_says_what_it_lacks():
    sender = VLLMWeightSyncScheme().create_sender()
    with pytest.raises(RuntimeError, match="register_model"):
        sender.init_all_workers_group(None, FakeEngine())
    with pytest.raises(RuntimeError, match="init_all_workers_group"):
        sender.update_weights()
    sender.shutdown()


def test_an_update_after_a_failed_opening_is_an_error():
    sender = VLLMWeightSyncScheme(anchor_every=2).create_sender()  # which is not for NCCL
    sender.register_model(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match="anchor_every=2"):
        sender.init_all_workers_group(None, FakeEngine())
    for update in (sender.update_weights, lambda: sender.start_update().result()):
        with pytest.raises(RuntimeError, match="init_all_workers_group"):
            update()
    sender.shutdown()


def test_a_model_that_was_refused_is_refused_again_and_another_one_is_sent():
    engine = TakingEngine()
    engine.quantization = "int8"
    senders = WeightSenders({}, SimpleNamespace(engine=engine))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    [sender] = senders.connected(model)
    assert sender.update_weights() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="neither sharded nor by name"):
            senders.connected({"0.weight": torch.ones(2, 3)})
        with pytest.raises(RuntimeError, match="init_all_workers_group"):
            sender.update_weights()
    senders.connected(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    assert sender.update_weights() == 2
    senders.shutdown()


@pytest.mark.parametrize("options", [{"pause_mode": "stop"}, {"rank": -1}, {"mode": "keep"}])
def test_a_scheme_refuses_what_it_does_not_know(options):
    with pytest.raises((ValueError, TypeError)):
        VLLMWeightSyncScheme(**options)


def test_a_policy_stands_for_its_model():
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    policy = TransformersWrapper(model, generate=False)
    names = {name for name, _ in model.named_parameters()}
    assert get_model_metadata(policy).keys() == get_model_metadata(model).keys() == names
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(policy)
    assert sender._model is model


def test_metadata_of_another_model_is_refused():
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match="1 weights differ"):
        sender.init_all_workers_group(get_model_metadata(torch.nn.Linear(4, 2)), FakeEngine())


def test_an_unknown_backend_is_refused():
    engine = FakeEngine()
    engine.weight_transfer_backend = "sharded_rdt"
    with pytest.raises(ValueError, match="'sharded_rdt'"):
        make_sender(VLLMWeightSyncScheme(), torch.nn.Linear(3, 2), engine)


def test_tied_weights_of_a_mapping_come_once():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    assert list(get_model_metadata(model.state_dict())) == ["0.weight"]
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert list(get_model_metadata(copies)) == ["0.weight", "1.weight"]


class TestUpdatesBesideTraining:
    @pytest.fixture
    def engine(self):
        """Takes nothing before it may."""

        class SlowEngine(TakingEngine):
            is_keeping = True

            def __init__(self):
                super().__init__()
                self.may_take = threading.Event()

            def update_weights(self, info):
                assert self.may_take.wait(240)
                super().update_weights(info)

        return SlowEngine()

    def test_training_goes_on_while_the_engines_take_a_copy(self, engine):
        model = torch.nn.Linear(3, 2)
        sent = model.weight.detach().to(torch.bfloat16)
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        update = sender.start_update()
        torch.nn.init.zeros_(model.weight)
        assert not update.done() and engine.policy_version == 0
        engine.may_take.set()
        assert update.result(240) == 1 == engine.policy_version
        assert torch.equal(engine.taken["weight"], sent)
        assert sender.start_update().result(240) == 2
        assert not engine.taken["weight"].any()
        sender.shutdown()

    def test_the_future_has_the_error(self, engine):
        sender = make_sender(VLLMWeightSyncScheme(), torch.nn.Linear(3, 2), engine)
        engine.is_full = True
        engine.may_take.set()
        with pytest.raises(WeightSyncError, match=r"no room.*version 0 as before"):
            sender.start_update().result(240)
        sender.shutdown()
        with pytest.raises(RuntimeError):
            sender.start_update()

    def test_an_engine_that_failed_to_load_is_not_said_to_hold_the_weights_of_before(self):
        whole, mixed = TakingEngine(), TakingEngine()
        model = torch.nn.Linear(3, 2)
        sender = make_sender(VLLMWeightSyncScheme(), model, [whole, mixed])
        sender.update_weights()
        mixed.fails_at = "finish"
        with pytest.raises(WeightSyncError, match="a mixture"):
            sender.update_weights()
        assert (whole.policy_version, mixed.policy_version) == (2, 1)
        mixed.fails_at, whole.is_full = None, True
        with pytest.raises(WeightSyncError, match=r"no room.*version 2 as before.* 1 of them failed to load"):
            sender.update_weights()
        assert whole.names[-1] == "resume" and mixed.names[::-1].index("pause") < mixed.names[::-1].index("resume")
        whole.is_full = False
        assert sender.update_weights() == 3 == whole.policy_version == mixed.policy_version
        assert mixed.names[-1] == "resume"
        sender.shutdown()

    def test_what_is_streamed_is_sent_before_it_returns(self, monkeypatch):
        model, seen = torch.nn.Linear(3, 2), []
        monkeypatch.setattr(EngineGroup, "connect", lambda *arguments: None)

        def take(group, members):
            seen.append(model.weight.clone())
            group.each(members, Member.start_weight_update)

        monkeypatch.setattr(EngineGroup, "take", take)
        sender = make_sender(VLLMWeightSyncScheme(), model, FakeEngine())
        update = sender.start_update()
        assert update.done() or seen, "training would change weights that are still to be read"
        assert update.result(240) == 1
        sender.shutdown()


def test_another_sender_does_not_resume_an_engine_that_holds_a_mixture():
    """It was left by the sender before; an update that is refused before it loads changes nothing of that."""
    engine, model = TakingEngine(), torch.nn.Linear(3, 2)
    first = make_sender(VLLMWeightSyncScheme(), model, engine)
    engine.fails_at = "finish"
    with pytest.raises(WeightSyncError, match="a mixture"):
        first.update_weights()
    first.shutdown()
    engine.fails_at, engine.is_full = None, True
    second = make_sender(VLLMWeightSyncScheme(), model, engine)
    with pytest.raises(WeightSyncError, match="No engine holds a complete set of weights; they stay paused"):
        second.update_weights()
    assert "resume" not in engine.names
    engine.is_full = False
    assert second.update_weights() == engine.policy_version
    assert engine.names[-1] == "resume"
    second.shutdown()
