"""The entry `loss`: every loss is what it would be in Python, and takes its own options only."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from loss_batches import near_policy, ragged_batch
from script_configs import SCRIPTS, config

from llmrl.config.losses import COMMON, LOSSES, OWN
from llmrl.config.sections import GRPOConfig, GRPOTrainConfig
from llmrl.objectives import DAPO, CISPOLoss, DPPOLoss, DrGRPOLoss, GRPOLoss, GSPOLoss, RLOOLoss

pytestmark = pytest.mark.usefixtures("takes_long")  # hydra composes configurations

DIVERGENCE = {"max_divergence": 0.05, "divergence": "kl"}
# Name, entries, the same in Python, and the advantage that belongs to it.
CHOSEN = [
    ("grpo", {}, GRPOLoss, {"clip_epsilon": 0.2}, "std"),
    ("grpo", {"clip_epsilon": 0.1}, GRPOLoss, {"clip_epsilon": 0.1}, "std"),
    ("grpo", {"clip_epsilon_high": 0.28}, GRPOLoss, {"clip_epsilon": (0.2, 0.28)}, "std"),
    ("grpo", {"dual_clip": 3.0, "kl_to_ref_coeff": 0.1}, GRPOLoss, {"dual_clip": 3.0, "kl_to_ref_coeff": 0.1}, "std"),
    ("dr_grpo", {}, DrGRPOLoss, {"fixed_length": 64 * 2}, "mean"),
    ("dr_grpo", {"fixed_length": 9, "clip_epsilon": 0.3}, DrGRPOLoss, {"fixed_length": 9, "clip_epsilon": 0.3}, "mean"),
    ("dapo", {}, DAPO, {}, "std"),
    ("dapo", {"clip_epsilon": 0.1}, DAPO, {"clip_epsilon": (0.1, 0.28)}, "std"),
    ("cispo", {"clip_epsilon_high": 0.5}, CISPOLoss, {"clip_epsilon": (1.0, 0.5)}, "std"),
    ("gspo", {"aggregation": "group_mean"}, GSPOLoss, {"aggregation": "group_mean"}, "std"),
    ("gspo", {"clip_epsilon": 0.001}, GSPOLoss, {"clip_epsilon": (0.001, 4e-4)}, "std"),
    ("rloo", {"importance_cap": None}, RLOOLoss, {"importance_cap": None}, "leave_one_out"),
    ("dppo", {}, DPPOLoss, {}, "std"),
    (
        "dppo",
        {"max_divergence": 0.05, "divergence": "kl"},
        DPPOLoss,
        {"max_divergence": 0.05, "divergence": "kl"},
        "std",
    ),
]


def entries(options):
    return [f"train.{name}={'null' if value is None else value}" for name, value in options.items()]


def values(loss):
    return {name: value for name, value in vars(loss).items() if not name.startswith("_")}


@pytest.mark.parametrize(("name", "options", "kind", "arguments", "normalization"), CHOSEN)
def test_a_loss_of_the_configuration_is_the_one_built_in_python(name, options, kind, arguments, normalization):
    cfg = config("grpo", f"loss={name}", "collect.max_new_tokens=64", "collect.max_turns=2", *entries(options))
    batch = ragged_batch(3)
    for row in batch.unbind(0):
        row["old_log_probs", "full"] = row["log_probs", "full"] + 0.1 * torch.randn(row["log_probs", "full"].shape)
        row["next", "ref_log_probs", "full"] = row["log_probs", "full"].clone()
    loss, expected = (
        cfg.build_loss(near_policy(batch)),
        kind(near_policy(batch), **{"importance_cap": 2.0, **arguments}),
    )
    assert type(loss) is kind and values(loss) == values(expected) and cfg.normalization == normalization
    assert loss(batch).total_loss().item() == expected(batch).total_loss().item()


def test_every_loss_is_built_above():
    assert {name for name, *_ in CHOSEN} == set(LOSSES)
    assert {option for _, options, *_ in CHOSEN for option in options} == {*OWN, *COMMON}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loss=rloo", "train.clip_epsilon=0.1"],
            r"train\.clip_epsilon is not an option of loss=rloo, got 0\.1; ",
        ),
        (["loss=dppo", "train.clip_epsilon_high=0.3"], r"It takes train\.max_divergence, train\.divergence"),
        (
            ["loss=grpo", "train.fixed_length=64"],
            r"fixed_length is not an option of loss=grpo, .* take it: dr_grpo",
        ),
        (["loss=dr_grpo", "train.aggregation=token_mean"], r"aggregation is not an option of loss=dr_grpo"),
        (["train.max_divergence=0.1"], r"max_divergence is not an option of loss=grpo.*take it: dppo\."),
        (["loss=cispo", "train.dual_clip=3"], "dual_clip is not an option of loss=cispo"),
        (["loss=dapoo"], r"loss must be one of grpo, .*; got 'dapoo'\. Did you mean 'dapo'\?"),
        (["loss=grpo", "train.dual_clip=1"], r"train\.dual_clip must be above 1"),
        (["loss=dppo", "train.divergence=js"], r"train\.divergence must be one of tv, kl"),
        (["loss=rloo", "train.num_epochs=2"], r"train\.num_epochs must be 1 with loss=rloo, got 2: .* no ratio"),
        (["loss=rloo", "train.num_minibatches=4"], r"train\.num_minibatches must be 1 with loss=rloo, got 4"),
        (["loss=gspo", "train.clip_epsilon=1.5"], r"train\.clip_epsilon must be above 0 and at most 1"),
    ],
)
def test_what_a_loss_does_not_take_is_refused_when_the_configuration_is_composed(overrides, message):
    with pytest.raises(ValueError, match=message):
        config("grpo", *overrides)


@pytest.mark.parametrize("name", LOSSES)
def test_every_pair_of_options_is_taken_or_refused_by_name(name):
    options = {"fixed_length": 9, **DIVERGENCE, "aggregation": "group_mean", "dual_clip": 2.0}
    options |= {"clip_epsilon": 0.1, "clip_epsilon_high": 0.3}
    cfg = config("grpo")
    sections = {section: getattr(cfg, section) for section in ("run", "model", "env", "collect")}
    for pair in itertools.combinations(options, 2):
        chosen = {option: options[option] for option in pair}
        train = GRPOTrainConfig(num_steps=1, learning_rate=1e-5, **chosen)
        refused = "|".join(option for option in pair if option not in LOSSES[name].entries)
        if refused:
            with pytest.raises(ValueError, match=rf"train\.({refused}) is not an option of loss={name}"):
                GRPOConfig(**sections, loss=name, train=train)
            continue
        loss = GRPOConfig(**sections, loss=name, train=train).build_loss(near_policy(ragged_batch(1)))
        bounds = {"clip_epsilon": loss.clip_epsilon_low, "clip_epsilon_high": loss.clip_epsilon_high}
        assert {option: bounds.get(option, getattr(loss, option, None)) for option in pair} == chosen


def test_the_readme_names_every_loss_with_its_options():
    rows = re.findall(r"^\| `loss=(\w+)` .*\|.*\| (.*) \|$", (SCRIPTS / "grpo/README.md").read_text(), re.MULTILINE)
    assert {name: tuple(re.findall(r"`train\.(\w+)`", cell)) for name, cell in rows} == {
        name: choice.entries for name, choice in LOSSES.items()
    }
