"""Transfers between GPUs: both ends of vLLM's NCCL and CUDA IPC engines run, as far as a machine without a GPU goes.

What stands in for the device: a communicator that broadcasts through the rendezvous' own store instead of NCCL, and a
table instead of CUDA's handles to memory. Ranks, rendezvous, metadata, packing, handles on their way through plain
types, and loading are vLLM's and ours.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stream_worker import GlooCommunicator, HostTorch, WorkerModel
from warm_processes import WarmPopen
from weight_sync_tools import FakeEngine, make_sender

from llmrl.engines import AsyncVLLM, EngineReplicas
from llmrl.engines.base import EngineError
from llmrl.engines.environment import transfer_variables
from llmrl.engines.vllm import private as vllm_private
from llmrl.engines.vllm import start as vllm_start
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSyncError
from llmrl.weight_sync.plugin import register

pytestmark = pytest.mark.usefixtures("imports_vllm")


class WorkerEngine(FakeEngine):
    """An engine with vLLM's weight-transfer engines as workers, in this process; all messages to them are JSON."""

    def __init__(self, backend="nccl", num_workers=1, **options):
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        register()
        super().__init__(num_workers=num_workers, **options)
        self.weight_transfer_backend = backend
        backend = {"nccl": "llmrl-nccl"}.get(backend, backend)
        self.models = [WorkerModel().requires_grad_(False) for _ in range(num_workers)]
        self._workers = []
        for rank, model in enumerate(self.models):
            record_metadata_for_reloading(model)
            parallel = SimpleNamespace(data_parallel_index=0, world_size=num_workers, rank=rank)
            config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.bfloat16))
            create = WeightTransferEngineFactory.create_engine
            self._workers.append(create(WeightTransferConfig(backend=backend), config, torch.device("cpu"), model))

    def _on_workers(self, action):
        with ThreadPoolExecutor(self.num_workers) as pool:
            try:
                list(pool.map(action, self._workers))
            except Exception as error:
                raise EngineError(f"vLLM refused: {error}") from error

    def init_weight_transfer_engine(self, info):
        super().init_weight_transfer_engine(info)
        info = json.loads(json.dumps(info))
        self._on_workers(lambda worker: worker.init_transfer_engine(worker.parse_init_info(info)))

    def start_weight_update(self):
        super().start_weight_update()
        self._on_workers(lambda worker: worker.start_weight_update())

    def update_weights(self, info):
        super().update_weights(info)
        info = json.loads(json.dumps(info))
        self._on_workers(lambda worker: worker.update_weights(info))

    def finish_weight_update(self, version):
        super().finish_weight_update(version)
        self._on_workers(lambda worker: worker.finish_weight_update())


class StoreCommunicator:
    """Broadcasts through the store of the group that NCCL would meet in."""

    def __init__(self, group, device):
        self._group = group

    def broadcast(self, tensor, src, stream=None):
        tensor.copy_(self._group.broadcast(tensor, src))

    def destroy(self):
        self._group = None


class ProcessEngine(FakeEngine):
    """An engine with a process as worker (`stream_worker`), which signals may end."""

    def __init__(self):
        super().__init__()
        command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "stream_worker.py"), "work"]
        self._process = WarmPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()
        self._is_shut_down = False

    @property
    def is_alive(self):  # as an engine's; `poll` returns None while another thread waits for the end
        return not self._is_shut_down and self._process.poll() is None

    def ask(self, name, given=None):
        """What the worker answers."""
        with self._lock:
            try:
                if name:
                    self._process.stdin.write(json.dumps([name, given]) + "\n")
                    self._process.stdin.flush()
                line = self._process.stdout.readline()
            except (OSError, ValueError):
                line = ""
        if not line:
            raise EngineError("the engine's process is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"vLLM refused: {answer['error']}")
        return answer["is"]

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in ("init", "start", "update", "finish"):
            self.ask(name, *arguments)

    def shutdown(self):
        self._is_shut_down = True
        self._process.kill()
        self._process.wait()


@pytest.fixture
def stand_in(monkeypatch):
    """Stands in for the device; `exports` are the sizes of the buffers that were exported."""
    from torch.multiprocessing import reductions
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", HostTorch.cuda.get_device_properties)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", StoreCommunicator)
    monkeypatch.setattr(packed_tensor, "torch", HostTorch())
    monkeypatch.setattr(
        packed_tensor, "_get_streams", lambda index, count: [SimpleNamespace(synchronize=lambda: None)] * count
    )
    memory, numbers = {}, itertools.count()

    def export(buffer):
        number = next(numbers)
        memory[number] = buffer
        return None, (number, "size", "stride", "offset", "storage", "dtype", "device")

    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda number, *rest: memory[number])
    return SimpleNamespace(exports=lambda: [buffer.numel() for buffer in memory.values()])


