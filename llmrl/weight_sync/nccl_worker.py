"""vLLM's end of transfers by NCCL, in its worker processes: vLLM's own, with a deadline."""

from __future__ import annotations

from dataclasses import dataclass

from llmrl.engines.vllm.private import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from llmrl.weight_sync.deadline import TRANSFER_SECONDS, TimedCommunicator


@dataclass(kw_only=True)
class TimedInitInfo(NCCLWeightTransferInitInfo):
    """vLLM's, and when a transfer is given up."""

    timeout_seconds: float = TRANSFER_SECONDS


class TimedNCCLEngine(NCCLWeightTransferEngine):
    """Takes weights by NCCL, and comes back with an error where the trainer or another worker does not go on."""

    init_info_cls = TimedInitInfo
    model_update_group: TimedCommunicator | None

    def init_transfer_engine(self, init_info: TimedInitInfo) -> None:
        """Meet the trainer and the other workers, anew where a group broke."""
        self.shutdown()
        super().init_transfer_engine(init_info)
        if self.model_update_group is not None:
            self.model_update_group = TimedCommunicator(self.model_update_group, init_info.timeout_seconds)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Take all of the weights.

        Raises:
            RuntimeError: before the group was opened.
            TransferStalledError: when they stopped coming; the model then holds a mixture.
        """
        if self.model_update_group is None:
            raise RuntimeError("the trainer has opened no group; call init_transfer_engine first.")
        with self.model_update_group.watched():
            super().receive_weights(update_info)
