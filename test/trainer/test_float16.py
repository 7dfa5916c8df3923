"""float16 over float32 weights: the loss is scaled, so that small gradients are kept, and an overflow is skipped."""

import copy

import torch
from loss_batches import ragged_batch, tiny_model

from llmrl.objectives import GRPOLoss
from llmrl.trainer import TransformersWrapper, train_step
from llmrl.trainer.trained_model import trained_model


def test_in_float16_small_gradients_are_kept_and_an_overflow_is_skipped():
    gradients = {}
    for dtype in (None, torch.float16):
        torch.manual_seed(0)
        policy = TransformersWrapper(tiny_model(), generate=False, autocast_dtype=dtype)
        batch = ragged_batch()
        for row in batch.unbind(0):
            row["advantage"] = row["advantage"] * 1e-6  # gradients are below float16's smallest number
        before = copy.deepcopy(policy.model.state_dict())
        report = train_step(GRPOLoss(policy), batch, torch.optim.SGD(policy.parameters(), lr=1e6), max_grad_norm=None)
        assert not report.is_skipped
        gradients[dtype] = {name: before[name] - one for name, one in policy.model.state_dict().items()}
    for name, expected in gradients[None].items():
        assert (gradients[torch.float16][name] - expected).norm() < 0.05 * expected.norm(), name
    assert report.measurements["loss_scale"] == 2**16 and report.measurements["num_overflows"] == 0
    trained_model(policy.model).scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-60)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    before = copy.deepcopy(policy.model.state_dict())
    report = train_step(GRPOLoss(policy), ragged_batch(), optimizer)
    assert report.skip_reason == "overflow" and report.to_metrics()["num_overflows"] == 1
    assert not optimizer.state
    assert all(torch.equal(one, before[name]) for name, one in policy.model.state_dict().items())
    assert not train_step(GRPOLoss(policy), ragged_batch(), optimizer).is_skipped
