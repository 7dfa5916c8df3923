"""Every public name of TorchRL's LLM layer, its arguments and methods are here or on the page on moving from it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl_reasons import REASONS

from llmrl._utils.arguments import keywords_of
from llmrl._utils.other_libraries import TABLE, instead_of
from llmrl.collectors import RayLLMCollector
from llmrl.envs.tasks.task import DeclaredTaskEnv
from llmrl.torchrl.names import AGENTIC, ELSEWHERE

pytestmark = pytest.mark.usefixtures("takes_long")

PAGE = Path(__file__).parents[2] / "docs/migrating-from-torchrl.md"
NAMESPACES = [
    "torchrl.data.llm",
    "torchrl.envs.llm",
    "torchrl.envs.llm.transforms",
    "torchrl.modules.llm",
    "torchrl.objectives.llm",
    "torchrl.collectors.llm",
    "torchrl.weight_update.llm",
]
# What the classes of a namespace inherit is theirs, too, where ours inherit from nothing of TorchRL's.
LAYERS = (*NAMESPACES, "torchrl.envs.llm", "torchrl.collectors", "torchrl.weight_update")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def section(title):
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@functools.cache
def counterparts():
    """TorchRL's name -> ours, None for what is not there."""
    found = {}
    same, _, other = section("Names").partition("Another name")
    for ours, names in re.findall(r"^\| `torchrl[\w.]+` \| `([\w.]+)` \| (`.*`) \|$", same, re.MULTILINE):
        found |= {name: f"{ours}.{name}" for name in re.findall(r"`(\w+)`", names)}
    for names, ours in re.findall(r"^\| (`.*?`) \| (?:`([\w.]+)`|—) \|", other, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), ours or None)
    return found


@pytest.mark.parametrize(("title", "names"), [("Names", ELSEWHERE), ("The agentic toolkit", AGENTIC)])
def test_the_page_prints_the_names_that_are_elsewhere(title, names):
    text = section(title).rpartition("| TorchRL | llmrl | |")[2]
    rows = re.findall(r"^\| (`.*?`) \| (?:`([\w.]+)`|—) \| ?(.*?) ?\|$", text, re.MULTILINE)
    printed = [(" ".join(re.findall(r"`(\w+)`", theirs)), ours or None, remark) for theirs, ours, remark in rows]
    assert printed == list(names)
    for _, ours, _ in names:
        assert ours is None or resolved(ours)


def test_the_page_prints_why_cases_of_torchrls_tests_do_not_pass_unchanged():
    printed = re.findall(r"^\| `(test_\w+\.py)` \| (.*) \| \d+ \|$", section("TorchRL's own tests"), re.MULTILINE)
    reasons = {(file, reason) for file, _, reason, _ in REASONS}
    assert reasons == {(file, reason) for file, reason in printed if not reason[0].isdigit()}


