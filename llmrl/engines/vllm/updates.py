"""Weight updates of vLLM: of the whole model, or as LoRA adapters."""

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

# Sizes that must be equal for one model to use the other's adapters.
_SHAPE_OF_A_MODEL = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


class WholeWeights:
    """Updates of the whole model's weights, for all requests at once."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.version = 0
        """Version of the weights that a new request would use."""

    @contextmanager
    def in_use(self) -> Iterator[tuple[LoRARequest | None, int | None]]:
        """Yield a request's adapter and version; both are None, because vLLM reports the version of each token."""
        yield None, None

    async def open_transfer(self, info: TransferInfo) -> None:
        """Open the workers' side of a transfer."""
        from llmrl.engines.vllm.private import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start(self) -> None:
        """Prepare an update."""
        await self._llm.start_weight_update()

    async def take(self, info: TransferInfo | list[TransferInfo]) -> None:
        """Receive weights."""
        from llmrl.engines.vllm.private import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish(self, version: int) -> None:
        """Activate the received weights."""
        await self._llm.finish_weight_update(weight_version=str(version))
        self.version = version


class AdapterUpdates(WholeWeights):
    """LoRA adapters, one per version; a request keeps its adapter to the end while later ones use the next.

    vLLM holds at most `max_loras` adapters; if requests use all of them, an update waits. After `open_transfer` every
    request has an adapter, initially one that adds nothing, because on a CPU vLLM may apply another request's adapter
    to requests without any (vllm-project/vllm, pull 48421). All methods run on the engine's own loop.
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
        """Yield the current adapter and its version, and keep the adapter until the request has ended."""
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
        """Compare the trainer's model and adapters with the engine's, and load an adapter that adds nothing.

        Raises ValueError if the models or their layers differ, the rank is too high, or a model on a CPU has experts.
        """
        from llmrl.engines.vllm.private import current_platform

        if current_platform.is_cpu() and self._llm.vllm_config.model_config.get_num_experts():
            raise ValueError(
                "vLLM runs no adapters in a model with experts on a CPU, whichever layers are adapted: send merged "
                "weights (lora='merged')."
            )
        own = self._llm.vllm_config.model_config.hf_text_config
        theirs = cast("dict[str, int]", info["model"])
        for name, value in theirs.items():
            if getattr(own, name, value) != value:
                raise ValueError(
                    f"the engine's model is another one: its {name} is {getattr(own, name)}, the trainer's is {value}."
                )
        if cast("int", info["rank"]) > self._max_rank:
            raise ValueError(
                f"the adapters have rank {info['rank']}, and this engine takes {self._max_rank} at most: start it with "
                f"engine_args={{'max_lora_rank': {info['rank']}}}."
            )
        if self._current is None:
            self._current = await self._load(cast("bytes", info["zeros"]), 1)

    async def start(self) -> None:
        """Forget an adapter that was received but not activated."""
        self._taken = None

    async def take(self, info: TransferInfo | list[TransferInfo]) -> None:
        """Load an adapter that no request uses yet. Raises ValueError if vLLM refuses its layers or shapes."""
        self._taken = None
        assert isinstance(info, dict), "adapters are the same for all workers"
        if info.get("is_discarded"):
            return
        await self._make_room()
        self._taken = await self._load(cast("bytes", info["weights"]), cast("int", info["rank"]))

    async def finish(self, version: int) -> None:
        """Activate the received adapter for new requests; the current version cancels the update."""
        taken = self._taken
        self._taken = None
        if taken is not None and version != self.version:
            self._current = taken
            self.version = version

    async def _load(self, weights: bytes, rank: int) -> LoRARequest:
        from llmrl.engines.vllm.private import LoRARequest

        number = next(self._ids)
        # B already includes the scale, so alpha / r must be 1.
        config = {"r": rank, "lora_alpha": rank, "target_modules": [], "peft_type": "LORA"}
        with tempfile.TemporaryDirectory(prefix="llmrl-adapter-") as folder:
            Path(folder, "adapter_model.safetensors").write_bytes(weights)
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            # The prefix cache distinguishes adapters by name, so names must be unique.
            request = LoRARequest(lora_name=f"llmrl-{number}", lora_int_id=number, lora_path=folder)
            await self._llm.add_lora(request)
        self._loaded.add(number)
        return request

    async def _make_room(self) -> None:
        """Remove unused adapters; wait if all are in use."""
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
    """Return the sizes that distinguish two models, from a transformers text configuration."""
    named = ((name, getattr(config, name, None)) for name in _SHAPE_OF_A_MODEL)
    return {name: value for name, value in named if isinstance(value, int)}
