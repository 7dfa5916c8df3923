"""The losses beside TorchRL's: the same numbers where they mean the same, and where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_batches import Table, near_policy, ragged_batch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.objectives import DAPO, CISPOLoss, DistillationLoss, GRPOLoss, SFTLoss

pytestmark = pytest.mark.usefixtures("takes_long")
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def batch_and_policy(seed: int) -> tuple[TensorDictBase, Table]:
    """TorchRL has no rollouts of several rows: each row is one."""
    batch = ragged_batch(seed)
    for index, row in enumerate(batch.unbind(0)):
        row["rollout", "rollout_id"] = NonTensorData(str(index))
        row["history"] = TensorDict({"full": NonTensorData("not read")})
        row["next", "teacher_log_probs"] = row["next", "ref_log_probs"].clone()
    return batch, near_policy(batch)


@pytest.fixture(scope="module")
def llm() -> Any:
    return pytest.importorskip("torchrl.objectives.llm")


def rows_of(policy: Table, batch: TensorDictBase) -> list[torch.Tensor]:
    return list(policy.log_probs.split([len(row["tokens", "full"]) for row in batch.unbind(0)]))


class DistributionActor(torch.nn.Module):
    """What TorchRL's GRPO family asks of a policy: a distribution over left-padded rows."""

    in_keys = (("tokens", "full"),)

    def __init__(self, policy: Table, batch: TensorDictBase) -> None:
        super().__init__()
        self._held = (policy, batch)  # not as submodule: the losses make functional copies of parameters

    def get_dist(self, tensordict: TensorDictBase, logits_key: str) -> Any:
        policy, batch = self._held

        def left_padded(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")

        class Distribution:
            mask = left_padded([row["masks", "all_assistant_mask"] for row in batch.unbind(0)])

            def log_prob(self, action: torch.Tensor) -> torch.Tensor:
                return left_padded(rows_of(policy, batch))

        return Distribution()


class LogProbActor(torch.nn.Module):
    """What TorchRL's SFT and distillation ask of a policy: log-probs of a history."""

    def __init__(self, policy: Table, batch: TensorDictBase) -> None:
        super().__init__()
        self._held = (policy, batch)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = [TensorDict({"log_probs": {"full": row}}) for row in rows_of(*self._held)]
        return lazy_stack(rows, 0)


def gradient(loss: torch.Tensor, policy: Table) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), policy.log_probs, retain_graph=True)[0]


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("clip_epsilon", [0.2, (0.1, 0.28)])
@pytest.mark.parametrize("name", ["GRPOLoss", "DAPO", "CISPOLoss"])
def test_the_grpo_family(name: str, clip_epsilon: Any, aggregation: Any, llm: Any) -> None:
    mine: type[GRPOLoss] = {"GRPOLoss": GRPOLoss, "DAPO": DAPO, "CISPOLoss": CISPOLoss}[name]
    for seed in range(3):
        batch, policy = batch_and_policy(seed)
        actor = DistributionActor(policy, batch)
        arguments = {"clip_epsilon": clip_epsilon, "aggregation": aggregation}
        theirs = getattr(llm, name)(actor, entropy_bonus=False, masking_strategy="rlhf", **arguments)(batch)
        ours = mine(policy, **arguments)(batch)
        torch.testing.assert_close(ours.ESS, theirs.ESS.squeeze(), **CLOSE)
        if name == "CISPOLoss":
            continue  # below: theirs has no log-prob in it
        torch.testing.assert_close(ours.loss_objective, theirs.loss_objective.squeeze(), **CLOSE)
        gradients = [gradient(output.loss_objective, policy) for output in (ours, theirs)]
        torch.testing.assert_close(*gradients, **CLOSE)


