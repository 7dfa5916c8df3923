"""How new weights come into vLLM: all of them into its model, or an adapter beside those that are in use."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmrl.engines.base import TransferInfo

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import AsyncLLM, LoRARequest

# What must be the same in two models of which one is given the other's adapters.
_SHAPE_OF_A_MODEL = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


class WholeWeights:
    """Weights that take the place of the model's, for all requests at once; vLLM counts their version."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.version = 0
        """Of the weights that a request started now would use."""

    @contextmanager
    def in_use(self) -> Iterator[tuple[LoRARequest | None, int | None]]:
        """Give what a request runs with: no adapter, and a version that vLLM tells with each token."""
        yield None, None

    async def open_transfer(self, info: TransferInfo) -> None:
        """Open the workers' end of a transfer."""
        from llmrl.engines.vllm.private import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start(self) -> None:
        """Make ready."""
        await self._llm.start_weight_update()

    async def take(self, info: TransferInfo | list[TransferInfo]) -> None:
        """Take weights."""
        from llmrl.engines.vllm.private import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish(self, version: int) -> None:
        """Put what was taken to use."""
        await self._llm.finish_weight_update(weight_version=str(version))
        self.version = version


class AdapterUpdates(WholeWeights):
    """LoRA adapters, one a version: a request ends on the one that it began with, while others use the next.

    vLLM holds as many as its `max_loras`. Where all of them have requests in flight, an update waits for the last
    request of one. From the moment that a trainer is known requests have an adapter, first one that adds nothing: on a
    CPU vLLM computes those without one by whatever adapter is in its last place (vllm-project/vllm, pull 48421). All
    methods run on the engine's own loop, so that no request begins between two lines of them.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__(llm)
        config = llm.vllm_config.lora_config
        assert config is not None, "the engine was started without adapters"
        self._max_loras = config.max_loras
        self._max_rank = config.max_lora_rank
        self._current: LoRARequest | None = None
        self._taken: LoRARequest | None = None
        self._ids = itertools.count(1)
        self._loaded: set[int] = set()
        self._num_requests: Counter[int] = Counter()
        self._one_has_ended = asyncio.Event()

    @contextmanager
    def in_use(self) -> Iterator[tuple[LoRARequest | None, int | None]]:
        """Give the current adapter and its version, and keep it until the request has ended."""
        adapter = self._current
        version = self.version
        key = 0 if adapter is None else adapter.lora_int_id
        self._num_requests[key] += 1
        try:
            yield adapter, version
        finally:
            self._num_requests[key] -= 1
            self._one_has_ended.set()

    async def open_transfer(self, info: TransferInfo) -> None:
        """Compare the trainer's model and adapters with the engine's, and begin with an adapter that adds nothing.

        Raises ValueError if the model is another one, a rank is above the engine's, vLLM does not adapt a layer, or
        the model has experts and runs on a CPU, where vLLM would die of the first request.
        """
        from llmrl.engines.vllm.private import current_platform

        if current_platform.is_cpu() and self._llm.vllm_config.model_config.get_num_experts():
            raise ValueError(
                "vLLM runs no adapters beside experts on a CPU, whichever layers are adapted: send merged weights."
            )
        own = self._llm.vllm_config.model_config.hf_text_config
        theirs = cast("dict[str, int]", info["model"])
        for name, value in theirs.items():
            if getattr(own, name, value) != value:
                raise ValueError(
                    f"the engine's model is another one: its {name} is {getattr(own, name)}, the trainer's {value}."
                )
        if cast("int", info["rank"]) > self._max_rank:
            raise ValueError(
                f"the adapters have rank {info['rank']}, and this engine takes {self._max_rank} at most: start it with "
                f"engine_args={{'max_lora_rank': {info['rank']}}}."
            )
        if self._current is None:
            self._current = await self._load(cast("bytes", info["zeros"]), 1)

    async def start(self) -> None:
        """Forget what was taken before and not put to use."""
        self._taken = None

    async def take(self, info: TransferInfo | list[TransferInfo]) -> None:
        """Load an adapter beside the others; requests go on meanwhile, and none uses it yet.

        Raises ValueError if vLLM refuses it: for a layer that it does not adapt, or of another shape.
        """
        self._taken = None
        assert isinstance(info, dict), "adapters are the same for all workers"
        if info.get("is_discarded"):
            return
        await self._make_room()
        self._taken = await self._load(cast("bytes", info["weights"]), cast("int", info["rank"]))

    async def finish(self, version: int) -> None:
        """Let requests begin with the adapter that was taken; an update that ends with the old version is given up."""
        taken = self._taken
        self._taken = None
        if taken is not None and version != self.version:
            self._current = taken
            self.version = version

    async def _load(self, weights: bytes, rank: int) -> LoRARequest:
        from llmrl.engines.vllm.private import LoRARequest

        number = next(self._ids)
        # What B is multiplied by is in B, so alpha / r is to be 1.
        config = {"r": rank, "lora_alpha": rank, "target_modules": [], "peft_type": "LORA"}
        with tempfile.TemporaryDirectory(prefix="llmrl-adapter-") as folder:
            Path(folder, "adapter_model.safetensors").write_bytes(weights)
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            # The prefix cache tells adapters by their names, so no two have the same.
            request = LoRARequest(lora_name=f"llmrl-{number}", lora_int_id=number, lora_path=folder)
            await self._llm.add_lora(request)
        self._loaded.add(number)
        return request

    async def _make_room(self) -> None:
        """Remove the adapters that no request uses or will use; wait for one where all are in use."""
        while True:
            used = {number for number, count in self._num_requests.items() if number and count}
            if self._current is not None:
                used.add(self._current.lora_int_id)
            for number in self._loaded - used:
                await self._llm.remove_lora(number)
                self._loaded.discard(number)
                self._num_requests.pop(number, None)
            if len(used) < self._max_loras and not self._num_requests[0]:
                return
            self._one_has_ended.clear()
            await self._one_has_ended.wait()


def shape_of_model(config: object) -> dict[str, int]:
    """Return what tells two models apart, of a transformers configuration of their text.

    Example:
        >>> from transformers import LlamaConfig
        >>> shape_of_model(LlamaConfig(num_hidden_layers=3))["num_hidden_layers"]
        3
    """
    named = ((name, getattr(config, name, None)) for name in _SHAPE_OF_A_MODEL)
    return {name: value for name, value in named if isinstance(value, int)}
