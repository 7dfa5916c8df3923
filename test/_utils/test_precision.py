"""Engine and trainer compute in dtypes that agree, and low precision loses nothing but its rounding."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_batches import ragged_batch, tiny_model, with_lora
from tensordict import TensorDictBase, lazy_stack
from weight_sync_tools import TakingEngine, make_sender

from llmrl.engines.vllm.arguments import EngineOptions, build_engine_args
from llmrl.objectives import GRPOLoss, SFTLoss, StreamsLoss, observed_tokens, trained_tokens, write_loss_weights
from llmrl.trainer import TrainStepReport, TransformersWrapper, train_step
from llmrl.trainer.head.log_probs import chunked_log_probs
from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSync


def test_a_step_in_the_same_autocast_region_sees_the_weights_of_the_step_before() -> None:
    losses = []
    for autocast_dtype in (torch.bfloat16, None):
        policy = TransformersWrapper(tiny_model(), generate=False, autocast_dtype=autocast_dtype)
        loss, optimizer = GRPOLoss(policy, clip_epsilon=(1.0, 1e4)), torch.optim.SGD(policy.parameters(), lr=0.3)
        outer = torch.autocast("cpu", dtype=torch.bfloat16) if autocast_dtype is None else contextlib.nullcontext()
        with outer:
            losses.append([train_step(loss, ragged_batch(), optimizer, max_grad_norm=None).loss for _ in range(3)])
    each_in_its_own, all_in_one = losses
    assert all_in_one == each_in_its_own
    assert abs(each_in_its_own[1] - each_in_its_own[0]) > 0.02


def sampled_batch(served: Any, *, version: int, seed: int = 0, temperature: float = 1.0) -> TensorDictBase:
    """Rows with the log-probs of `served`, in float64, one row at a time."""
    rows = ragged_batch(seed, num_rows=16)
    model = copy.deepcopy(served).double()
    model.set_attn_implementation("eager")
    for row in rows.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        with torch.no_grad():
            log_probs = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, ids[1:, None])[:, 0]
        row["log_probs", "full"] = torch.cat([torch.zeros(1), chosen.float()]) * mask
        row["policy_versions", "full"] = torch.where(mask, version, -1)
    return rows


class Trainer:
    """A model, its loss, and a sender of its weights to an engine that takes whatever it is sent."""

    def __init__(self, engine_dtype: torch.dtype = torch.float32, autocast_dtype: Any = "auto") -> None:
        self.model = tiny_model()
        self.loss = GRPOLoss(
            TransformersWrapper(self.model, generate=False, autocast_dtype=autocast_dtype), clip_epsilon=(1.0, 1e4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.engine = TakingEngine()
        self.engine.model_dtype = engine_dtype

    def connect(self) -> WeightSync:
        return make_sender(VLLMWeightSyncScheme(), self.model, self.engine)

    def step(self, batch: TensorDictBase) -> TrainStepReport:
        return train_step(self.loss, batch, self.optimizer)


def messages_of(action: Callable[[], object]) -> list[str]:
    """What an action warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_and_trainer_compute_in_the_same_dtype_by_default(
    device: str, monkeypatch: pytest.MonkeyPatch, imports_vllm: None
) -> None:
    options: EngineOptions = {"dtype": None, "kv_cache_memory": 1, "weight_transfer": False}
    served = build_engine_args("model", options, is_cpu=device == "cpu")
    monkeypatch.setattr(TransformersWrapper, "device", torch.device(device))
    model = tiny_model()
    policy = TransformersWrapper(model, generate=False)
    assert str(trained_model(model).compute_dtype) == f"torch.{served.dtype}"
    assert policy.autocast_dtype == (None if device == "cpu" else torch.bfloat16)
    assert TransformersWrapper(tiny_model().bfloat16(), generate=False).autocast_dtype is None


