"""`TokenLog`: stores the tokens of training rows with their per-token data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import torch
from tensordict import TensorDictBase

from llmrl._utils.files import check_fits_memory, open_file, write_atomically
from llmrl.data.state_file import DamagedFileError
from llmrl.data.tensordicts import batch_elements, plain

_DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "log_probs": np.float32,
    "trainer_log_probs": np.float32,
    "versions": np.int32,
}
_BYTES_IN_LISTS = 7
"""Bytes of lists per byte of arrays: a token needs about 120 bytes in lists, as number objects, and 17 in arrays."""
TOKEN_KEYS = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "full"),
    ("policy_versions", "full"),
    ("rollout", "rollout_id"),
    ("rollout", "row_index"),
)
"""Entries of a row that are stored, besides its advantage."""


@dataclass(slots=True)
class TokenRow:
    """One training row for display; the lists are `[num_tokens]`."""

    rollout_id: str
    row_index: int
    advantage: float
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probs of the sampler."""
    trainer_log_probs: list[float] = field(default_factory=list)
    """Log-probs of the trainer before the update; NaN if unknown."""
    versions: list[int] = field(default_factory=list)


class TokenLog:
    """A folder with one compressed file per step and split, created by the first write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(
        self,
        step: int,
        rows: TensorDictBase | Sequence[TensorDictBase],
        trainer_log_probs: Iterable[torch.Tensor] | None = None,
        *,
        not_trained: Sequence[TensorDictBase] = (),
        split: str = "train",
    ) -> None:
        """Store a batch of rows. Raises ValueError if a row does not have one trainer log-prob per token.

        Args:
            rows: from a collector or `rollout_rows`.
            trainer_log_probs: `[num_tokens]` per row, NaN if unknown.
            not_trained: further rows with the entries `TOKEN_KEYS`, of rollouts that are not trained on.
            split: `"train"`, or the name of an evaluation.
        """
        elements = batch_elements(rows) if isinstance(rows, TensorDictBase) else list(rows)
        columns: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
        given: list[torch.Tensor | None] = [None] * len(elements)
        if trainer_log_probs is not None:
            given = list(trainer_log_probs)
        elements += not_trained
        given += [None] * len(not_trained)
        for row, trainer in zip(elements, given, strict=True):
            token_ids = row.get(("tokens", "full"))
            if trainer is None:
                trainer = torch.full(token_ids.shape, torch.nan)
            elif trainer.shape != token_ids.shape:
                raise ValueError(
                    f"trainer_log_probs has shape {tuple(trainer.shape)} for a row of {len(token_ids)} tokens; "
                    "give one log-prob per token, NaN where it is unknown."
                )
            values = {
                "token_ids": token_ids,
                "loss_mask": row.get(("masks", "all_assistant_mask")),
                "log_probs": row.get(("log_probs", "full")),
                "trainer_log_probs": trainer,
                "versions": row.get(("policy_versions", "full")),
            }
            for name, value in values.items():
                columns[name].append(value.detach().cpu().numpy().astype(_DTYPES[name]))
        advantages = [_advantage(row) for row in elements]
        self.path.mkdir(parents=True, exist_ok=True)
        arrays = dict(
            lengths=np.array([len(ids) for ids in columns["token_ids"]], dtype=np.int64),
            rollout_ids=np.array([plain(row.get(("rollout", "rollout_id"))) for row in elements], dtype=np.str_),
            row_indices=np.array([int(row.get(("rollout", "row_index"))) for row in elements], dtype=np.int32),
            advantages=np.array(advantages, np.float32),
            **{name: np.concatenate(parts) for name, parts in columns.items()},
        )

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:  # NumPy would append its suffix to a file name
                np.savez_compressed(file, **arrays)

        write_atomically(self._path(step, split), write)

    def copy(self, other: TokenLog, step: int, split: str = "train") -> None:
        """Copy the tokens of a step from another folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open_file(other._path(step, split), "rb") as file:
            data = file.read()
        write_atomically(self._path(step, split), lambda path: path.write_bytes(data))

    def _path(self, step: int, split: str) -> Path:
        return self.path / (f"{step:06d}.npz" if split == "train" else f"{step:06d}-{quote(split, safe='')}.npz")

    def steps(self) -> list[tuple[int, str]]:
        """Return the stored steps and splits, sorted; files with other names are left out."""
        stems = (path.stem.partition("-") for path in self.path.glob("[0-9]*.npz"))
        return sorted((int(step), unquote(split) or "train") for step, _, split in stems if step.isdecimal())

    def read(self, step: int, split: str = "train") -> list[TokenRow]:
        """Return the rows of a step.

        Raises FileNotFoundError if the step was not stored, and DamagedFileError if its file is damaged.
        """
        path = self._path(step, split)
        try:
            return self._read(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing: the tokens of step {step} were lost or not stored.") from None
        except Exception as error:  # a file of unknown origin may raise any error
            raise DamagedFileError(f"{path} is damaged: {error}. Remove it to see the rest of the run.") from error

    @staticmethod
    def _read(path: Path) -> list[TokenRow]:
        with open_file(path, "rb") as file, np.load(file) as data:
            num_bytes = sum(entry.file_size for entry in data.zip.infolist())
            check_fits_memory(path, num_bytes * _BYTES_IN_LISTS)  # a small file may expand a thousandfold
            ends = data["lengths"].cumsum()[:-1]
            columns = {name: [part.tolist() for part in np.split(data[name], ends)] for name in _DTYPES}
            heads = zip(data["rollout_ids"], data["row_indices"], data["advantages"], strict=True)
            return [
                TokenRow(str(rollout_id), int(row_index), float(advantage), *values)
                for (rollout_id, row_index, advantage), *values in zip(heads, *columns.values(), strict=True)
            ]


def _advantage(row: TensorDictBase) -> float:
    """Return a row's advantage (the mean over trained tokens if each token has one); NaN without an advantage."""
    advantage = row.get("advantage", None)
    if advantage is None:
        return math.nan
    mask = row.get(("masks", "all_assistant_mask"))
    if advantage.numel() == len(mask):
        advantage = advantage.reshape(-1)[mask]
    return float(advantage.mean())