def test_cispo_agrees_where_nothing_is_clipped_and_keeps_its_gradient_where_theirs_is_lost(llm: Any) -> None:
    batch, policy = batch_and_policy(0)
    actor = DistributionActor(policy, batch)
    wide = (0.999, 1e6)
    ours = CISPOLoss(policy, clip_epsilon=wide)(batch)
    theirs = llm.CISPOLoss(actor, clip_epsilon=wide, entropy_bonus=False, masking_strategy="rlhf")(batch)
    # Values differ (w A log pi here, w A there); the gradient of both is w A at each token.
    expected = gradient(theirs.loss_objective, policy)
    torch.testing.assert_close(gradient(ours.loss_objective, policy), expected, **CLOSE)
    narrow = (0.01, 0.01)
    theirs = llm.CISPOLoss(actor, clip_epsilon=narrow, entropy_bonus=False, masking_strategy="rlhf")(batch)
    mask = torch.cat([row["masks", "all_assistant_mask"] for row in batch.unbind(0)])
    lost = mask & (gradient(theirs.loss_objective, policy) == 0)
    assert lost.sum() > mask.sum() / 2
    assert (gradient(CISPOLoss(policy, clip_epsilon=narrow)(batch).loss_objective, policy)[lost] != 0).all()


def test_the_kl_is_averaged_over_trained_tokens_only(llm: Any) -> None:
    batch, policy = batch_and_policy(0)
    theirs = llm.GRPOLoss(
        DistributionActor(policy, batch), entropy_bonus=False, masking_strategy="rlhf", kl_to_ref_coeff=1.0
    )(batch)
    ours = GRPOLoss(policy, kl_to_ref_coeff=1.0)(batch)
    lengths = [len(row["tokens", "full"]) for row in batch.unbind(0)]
    num_trained = sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0))
    share = num_trained / (max(lengths) * len(lengths))  # theirs divides by the padded size
    torch.testing.assert_close(ours.kl_to_ref * share, theirs.kl_to_ref, **CLOSE)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_sft(reduction: Any, is_normalized: bool, llm: Any) -> None:
    batch, policy = batch_and_policy(1)
    arguments: dict[str, Any] = {"reduction": reduction, "normalize_by_seq_length": is_normalized}
    ours = SFTLoss(policy, **arguments)(batch).loss_sft
    theirs = llm.SFTLoss(LogProbActor(policy, batch), tokenizer=object(), tokenizer_kwargs={}, **arguments)(batch)
    torch.testing.assert_close(ours, theirs.loss_sft, **CLOSE)
    torch.testing.assert_close(gradient(ours, policy), gradient(theirs.loss_sft, policy), **CLOSE)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_minor_sft_where_the_reference_is_scored_on_trained_tokens_only(is_normalized: bool, llm: Any) -> None:
    batch, policy = batch_and_policy(1)
    for row in batch.unbind(0):
        row["next", "ref_log_probs", "full"] *= row["masks", "all_assistant_mask"]
    arguments: dict[str, Any] = {
        "loss_function": "minor_sft",
        "beta": 0.7,
        "normalize_by_seq_length": is_normalized,
        "kl_to_ref_coeff": 2.0,  # as TorchRL's configuration of expert iteration has it
    }
    actor = LogProbActor(policy, batch)
    with pytest.warns(UserWarning, match="kl_to_ref_coeff=2.0 has no meaning with loss_function='minor_sft'"):
        loss = SFTLoss(policy, **arguments)
    with pytest.warns(UserWarning, match="should not be set when using minor_sft"):
        theirs = llm.SFTLoss(actor, tokenizer=object(), tokenizer_kwargs={}, **arguments)(batch)
    ours = loss(batch)
    torch.testing.assert_close(ours.loss_sft, theirs.loss_sft, **CLOSE)
    torch.testing.assert_close(gradient(ours.loss_sft, policy), gradient(theirs.loss_sft, policy), **CLOSE)
    assert ours.loss_kl_to_ref.item() == theirs.loss_kl_to_ref.item() == 0 and ours.kl_to_ref is not None


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_distillation(direction: Any, reduction: Any, llm: Any) -> None:
    batch, policy = batch_and_policy(2)
    arguments: dict[str, Any] = {"kl_direction": direction, "reduction": reduction}
    ours = DistillationLoss(policy, **arguments)(batch).loss_distill
    theirs = llm.DistillationLoss(LogProbActor(policy, batch), tokenizer=object(), **arguments)(batch)
    torch.testing.assert_close(ours, theirs.loss_distill, **CLOSE)
    torch.testing.assert_close(gradient(ours, policy), gradient(theirs.loss_distill, policy), **CLOSE)