@pytest.mark.parametrize(
    ("engine_dtype", "autocast_dtype", "told"),
    [
        (torch.float32, "auto", None),
        (torch.float32, None, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, "auto", "engine computes in bfloat16 and the trainer in float32"),
        (torch.float32, torch.bfloat16, "engine computes in float32 and the trainer in bfloat16"),
        (torch.float16, torch.bfloat16, "engine computes in float16 and the trainer in bfloat16"),
    ],
)
def test_dtypes_that_do_not_agree_are_reported_when_engine_and_trainer_meet(
    engine_dtype: torch.dtype, autocast_dtype: Any, told: str | None
) -> None:
    trainer = Trainer(engine_dtype, autocast_dtype)
    senders: list[WeightSync] = []
    messages = messages_of(lambda: senders.append(trainer.connect()))
    assert len(messages) == (told is not None)
    if told is not None:
        engine_name = str(engine_dtype).removeprefix("torch.")
        assert told in messages[0] and f"autocast_dtype=torch.{engine_name}" in messages[0]
    assert messages_of(senders[0].update_weights) == []  # once is enough
    senders[0].shutdown()


def test_a_policy_that_is_made_after_the_sender_is_compared_at_the_first_update() -> None:
    model, engine = tiny_model(), TakingEngine()
    senders: list[WeightSync] = []
    assert messages_of(lambda: senders.append(make_sender(VLLMWeightSyncScheme(), model, engine))) == []
    TransformersWrapper(model, generate=False)
    assert len(messages_of(senders[0].update_weights)) == 1
    senders[0].shutdown()


def test_the_base_of_an_adapted_model_is_the_same_model() -> None:
    pytest.importorskip("peft")
    model = with_lora(tiny_model(), ["q_proj"])
    TransformersWrapper(model, generate=False)
    assert trained_model(model.get_base_model()).compute_dtype is torch.float32
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(model)
    assert "Precision" in messages_of(lambda: sender.init_all_workers_group(None, TakingEngine()))[0]
    sender.shutdown()


def test_an_engine_that_agrees_is_never_warned_of() -> None:
    trainer = Trainer()
    sender = trainer.connect()

    def train() -> None:
        for step in range(4):
            report = trainer.step(sampled_batch(trainer.model, version=step, seed=step))
            assert report.measurements["log_prob_difference_max"] < 1e-3 and not report.is_skipped
            sender.update_weights()

    assert messages_of(train) == []
    sender.shutdown()


def test_weights_that_do_not_reach_the_engine_are_the_first_cause_named() -> None:
    trainer = Trainer()
    sender = trainer.connect()
    served = copy.deepcopy(trainer.model)
    trainer.step(sampled_batch(served, version=0))
    assert sender.update_weights() == 1
    messages = messages_of(lambda: trainer.step(sampled_batch(served, version=1, seed=1)))
    assert len(messages) == 1 and "rounding explains 0.001" in messages[0]
    assert "  1. the engine does not hold the trainer's weights" in messages[0]
    sender.shutdown()


def test_another_temperature_is_the_first_cause_named_where_the_first_step_is_off() -> None:
    trainer = Trainer()
    sender = trainer.connect()
    messages = messages_of(lambda: trainer.step(sampled_batch(trainer.model, version=0, temperature=0.7)))
    assert len(messages) == 1 and "  1. the temperature" in messages[0]
    sender.shutdown()


def test_arguments_that_no_test_covers_end_training_where_the_first_batch_is_off() -> None:
    trainer = Trainer()
    trainer.engine.untested_arguments = ("attention_backend",)  # type: ignore[attr-defined]
    sender = trainer.connect()
    with pytest.raises(ValueError, match="attention_backend, which llmrl's tests do not cover"):
        trainer.step(sampled_batch(trainer.model, version=0, temperature=0.7))
    assert messages_of(lambda: trainer.step(sampled_batch(trainer.model, version=0))) == []
    sender.update_weights()
    # Once they agreed, the cause is another.
    assert len(messages_of(lambda: trainer.step(sampled_batch(trainer.model, version=1, temperature=0.7)))) == 1
    sender.shutdown()


def test_the_first_stream_of_sampled_tokens_is_compared_with_its_engine() -> None:
    trainer = Trainer()
    streams = {"observations": SFTLoss(), "policy": trainer.loss}
    policy, trainer.loss.actor_network = trainer.loss.actor_network, None
    trainer.loss = StreamsLoss(policy, streams=streams)  # type: ignore[assignment]
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    sender = trainer.connect()

    def step(temperature: float) -> TrainStepReport:
        rows = write_loss_weights(
            sampled_batch(trainer.model, version=sender.update_weights(), temperature=temperature),
            observations=observed_tokens,
            policy=trained_tokens,
        ).unbind(0)
        # Neither observations nor demonstrations have log-probs of a sampler.
        demonstration = write_loss_weights(
            lazy_stack([ragged_batch(1)[0].select("tokens", "masks").clone()]), observations=trained_tokens
        )
        return trainer.step(lazy_stack([*rows, demonstration[0]]))

    reports: list[TrainStepReport] = []
    assert messages_of(lambda: reports.append(step(1.0))) == []
    assert reports[0].measurements["on_policy_difference"] < 1e-3
    messages = messages_of(lambda: reports.append(step(0.7)))
    assert len(messages) == 1 and "rounding explains 0.001" in messages[0]
    sender.shutdown()


