"""What tests share: the embedded model, its renderer, one engine; which marks they have, and which run together."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import ssl
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

# How long an example takes is the machine's business. Other examples are searched for in a long run only (`fuzzing`).
hypothesis.settings.register_profile(
    "llmrl",
    deadline=None,
    derandomize="LLMRL_FUZZ_MINUTES" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("llmrl")

# Before torch is imported: its idle threads would otherwise spin on the cores that the engine's process needs.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process per core

# A mark is set by what a test asks for, itself or through another fixture.
MARKS = {"real_vllm": "engine", "ray_nodes": "ray", "own_programs": "slow", "takes_long": "slow"}
# Files that share what takes long to start run in one process; the others go one by one.
SHARED = {
    "the examples": ("example_engine",),
    "the engine": ("vllm_engine", "trainable_engine", "shallow_engine"),
    "the cluster": ("ray_nodes", "ray_cluster"),
}
# Of tests that start programs: on a machine that is busy with other things each start can take a minute.
TIMEOUT_S = 900


@functools.cache
def group_of(path):
    """What runs in one process with a file of tests."""
    text = (Path(__file__).parent.parent / path).read_text()
    return next((group for group, names in SHARED.items() if any(name in text for name in names)), path)


def pytest_collection_modifyitems(items):
    """Set marks; in one of several processes, put first what takes longest."""
    starting = set()
    for item in items:
        for fixture, mark in MARKS.items():
            if fixture in item.fixturenames:
                item.add_marker(mark)
                # What the command line says holds: with --timeout=0 a random search may take an hour.
                if item.config.getoption("timeout") is None:
                    item.add_marker(pytest.mark.timeout(TIMEOUT_S))
                starting.add(item.path)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (group_of(item.path) not in SHARED, item.path not in starting))


def pytest_collection_finish():
    """What the tests are made of lives until the end: collections of garbage need not look through it."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fork processes from one that has imported vLLM, but on GPUs, which a fork cannot use."""
    fixtures = set(item.fixturenames)
    is_starting = not fixtures.isdisjoint(("real_vllm", "own_programs"))
    if not is_starting or "spawned_engines" in fixtures or Path("/dev/nvidiactl").exists():
        return (yield)
    from warm_processes import fork_what_is_spawned

    with fork_what_is_spawned():
        return (yield)


_shared = contextlib.ExitStack()  # what the files of a group share


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End what a group of files shared with its last test: an idle Ray cluster takes a tenth of a core."""
    yield
    is_last = "PYTEST_XDIST_WORKER" in os.environ and nextitem and group_of(nextitem.path) != group_of(item.path)
    if not nextitem or is_last:
        _shared.close()


def pytest_sessionfinish():
    """End it where tests are given up, too."""
    _shared.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Fork the processes that tests run in, too: not on GPUs, nor where coverage is to see what imports run."""
    if Path("/dev/nvidiactl").exists() or config.getoption("cov_source", None):
        return
    import execnet.gateway_io
    from warm_processes import worker_io

    execnet.gateway_io.Popen2IOMaster = worker_io(has_engines="not engine" not in config.option.markexpr)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out whole groups of files."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid.partition("::")[0])

    return GroupScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def certificates():
    """Certificates are read once, and not by each of hundreds of HTTP clients."""
    with mock.patch.object(ssl, "create_default_context", functools.cache(ssl.create_default_context)):
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenizers():
    """A folder's tokenizer is parsed once, and not by each of hundreds of runs."""
    from parsed_tokenizers import parse_once

    with parse_once():
        yield


@pytest.fixture
def clock():
    """The clock of the event loops that a test makes, which it moves on so that limits pass."""
    from moved_clock import moved_clock

    with moved_clock() as clock:
        yield clock


@pytest.fixture(scope="session")
def real_vllm():
    """Asked for by whatever starts a vLLM engine."""
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed")


@pytest.fixture(scope="session")
def imports_vllm(takes_long):
    """Asked for by what imports vLLM, which takes ten seconds."""
    pytest.importorskip("vllm")


@pytest.fixture
def spawned_engines(real_vllm):
    """Asked for in place of `real_vllm` where an engine's process must be an interpreter of its own."""


@pytest.fixture(scope="session")
def own_programs():
    """Asked for by whatever starts programs, or compiles."""


@pytest.fixture(scope="session")
def takes_long():
    """Asked for by what takes seconds without them, such as importing vLLM, as TorchRL's LLM modules do."""


@pytest.fixture(scope="session")
def model_path():
    """Folder of SmolLM2-135M-Instruct, bfloat16."""
    from llmrl.testing.embedded_model import ensure_embedded_model

    return str(ensure_embedded_model())


