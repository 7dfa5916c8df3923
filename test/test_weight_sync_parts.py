"""The parts of weight sync that need no engine: packing, shared memory, names, the receivers' fan-out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from llmrl.engines.base import EngineError
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSyncError, get_model_metadata
from llmrl.weight_sync.packing import ALIGNMENT, PackedLayout, read_tag, write_tag
from llmrl.weight_sync.shared_memory import SharedBuffer, open_shared
from llmrl.weight_sync.source import checkpoint_name, named_weights


class FakeEngine:
    """Records what its control plane is told."""

    weight_transfer_backend = "nccl"
    model_dtype = torch.bfloat16

    def __init__(self, num_workers=1, version=0, fails_at=None):
        self.num_workers, self.policy_version, self.fails_at = num_workers, version, fails_at
        self.calls = []

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self.fails_at:
            raise EngineError(f"{name} refused")

    def pause(self, mode, *, clear_cache):
        self._call("pause", mode, clear_cache)

    def resume(self):
        self._call("resume")

    def reset_prefix_cache(self, *, reset_running_requests):
        self._call("reset_prefix_cache", reset_running_requests)
        return True

    def init_weight_transfer_engine(self, info):
        self._call("init", info)

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, info):
        self._call("update")

    def finish_weight_update(self, version):
        self._call("finish", version)
        self.policy_version = int(version)


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
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert read_tag(buffer) == "tag"


def test_a_layout_refuses_nothing_and_twice():
    with pytest.raises(ValueError, match="no weights"):
        PackedLayout.of([])
    with pytest.raises(ValueError, match="twice"):
        PackedLayout.of([("a", torch.float32, (1,))] * 2)


def test_another_process_reads_the_buffer_and_writes_only_its_own_copy():
    shared = SharedBuffer(256)
    shared.tensor.copy_(torch.arange(256, dtype=torch.uint8))
    code = (
        "from llmrl.weight_sync.shared_memory import open_shared\n"
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


def test_a_model_with_adapters_is_refused():
    model = torch.nn.Linear(2, 2)
    model.peft_config = {"default": object()}
    with pytest.raises(TypeError, match="merge"):
        get_model_metadata(model)
    with pytest.raises(TypeError, match="list"):
        get_model_metadata([1])


def test_workers_of_each_engine_follow_those_of_the_one_before():
    engines = [FakeEngine(num_workers=2), FakeEngine(num_workers=1), FakeEngine(num_workers=4)]
    receiver = VLLMWeightSyncScheme().create_receiver(engines)
    receiver.init_weight_transfer_engine({"rank_offset": 1, "world_size": 8})
    assert [engine.calls[0][1]["rank_offset"] for engine in engines] == [1, 3, 4]
    assert receiver.num_workers == 7


def test_several_engines_get_one_version():
    engines = [FakeEngine(version=3), FakeEngine(version=5)]
    receiver = VLLMWeightSyncScheme().create_receiver(engines)
    assert receiver.policy_version == 3
    assert receiver.finish_weight_update() == 6
    assert [engine.policy_version for engine in engines] == [6, 6]


def test_engines_resume_after_an_error_unless_told_to_stay():
    engine = FakeEngine()
    receiver = VLLMWeightSyncScheme(pause_mode="abort").create_receiver(engine)
    with pytest.raises(KeyError), receiver.paused():
        raise KeyError
    assert [call[0] for call in engine.calls] == ["pause", "resume"]
    assert engine.calls[0][1] == "abort"
    with receiver.paused():
        receiver.stay_paused()
    assert engine.calls[-1][0] == "pause"


def test_engines_without_weight_transfer_are_refused():
    engine = FakeEngine()
    engine.weight_transfer_backend = None
    with pytest.raises(ValueError, match="weight_transfer=True"):
        VLLMWeightSyncScheme().create_receiver(engine)
    with pytest.raises(ValueError, match="empty"):
        VLLMWeightSyncScheme().create_receiver([])


def test_a_sender_says_what_it_lacks():
    sender = VLLMWeightSyncScheme().create_sender()
    with pytest.raises(RuntimeError, match="register_model"):
        sender.init_all_workers_group(None, FakeEngine())
    with pytest.raises(RuntimeError, match="init_all_workers_group"):
        sender.update_weights()
    sender.shutdown()


@pytest.mark.parametrize("options", [{"pause_mode": "stop"}, {"rank": -1}, {"mode": "keep"}])
def test_a_scheme_refuses_what_it_does_not_know(options):
    with pytest.raises((ValueError, TypeError)):
        VLLMWeightSyncScheme(**options)


class TestNcclTransfer:
    """vLLM's own NCCL engines on GPU: driven as far as a machine without one goes."""

    @pytest.fixture(autouse=True)
    def _needs_vllm(self):
        pytest.importorskip("vllm")

    def test_trainer_and_workers_make_one_group(self):
        from llmrl.weight_sync.transport import trainer_init_info

        scheme = VLLMWeightSyncScheme(master_address="10.0.0.1", master_port=1234, rank=2)
        info = trainer_init_info(scheme, "nccl", num_workers=3)
        assert (info.master_address, info.master_port, info.world_size, info.rank) == ("10.0.0.1", 1234, 4, 2)
        with pytest.raises(ValueError, match="'ipc'"):
            trainer_init_info(scheme, "ipc", num_workers=1)

    def test_an_update_runs_through_vllms_trainer_engine(self, monkeypatch):
        from vllm.distributed.weight_transfer import nccl_engine

        sent = {}
        monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: FakeCommunicator())
        monkeypatch.setattr(
            nccl_engine,
            "packed_nccl_broadcast_producer",
            lambda iterator, **options: sent.update((name, tensor.clone()) for name, tensor in iterator),
        )
        model, engine = torch.nn.Linear(3, 2), FakeEngine(version=4)
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), engine)
        assert engine.calls[0][1]["world_size"] == 2
        assert sender.update_weights() == 5
        assert [call[0] for call in engine.calls[1:]] == [
            "pause", "start", "update", "finish", "reset_prefix_cache", "resume",
        ]  # fmt: skip
        assert sent["weight"].dtype is torch.bfloat16
        assert torch.equal(sent["weight"], model.weight.to(torch.bfloat16))
        sender.shutdown()

    def test_a_failure_that_cannot_be_undone_leaves_the_engine_paused(self, monkeypatch):
        from vllm.distributed.weight_transfer import nccl_engine

        monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: FakeCommunicator())
        monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **options: list(iterator))
        engine = FakeEngine(fails_at="update")
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(torch.nn.Linear(3, 2))
        sender.init_all_workers_group(None, engine)
        with pytest.raises(WeightSyncError, match="stays paused until an update succeeds"):
            sender.update_weights()
        assert "resume" not in [call[0] for call in engine.calls]
        engine.fails_at = None
        assert sender.update_weights() == 1
        assert engine.calls[-1][0] == "resume"

    def test_metadata_of_another_model_is_refused(self, monkeypatch):
        from vllm.distributed.weight_transfer import nccl_engine

        monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: FakeCommunicator())
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(torch.nn.Linear(3, 2))
        with pytest.raises(ValueError, match="1 weights differ"):
            sender.init_all_workers_group(get_model_metadata(torch.nn.Linear(4, 2)), FakeEngine())


class FakeCommunicator:
    def destroy(self):
        pass