def test_dtypes_that_do_not_agree_are_the_first_cause_named() -> None:
    trainer = Trainer(torch.bfloat16)
    messages_of(trainer.connect)
    messages = messages_of(lambda: trainer.step(sampled_batch(trainer.model, version=0, temperature=0.5)))
    assert len(messages) == 1 and "rounding explains 0.1" in messages[0]
    assert "  1. the engine computes in bfloat16 and the trainer in float32" in messages[0]


def test_what_older_weights_sampled_or_a_second_update_sees_is_no_cause_for_a_warning() -> None:
    trainer = Trainer()
    sender = trainer.connect()
    old = copy.deepcopy(trainer.model)
    batch = sampled_batch(old, version=0)

    def train() -> None:
        trainer.step(batch)
        assert trainer.step(batch).measurements["log_prob_difference_mean"] > 0.05  # its second update
        sender.update_weights()
        stale = trainer.step(sampled_batch(old, version=0, seed=2))
        assert stale.measurements["log_prob_difference_mean"] > 0.05

    assert messages_of(train) == []
    sender.shutdown()


def test_a_difference_is_reported_again_only_when_it_has_doubled_or_is_new() -> None:
    trainer = Trainer()
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    sender = trainer.connect()

    def warns(temperature: float) -> bool:
        messages = messages_of(
            lambda: trainer.step(sampled_batch(trainer.model, version=sender.update_weights(), temperature=temperature))
        )
        return len(messages) == 1

    assert [warns(t) for t in (0.8, 0.79, 0.5, 1.0, 0.8)] == [True, False, True, False, True]
    sender.shutdown()


def test_the_first_batch_of_an_engine_in_int8_measures_rounding_and_more_is_reported() -> None:
    def trained(temperatures: list[float]) -> tuple[list[TrainStepReport], list[str]]:
        trainer = Trainer()
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        sender = trainer.connect()
        trained_model(trainer.model).is_engine_int8 = True
        reports: list[TrainStepReport] = []

        def step(temperature: float) -> None:
            batch = sampled_batch(trainer.model, version=sender.update_weights(), temperature=temperature)
            reports.append(trainer.step(batch))

        messages = messages_of(lambda: [step(temperature) for temperature in temperatures])
        sender.shutdown()
        return reports, messages

    reports, messages = trained([0.95, 0.93, 0.7, 1.0])
    bounds = [report.measurements["on_policy_difference_bound"] for report in reports]
    assert bounds == [pytest.approx(2 * reports[0].measurements["log_prob_difference_mean"])] * 4 and bounds[0] > 0.001
    assert len(messages) == 1 and "  1. the engine computes in int8" in messages[0]
    reports, messages = trained([0.1])
    assert reports[0].measurements["on_policy_difference"] > 0.5
    assert len(messages) == 1 and "rounding explains 0.5" in messages[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_low_precision_hidden_states_have_log_probs_of_logits_that_are_not_rounded(
    dtype: torch.dtype, is_autocast: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((40, 64), (301, 64), (301,)))
    targets = torch.randint(0, 301, (40,), generator=generator)
    # The operands are rounded, as the engine's are; float64 makes of them what is exact.
    leaves = [tensor.to(dtype) for tensor in (hidden, weight, bias)]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    expected = (exact[0] @ exact[1].T + exact[2]).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    given = [(leaf.float() if is_autocast else leaf).requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", dtype=dtype, enabled=is_autocast):
        log_probs, _ = chunked_log_probs(given[0], given[1], targets, bias=given[2], chunk_size=16)
        log_probs.sum().backward()
    expected.sum().backward()
    assert expected.min() < -20  # where a logit rounded to bfloat16 is off by 0.06
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=2e-5)
    for ours, theirs in zip(given, exact, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() < 4e-3 * theirs.grad.norm()
