"""A trainer that is killed leaves none of its engines behind, whenever that is; cheap processes stand for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import is_running, wait_until

from llmrl.engines.child_process import PARENT_VARIABLE

# Each writes its process id, starts the next one as vLLM does, and registers when its turn comes.
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from llmrl.engines.child_process import PARENT_VARIABLE, register
folder, names = Path(sys.argv[1]), sys.argv[2:]
(folder / f"{names[0]}.part").write_text(str(os.getpid()))
(folder / f"{names[0]}.part").rename(folder / f"{names[0]}.pid")
if names[0] == "trainer":
    os.environ[PARENT_VARIABLE] = str(os.getpid())
else:
    while not (folder / f"{names[0]} may register").exists():
        time.sleep(0.005)
    register()
    (folder / f"{names[0]} is registered").touch()
if names[1:]:
    subprocess.Popen([sys.executable, "-c", os.environ["PROGRAM"], folder, *names[1:]])
time.sleep(600)
"""
NAMES = ("trainer", "engine", "worker")
MOMENTS = ("engine.pid", "engine is registered", "worker.pid", "worker is registered")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone")
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_process_of_an_engine_ends_with_a_trainer_that_is_killed_while_it_starts(tmp_path, own_programs, moment):
    environment = {**os.environ, "PROGRAM": PROGRAM}
    trainer = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path, *NAMES], env=environment)
    try:
        for reached in MOMENTS[: MOMENTS.index(moment) + 1]:
            if reached.endswith("registered"):
                Path(tmp_path, reached.replace("is registered", "may register")).touch()
            wait_until(Path(tmp_path, reached).exists)
    finally:
        trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    for name in NAMES[1:]:
        Path(tmp_path, f"{name} may register").touch()
    processes = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    try:
        wait_until(lambda: not any(map(is_running, processes)), timeout_s=120)
    finally:
        for process in filter(is_running, processes):
            os.kill(process, signal.SIGKILL)
    assert len(processes) == (2 if moment.startswith("engine") else 3)


def test_a_process_that_another_one_started_meanwhile_goes_on(tmp_path, own_programs):
    """The variable is there for whatever is started at that moment; the trainer lives."""
    code = "from llmrl.engines.child_process import register; register(); print('goes on')"
    shell = f'{sys.executable} -c "{code}"; true'
    environment = {**os.environ, "LLMRL_ENGINE_PARENT": str(os.getpid())}
    answer = subprocess.run(["sh", "-c", shell], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "goes on"


@pytest.mark.parametrize(("name", "importing"), [("__mp_main__", 50_000), ("__main__", 700)])
def test_an_engines_process_collects_garbage_rarely_while_it_imports(name, importing, own_programs):
    program = f"""if True:
        import gc, runpy
        runpy.run_module("llmrl.engines.child_process", run_name={name!r})
        print(gc.get_threshold()[0])
        from llmrl.engines.child_process import register
        register()
        print(gc.get_threshold()[0])
    """
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [str(importing), "700"]


def test_an_engines_process_is_quiet_while_it_imports_vllm(imports_vllm):
    """vLLM applies its log level after its imports, one of which warns of Triton on a CPU."""
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "VLLM_LOGGING_LEVEL": "ERROR"}
    program = "from llmrl import AsyncVLLM\nimport vllm.triton_utils"  # the main module, then what its target imports
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
