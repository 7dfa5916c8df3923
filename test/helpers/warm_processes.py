"""Python processes that are forked from one that has imported vLLM, in place of interpreters that import it again.

To import vLLM, torch and transformers takes 10 to 15 s of processor time in each engine, script and rank. A server
imports them once. It is a child of the process that asks. What it forks becomes a child of that process, too, has the
environment, the folder and the files that it is given, can fork others in the same way, and ends as an interpreter
does.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import itertools
import logging
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from multiprocessing import util
from pathlib import Path
from unittest import mock

# What the processes import. None of it may start a thread: a process that has several cannot be forked.
ENGINE_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "llmrl.weight_sync.plugin",
)
MODULES = (
    "llmrl",
    "llmrl.engines",
    # What scripts and ranks import besides.
    "llmrl.scripts.grpo",
    "hydra",
    "matplotlib.pyplot",
    "peft",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)
# What files of tests import, of which each process imports all.
TEST_MODULES = ("anthropic", "openai", "aiohttp.web", "gymnasium", "mcp", "torchrl.trainers")
# Variables that are read before a program runs: those of a warm process are the server's.
READ_EARLY = ("CUDA_", "GOMP_", "HF_", "LD_", "MKL_", "PYTHONHASHSEED", "PYTHONPATH", "TRANSFORMERS_")
PR_SET_CHILD_SUBREAPER = 36
HEADER = struct.Struct("<Q")


class WarmServer:
    """Forks processes for this one."""

    def __init__(self, connection, process=None):
        self._connection = connection
        self._process = process
        self._is_ready = False

    @classmethod
    def launch(cls, environment, *parts):
        """Start a server in an interpreter of its own, which imports what `engines` or `tests` need besides."""
        connection, its_end = socket.socketpair()
        with its_end:
            number = its_end.fileno()
            command = [sys.executable, __file__, str(number), *parts]
            return cls(connection, subprocess.Popen(command, env=environment, pass_fds=[number]))

    @classmethod
    def fork(cls):
        """Fork a server from this process, which has one thread, for those that it will start itself."""
        connection, its_end = socket.socketpair()
        if os.fork() == 0:
            # What the program has open ends with the program.
            with Path(os.devnull).open("r+b", buffering=0) as nothing:
                for number in range(3):
                    os.dup2(nothing.fileno(), number)
            os.closerange(3, its_end.fileno())
            os.closerange(its_end.fileno() + 1, 4096)
            become(*serve(its_end))  # in what it forks
        its_end.close()
        return cls(connection)

    def start(self, arguments, environment, files, *, folder=None, is_session=False):
        """Start `python *arguments`, in which `number` is our file `files[number]`; return its process id."""
        folder = str(folder or Path.cwd())
        request = pickle.dumps((list(arguments), dict(environment), folder, list(files), is_session))
        with _starting:
            if not self._is_ready:
                self._answer()
                self._is_ready = True
            with adopting():
                socket.send_fds(self._connection, [HEADER.pack(len(request))], list(files.values()))
                self._connection.sendall(request)
                return self._answer()

    def _answer(self):
        answer = self._connection.recv(HEADER.size)
        assert answer, "the server of warm processes has ended"
        return HEADER.unpack(answer)[0]


_starting = threading.Lock()  # one at a time: this process adopts what becomes an orphan meanwhile


@contextlib.contextmanager
def adopting():
    """Let this process become the parent of orphans below it."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def receive(connection):
    """A request and the files that come with it; nothing at the end."""
    header, files, *_ = socket.recv_fds(connection, HEADER.size, 200)
    size = HEADER.unpack(header)[0] if header else 0
    request = b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    return request, files


def serve(connection):
    """Fork a process for each request and return the request there; end when no process is left that could ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the program
    connection.sendall(HEADER.pack(0))
    while True:
        request, files = receive(connection)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            *asked, is_session = pickle.loads(request)
            if is_session:  # before the process is known: who starts it may ask for its group
                os.setsid()
            connection.sendall(HEADER.pack(os.getpid()))
            connection.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return asked, files
        os.wait()
        for file in files:
            os.close(file)


def catch_up(environment):
    """Do what is done at the start or on import with variables that the server may have otherwise."""
    mallopt = ctypes.CDLL(None).mallopt
    for option, name in ((-1, "MALLOC_TRIM_THRESHOLD_"), (-3, "MALLOC_MMAP_THRESHOLD_")):
        if name in environment:
            mallopt(option, min(int(environment[name]), 2**31 - 1))
    torch = sys.modules["torch"]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    sys.modules["torch._dynamo.config"].disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    logging.getLogger("vllm").setLevel(environment.get("VLLM_LOGGING_LEVEL", "INFO"))
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")


def become(request, files):
    """Run the program that was asked for, and end."""
    arguments, environment, folder, numbers = request
    above = 1 + max((*numbers, *files))
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    catch_up(environment)
    # Under this name the program finds it, and asks the same server.
    sys.modules["warm_processes"] = sys.modules["__main__"]
    _servers[key_of(environment)] = own = WarmServer.fork()
    util.spawnv_passfds = forking(own)
    end_with(lambda: run_program(*itertools.dropwhile(lambda word: word in ("-u", "-B"), arguments), folder=folder))


def run_program(first, *rest, folder):
    """Run what the arguments of an interpreter say."""
    if first == "-m":
        sys.argv, sys.path[0] = list(rest), folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        source, name = rest[0], "<string>"
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        source, name = Path(first).read_bytes(), first
        main.__file__ = name
    exec(compile(source, name, "exec"), vars(main))


def end_with(program):
    """Run a program and end as an interpreter does, but leave its objects: to free vLLM's takes half a second."""
    is_interrupted = False
    status = None
    try:
        program()
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        is_interrupted = isinstance(error, KeyboardInterrupt)
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it is closed
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 255)


