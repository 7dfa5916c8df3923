"""`BestAnswers`: the buffer that expert iteration learns from."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack


class BestAnswers:
    """Buffer of recent good rows, each learned several times, since few are right at first.

    Args:
        size: maximum number of rows.
        rows_per_sample: number of rows of a sample, drawn with replacement.
        max_reuse: mean number of times that each row is sampled.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> best = BestAnswers(2, rows_per_sample=4, max_reuse=2)
        >>> best.extend(TensorDict({"answer": torch.arange(3)}, [3]))
        >>> best.sample().shape, sorted(int(row["answer"]) for row in best.rows), best.is_learned
        (torch.Size([4]), [1, 2], False)
    """

    def __init__(self, size: int, *, rows_per_sample: int, max_reuse: int) -> None:
        self.size = size
        self.rows_per_sample = rows_per_sample
        self.max_reuse = max_reuse
        self.rows: list[TensorDictBase] = []
        self.num_kept = 0
        self.num_learned = 0

    @property
    def is_learned(self) -> bool:
        """Whether rows were sampled `max_reuse` times on average; true without any row."""
        return self.num_learned >= self.max_reuse * self.num_kept

    def extend(self, batch: TensorDictBase) -> None:
        """Add a batch of rows, which may be empty."""
        if batch.shape[0]:
            self.rows = [*self.rows, *batch.unbind(0)][-self.size :]
            self.num_kept += batch.shape[0]

    def sample(self) -> TensorDictBase:
        """Return rows to train on, `[rows_per_sample]`."""
        self.num_learned += self.rows_per_sample
        places = torch.randint(len(self.rows), (self.rows_per_sample,)).tolist()
        return lazy_stack([self.rows[place] for place in places])

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and the counts."""
        return {"rows": self.rows, "num_kept": self.num_kept, "num_learned": self.num_learned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.rows = state_dict["rows"]
        self.num_kept = state_dict["num_kept"]
        self.num_learned = state_dict["num_learned"]
