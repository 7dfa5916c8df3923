"""TorchRL's `VecNormV2` over batches of conversations."""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.envs import transforms

from llmrl.data.tensordicts import batch_elements, restacked


class VecNormV2(transforms.VecNormV2):
    """TorchRL's `VecNormV2`, which here updates its statistics with one conversation after another.

    TorchRL's class cannot read the lazily stacked batches of ragged conversations.
    """

    def _maybe_stateful_init(self, data: TensorDictBase) -> None:
        super()._maybe_stateful_init(batch_elements(data)[0])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if not next_tensordict.batch_size or not self.stateful:
            return super()._step(tensordict, next_tensordict)
        pairs = zip(batch_elements(tensordict), batch_elements(next_tensordict), strict=True)
        normalized = [super(VecNormV2, self)._step(*pair) for pair in pairs]
        return restacked(normalized, next_tensordict.batch_size)
