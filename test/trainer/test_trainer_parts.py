"""What a training loop is made of: optimizer with its schedule, several updates per batch, model and reference."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from loss_batches import plain_log_probs, ragged_batch, tiny_model

from llmrl.objectives import GRPOLoss, SFTLoss, StreamsLoss, trained_tokens, write_loss_weights
from llmrl.trainer import (
    LoRAConfig,
    TransformersWrapper,
    load_model,
    make_optimizer,
    make_reference,
    minibatches,
    train_step,
)

OLD = ("old_log_probs", "full")


def rates_of(optimizer: Any, schedule: Any, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_learning_rates_are_those_of_the_formulas(name: str, warmup_steps: int) -> None:
    made = make_optimizer(
        torch.nn.Linear(2, 2), learning_rate=0.4, schedule=name, warmup_steps=warmup_steps, num_steps=11
    )
    expected = []
    for step in range(11):
        part = (step - warmup_steps) / (11 - warmup_steps)
        after = {"constant": 1.0, "linear": 1 - part, "cosine": math.cos(math.pi * part / 2) ** 2}[name]
        expected.append(0.4 * ((step + 1) / (warmup_steps + 1) if step < warmup_steps else after))
    assert rates_of(*made, 11) == pytest.approx(expected)
    assert min(expected) > 0, "no batch is collected to learn nothing from it"


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decays_are_those_of_transformers(name: str) -> None:
    from transformers import get_scheduler

    made = make_optimizer(torch.nn.Linear(2, 2), learning_rate=0.4, schedule=name, num_steps=9)
    theirs = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.4)
    schedule = get_scheduler(name, theirs, num_warmup_steps=0, num_training_steps=9)
    expected = []
    for _ in range(9):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()
    assert rates_of(*made, 9) == pytest.approx(expected)


def test_a_schedule_that_has_ended_says_so_instead_of_learning_nothing() -> None:
    optimizer, schedule = make_optimizer(torch.nn.Linear(2, 2), learning_rate=0.1, schedule="cosine", num_steps=2)
    rates_of(optimizer, schedule, 2)
    with pytest.raises(ValueError, match="after num_steps=2"):
        schedule.step()


def trained(model: Any, optimizer: Any, schedule: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("order", [("optimizer", "schedule"), ("schedule", "optimizer")])
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted(order: tuple[str, str]) -> None:
    def make(**changed: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        settings = {"learning_rate": 0.1, "weight_decay": 0.2, "schedule": "cosine", "warmup_steps": 2, "num_steps": 9}
        optimizer, schedule = make_optimizer(model, **{**settings, **changed})
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    whole, begun = make(), make()
    trained(*whole.values(), range(8))
    trained(*begun.values(), range(4))
    state = copy.deepcopy({name: part.state_dict() for name, part in begun.items()})
    resumed = make()
    for name in ("model", *order):
        resumed[name].load_state_dict(state[name])
    trained(*resumed.values(), range(4, 8))
    for ours, theirs in zip(resumed["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # What the configuration says now is what counts, of a state that was saved with other numbers.
    changed = make(learning_rate=0.03, weight_decay=0.5, num_steps=20)
    for name in ("model", *order):
        changed[name].load_state_dict(state[name])
    expected = 0.03 * (1 + math.cos(math.pi * (4 - 2) / (20 - 2))) / 2
    assert [group["lr"] for group in changed["optimizer"].param_groups] == pytest.approx([expected] * 2)
    assert [group["weight_decay"] for group in changed["optimizer"].param_groups] == [0.5, 0.0]
    assert changed["schedule"].get_last_lr() == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be a positive"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"schedule": "cosin"}, "one of .*'cosine'"),
        ({"schedule": "linear"}, "give num_steps"),
        ({"schedule": "linear", "warmup_steps": 5, "num_steps": 5}, "leaves no step"),
    ],
)
def test_settings_that_make_no_sense_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_optimizer(torch.nn.Linear(2, 2), **{"learning_rate": 0.1, **arguments})


def test_a_model_that_is_frozen_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(torch.nn.Linear(2, 2).requires_grad_(False), learning_rate=0.1)


def rollouts_of(batch: Any) -> list[str]:
    return list(batch["rollout", "rollout_id"])


def test_each_epoch_has_every_rollout_once_and_whole() -> None:
    batch = ragged_batch(num_rows=13)  # rows 1 and 2 are of one rollout: 12 rollouts, two per group
    parts = [rollouts_of(part) for part in minibatches(batch, SFTLoss(None), num_epochs=2, num_minibatches=3, seed=4)]
    assert len(parts) == 6
    for epoch in (parts[:3], parts[3:]):
        assert sorted(rollout for part in epoch for rollout in part) == sorted(rollouts_of(batch))
        assert [len(set(part)) for part in epoch] == [4, 4, 4]
        assert not any(set(a) & set(b) for a in epoch for b in epoch if a is not b)
    assert parts[:3] != parts[3:], "each epoch has an order of its own"
    # A group's rows share their prompt: at most one group is divided at each of the two cuts.
    groups = [{int(rollout) // 2 for rollout in part} for part in parts[:3]]
    assert sum(len(group) for group in groups) <= len(set().union(*groups)) + 2


def test_mini_batches_depend_on_their_seed_alone() -> None:
    def parts(seed: int) -> list[list[str]]:
        random.random(), torch.rand(1)
        made = minibatches(ragged_batch(num_rows=9), SFTLoss(None), num_epochs=2, num_minibatches=2, seed=seed)
        return [rollouts_of(part) for part in made]

    assert parts(0) == parts(0) and parts(0) != parts(1)


def test_one_update_is_on_the_batch_itself_and_costs_no_pass() -> None:
    batch = ragged_batch()
    (part,) = minibatches(batch, GRPOLoss(None), seed=0)
    assert part is batch and OLD[0] not in batch.keys()  # noqa: SIM118 - of a TensorDict


def test_there_are_no_more_mini_batches_than_rollouts() -> None:
    parts = list(minibatches(ragged_batch(num_rows=3), SFTLoss(None), num_minibatches=8, seed=0))
    assert sorted(map(len, map(rollouts_of, parts))) == [1, 2]
    with pytest.raises(ValueError, match="num_epochs must be at least 1, got 0"):
        minibatches(ragged_batch(), SFTLoss(None), num_epochs=0, seed=0)


def plain_update(model: Any, rows: list[Any], old: dict[int, torch.Tensor], rate: float) -> int:
    """One step of gradient descent on PPO's clipped token mean, a row at a time; the number of clipped tokens."""
    model.zero_grad()
    terms, num_clipped = [], 0
    for row in rows:
        log_probs, advantage = plain_log_probs(model, row), row["advantage"].item()
        for place in row["masks", "all_assistant_mask"].nonzero()[:, 0].tolist():
            ratio = (log_probs[place] - old[id(row)][place]).exp()
            num_clipped += int(not 0.8 <= ratio.item() <= 1.2)
            terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    torch.stack(terms).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
    return num_clipped


