"""Start of a training script: composes a typed configuration from files and the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llmrl._utils.arguments import nearest
from llmrl._utils.failure import NothingLearned
from llmrl._utils.imports import MissingExtraError, require
from llmrl._utils.json_values import as_entry_value, without_references
from llmrl._utils.other_libraries import EXPLAINED, SYNONYMS
from llmrl.config.dry_run import as_dry_run, plan_of
from llmrl.config.entries import choices_of, entries_by_name, types_of
from llmrl.config.fit import check_fit
from llmrl.config.imitation import DistillationConfig, ExpertIterationConfig, SFTConfig
from llmrl.config.ranks import leave_ranks, start_ranks
from llmrl.config.resumed import own_config
from llmrl.config.sections import GRPOConfig, ScriptConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

Config = TypeVar("Config", bound=ScriptConfig)
AnyConfig = TypeVar("AnyConfig")

CONFIGS: Mapping[str, type[ScriptConfig]] = {
    "grpo": GRPOConfig,
    "expert-iteration": ExpertIterationConfig,
    "sft": SFTConfig,
    "distillation": DistillationConfig,
}
"""The configuration of each algorithm, by the name of its file. A file's defaults list names it as `NAME-schema`."""


def launch(main: Callable[[Config], None], config_type: type[Config], config_path: str) -> None:
    """Call `main` with the configuration that the command line describes.

    hydra composes the configuration from the file `config_path` (relative to the file that defines `main`), the groups
    that the command line names (`task=gsm8k`), and single entries (`train.learning_rate=1e-6`).
    Invalid entries end the program with a message before anything starts. With `resume=true`, the
    command line changes the run's saved configuration. With `train.num_ranks` above 1, this number
    of processes is started, unless `torchrun` has already started them.
    """
    require("hydra", extra="scripts")
    import hydra
    from torch.distributed.elastic.multiprocessing.errors import record

    register_schemas()
    sys.argv[1:] = [entry for word in sys.argv[1:] for entry in _entries_of(word)]
    path = (Path(main.__code__.co_filename).parent / config_path).resolve()
    is_composed = False
    hiding = contextlib.ExitStack()

    def task(cfg: DictConfig) -> None:
        nonlocal is_composed
        hiding.close()
        try:
            config = prepared(cfg, config_type)
            _require_packages(config)
            check_fit(config)
        except (ValueError, FileNotFoundError, MissingExtraError) as error:
            raise SystemExit(str(error)) from None
        is_composed = True
        start_ranks(config)
        try:
            record(main)(config)
        except NothingLearned:  # the run has printed the reason, and hydra would add a traceback
            raise SystemExit(1) from None
        leave_ranks()

    hiding.enter_context(hidden_groups())
    try:
        hydra.main(config_path=str(path.parent), config_name=path.stem, version_base=None)(task)()
    except SystemExit:
        if {"--help", "-h"} & set(sys.argv[1:]):
            print("== Values of entries ==")
            for name, values in choices_of(config_type).items():
                print(f"  {name}: {', '.join(values)}")
        elif not is_composed:
            for hint in hints(sys.argv[1:], config_type):
                print(hint, file=sys.stderr)
        raise
    finally:
        hiding.close()


def run_script(arguments: Sequence[str]) -> int:
    """Run Python with arguments, its output on standard error, and return the exit status.

    Ctrl-C reaches only the script, which ends its run; this process waits for it. Call it from the main thread.
    """
    with subprocess.Popen([sys.executable, *arguments], stdout=sys.stderr.fileno()) as script:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return script.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def _require_packages(config: ScriptConfig) -> None:
    if config.model.lora.rank is not None:
        require("peft", extra="lora")
    if config.train.moments == "8bit" or config.model.lora.quantize_base:
        require("bitsandbytes", extra="optim")
    if config.train.head_kernel == "liger":
        require("liger_kernel", extra="gpu")


def _entries_of(word: str) -> list[str]:
    """Return the overrides for a word of the command line: `task=NAME` may name an environment instead of a file.

    Example:
        >>> _entries_of("task=gsm8k"), _entries_of("task=mypackage/thing")
        (['task=gsm8k'], ['task=own', "env.name='mypackage/thing'"])
        >>> _entries_of("eval.envs.hard.name=math")
        ['+eval.envs={hard: {name: math}}']
    """
    entry, _, value = word.partition("=")
    environment = entry.lstrip("+")
    if value and environment.startswith("eval.envs."):
        # OmegaConf takes a new environment only as part of `eval.envs`, into which it merges several of them.
        for part in reversed(environment.split(".")[2:]):
            value = f"{{{part}: {value}}}"
        return [f"+eval.envs={value}"]
    name = word.removeprefix("task=")
    if name == word or not {"/", ":"} & set(name):
        return [word]
    return ["task=own", f"env.name={as_entry_value(name)}"]


