"""`AsyncVLLM`: vLLM in its own process, awaited from any event loop, with its weights updated in place."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self, TypeVar, Unpack

from llmrl._utils.arguments import KnownArguments, keywords_of, refuse_unknown
from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines.base import (
    Completion,
    EngineError,
    PauseMode,
    SamplingConfig,
    TransferInfo,
    check_request,
    completion_budget,
)
from llmrl.engines.hang_detector import DEFAULT_HANG_TIMEOUT_SECONDS, HangWatch
from llmrl.engines.load import METRICS, EngineLoad, LoadMeter
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND, NCCL_BACKEND, EngineOptions, translate_torchrl_options
from llmrl.engines.vllm.private import close_llm, num_unfinished_tokens, pause_at_once
from llmrl.engines.vllm.quantized import quantization_of
from llmrl.engines.vllm.requests import generate_one, num_reported, sampling_params, unless_it_dies
from llmrl.engines.vllm.scores import VLLMScores
from llmrl.engines.vllm.start import start_vllm
from llmrl.engines.vllm.updates import AdapterUpdates, WholeWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.engines.vllm.private import AsyncLLM


T = TypeVar("T")


class AsyncVLLM(KnownArguments, VLLMScores):
    """A vLLM engine: token ids in, exact completions out, weights replaced while requests are in flight.

    The engine core runs in a child process; a thread of this process talks to it, so `generate` may be awaited from
    any event loop, many at once. Build one with `AsyncVLLM.from_pretrained`. It is also the client that vLLM's
    trainer-side weight-transfer engines drive (`init_weight_transfer_engine` … `finish_weight_update`).
    """

    start_several: ClassVar[Callable[..., Any]]
    """`EngineReplicas.from_pretrained`, set where that class is defined, which knows this one."""

    def __init__(
        self,
        llm: AsyncLLM,
        background: BackgroundLoop,
        load: LoadMeter,
        *,
        weight_transfer: str | None,
        start_s: float,
        hang_timeout_seconds: float | None = None,
    ):
        self._llm = llm
        self._background = background
        self._load = load
        self._weight_transfer_backend = weight_transfer
        self.start_s = start_s
        """Seconds from the call to an engine that takes requests."""
        self.max_model_len: int = llm.vllm_config.model_config.max_model_len
        """Prompt and completion together, in tokens."""
        self.vocab_size: int = llm.vllm_config.model_config.get_vocab_size()
        self.model_dtype = llm.vllm_config.model_config.dtype
        """dtype of the weights in the engine."""
        self.quantization: str | None = quantization_of(llm.vllm_config)
        """How the weights in the engine are quantised, `None` when they are not."""
        self.num_workers: int = llm.vllm_config.parallel_config.world_size_across_dp
        self.host = socket.gethostname()
        """Name of the machine that the engine runs on."""
        self._updates = AdapterUpdates(llm) if weight_transfer == ADAPTER_BACKEND else WholeWeights(llm)
        self._id_prefix = uuid.uuid4().hex[:8]
        self._id_counter = itertools.count()
        self._in_flight: set[str] = set()
        self._num_tokens = 0
        self._is_paused = False
        self._can_sleep: bool = llm.vllm_config.model_config.enable_sleep_mode
        self._is_asleep = False
        self.lacks_weights = False
        """Whether it gave its weights back to sleep, and no update has brought others."""
        self._watch = HangWatch(hang_timeout_seconds)
        self._finalizer = weakref.finalize(self, close_llm, llm, background)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str],
        *,
        num_replicas: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Start an engine; `EngineReplicas.from_pretrained` starts several, or in Ray actors, with the same options.

        Args:
            model_name: folder or hub name.
            num_replicas: start so many, as `EngineReplicas`.
            options: see `llmrl.engines.vllm.arguments.EngineOptions`.

        Raises:
            ImportError: when vLLM is not installed, naming the extra.
            TypeError: for an option that is not known, or a name in `engine_args` that vLLM has not, with the nearest
                one or what to do instead.
            EngineError: when the engine does not start; its own log says why.
        """
        refuse_unknown("AsyncVLLM.from_pretrained", options, keywords_of(cls.from_pretrained) or ())
        options = translate_torchrl_options(options)
        if num_replicas is not None:
            return cls.start_several(model_name, num_replicas, **options)
        hang_timeout_seconds = options.get("hang_timeout_seconds", DEFAULT_HANG_TIMEOUT_SECONDS)
        HangWatch(hang_timeout_seconds)  # refuses a wrong one before the engine starts
        start = time.perf_counter()
        llm, background, load = start_vllm(os.fspath(model_name), options)
        config = llm.vllm_config.weight_transfer_config
        start_s = time.perf_counter() - start
        backend = None if config is None else config.backend.replace(NCCL_BACKEND, "nccl")
        backend = backend if llm.vllm_config.lora_config is None else ADAPTER_BACKEND
        return cls(
            llm, background, load, weight_transfer=backend, start_s=start_s, hang_timeout_seconds=hang_timeout_seconds
        )

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights that a request started now would use; 0 for the weights it started with."""
        return self._updates.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Count on from `version`: for a resumed run, before its weights are sent."""
        self._updates.version = version

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve requests."""
        is_running = self._finalizer.alive and not self._background.is_closed and not self._llm.errored
        return is_running and not self._watch.why

    @property
    def num_in_flight(self) -> int:
        """Requests that have not returned yet."""
        return len(self._in_flight)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self._llm.get_tokenizer()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` ([num_prompt_tokens]); `routing_key` has no effect on one engine.

        Raises ValueError for an empty prompt, one without room for a token, a token id outside the vocabulary, or a
        `request_id` that is in flight, or truncation of which vLLM cannot say what it kept, and EngineError if the
        engine died, was shut down, sleeps, or returned tokens without their log-probs.
        """
        if request_id is None:
            request_id = f"{self._id_prefix}-{next(self._id_counter)}"
        check_request(request_id, prompt_ids, self._in_flight)
        budget = completion_budget(len(prompt_ids), sampling, self.max_model_len)
        self._check_alive(and_awake=True)
        num_log_probs = num_reported(sampling, self._llm.vllm_config.model_config)
        params = sampling_params(sampling, budget, num_log_probs=num_log_probs)
        request = generate_one(self._llm, list(prompt_ids), params, request_id, self._updates)
        completion = await self._serve(request_id, request)
        self._num_tokens += len(completion.token_ids)
        return completion

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raises ValueError for top-p or min-p without top-k: vLLM cannot say what these kept."""
        num_reported(sampling, self._llm.vllm_config.model_config)

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion for each prompt, all in flight at once; blocks, so not for use in an event loop."""

        async def generate_all() -> list[Completion]:
            return list(await asyncio.gather(*(self.generate(prompt, sampling) for prompt in prompts)))

        return self._background.run(generate_all())

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what it has, with finish reason `abort`. Unknown ids are ignored."""
        if self.is_alive and request_id in self._in_flight:
            await self._background.wait(self._llm.abort(request_id))

    async def progress(self) -> int | None:
        """Return a number that changes with every token that comes; None while none is due: idle, or paused."""
        if self._is_paused or not self._in_flight:
            return None
        return self._num_tokens + num_unfinished_tokens(self._llm)

    def take_load(self, reader: str = METRICS) -> EngineLoad:
        """Return how hard it worked since this reader's last call."""
        return self._load.take(reader)

    def _check_alive(self, *, and_awake: bool = False) -> None:
        if not self.is_alive:
            raise EngineError(self._watch.why or "The vLLM engine is not running; start a new one.")
        if and_awake and self.lacks_weights:
            raise EngineError("The engine sleeps: it gave back its weights, and goes on after the next update.")

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def weight_transfer_backend(self) -> str | None:
        """The vLLM backend that new weights come through, `None` when started without."""
        return self._weight_transfer_backend

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop stepping: requests in flight stay (`keep`), are finished first (`wait`) or end now (`abort`).

        `clear_cache` also drops the key-value blocks, those of kept requests too: they are computed anew.
        """
        if clear_cache:
            self._control(self._llm.pause_generation(mode=mode, clear_cache=True))
        else:
            self._control(pause_at_once(self._llm, mode))
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`, or after `sleep` and an update. Raises EngineError if it sleeps and has no weights."""
        self._check_alive(and_awake=True)
        if self._is_asleep:
            self._control(self._llm.wake_up(["kv_cache"]))
        self._control(self._llm.resume_generation())
        self._is_paused = self._is_asleep = False

    def sleep(self) -> None:
        """Give the GPU's memory back, weights and key-value blocks (vLLM's level 2), until an update wakes it.

        Requests in flight wait, and read their prefixes again afterwards. The update takes room for the weights before
        they come, and for the blocks when the engine goes on. May be called twice.

        Raises EngineError if the engine was started without `enable_sleep`.
        """
        if not self._can_sleep:
            raise EngineError("This engine cannot sleep; start it on a GPU with enable_sleep=True.")
        if not self.lacks_weights:
            self._control(self._llm.sleep(level=2, mode="keep"))
        self._is_paused = self._is_asleep = self.lacks_weights = True

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Drop cached key-value blocks; without `reset_running_requests` those in use stay, and false is returned."""
        return self._control(self._llm.reset_prefix_cache(reset_running_requests=reset_running_requests))

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the engine's end of a transfer. Raises EngineError if it was started without, or its backend refuses."""
        self._require_weight_transfer()
        self._control(self._updates.open_transfer(init_info))

    def start_weight_update(self) -> None:
        """Make the engine ready to take new weights; pause it first."""
        self._require_weight_transfer()
        if self.lacks_weights:
            self._control(self._llm.wake_up(["weights"]))
        self._control(self._updates.start())

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Take weights as the backend describes them. Raises EngineError if it refuses; the version does not change."""
        self._control(self._updates.take(update_info))

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Put the taken weights to use and return their version: the next one, unless given."""
        before = self.policy_version
        version = before + 1 if weight_version is None else int(weight_version)
        self._control(self._updates.finish(version))
        self.lacks_weights &= version == before  # an update that was given up
        return version

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the engine's process and thread; requests in flight raise `EngineError`. May be called twice."""
        self._finalizer()

    def __enter__(self) -> AsyncVLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Never:
        raise TypeError("AsyncVLLM holds a running process and cannot be pickled; start it where it is used.")

    def _require_weight_transfer(self) -> None:
        if self._weight_transfer_backend is None:
            raise EngineError("This engine was started with weight_transfer=False; start it with weight_transfer=True.")

    def _control(self, coroutine: Coroutine[object, object, T]) -> T:
        try:
            self._check_alive()
        except EngineError:
            coroutine.close()
            raise
        try:
            return self._background.run(unless_it_dies(self._llm, coroutine))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM refused: {error}") from error
