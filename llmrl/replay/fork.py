"""`fork`: creates a new run from the first steps of a recorded run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from llmrl._utils.files import cut_lines, open_file
from llmrl._utils.json_values import without_references
from llmrl.config.launch import typed
from llmrl.config.ranks import this_rank
from llmrl.config.resumed import changes_of, check_fixed, save_config
from llmrl.config.sections import GRPOConfig
from llmrl.replay.loop import OnStep, ReplayLoop, compute_on_ranks, pass_over
from llmrl.replay.recorded import RecordedRun
from llmrl.runs.run_folder import RunFolder
from llmrl.runs.tracked import save_split, split_tracked


def fork(
    run: RecordedRun,
    step: int,
    path: str | Path,
    changes: Sequence[str] = (),
    *,
    on_step: OnStep = pass_over,
) -> dict[str, tuple[object, object]]:
    """Create a run from the first steps of a recorded one, to be resumed; return old and new values of changed entries.

    The new run has the model, the optimizer, the position in the data and the random states after `step`, computed
    again from the last checkpoint before it, or from the initial model. Metrics, rollouts and tokens are copied up to
    `step`. `path` is the new run's folder; `changes` are entries such as `train.learning_rate=1e-6`.

    Raises:
        FileExistsError: if the folder exists.
        ValueError: if the step was not logged, if a batch before it was not kept, or if an entry is
            unknown or cannot change within a run.
    """
    from omegaconf import OmegaConf

    run.check_step(step)
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already; set run.path to another folder.")
    new_path = without_references({"run": {"path": str(path)}})
    changed = OmegaConf.merge(without_references(run.entries), OmegaConf.from_dotlist(list(changes)), new_path)
    cfg = typed(changed, GRPOConfig)
    entries = OmegaConf.to_container(changed, resolve=True)
    check_fixed(run.entries, entries, run.path)
    compute_on_ranks(run.config().train.num_ranks, _write, run.path, step, cfg, on_step=on_step)
    return changes_of(run.entries, entries)


def _write(path: Path, step: int, cfg: GRPOConfig, on_step: OnStep) -> None:
    """Compute the steps up to `step`, and write the folder of the new run."""
    run = RecordedRun(path)
    computed = ReplayLoop(run, run.config(), [step], start=run.start_of(step), on_step=on_step).play()
    folder = RunFolder(cfg.run.path, trackers=[]) if this_rank() == 0 else None
    try:
        state, shards = split_tracked(computed.after, Path(cfg.run.path), step)
        collector = run.batch(step)["collector"]
        state |= {"step": step, "collector": collector, "random": computed.random}
        save_split(state, shards, None if folder is None else folder.save_checkpoint)
        if folder is not None:
            _copy(run, folder, step)
            save_config(cfg, folder.path)
    finally:
        if folder is not None:
            folder.close()


def _copy(run: RecordedRun, folder: RunFolder, step: int) -> None:
    for logged in range(step + 1):
        if metrics := run.metrics(logged):
            folder.log_metrics(logged, {name: value for name, value in metrics.items() if name != "step"})
    if (before := run.folder.read_summary().get("before")) is not None:
        folder.write_summary({"before": before})
    for path in (folder.rollouts_path, folder.health.path, folder.machines.path):
        if (run.path / path.name).exists():
            with open_file(run.path / path.name, "rb") as source, open_file(path, "wb") as target:
                shutil.copyfileobj(source, target)
            cut_lines(path, lambda line: json.loads(line)["step"] <= step)
    for place, split in run.folder.tokens.steps():
        if place <= step:
            folder.tokens.copy(run.folder.tokens, place, split)
    if run.folder.tokenizer_path.exists():
        shutil.copytree(run.folder.tokenizer_path, folder.tokenizer_path)