@pytest.fixture(scope="session")
def tokenizer(model_path):
    """Its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """Its renderer."""
    from llmrl.rendering import make_renderer

    return make_renderer(tokenizer)


def engine_options():
    """On all cores, unless the other processes want theirs."""
    cpu_threads = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
    return {"max_model_len": 2048, "kv_cache_memory": 1 << 30, "cpu_threads": cpu_threads}


@pytest.fixture(scope="session")
def vllm_engine(model_path, real_vllm):
    """One vLLM engine for the whole session; a test that changes its weights puts them back."""
    from llmrl.engines import AsyncVLLM

    return _shared.enter_context(AsyncVLLM.from_pretrained(model_path, **engine_options()))


@pytest.fixture(scope="session")
def shallow_model_path(model_path, tmp_path_factory):
    """Folder of the embedded model with four of its layers, for tests that compare and do not read what it says."""
    from shallow_models import save_shallow

    return save_shallow(model_path, tmp_path_factory.mktemp("shallow") / "model")


@pytest.fixture(scope="session")
def shallow_engine(shallow_model_path, real_vllm):
    """An engine with it for the whole session; a test that changes its weights puts them back."""
    from llmrl.engines import AsyncVLLM

    return _shared.enter_context(AsyncVLLM.from_pretrained(shallow_model_path, **engine_options()))


@pytest.fixture(scope="session")
def shallow_model(shallow_model_path):
    """It in transformers, float32; a test that changes its weights puts them back."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(shallow_model_path, dtype=torch.float32).eval()


@contextlib.contextmanager
def weights_put_back(engine, load_model):
    """Give an engine that was given other weights those of a model again."""
    version = engine.policy_version
    yield
    if engine.policy_version != version:
        from llmrl import VLLMWeightSyncScheme, get_model_metadata

        sender, model = VLLMWeightSyncScheme().create_sender(), load_model()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), engine)
        sender.update_weights()
        engine.policy_version = version


@pytest.fixture
def trainable_engine(vllm_engine, request):
    """The session's engine for a test that may give it other weights; they are put back."""
    with weights_put_back(vllm_engine, lambda: request.getfixturevalue("reference_model")):
        yield vllm_engine


@pytest.fixture(scope="session")
def started_example_engine(tmp_path_factory, real_vllm):
    """An engine of a tiny model that answers with digits, and the home in which it is the embedded model."""
    from biased_models import save_as_embedded

    from llmrl.engines import AsyncVLLM

    home = tmp_path_factory.mktemp("home")
    folder = save_as_embedded(home)
    options = {"max_model_len": 2048, "kv_cache_memory": 1 << 28, "cpu_threads": 1}
    return _shared.enter_context(AsyncVLLM.from_pretrained(folder, **options)), folder, home


@pytest.fixture
def example_engine(started_example_engine, monkeypatch):
    """What examples run on, in place of the embedded model and an engine with it; its weights are put back."""
    engine, folder, home = started_example_engine
    monkeypatch.setenv("LLMRL_HOME", str(home))

    def load_model():
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    with weights_put_back(engine, load_model):
        yield engine


@pytest.fixture(scope="session")
def reference_model(model_path):
    """The same model in transformers, float32; a test that changes its weights puts them back."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory):
    """Folder of a random llama of one layer, with the tokenizer of SmolLM2, that vLLM starts in seconds."""
    from llmrl.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory):
    """A Ray cluster of one node, with one `seat`, on this machine for the whole session; nodes come and go."""
    pytest.importorskip("ray")
    import ray_workers
    from ray.cluster_utils import Cluster

    class ForkingCluster(Cluster):
        def add_node(self, **options):
            return super().add_node(setup_worker_path=ray_workers.__file__, **options)

    # A node that is gone is known to be in 3 s, not in 15.
    health = {"initial_delay_ms": 1000, "period_ms": 1000, "failure_threshold": 3}
    head = {"num_cpus": 2, "resources": {"seat": 1}, "include_dashboard": False}
    head["_system_config"] = {f"health_check_{name}": value for name, value in health.items()}
    _shared.enter_context(ray_workers.forked_workers(tmp_path_factory.mktemp("ray")))
    cluster = ForkingCluster(initialize_head=True, head_node_args=head)
    _shared.callback(cluster.shutdown)
    return cluster


@pytest.fixture(scope="session")
def ray_cluster(ray_nodes):
    """Ray, connected to it; actors that want no core of their own ask for `num_cpus=0`."""
    import ray

    ray.init(address=ray_nodes.address, log_to_driver=False)
    _shared.callback(ray.shutdown)
    return ray


@pytest.fixture(scope="module")
def sites():
    """A web site on loopback that a browser may see, and one that it may not."""
    from web_sites import Site

    allowed, other = Site(), Site()
    allowed.other = f"http://{other.address}"
    yield allowed, other
    allowed.server.shutdown()
    other.server.shutdown()


@pytest.fixture(scope="module")
def browser(sites, tmp_path_factory):
    """A browser's tools for the first of the sites."""
    from llmrl.transforms import BrowserTransform

    transform = BrowserTransform([sites[0].address], timeout=60.0, screenshot_folder=tmp_path_factory.mktemp("shots"))
    yield transform
    transform.close()


@pytest.fixture
def chat(browser, sites):
    """A conversation with the browser; the sites have forgotten what they were asked for."""
    from tool_conversations import Chat

    for site in sites:
        site.requested.clear()
    chat = Chat(browser)
    yield chat
    chat.data["tool_state", "session"].release()