@pytest.fixture
def trusting(monkeypatch):
    """The environment that an engine for CUDA IPC is started with."""
    for name, value in transfer_variables("ipc").items():
        monkeypatch.setenv(name, value)


def trained_model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"first": torch.nn.Linear(3, 4), "second": torch.nn.Linear(4, 2)})


def assert_same(model, engine):
    for worker_model in engine.models:
        for name, weight in model.named_parameters():
            own = worker_model.get_parameter(name)
            assert torch.equal(own, weight.to(torch.bfloat16).to(own.dtype)), name


def test_nccl_makes_one_group_of_trainer_and_all_workers_and_weights_arrive(stand_in):
    engines, model = [WorkerEngine(version=4), WorkerEngine(version=4, num_workers=2)], trained_model()
    sender = make_sender(VLLMWeightSyncScheme(master_address="127.0.0.1"), model, engines)
    infos = [engine.calls[0][1] for engine in engines]
    assert [(info["rank_offset"], info["world_size"]) for info in infos] == [(1, 4), (2, 4)]
    assert infos[0]["master_port"] == infos[1]["master_port"]
    for version in (5, 6):
        with torch.no_grad():
            model["first"].weight.add_(1)
        assert sender.update_weights() == version
        for engine in engines:
            assert_same(model, engine)
            assert engine.names[-6:] == ["pause", "start", "update", "finish", "reset_prefix_cache", "resume"]
    sender.shutdown()


def test_a_worker_that_is_killed_or_stands_still_in_a_broadcast_ends_it_and_the_others_get_the_weights(
    stand_in, monkeypatch, own_programs
):
    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", GlooCommunicator)
    info = functools.partial(vllm_private.NCCLTrainerInitInfo, packed_buffer_size_bytes=1)  # a weight a broadcast
    monkeypatch.setattr(vllm_private, "NCCLTrainerInitInfo", info, raising=False)
    survivor, victims, model = WorkerEngine(), [ProcessEngine(), ProcessEngine()], trained_model()
    try:
        assert [engine.ask(None) for engine in victims] == ["ready"] * 2
        replicas = EngineReplicas([victims[0], survivor, victims[1]], hang_timeout_seconds=6.0)
        sender = make_sender(VLLMWeightSyncScheme(), model, replicas)
        for version, (victim, ends) in enumerate([(None, ""), (victims[0], "SIGSTOP"), (victims[1], "SIGKILL")], 1):
            with torch.no_grad():
                model["first"].weight.add_(1)
            if victim is not None:
                victim.ask("end_at", [2, ends])
            assert sender.update_weights() == version == survivor.policy_version
            assert [engine.is_alive for engine in victims] == [version < 2, version < 3]
            assert_same(model, survivor)
            assert survivor.names[-1] == "resume"
        assert (replicas.num_hangs, replicas.num_deaths) == (1, 2)
        sender.shutdown()
    finally:
        for engine in victims:
            engine.shutdown()


def test_a_group_that_is_not_met_is_an_error_and_no_wait(stand_in, monkeypatch):
    with pytest.raises(EngineError, match="init refused"):
        make_sender(VLLMWeightSyncScheme(), trained_model(), WorkerEngine(fails_at="init"))

    def refuse(info, *, client, source):
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(vllm_private._find("NCCLTrainerWeightTransferEngine"), "trainer_init", refuse)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        make_sender(VLLMWeightSyncScheme(), trained_model(), WorkerEngine())


def test_weights_are_read_when_what_the_gpu_was_asked_before_is_done(stand_in, monkeypatch):
    engine, model = WorkerEngine(), trained_model()
    sender = make_sender(VLLMWeightSyncScheme(), model, engine)
    done, before = [], len(engine.names)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: done.append(list(engine.names[before:])))
    sender.update_weights()
    assert done[0] == [] and "update" in engine.names[before:]
    sender.shutdown()


