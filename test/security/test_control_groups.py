"""Control groups: the memory of an interpreter and all that it starts is bounded where a group is delegated."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cages import LIMITS

from llmrl.runs.run_folder import memory_kills
from llmrl.sandbox import control_groups, launch
from llmrl.sandbox.control_groups import MemoryGroups, delegated_group
from llmrl.sandbox.launch import IsolationError
from llmrl.sandbox.service import PythonExecutorService

pytestmark = pytest.mark.usefixtures("own_programs")

# Three processes, each of which may have 512 MiB, take 300 MiB each; how many of them live.
HOGS = """
import os, time
hogs = []
for number in range(3):
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        held = bytearray(300 << 20)
        for place in range(0, len(held), 4096): held[place] = 1
        os.write(writing, b'x')
        time.sleep(60)
    os.close(writing)
    hogs.append((pid, reading))
for pid, reading in hogs:
    os.read(reading, 1)  # it holds all, or has ended
living = {pid for pid, _ in hogs}
for _ in range(100):  # one that the kernel is ending takes its time
    living = {pid for pid in living if os.waitpid(pid, os.WNOHANG)[0] == 0}
    if len(living) < 2: break
    time.sleep(0.1)
print(len(living))
"""


def test_memory_of_all_processes_together_is_bounded(cage):
    if "a bound on memory in all" not in cage.service.description:
        pytest.skip("no control group is delegated here")
    start, num_kills = memory_kills()
    (num_living,) = map(int, cage.lines(HOGS))
    # The kernel may end the interpreter's copies alone: it prints.
    assert num_living <= (LIMITS.memory_bytes + LIMITS.folder_bytes) / (300 << 20)
    assert memory_kills()[0] == start and memory_kills()[1] >= num_kills + 3 - num_living
    assert cage.lines("print('serves on')") == ["serves on"]


@pytest.fixture
def own(monkeypatch):
    """A group for this test: below the delegated one, other processes make and remove groups."""
    try:
        outer, version = delegated_group()
    except OSError as error:
        pytest.skip(str(error))
    own = outer / f"llmrl-test-{uuid.uuid4().hex[:8]}"
    own.mkdir()
    if version == 2:
        (own / "cgroup.subtree_control").write_text("+memory")
    monkeypatch.setattr(control_groups, "delegated_group", lambda: (own, version))
    yield own
    own.rmdir()


def groups_in(own):
    return [path for path in own.iterdir() if path.is_dir()]


def test_groups_are_as_many_as_interpreters_and_gone_with_the_service(own):
    service = PythonExecutorService(num_ready=2, timeout=60, isolation="process")
    (folder,) = groups_in(own)
    for number in range(12):
        assert service.execute(f"print({number})")["stdout"] == f"{number}\n"
    assert len(groups_in(folder)) < 12
    service.close()
    assert not folder.exists()


def test_closing_ends_calls_in_progress_and_removes_their_groups(own):
    service = PythonExecutorService(num_ready=1, isolation="process")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(service.execute, "import time; time.sleep(600)", timeout=600)
        time.sleep(0.3)
        service.close()
    assert groups_in(own) == [] and call.exception() is not None


def test_a_level_that_is_refused_leaves_no_group(own, monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(IsolationError, match="not installed"):
        PythonExecutorService(isolation="bubblewrap")
    monkeypatch.setattr(launch, "_CODE", "import os; os._exit(1)")
    for level in ("namespaces", "process"):
        with pytest.raises(IsolationError, match="its process ended"):
            PythonExecutorService(isolation=level)
    assert groups_in(own) == []


@pytest.mark.usefixtures("own")
def test_no_group_is_removed_before_its_interpreter_is_in_it():
    service = PythonExecutorService(num_ready=8, timeout=60, isolation="process")
    with ThreadPoolExecutor(32) as threads:
        results = list(threads.map(lambda number: service.execute(f"print({number})"), range(96)))
    assert [result["stdout"] for result in results] == [f"{number}\n" for number in range(96)]
    assert len(service._launcher._processes) == 1  # what starts interpreters lived through all
    service.close()


def test_groups_of_a_program_that_was_killed_are_removed_by_the_next(own):
    code = f"""
import os
from pathlib import Path
from llmrl.sandbox import control_groups
control_groups.delegated_group = lambda: (Path({str(own)!r}), {control_groups.delegated_group()[1]})
print(control_groups.MemoryGroups(1 << 30)._folder, flush=True)
os.kill(os.getpid(), 9)
"""
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.parent == own and left.exists()
    MemoryGroups(1 << 30).close()
    assert not left.exists()


def test_where_no_group_is_delegated_interpreters_start_and_the_description_says_no_bound(monkeypatch):
    def refuse():
        raise OSError("none")

    monkeypatch.setattr(control_groups, "delegated_group", refuse)
    service = PythonExecutorService(num_ready=1, isolation="process")
    assert "memory in all" not in service.description and service.execute("print(1)")["stdout"] == "1\n"
    service.close()


# Version 2 on this kernel, by whichever controller it has there.
DIVIDE = """
import sys
from pathlib import Path
from llmrl.sandbox import control_groups
group, control_groups._CONTROLLER = Path(sys.argv[1]), sys.argv[2]
sys.stdin.readline()
try: print(*control_groups.delegated_group())
except OSError as error: print(error); sys.exit()
groups = control_groups.MemoryGroups(1 << 30)
has_controller = control_groups._CONTROLLER in (groups._folder / "cgroup.controllers").read_text().split()
print(groups._folder.parent, (group / "cgroup.procs").read_text() == "", has_controller)
groups.close()
print(len(list(group.glob("llmrl-python-*"))), *control_groups.delegated_group())
"""


@pytest.mark.parametrize("is_delegated", [True, False])
def test_a_group_of_version_2_is_divided_where_its_manager_allows_it(is_delegated):
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    root = next((Path(mount[4]) for mount in mounts if "cgroup2" in mount), None)
    if os.getuid() or root is None or not os.access(root, os.W_OK):
        pytest.skip("no control groups of version 2 that may be made")
    controllers = (root / "cgroup.controllers").read_text().split()
    controller = next((name for name in ("memory", "hugetlb", "pids") if name in controllers), None)
    if controller is None:
        pytest.skip("version 2 has no controller here")
    is_divided = controller in (root / "cgroup.subtree_control").read_text().split()
    (root / "cgroup.subtree_control").write_text(f"+{controller}")
    group = root / f"llmrl-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        if is_delegated:
            os.setxattr(group, "user.delegate", b"1")
        process = subprocess.Popen(
            [sys.executable, "-c", DIVIDE, str(group), controller],
            env={"PYTHONPATH": str(Path(launch.__file__).parents[2])},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        (group / "cgroup.procs").write_text(str(process.pid))
        said = process.communicate("\n", timeout=60)[0].splitlines()
        if is_delegated:
            assert said[0] == f"{group} 2" and said[1] == f"{group} True True"
            assert said[2] == f"0 {group} 2"
        else:  # and memory may be of version 1
            assert f"{group}" not in said[0]
    finally:
        for path in (*group.glob("llmrl-*"), group):
            path.rmdir()
        if not is_divided:
            (root / "cgroup.subtree_control").write_text(f"-{controller}")
