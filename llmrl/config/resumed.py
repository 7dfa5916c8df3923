"""Configuration of a resumed run: the saved configuration with the changes of the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmrl._utils.cpu_limit import call_within
from llmrl._utils.files import UnsafeFileError, open_file, write_atomically
from llmrl._utils.json_values import by_dotted_name, without_references
from llmrl.config.sections import ScriptConfig
from llmrl.data.state_file import DamagedFileError

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "config.yaml"
_READING_SECONDS = 10.0
"""CPU time limit for reading a configuration, because nested references can make a small file very expensive."""

Entries: TypeAlias = dict[str, object]
"""Entries of a configuration, with nested groups."""

# A run has one algorithm, one model, one format of moments and one order of prompts. With others, its
# checkpoint and its position in the data are invalid.
_FIXED = (
    "algorithm",
    "seed",
    "model.path",
    "model.chat_template",
    "model.lora",
    "env.name",
    "env.data",
    "env.train_split",
    "env.options",
    "collect.group_size",
    "train.moments",
)


def save_config(cfg: ScriptConfig, folder: Path) -> None:
    """Write a run's configuration to its `config.yaml`."""
    from omegaconf import OmegaConf

    entries = OmegaConf.create(without_references(asdict(cfg)))
    write_atomically(folder / CONFIG_NAME, lambda path: OmegaConf.save(entries, path))


def load_config(folder: Path) -> Entries:
    """Return the entries of a run's `config.yaml`.

    Raises:
        UnsafeFileError: if the file is a link, a pipe, a socket or a device.
        DamagedFileError: if the file is missing or not a valid configuration.
    """
    from omegaconf import OmegaConf

    path = folder / CONFIG_NAME
    try:
        with open_file(path) as file:
            saved = call_within(lambda: OmegaConf.to_container(OmegaConf.load(file), resolve=True), _READING_SECONDS)
        if not isinstance(saved, dict):
            raise ValueError("it holds no sections")
    except UnsafeFileError:
        raise
    except Exception as error:  # a value that does not match its tag in YAML raises errors of various types
        raise DamagedFileError(f"{path} is damaged: {error}. Put a copy of it in its place.") from error
    return {str(name): value for name, value in saved.items()}


def own_config(cfg: DictConfig) -> DictConfig:
    """Return the configuration of a script: `cfg` as hydra composed it, or the saved one if `cfg` resumes a run."""
    if not cfg.resume:
        return cfg
    overrides, config_folders = _command_line()
    return resumed_config(cfg, overrides=overrides, config_folders=config_folders)[0]


def resumed_config(
    cfg: DictConfig | ScriptConfig, *, overrides: Sequence[str] | None = None, config_folders: Sequence[Path] = ()
) -> tuple[DictConfig, dict[str, tuple[object, object]]]:
    """Return the configuration with which the run in `run.path` continues, and its changes.

    The saved configuration is changed by `overrides`: single entries (`train.learning_rate=1e-5`),
    or the entries of a file in `config_folders` (`hardware=gpu1`). `task=` must name the run's own
    task. Entries that the saved configuration lacks are taken from `cfg`.

    Args:
        cfg: the composed configuration, from hydra or typed; `run.path` is the folder of the run.
        overrides: overrides of the command line, in hydra's form; None requests every entry of `cfg`.
        config_folders: folders of the files that hydra composed.

    Returns:
        The configuration; and the old and new values of each changed entry, by its dotted name.

    Raises:
        FileNotFoundError: if the folder has no configuration.
        DamagedFileError: if the file is not a valid configuration.
        ValueError: if another algorithm, model, task or order of prompts is requested, or an entry is deleted.
    """
    from omegaconf import OmegaConf

    folder = Path(cfg.run.path)
    if not (folder / CONFIG_NAME).exists():
        raise FileNotFoundError(
            f"{folder / CONFIG_NAME} is missing, so there is no run to resume: name its folder with run.path, or start "
            "a new run without resume=true."
        )
    saved = load_config(folder)
    given = asdict(cfg) if isinstance(cfg, ScriptConfig) else OmegaConf.to_container(cfg, resolve=True)
    composed = without_references(given)
    parts = [_completed(without_references(saved), composed), *_asked(composed, overrides, config_folders)]
    # These entries belong to this call, not to the run.
    parts.append({"resume": True, "dry_run": composed["dry_run"], "run": {"path": composed["run"]["path"]}})
    resumed = OmegaConf.merge(*map(OmegaConf.create, parts))
    if overrides is None and "env" in composed:  # merging has kept the saved options that `cfg` lacks
        OmegaConf.update(resumed, "env.options", composed["env"]["options"], merge=False)
    requested = OmegaConf.to_container(resumed, resolve=True)
    check_fixed(saved, requested, folder)
    changes = changes_of(saved, requested)
    for name in ("resume", "run.path"):
        changes.pop(name, None)
    return resumed, changes