def test_two_epochs_of_mini_batches_are_those_of_a_plain_loop() -> None:
    model, rate = tiny_model(), 1.0
    plain = copy.deepcopy(model).double().eval()
    plain.set_attn_implementation("eager")
    batch = ragged_batch(num_rows=8)
    rows = list(batch.unbind(0))
    with torch.no_grad():
        old = {id(row): plain_log_probs(plain, row) for row in rows}
    by_rollout: dict[str, list[Any]] = {}
    for row in rows:
        by_rollout.setdefault(row["rollout", "rollout_id"], []).append(row)
    policy = TransformersWrapper(model, generate=False)
    loss, optimizer = GRPOLoss(policy), torch.optim.SGD(model.parameters(), lr=rate)
    reports, num_clipped = [], []
    for part in minibatches(batch, loss, num_epochs=2, num_minibatches=2, seed=0):
        reports.append(train_step(loss, part, optimizer, max_grad_norm=None))
        of_part = [row for rollout in dict.fromkeys(rollouts_of(part)) for row in by_rollout[rollout]]
        num_clipped.append(plain_update(plain, of_part, old, rate))
    assert num_clipped[0] == 0 and sum(num_clipped) > 4, "the later updates are clipped by the log-probs before all"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)
    for row in rows:  # those before the first update, whatever came after
        mask = row["masks", "all_assistant_mask"]
        torch.testing.assert_close(row[OLD].double()[mask], old[id(row)][mask], rtol=1e-4, atol=1e-4)
    fractions = [count / one.num_trained_tokens for count, one in zip(num_clipped, reports, strict=True)]
    assert [one.measurements["clip_fraction"] for one in reports] == pytest.approx(fractions)