def test_the_group_is_made_anew_when_a_replica_is_replaced(stand_in):
    engines, model = [WorkerEngine(), WorkerEngine()], trained_model()
    sender = make_sender(VLLMWeightSyncScheme(), model, engines)
    engines[1] = WorkerEngine()
    assert sender.update_weights() == 1
    assert engines[0].names.count("init") == 2 and engines[1].names.count("init") == 1
    engines[1] = late = WorkerEngine()
    with pytest.raises(WeightSyncError, match="after the next update"):
        sender.bring_up_to_date(late)
    assert sender.update_weights() == 2 == late.policy_version
    assert_same(model, late)
    sender.shutdown()


def test_ipc_hands_out_one_buffer_that_is_filled_as_often_as_needed(stand_in, trusting, monkeypatch):
    from vllm.distributed.weight_transfer import ipc_engine

    engine, model = WorkerEngine("ipc"), trained_model()
    sender = make_sender(VLLMWeightSyncScheme(), model, engine)
    assert sender.update_weights() == 1
    assert_same(model, engine)
    assert engine.names.count("update") == 1
    # Were vLLM's default smaller than a weight, the buffer would be as large as that.
    monkeypatch.setattr(ipc_engine, "DEFAULT_PACKED_BUFFER_SIZE_BYTES", 4)
    with torch.no_grad():
        model["second"].weight.mul_(-1)
    other = make_sender(VLLMWeightSyncScheme(), model, engine)
    assert other.update_weights() == 2
    assert_same(model, engine)
    assert engine.names.count("update") > 2
    assert stand_in.exports() == [2 * sum(p.numel() for p in model.parameters()), 2 * model["first"].weight.numel()]
    sender.shutdown()
    other.shutdown()


def test_handles_of_ipc_are_refused_by_an_engine_that_was_started_without(stand_in, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    sender = make_sender(VLLMWeightSyncScheme(), trained_model(), WorkerEngine("ipc"))
    with pytest.raises(WeightSyncError, match="Refusing to deserialize"):
        sender.update_weights()
    sender.shutdown()


@pytest.mark.parametrize(("backend", "known_as", "expected"), [("ipc", "ipc", "1"), ("nccl", "llmrl-nccl", None)])
def test_only_engines_for_ipc_take_handles_and_all_are_spawned(
    monkeypatch, tiny_model_path, backend, known_as, expected
):
    from vllm.platforms import current_platform
    from vllm.utils.system_utils import get_mp_context

    seen, sockets = [], []

    async def start(arguments, stat_logger):
        seen.append((arguments.weight_transfer_config.backend, os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION")))
        assert get_mp_context().get_start_method() == "spawn"
        assert arguments.enable_sleep_mode
        sockets.append(Path(os.environ["VLLM_RPC_BASE_PATH"]))
        (sockets[0] / "one").touch()
        raise RuntimeError("seen enough")

    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    monkeypatch.setattr(vllm_start, "start_llm", start)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(EngineError, match="seen enough"):
        AsyncVLLM.from_pretrained(tiny_model_path, weight_transfer=backend, enable_sleep=True)
    assert seen == [(known_as, expected)]
    assert not sockets[0].exists(), "what vLLM leaves behind goes with its engine"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ


def test_a_failure_that_cannot_be_undone_leaves_the_engine_paused(stand_in, trusting):
    engine, model = WorkerEngine("ipc", fails_at="update"), trained_model()
    sender = make_sender(VLLMWeightSyncScheme(), model, engine)
    with pytest.raises(WeightSyncError, match="stay paused until an update succeeds"):
        sender.update_weights()
    assert "resume" not in engine.names
    engine.fails_at = None
    assert sender.update_weights() == 1
    assert engine.names[-1] == "resume"
    assert_same(model, engine)
    sender.shutdown()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_without_a_gpu_both_ends_say_so(tiny_model_path, backend):
    with pytest.raises(EngineError, match=rf"weight_transfer='{backend}' moves weights between GPUs.*pass weight_tr"):
        AsyncVLLM.from_pretrained(tiny_model_path, weight_transfer=backend)
    engine = FakeEngine()
    engine.weight_transfer_backend = backend
    with pytest.raises(ValueError, match=f"'{backend}', which moves them between GPUs, and this process has none"):
        make_sender(VLLMWeightSyncScheme(), trained_model(), engine)
