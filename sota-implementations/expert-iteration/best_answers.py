"""The buffer that expert iteration learns from."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack


class BestAnswers:
    """The last rows that were kept, and how often they were learned.

    It outlives the step: at first few answers are right, and those few are learned again and again.

    Args:
        size: rows that it holds.
        rows_per_sample: rows of a sample, drawn with replacement.
        max_reuse: times that a row is learned, on average.
    """

    def __init__(self, size: int, *, rows_per_sample: int, max_reuse: int) -> None:
        self.size, self.rows_per_sample, self.max_reuse = size, rows_per_sample, max_reuse
        self.rows: list[TensorDictBase] = []
        self.num_kept = self.num_learned = 0

    @property
    def is_learned(self) -> bool:
        """Whether the rows so far were learned often enough; before the first there is nothing to learn from."""
        return self.num_learned >= self.max_reuse * self.num_kept

    def extend(self, batch: TensorDictBase) -> None:
        """Add a batch of rows, which may be empty."""
        if batch.shape[0]:
            self.rows = [*self.rows, *batch.unbind(0)][-self.size :]
            self.num_kept += batch.shape[0]

    def sample(self) -> TensorDictBase:
        """Rows to learn now."""
        self.num_learned += self.rows_per_sample
        places = torch.randint(len(self.rows), (self.rows_per_sample,)).tolist()
        return lazy_stack([self.rows[place] for place in places])

    def state_dict(self) -> dict[str, Any]:
        """The rows that are kept, and the counts."""
        return {"rows": self.rows, "num_kept": self.num_kept, "num_learned": self.num_learned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.rows = state_dict["rows"]
        self.num_kept, self.num_learned = state_dict["num_kept"], state_dict["num_learned"]