@functools.cache
def register_schemas() -> None:
    """Register the configuration classes with hydra, for files that name them in their defaults."""
    from hydra.core.config_store import ConfigStore

    for name, config_type in CONFIGS.items():
        ConfigStore.instance().store(name=f"{name}-schema", node=config_type)


@contextlib.contextmanager
def hidden_groups() -> Iterator[None]:
    """Hide groups of configurations that other packages have registered by the name of an entry.

    hydra would take the value of `loss=dapo` for a file of the group `loss` that TorchRL's trainers register.
    """
    from hydra.core.config_store import ConfigStore

    repo = ConfigStore.instance().repo
    entries = [field.name for config_type in CONFIGS.values() for field in dataclasses.fields(config_type)]
    hidden = {name: repo.pop(name) for name in entries if name in repo}
    try:
        yield
    finally:
        repo.update(hidden)


def prepared(cfg: DictConfig, config_type: type[Config]) -> Config:
    """Return the typed form of a composed configuration, as changed by `resume` and `dry_run`.

    Raises:
        ValueError: if an entry does not exist or has an invalid value, and as in `resumed_config`.
        FileNotFoundError: if there is no run to resume.
    """
    composed = own_config(cfg)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # the number of ranks that torchrun has started
        composed.train.num_ranks = int(os.environ["WORLD_SIZE"])
    config = typed(composed, config_type)
    if not config.dry_run:
        return config
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(plan_of(config)))
    return as_dry_run(config)


def typed(cfg: DictConfig, config_type: type[AnyConfig]) -> AnyConfig:
    """Convert nested dicts or a hydra configuration to a configuration class.

    Raises ValueError if an entry does not exist, with the nearest name, or has an invalid value.

    Example:
        >>> from llmrl.config.sections import TrainConfig
        >>> typed({"num_steps": 3, "learning_rate": 1e-5}, TrainConfig).max_grad_norm
        1.0
        >>> typed({"num_steps": 3, "learning_rat": 1e-5}, TrainConfig)
        Traceback (most recent call last):
        ...
        ValueError: the configuration has no entry 'learning_rat'. Did you mean 'learning_rate'?
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

    try:
        is_composed = OmegaConf.is_config(cfg)  # its references are resolved; what is left of them is text
        entries = without_references(OmegaConf.to_container(cfg, resolve=True)) if is_composed else cfg
        config = OmegaConf.to_object(OmegaConf.merge(_schema_of(config_type), entries))  # type: ignore[arg-type]
    except ConfigKeyError as error:
        known = [entry.name for entry in dataclasses.fields(error.object_type)]
        raise ValueError(_no_entry(str(error.full_key), known)) from error
    except MissingMandatoryValue as error:
        raise ValueError(f"the configuration lacks {error.full_key!r}, which has no default: {error.msg}.") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"the configuration's entry {error.full_key!r}: {error.msg}.") from error
    assert isinstance(config, config_type)
    return config


@functools.cache
def _schema_of(config_type: type[object]) -> DictConfig:
    """Return the entries of a configuration class. The cached object is safe, because merging copies it."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(config_type)


def _no_entry(name: str, known: list[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return a message about an unknown entry; `elsewhere` maps the last parts of all entries to dotted names."""
    group, _, last = name.rpartition(".")
    near = nearest(last, known)
    other = nearest(last, elsewhere or ())
    if last == "reward_funcs":
        hint = "The environment contains the reward: env.name=my_env.py:make."
    elif last in EXPLAINED:
        hint = f"{EXPLAINED[last][0].upper()}{EXPLAINED[last][1:]}."
    elif elsewhere and other and (near is None or last in SYNONYMS):
        hint = f"Did you mean {elsewhere[other]!r}?"
    elif near:
        hint = f"Did you mean {'.'.join(filter(None, [group, near]))!r}?"
    else:
        hint = f"It has {', '.join(known)}."
    return f"the configuration has no entry {name!r}. {hint}"


def hints(overrides: list[str], config_type: type[ScriptConfig]) -> list[str]:
    """Return a suggestion for each unknown entry of a command line."""
    found = []
    for override in overrides:
        name = override.partition("=")[0].lstrip("+~")
        parts = name.split(".")
        section: type = config_type
        for place, part in enumerate(parts):
            if not dataclasses.is_dataclass(section) or name.startswith(("-", "hydra")) or name in ("task", "hardware"):
                break
            known = [entry.name for entry in dataclasses.fields(section)]
            if part not in known:
                shown = name if parts[-1] in {**SYNONYMS, **EXPLAINED} else ".".join(parts[: place + 1])
                found.append(_no_entry(shown, known, entries_by_name(config_type)))
                break
            section = types_of(section)[part]
    return found
