"""What an engine keeps among temporary files and in shared memory is gone with it, also when it was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from waiting import is_running, wait_until
from weight_sync_tools import sharp_llama

from llmrl.engines import AsyncVLLM, EngineError
from llmrl.engines.engine_folder import engine_folder
from llmrl.engines.vllm import private as vllm_private


@pytest.fixture
def base(monkeypatch):
    """Where folders of engines are made; its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        monkeypatch.setenv("TMPDIR", folder)  # of processes that are started, so that others' files are not seen
        yield Path(folder)


@pytest.mark.slow
def test_the_folder_of_a_trainer_that_was_killed_is_removed_at_the_next_start(base):
    code = (
        "from llmrl.engines.engine_folder import engine_folder\n"
        "with engine_folder() as folder: open(folder + '/socket', 'w').close(); print(folder, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as trainer:
        left = Path(trainer.stdout.readline().strip())
        os.utime(left, (0, 0))  # long ago
        with engine_folder() as own:
            assert left.is_dir(), "its trainer lives"
            os.utime(own, (0, 0))
            with engine_folder():
                assert Path(own).is_dir()
        trainer.kill()
    assert list(base.iterdir()) == [left]
    with engine_folder() as own:
        assert list(base.iterdir()) == [Path(own)]
    assert not list(base.iterdir())


def test_a_start_without_the_folder_of_all_engines_leaves_no_thread(imports_vllm, base, monkeypatch):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(base / "absent"))
    before = threading.enumerate()
    with pytest.raises(EngineError, match=f"No such file or directory: '{base}/absent"):
        AsyncVLLM.from_pretrained("model")
    assert not [thread for thread in set(threading.enumerate()).difference(before) if thread.name == "llmrl-vllm"]


def test_the_file_at_which_workers_meet_is_in_the_folder(tmp_path, monkeypatch, imports_vllm):
    from vllm.utils import network_utils

    monkeypatch.setattr(network_utils, "tempfile", tempfile)
    vllm_private.put_files_into(str(tmp_path))
    assert network_utils.get_file_store_init_method().startswith(f"file://{tmp_path}/vllm_dist_")


def test_a_killed_engine_of_several_processes_leaves_neither_files_nor_shared_memory(real_vllm, tmp_path, base):
    sharp_llama(tmp_path)
    engine = AsyncVLLM.from_pretrained(
        tmp_path, max_model_len=512, kv_cache_memory=1 << 26, cpu_threads=1,
        engine_args={"skip_tokenizer_init": True, "tensor_parallel_size": 2},
    )  # fmt: skip
    [process] = vllm_private.processes_of(engine.llm)
    workers = psutil.Process(process.pid).children(recursive=True)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (process.pid, *(worker.pid for worker in workers))]
    shared = [Path(path) for path in set(re.findall(r"/dev/shm/psm_\w+", "".join(maps)))]
    assert shared and list(base.rglob("vllm_dist_*"))
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not engine.is_alive)
    engine.shutdown()
    assert not [path for path in shared if path.exists()]
    assert not list(base.iterdir())
    wait_until(lambda: not any(is_running(worker.pid) for worker in workers), timeout_s=60)