def every_token(row: Any) -> torch.Tensor:
    return torch.ones(len(row["tokens", "full"]))


@pytest.mark.parametrize(
    ("make_loss", "mask_of"),
    [
        (lambda policy: StreamsLoss(policy, streams={"sft": SFTLoss(), "all": GRPOLoss()}), every_token),
        (lambda policy: GRPOLoss(policy, masking_strategy="generic"), every_token),
        (lambda policy: GRPOLoss(policy), trained_tokens),
    ],
)
def test_old_log_probs_are_those_of_the_tokens_that_a_loss_or_stream_trains(make_loss: Any, mask_of: Any) -> None:
    model = tiny_model()
    plain = copy.deepcopy(model).double().eval()
    plain.set_attn_implementation("eager")
    batch = write_loss_weights(ragged_batch(num_rows=5), sft=trained_tokens, all=every_token)
    loss = make_loss(TransformersWrapper(model, generate=False))
    for part in minibatches(batch, loss, num_minibatches=2, seed=0):
        for row in part.unbind(0):
            expected = plain_log_probs(plain, row).detach() * mask_of(row)
            torch.testing.assert_close(row[OLD].double(), expected, rtol=1e-4, atol=1e-4)


def test_later_updates_of_a_stream_are_clipped() -> None:
    fractions = []
    for is_stream in (False, True):
        policy = TransformersWrapper(tiny_model(), generate=False)
        loss: Any = GRPOLoss(importance_cap=2.0)
        if is_stream:
            loss = StreamsLoss(policy, streams={"policy": loss})
        else:
            loss.actor_network = policy
        optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
        batch = write_loss_weights(ragged_batch(num_rows=8), policy=trained_tokens)
        parts = minibatches(batch, loss, num_epochs=2, seed=0)
        reports = [train_step(loss, part, optimizer, max_grad_norm=None) for part in parts]
        fractions.append([report.measurements["clip_fraction"] for report in reports])
    alone, stream = fractions
    assert stream == pytest.approx(alone) and stream[0] == 0 < stream[1]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: Any) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(folder)
    return folder


def test_a_model_is_loaded_in_float32_and_may_checkpoint(saved_model: str) -> None:
    model = load_model(saved_model, gradient_checkpointing=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.is_gradient_checkpointing and all(parameter.requires_grad for parameter in model.parameters())


def test_with_adapters_only_they_are_trained(saved_model: str) -> None:
    pytest.importorskip("peft")
    model = load_model(saved_model, lora=LoRAConfig(rank=2, alpha=8, target_modules=("q_proj", "down_proj")))
    optimizer, _ = make_optimizer(model, learning_rate=1e-2, weight_decay=0.1)
    trained_names = {name.split(".")[-4] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained_names == {"q_proj", "down_proj"}
    # Of each of two layers two projections, of each two factors of rank 2: [2, in] and [out, 2].
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == 2 * 2 * (32 + 40)
    assert model.base_model.model.model.layers[0].self_attn.q_proj.scaling == {"default": 4.0}


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"alpha": 0}])
def test_adapters_that_change_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        LoRAConfig(**arguments)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)], ids=["second model", "adapters off"])
def test_the_reference_is_the_model_before_training(saved_model: str, lora: LoRAConfig | None) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    torch.manual_seed(0)
    model = load_model(saved_model, lora=lora)
    policy = TransformersWrapper(model, generate=False, generate_kwargs={"temperature": 0.7})
    reference = make_reference(policy, saved_model)
    loss = GRPOLoss(policy, kl_to_ref_coeff=0.5, importance_cap=2.0)
    optimizer, _ = make_optimizer(model, learning_rate=0.05)
    reports = [train_step(loss, reference(ragged_batch()), optimizer) for _ in range(3)]
    assert reports[0].measurements["kl_to_ref"] == pytest.approx(0.0, abs=1e-6)
    before, batch = tiny_model().eval(), reference(ragged_batch())
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        with torch.no_grad():
            logits = before(input_ids=ids[None]).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][mask[1:]]
        torch.testing.assert_close(row["next", "ref_log_probs", "full"][mask], expected, rtol=1e-4, atol=1e-4)
    assert reports[-1].measurements["kl_to_ref"] > 1e-3, "the policy has moved, the reference has not"
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == num_trained