def test_names_of_the_agentic_toolkit_are_here_or_refused_with_what_has_their_place():
    toolkit = importlib.import_module("llmrl.torchrl.envs.llm.agentic")
    tools = importlib.import_module("llmrl.tools")
    assert all(getattr(toolkit, name) is getattr(tools, name) for name in toolkit.__all__)
    assert importlib.import_module("llmrl.torchrl.envs.llm.agentic.repl") is toolkit
    with pytest.raises(ImportError, match="llmrl has no JupyterRepl: Jupyter kernels are not supported"):
        toolkit.JupyterRepl  # noqa: B018


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_namespace_of_torchrl_has_its_names_here(namespace):
    here, theirs = importlib.import_module(f"llmrl.{namespace}"), importlib.import_module(namespace)
    elsewhere = {name for names, _, _ in ELSEWHERE for name in names.split()}
    assert set(theirs.__all__) - elsewhere <= set(here.__all__)
    for name in here.__all__:
        ours = getattr(here, name)
        assert ours is resolved(counterparts()[name]) or ours.__module__.startswith("llmrl.torchrl.")
    around = importlib.import_module(f"llmrl.{namespace.partition('.llm')[0]}")
    for name in elsewhere & set(theirs.__all__):
        for place in (here, around):
            with pytest.raises(ImportError, match=f"llmrl has no {name}: [^.]"):
                getattr(place, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        here.no_such_name  # noqa: B018


def test_public_submodules_of_torchrl_are_importable_here():
    for namespace in NAMESPACES:
        package = importlib.import_module(namespace)
        for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{namespace}."):
            is_private = any(part.startswith("_") for part in found.name.split("."))
            is_inner = found.name.endswith(("vllm.base", "_plugin", "vllm_utils"))
            if not is_private and not is_inner:
                ours = importlib.import_module(f"llmrl.{found.name}")
                around, _, name = f"llmrl.{found.name}".rpartition(".")
                assert getattr(importlib.import_module(around), name) is ours


def resolved(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_name_of_torchrl_is_listed_and_no_other():
    assert set(counterparts()) == {name for one in NAMESPACES for name in importlib.import_module(one).__all__}
    for ours in filter(None, counterparts().values()):
        resolved(ours)


def taken(function):
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind not in VARIADIC and one.name not in ("self", "cls")]


def made_with(theirs):
    """Keywords that a class takes, or its metaclass for it, or that a function takes."""
    if not isinstance(theirs, type):
        return taken(theirs)
    metas = [meta for meta in type(theirs).__mro__ if meta.__module__.startswith("torchrl.envs.llm")]
    by_meta = [name for meta in metas if "__call__" in vars(meta) for name in taken(vars(meta)["__call__"])]
    return list(dict.fromkeys([*taken(theirs.__init__), *by_meta]))


def known(ours):
    """Keywords that a class or function of ours takes, those that its bases take for it included."""
    if not isinstance(ours, type):
        return set(keywords_of(ours) or ())
    names = set(inspect.signature(ours).parameters)
    if issubclass(ours, RayLLMCollector):  # it takes no policy, which its base does
        return set(keywords_of(ours.__init__))
    for base in ours.__mro__:
        if base.__module__.startswith("llmrl.") and "__init__" in vars(base):
            names |= set(keywords_of(base.__init__) or taken(base.__init__))
    return names


def members(theirs):
    """Public methods and properties that TorchRL's LLM layer defines for a class."""
    for name in dir(theirs):
        owner = next(base for base in theirs.__mro__ if name in vars(base)) if hasattr(theirs, name) else object
        if name.startswith("_") or name in dir(torch.nn.Module) or not owner.__module__.startswith(LAYERS):
            continue
        value = vars(owner)[name]
        # A tensorclass has TensorDict's methods; what a transform makes of specs TorchRL calls by position.
        if (hasattr(theirs, "from_tensordict") and hasattr(TensorDict, name)) or name.startswith("transform_"):
            continue
        if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
            yield name, value


source_of = functools.cache(inspect.getsource)  # which parses the whole file


def has(ours, name):
    """Whether a class has an attribute, or sets it on its instances."""
    bases = [base for base in ours.__mro__ if base.__module__.startswith("llmrl.")]
    is_set = any(re.search(rf"self\.{name}\b[^=()\n]* = ", source_of(base)) for base in bases)
    return is_set or hasattr(ours, name) or any(name in inspect.get_annotations(base) for base in bases)


def same_names():
    """(name, theirs, ours) of everything public that has TorchRL's name."""
    for namespace in NAMESPACES:
        for name in importlib.import_module(namespace).__all__:
            path = counterparts()[name]
            if path is not None and path.rpartition(".")[2] == name:
                yield name, resolved(f"{namespace}.{name}"), resolved(path)


@functools.cache
def missing():
    """(owner, entry) of everything that TorchRL takes and ours does not, where the name is the same."""
    found = set()
    for name, theirs, ours in same_names():
        found |= {(name, one) for one in made_with(theirs) if one not in known(ours)}
        for member, value in members(theirs) if isinstance(theirs, type) else ():
            if not has(ours, member):
                found.add((name, f".{member}"))
            elif not isinstance(value, property):
                method = getattr(ours, member)
                keywords = keywords_of(getattr(method, "__func__", method))
                if keywords is None:  # what else it takes goes to the constructor, or to a template
                    keywords = {*taken(method), *known(ours)}
                found |= {(f"{name}.{member}", one) for one in taken(getattr(theirs, member)) if one not in keywords}
    return found


@pytest.mark.parametrize("name", ["VLLMWeightSyncScheme", "VLLMDoubleBufferSyncScheme", "KLRewardTransform"])
def test_defaults_of_torchrls_configurations_are_taken_or_in_the_table(name):
    configurations = {
        one._target_.rpartition(".")[2]: one
        for module in ("weight_sync_schemes", "transforms")
        for one in vars(importlib.import_module(f"torchrl.trainers.algorithms.configs.{module}")).values()
        if dataclasses.is_dataclass(one) and ".llm." in str(getattr(one, "_target_", ""))
    }
    assert len(configurations) == 3
    fields = {one.name: one.default for one in dataclasses.fields(configurations[name]) if one.name[0] != "_"}
    ours = resolved(counterparts()[name])
    assert {one for one in fields if one not in known(ours)} <= {entry for owner, entry in table() if owner == name}
    given = {one: value for one, value in fields.items() if one in known(ours)}
    given |= {one: value for one, value in {"remote_addr": "folder", "ref_model_factory": list}.items() if one in given}
    assert isinstance(ours(**given), ours) and len(given) >= 3


def table():
    return {
        (owner, entry): advice
        for owners, entries, advice in TABLE
        for owner in owners.split()
        for entry in entries.split()
    }


def test_what_is_missing_is_in_the_table_and_nothing_else():
    assert sorted(missing() - table().keys()) == []
    unused = {(owner, entry) for owner, entry in table().keys() - missing() if not owner.startswith("AsyncVLLM.from_")}
    assert sorted(unused) == []


def test_the_page_prints_the_table():
    rows = re.findall(
        r"^\| (`.*`) \| (`.*`) \| (.+) \|$", section("Arguments and methods that are not there"), re.MULTILINE
    )
    printed = [
        (" ".join(re.findall(r"`([^`]+)`", a)), " ".join(re.findall(r"`([^`]+)`", b)), advice) for a, b, advice in rows
    ]
    assert printed == [(owners, entries, advice) for owners, entries, advice in TABLE]


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind not in VARIADIC}


