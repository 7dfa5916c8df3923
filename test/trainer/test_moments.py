"""AdamW with moments of 8 bits: near AdamW, a quarter of its memory, and resumed from a file to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmrl.config.sections import TrainerConfig
from llmrl.data.state_file import load_state, save_state
from llmrl.trainer import make_optimizer

pytest.importorskip("bitsandbytes")


def made(moments: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 64))
    options: dict[str, Any] = {"learning_rate": 3e-3, "weight_decay": 0.1, "schedule": "cosine", "num_steps": 20}
    return model, *make_optimizer(model, moments=moments, **options)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def test_losses_are_near_those_of_float32_and_memory_is_a_quarter() -> None:
    eight, exact = made("8bit"), made("float32")
    assert train(*eight, range(20)) == pytest.approx(train(*exact, range(20)), rel=2e-3)
    states = [one[1].state_dict()["state"] for one in (eight, exact)]
    assert num_bytes(states[0][0]) < 0.26 * num_bytes(states[1][0])
    # A bias of 1,024 values keeps float32; torch counts the steps in a tensor of 4 bytes.
    assert num_bytes(states[0][2]) == num_bytes(states[1][2]) - 4


def test_a_run_resumed_from_a_file_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    whole, begun, resumed = made("8bit"), made("8bit"), made("8bit")
    expected = train(*whole, range(9))[5:]
    train(*begun, range(5))
    save_state(tmp_path / "state", {str(number): part.state_dict() for number, part in enumerate(begun)})
    state = load_state(tmp_path / "state", advice="")
    for number, part in enumerate(resumed):
        part.load_state_dict(state[str(number)])
    assert train(*resumed, range(5, 9)) == expected
    assert all(torch.equal(*pair) for pair in zip(whole[0].parameters(), resumed[0].parameters(), strict=True))


@pytest.mark.parametrize(("saved", "loading"), [("8bit", "float32"), ("float32", "8bit")])
def test_moments_of_the_other_form_are_refused(saved: str, loading: str) -> None:
    one, other = made(saved), made(loading)
    train(*one, range(1))
    with pytest.raises(ValueError, match=f"the state has moments='{saved}', and the optimizer moments='{loading}'"):
        other[1].load_state_dict(one[1].state_dict())


def test_ranks_that_shard_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.moments=8bit is for one rank, and train\.num_ranks=2"):
        TrainerConfig(moments="8bit", num_ranks=2)
