"""A run in float16: gradients that overflow, a kill, and what a checkpoint keeps of the loss's scale."""

import copy
from functools import partial

import pytest
import torch
from biased_models import letters_of

from llmrl import DatasetChatEnv, RubricReward, TransformersEngine, train
from llmrl.runs.run_folder import RunFolder
from llmrl.scripts import grpo
from llmrl.trainer import train_step
from llmrl.trainer.trained_model import trained_model


class Killed(Exception):
    pass


def make_env():
    env = DatasetChatEnv([f"{a} + 1 =" for a in range(6)], repeats=4, name="train")
    return env.append_transform(RubricReward(letters_of))


def test_an_overflow_is_skipped_and_a_killed_run_ends_as_it_would_have(
    tiny_model_path, tmp_path, monkeypatch, takes_long
):
    # So large a scale overflows at first, and a thousandth of a thousandth of it does not.
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**40, backoff_factor=2.0**-15)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    seen = []

    def step_then_kill(loss, batch, optimizer, **options):
        model = loss.actor_network.model
        before = copy.deepcopy(model.state_dict())
        report = train_step(loss, batch, optimizer, **options)
        seen.append((report, before, copy.deepcopy(model.state_dict()), trained_model(model).scaler.state_dict()))
        if len(seen) == 5:
            raise Killed
        return report

    def step_again(loss, batch, optimizer, **options):
        seen.append(loss.actor_network.model)
        return train_step(loss, batch, optimizer, **options)

    engine = TransformersEngine(tiny_model_path)
    run = partial(
        train, tiny_model_path, make_env(), path=tmp_path / "run", engine=engine, num_steps=5, groups_per_batch=2,
        max_new_tokens=8, learning_rate=1e-2, checkpoint_every=4, dtype="float16",
    )  # fmt: skip
    monkeypatch.setattr(grpo, "train_step", step_then_kill)
    with pytest.raises(Killed):
        run()
    monkeypatch.setattr(grpo, "train_step", step_again)
    run(resume=True)
    engine.shutdown()
    first, before, after, _ = seen[0]
    assert (first.is_skipped, first.skip_reason) == (True, "overflow")
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    metrics = {int(row["step"]): row for row in RunFolder(tmp_path / "run", read_only=True).read_metrics()}
    assert (metrics[1]["num_overflows"], metrics[1]["is_skipped"]) == (1, 1)
    assert metrics[1]["loss_scale"] == pytest.approx(2.0**40, rel=1e-5)
    assert (metrics[4]["num_overflows"], metrics[4]["is_skipped"]) == (0, 0)
    assert metrics[4]["loss_scale"] < 2.0**39 and metrics[4]["weight_change"] > 0
    for step in (1, 2, 3, 4, 5):
        assert metrics[step]["on_policy_difference"] < 0.02
    # The fifth step was made twice, the second time from the checkpoint of the fourth.
    assert len(seen) == 6
    resumed = seen[5]
    _, _, expected, scale = seen[4]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.state_dict().items())
    assert trained_model(resumed).scaler.state_dict() == scale and scale["scale"] == pytest.approx(
        metrics[4]["loss_scale"], rel=1e-5
    )
