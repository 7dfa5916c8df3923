"""The held tokens of a conversation: lists that grow in place, and tensors that mirror them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llmrl.data import TokenColumns

if TYPE_CHECKING:
    import torch

Column = Literal["token_ids", "loss_mask", "log_probs", "versions"]
COLUMNS: tuple[Column, ...] = ("token_ids", "loss_mask", "log_probs", "versions")

_MIN_CAPACITY = 256


class TokenBuffer:
    """Columns that only grow, shared by successive values of a conversation, each of which sees a prefix.

    Tensors are made when first asked for; from then on each turn writes its own tokens only.
    """

    __slots__ = ("_mirrors", "columns")

    def __init__(self, columns: TokenColumns | None = None) -> None:
        self.columns = TokenColumns() if columns is None else columns
        self._mirrors: dict[Column, tuple[torch.Tensor, int]] = {}

    def tensor_view(self, column: Column, length: int) -> torch.Tensor:
        """The first `length` entries of a column, [length], sharing memory with views of other lengths.

        Raises:
            ValueError: for an unknown column.
        """
        import torch

        if column not in COLUMNS:
            raise ValueError(f"column must be one of {COLUMNS}, got {column!r}.")
        values = getattr(self.columns, column)
        dtypes = {"loss_mask": torch.bool, "log_probs": torch.float32}
        buffer, num_written = self._mirrors.get(column, (None, 0))
        if buffer is None or buffer.shape[0] < length:
            # Doubling: views handed out earlier keep the smaller buffer, together no larger than the new one.
            capacity = max(_MIN_CAPACITY, 2 * length)
            larger = torch.empty(capacity, dtype=dtypes.get(column, torch.int64))
            if buffer is not None:
                larger[:num_written] = buffer[:num_written]
            buffer = larger
        if num_written < length:
            buffer[num_written:length] = torch.tensor(values[num_written:length], dtype=buffer.dtype)
            num_written = length
        self._mirrors[column] = (buffer, num_written)
        return buffer[:length]