def our_defaults(ours):
    """Of a function, or of a constructor and of those that it hands keywords on to."""
    if isinstance(ours, type) and issubclass(ours, DeclaredTaskEnv):  # an ellipsis: what `DatasetChatEnv` has
        return {name: value for name, value in defaults(ours).items() if value is not ...}
    bases = [base for base in ours.__mro__ if base.__module__.startswith("llmrl.")] if isinstance(ours, type) else []
    made = [base.__init__ for base in bases if "__init__" in vars(base)] or [ours]
    return {name: value for one in reversed(made) for name, value in defaults(one).items()}


def differing(owner, theirs, ours):
    for name, default in theirs.items():
        if default is not inspect.Parameter.empty and name in ours and ours[name] != default:
            here = "needed" if ours[name] is inspect.Parameter.empty else repr(ours[name])
            yield owner, name, repr(default), here


def test_defaults_that_differ_are_on_the_page_and_no_others():
    found = set()
    for name, theirs, ours in same_names():
        made = theirs.__init__ if isinstance(theirs, type) else theirs
        found.update(differing(name, defaults(made), our_defaults(ours)))
        for member, value in members(theirs) if isinstance(theirs, type) else ():
            if has(ours, member) and not isinstance(value, property) and callable(getattr(ours, member)):
                theirs_of, ours_of = defaults(getattr(theirs, member)), defaults(getattr(ours, member))
                found.update(differing(f"{name}.{member}", theirs_of, ours_of))
    rows = re.findall(
        r"^\| (`.*`) \| (`.*`) \| `(.+?)` \| (.+?) \| .+ \|$", section("Defaults that differ"), re.MULTILINE
    )
    printed = {
        (owner, argument, theirs, ours.strip("`"))
        for owners, arguments, theirs, ours in rows
        for owner in re.findall(r"`([^`]+)`", owners)
        for argument in re.findall(r"`([^`]+)`", arguments)
    }
    assert sorted(found - printed) == sorted(printed - found) == []


@pytest.mark.parametrize("name", ["LLMCollector", "RayLLMCollector"])
def test_a_method_that_a_collector_has_not_is_missed_with_what_to_do(name):
    collector = object.__new__(resolved(counterparts()[name]))
    methods = [entry for owner, entry in table() if owner == name and entry.startswith(".")]
    assert len(methods) > 20
    for method in methods:
        with pytest.raises(AttributeError, match=re.escape(f"has no {method[1:]!r}: {instead_of(name)[method]}.")):
            getattr(collector, method[1:])


def refusals():
    """Arguments of constructors and functions of the table; methods of instances are refused by Python."""
    return sorted({(owner, entry) for owner, entry in table() if "." not in entry and owner.count(".") == 0})


def test_every_argument_is_refused_by_its_name_with_what_to_do_instead():
    silent = []
    for owner, argument in refusals():
        ours = resolved(counterparts()[owner])
        needed = [one for one in inspect.signature(ours).parameters.values() if one.default is one.empty]
        given = () if isinstance(ours, type) else (None for one in needed if one.kind is one.POSITIONAL_OR_KEYWORD)
        with pytest.raises(TypeError) as error:
            ours(*given, **{argument: None})
        if f"{argument!r}: {instead_of(owner)[argument]}." not in str(error.value):
            silent.append(f"{owner}({argument}=): {error.value}")
    assert len(refusals()) > 100 and not silent, "\n".join(silent)