# -- in a process that starts others -------------------------------------------------------------------------------

_servers: dict[tuple[tuple[str, str], ...], WarmServer] = {}
_lock = threading.Lock()


def key_of(environment):
    """What processes of one server have in common."""
    early = {name: text for name, text in environment.items() if name.startswith(READ_EARLY)}
    # What a process that has imported vLLM has besides: OpenCV adds a folder of its own, vLLM the libgomp of torch.
    for name, part in (("LD_LIBRARY_PATH", "/cv2/"), ("LD_PRELOAD", "/torch/lib/")):
        early[name] = ":".join(path for path in early.get(name, "").split(":") if path and part not in path)
    return tuple(sorted((name, text) for name, text in early.items() if text))


def server_for(environment):
    """The server of processes with this environment; it is launched when it is first asked for."""
    key = key_of(environment)
    with _lock:
        if key not in _servers:
            # With more threads for numerics the server would have several, and could not be forked.
            _servers[key] = WarmServer.launch({**environment, "OMP_NUM_THREADS": "1"}, "engines")
        return _servers[key]


def forking(own=None):
    """What `multiprocessing` starts processes with; a server forks interpreters, `own` or that of the environment."""
    spawn = util.spawnv_passfds

    def start(path, arguments, files):
        options = [os.fsdecode(one) for one in arguments]
        if options[-1] != "--multiprocessing-fork":
            return spawn(path, arguments, files)
        server = own or server_for(os.environ)
        numbers = {number: number for number in (0, 1, 2, *files)}
        return server.start(options[options.index("-c") :], os.environ, numbers)

    return start


def fork_what_is_spawned():
    """Let this process's `multiprocessing` fork where it would start an interpreter."""
    return mock.patch.object(util, "spawnv_passfds", forking())


class WarmPopen(subprocess.Popen):
    """`subprocess.Popen` of a Python program, `[sys.executable, "-c", …]` for one, in a warm process."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        assert args[0] == sys.executable and not pass_fds and preexec_fn is None
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = others[3:9]
        ends = (p2cread, c2pwrite, errwrite)
        files = {number: number if end == -1 else end for number, end in enumerate(ends)}
        environment = dict(os.environ if env is None else env)
        self.pid = server_for(environment).start(
            map(str, args[1:]), environment, files, folder=cwd, is_session=others[14]
        )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run_warm(command, *, timeout=None, **options):
    """`subprocess.run` of a Python program in a warm process; what it prints is text."""
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def worker_io(*, has_engines):
    """What pytest-xdist starts its processes with: they are forked from one that has imported what they will."""
    from execnet.gateway_base import Popen2IO
    from execnet.gateway_io import Popen2IOMaster

    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a process per core
    _servers[key_of(environment)] = WarmServer.launch(environment, "tests", *(["engines"] if has_engines else []))

    class WarmIO(Popen2IOMaster):
        def __init__(self, args, execmodel):
            self.popen = WarmPopen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    return WarmIO


class _Later(types.ModuleType):
    """Stands for a module that is not imported yet: it is imported where one of its names is used.

    Nothing can be imported from it.
    """

    def __getattr__(self, name):
        module = importlib.import_module(self.__name__)
        if module is self:
            raise AttributeError(name)
        return getattr(module, name)


def main():
    number, *parts = sys.argv[1:]
    gc.disable()  # a quarter of the time of the imports
    # What is forked may be a process of Ray's, and Ray reads its variables on import.
    if spec := importlib.util.find_spec("ray"):
        sys.modules["ray"] = _Later("ray")
        sys.modules["ray"].__spec__ = spec
    for name in (
        *(ENGINE_MODULES if "engines" in parts else ()),
        *MODULES,
        *(TEST_MODULES if "tests" in parts else ()),
    ):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    sys.modules.pop("ray", None)
    gc.collect()
    gc.freeze()
    gc.enable()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "what was imported started threads"
    become(*serve(socket.socket(fileno=int(number))))


if __name__ == "__main__":
    main()