def check_fixed(before: Entries, after: Entries, path: Path) -> None:
    """Raise ValueError if the entries of the run in `path` change in a way with which the run cannot continue."""
    old, new = by_dotted_name(before), by_dotted_name(after)
    for name in dict.fromkeys((*old, *new)):
        is_fixed = any(name == fixed or name.startswith(f"{fixed}.") for fixed in _FIXED)
        # A missing option is the environment's default. Other entries may be missing in one of two versions.
        is_compared = name.startswith("env.options.") or (name in old and name in new)
        if is_fixed and is_compared and old.get(name) != new.get(name):
            raise ValueError(
                f"the run in {path} has {name}={old.get(name)!r} and cannot continue with {new.get(name)!r}, since its "
                "checkpoint and its position in the data depend on it. Leave the entry out, or start another run "
                "in another folder."
            )


def _command_line() -> tuple[list[str] | None, list[Path]]:
    """Return hydra's overrides and the folders that it composes from; None and no folders without hydra."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    if hydra_config is None or not hydra_config.HydraConfig.initialized():
        return None, []
    config = hydra_config.HydraConfig.get()
    sources = [source.path for source in config.runtime.config_sources if source.schema == "file"]
    return list(config.overrides.task), [Path(path) for path in sources]


def _asked(composed: Entries, overrides: Sequence[str] | None, folders: Sequence[Path]) -> list[Entries]:
    """Return the entries that the command line requests, in the order of the command line, as nested dicts."""
    if overrides is None:
        return [composed]
    from hydra.core.override_parser.overrides_parser import OverridesParser

    asked: list[Entries] = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name = override.key_or_group
        value = override.value()
        if override.is_delete():
            raise ValueError(
                f"a resumed run keeps its entries, so {override.input_line!r} cannot be applied; set "
                "the entry to a value instead."
            )
        # An entry that is no group may be a path, beside which a file of this name lies.
        groups = [folder / name for folder in folders if (folder / name).is_dir()]
        files = [path for group in groups if (path := group / f"{value}.yaml").exists()]
        if not files:
            asked.append(_nested(name, value))
            continue
        parts = entries_of(files[0], groups)
        if name == "task":  # the run may have overridden other entries of the task
            names = [env["name"] for part in parts if isinstance(env := part.get("env"), dict) and "name" in env]
            parts = [{"env": {"name": name}} for name in names[-1:]]
        asked += parts
    return asked


def entries_of(path: Path, folders: Sequence[Path] = ()) -> list[Entries]:
    """Return the entries of a configuration file, after those of its `defaults`, from `folders` or else its own."""
    from omegaconf import OmegaConf

    own = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(own, dict)
    names = [f"{base}.yaml" for base in own.pop("defaults", []) if base != "_self_"]
    bases = [
        next((one for folder in folders if (one := folder / name).exists()), path.with_name(name)) for name in names
    ]
    return [*(part for base in bases for part in entries_of(base, folders)), own]


def changes_of(before: Entries, after: Entries) -> dict[str, tuple[object, object]]:
    """Return the entries of `after` that differ from those of `before`, by dotted names, with both values.

    Example:
        >>> changes_of({"train": {"num_steps": 5}, "seed": 0}, {"train": {"num_steps": 6}, "seed": 0})
        {'train.num_steps': (5, 6)}
    """
    old = by_dotted_name(before)
    return {name: (old.get(name), value) for name, value in by_dotted_name(after).items() if old.get(name) != value}


def _completed(saved: Entries, composed: Entries) -> Entries:
    """Return `saved` with the missing entries of `composed`; entries are not merged below the second level."""
    completed = composed | saved
    for group, entries in composed.items():
        own = saved.get(group)
        if isinstance(entries, dict) and isinstance(own, dict):
            completed[group] = entries | own
    return completed


def _nested(name: str, value: object) -> Entries:
    group, _, rest = name.partition(".")
    return {group: _nested(rest, value) if rest else value}
