"""What of packed rows a rank computes that shares them with others; steps are in `test_objectives_sharded.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from script_configs import config

from llmrl.config.fit import check_fit
from llmrl.trainer.context import ContextRanks


def ranks_of(size: int) -> list[ContextRanks]:
    def mesh(rank: int) -> Any:
        return SimpleNamespace(get_local_rank=lambda: rank, size=lambda: size)

    return [ContextRanks(mesh(rank)) for rank in range(size)]


@given(
    num_bins=st.integers(1, 3),
    length=st.integers(1, 20),
    size=st.integers(1, 5),
    shape=st.sampled_from([(), (2,), (2, 3)]),
)
def test_parts_put_together_are_the_whole(num_bins: int, length: int, size: int, shape: tuple[int, ...]) -> None:
    whole = torch.randint(9, (num_bins, length, *shape))
    parts = [ranks.part_of(whole, fill=-1) for ranks in ranks_of(size)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, 1)
    assert torch.equal(joined[:, :length], whole) and (joined[:, length:] == -1).all()


@given(num_bins=st.integers(1, 3), length=st.integers(1, 20), size=st.integers(1, 5), data=st.data())
def test_each_position_is_one_ranks_and_names_its_token(num_bins: int, length: int, size: int, data: Any) -> None:
    tokens = torch.arange(num_bins * length).view(num_bins, length)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, tokens.numel() - 1), unique=True)), dtype=torch.int64)
    found = [ranks.part_of(tokens).flatten()[ranks.positions_of(positions, length)] for ranks in ranks_of(size)]
    assert sorted(torch.cat(found).tolist()) == sorted(positions.tolist())


def test_what_cannot_be_shared_is_refused_with_the_configuration(tiny_model_path: str) -> None:
    model = f"model.path={tiny_model_path}"
    with pytest.raises(ValueError, match=r"train\.context_ranks=2 must divide train\.num_ranks=3"):
        config("grpo", model, "train.num_ranks=3", "train.context_ranks=2")
    with pytest.raises(ValueError, match=r"train\.context_ranks=3 does not divide the 1 heads"):
        check_fit(config("grpo", model, "train.num_ranks=3", "train.context_ranks=3"))
