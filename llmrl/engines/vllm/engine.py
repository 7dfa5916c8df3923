"""`AsyncVLLM`: a vLLM engine in its own process."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
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
from llmrl.engines.scores import TokenScores, check_scored
from llmrl.engines.token_stream import TokenStream
from llmrl.engines.vllm.arguments import (
    ADAPTER_BACKEND,
    NCCL_BACKEND,
    EngineOptions,
    check_options,
    translate_torchrl_options,
)
from llmrl.engines.vllm.grammars import Grammars
from llmrl.engines.vllm.passed_through import untested
from llmrl.engines.vllm.private import close_llm, num_unfinished_tokens, pause_at_once
from llmrl.engines.vllm.quantized import quantization_of
from llmrl.engines.vllm.requests import (
    answer_of,
    generate_one,
    is_cut_by_grammar_alone,
    num_reported,
    read_prompt_scores,
    sampling_params,
    scoring_params,
    unless_it_dies,
)
from llmrl.engines.vllm.start import start_vllm
from llmrl.engines.vllm.updates import AdapterUpdates, WholeWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.engines.vllm.private import AsyncLLM


T = TypeVar("T")


class AsyncVLLM(KnownArguments):
    """A vLLM engine that can replace its weights while requests are in flight; made by `AsyncVLLM.from_pretrained`.

    The engine core runs in a child process. `generate` may be awaited from any event loop,
    concurrently. vLLM's trainer-side weight-transfer engines can use this class as their client.
    """

    takes_grammars = True
    streams_tokens = True
    start_several: ClassVar[Callable[..., Any]]
    """`EngineReplicas.from_pretrained`, set in its module, which imports this one."""

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
        self.weight_transfer_backend = weight_transfer
        """vLLM's weight-transfer backend, or None."""
        self.start_s = start_s
        """Seconds from the call until the engine accepted requests."""
        self.max_model_len: int = llm.vllm_config.model_config.max_model_len
        """Maximum number of tokens of prompt and completion together."""
        self.vocab_size: int = llm.vllm_config.model_config.get_vocab_size()
        self.model_dtype = llm.vllm_config.model_config.dtype
        """dtype of the engine's weights."""
        self.quantization: str | None = quantization_of(llm.vllm_config)
        """Quantisation of the engine's weights, or None."""
        self.untested_arguments: tuple[str, ...] = ()
        """Arguments that llmrl has not compared with a trainer; training ends if the first batch's log-probs differ."""
        self.num_workers: int = llm.vllm_config.parallel_config.world_size_across_dp
        self.host = socket.gethostname()
        """Name of the engine's machine."""
        self._updates = AdapterUpdates(llm) if weight_transfer == ADAPTER_BACKEND else WholeWeights(llm)
        self._grammars = Grammars(llm)
        self._id_prefix = uuid.uuid4().hex[:8]
        self._id_counter = itertools.count()
        self._in_flight: set[str] = set()
        self._num_tokens = 0
        self._is_paused = False
        self._can_sleep: bool = llm.vllm_config.model_config.enable_sleep_mode
        self._is_asleep = False
        self.lacks_weights = False
        """Whether the engine dropped its weights in `sleep` and has not received new weights since."""
        self._watch = HangWatch(hang_timeout_seconds)
        self._finalizer = weakref.finalize(self, background.call_outside, close_llm, llm, background)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str],
        *,
        num_replicas: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Start an engine; `EngineReplicas.from_pretrained` starts several with the same options, also in Ray.

        Args:
            model_name: folder or hub name.
            num_replicas: number of engines; if given, `EngineReplicas` are returned.
            options: see `llmrl.engines.vllm.arguments.EngineOptions`.

        Raises:
            ImportError: if vLLM, or a part of it that is needed, is not installed.
            TypeError: if an option or a name in `engine_args` is unknown; the message suggests an alternative.
            ValueError: if an option has a value that no engine takes, or an argument in
                `engine_args` makes log-probs differ from the trainer's; the message says why.
            EngineError: if the engine does not start; vLLM's log says why.
        """
        refuse_unknown("AsyncVLLM.from_pretrained", options, keywords_of(cls.from_pretrained) or ())
        options = translate_torchrl_options(options)
        check_options(options)
        if num_replicas is not None:
            return cls.start_several(model_name, num_replicas, **options)
        hang_timeout = options.get("hang_timeout_seconds", DEFAULT_HANG_TIMEOUT_SECONDS)
        HangWatch(hang_timeout)  # checks the value before the engine starts
        start = time.perf_counter()
        llm, background, load = start_vllm(os.fspath(model_name), options)
        config = llm.vllm_config.weight_transfer_config
        start_s = time.perf_counter() - start
        backend = None if config is None else config.backend.replace(NCCL_BACKEND, "nccl")
        if llm.vllm_config.lora_config is not None:
            backend = ADAPTER_BACKEND
        engine = cls(llm, background, load, weight_transfer=backend, start_s=start_s, hang_timeout_seconds=hang_timeout)
        engine.untested_arguments = untested(options.get("engine_args") or {})
        if options.get("speculative") and llm.vllm_config.device_config.device_type != "cpu":
            engine.untested_arguments += ("speculative",)
        return engine

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights that a new request would use; initially 0."""
        return self._updates.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Set the version from which updates are counted, when a run is resumed."""
        self._updates.version = version

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve requests."""
        is_running = self._finalizer.alive and not self._background.is_closed and not self._llm.errored
        return is_running and not self._watch.why

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own engine; to change weights or pause it, call this class instead."""
        return self._llm

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight."""
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
        stream: TokenStream | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids` ([num_prompt_tokens]); `routing_key` has no effect on one engine.

        `stream` receives the tokens as they are sampled. Raises ValueError if the prompt is empty, leaves no room for a
        token or has an unknown token id, `request_id` is in flight, or vLLM cannot report the kept ids, and EngineError
        if the engine died, was shut down, sleeps, or returned tokens without their log-probs.
        """
        if request_id is None:
            request_id = f"{self._id_prefix}-{next(self._id_counter)}"
        check_request(request_id, prompt_ids, self._in_flight)
        budget = completion_budget(len(prompt_ids), sampling, self.max_model_len)
        self._check_alive(and_awake=True)
        num_log_probs = num_reported(sampling, self._llm.vllm_config.model_config)
        params = sampling_params(sampling, budget, num_log_probs=num_log_probs, is_streamed=stream is not None)
        request = generate_one(self._llm, list(prompt_ids), params, request_id, self._updates, stream)
        completion = await self._serve(request_id, request)
        if sampling.grammar is not None and is_cut_by_grammar_alone(sampling):
            masks = asyncio.to_thread(self._grammars.masks, sampling.grammar, completion.token_ids, params)
            completion = replace(completion, sampling_mask=await masks)
        self._num_tokens += len(completion.token_ids)
        return completion

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return token scores as `ScoresTokens.score` does. Also raises EngineError if the engine sleeps.

        vLLM computes all tokens anew, since its prefix cache has no log-probs.
        """
        check_scored(token_ids, top_k, self.max_model_len)
        self._check_alive(and_awake=True)
        request_id = f"{self._id_prefix}-{next(self._id_counter)}"
        asked = answer_of(self._llm, list(token_ids), scoring_params(top_k), request_id, self._updates)
        output, _ = await self._serve(request_id, asked)
        self._num_tokens += 1
        return read_prompt_scores(output, token_ids, top_k)

    async def _serve(self, request_id: str, request: Coroutine[None, None, T]) -> T:
        """Await a request on the engine's loop; it counts as in flight, and the engine is watched for hangs."""
        self._in_flight.add(request_id)
        self._watch.begin(self, self._background)
        try:
            return await self._background.wait(request)
        except RuntimeError as error:
            if self._watch.why:
                raise EngineError(self._watch.why) from error
            if isinstance(error, EngineError) or not self._background.is_closed:
                raise
            raise EngineError("The vLLM engine was shut down.") from error
        finally:
            self._in_flight.discard(request_id)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ValueError for values that vLLM does not support, or if vLLM cannot report the kept ids."""
        num_reported(sampling, self._llm.vllm_config.model_config)
        sampling_params(sampling, 1)
        if sampling.grammar is not None:
            self._grammars.check(sampling.grammar)

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion for each prompt concurrently; blocks, so it must not be called in an event loop.

        Raises the first error of `generate`, after aborting the other requests.
        """

        async def generate_all() -> list[Completion]:
            requests = [asyncio.ensure_future(self.generate(prompt, sampling)) for prompt in prompts]
            try:
                return await asyncio.gather(*requests)
            except BaseException:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
                raise

        return self._background.run(generate_all())

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far. Unknown ids are ignored."""
        if self.is_alive and request_id in self._in_flight:
            await self._background.wait(self._llm.abort(request_id))

    async def progress(self) -> int | None:
        """Return a number that changes with every new token; None if the engine is idle or paused."""
        if self._is_paused or not self._in_flight:
            return None
        return self._num_tokens + num_unfinished_tokens(self._llm)

    def take_load(self, reader: str = METRICS) -> EngineLoad:
        """Return the load since this reader's last call."""
        return self._load.take(reader)

    def _check_alive(self, *, and_awake: bool = False) -> None:
        if not self.is_alive:
            raise EngineError(self._watch.why or "The vLLM engine is not running; start a new one.")
        if and_awake and self.lacks_weights:
            raise EngineError("The engine sleeps: it has freed its weights, and serves after the next update.")

    # -- weights -------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop stepping; requests in flight are kept, finished first (`wait`) or aborted.

        `clear_cache` also drops the key-value blocks, including those of kept requests, which are recomputed.
        """
        if clear_cache:
            self._control(self._llm.pause_generation(mode=mode, clear_cache=True))
        else:
            self._control(pause_at_once(self._llm, mode))
        self._is_paused = True

    def resume(self) -> None:
        """Continue after `pause`, or after `sleep` and an update. Raises EngineError if weights are missing."""
        self._check_alive(and_awake=True)
        if self._is_asleep:
            self._control(self._llm.wake_up(["kv_cache"]))
        self._control(self._llm.resume_generation())
        self._is_paused = self._is_asleep = False

    def sleep(self) -> None:
        """Free the GPU memory of weights and key-value blocks (vLLM's level 2) until the next update.

        Requests in flight wait. May be called twice. Raises EngineError if `enable_sleep` was not set.
        """
        if not self._can_sleep:
            raise EngineError("This engine cannot sleep; start it on a GPU with enable_sleep=True.")
        if not self.lacks_weights:
            self._control(self._llm.sleep(level=2, mode="keep"))
        self._is_paused = self._is_asleep = self.lacks_weights = True

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Drop cached key-value blocks; without `reset_running_requests`, keep those in use and return False."""
        return self._control(self._llm.reset_prefix_cache(reset_running_requests=reset_running_requests))

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the engine's side of a transfer. Raises EngineError if the engine has no backend or refuses."""
        self._require_weight_transfer()
        self._control(self._updates.open_transfer(init_info))

    def start_weight_update(self) -> None:
        """Prepare the paused engine for new weights."""
        self._require_weight_transfer()
        if self.lacks_weights:
            self._control(self._llm.wake_up(["weights"]))
        self._control(self._updates.start())

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Receive weights; the policy version does not change. Raises EngineError if the backend refuses."""
        self._control(self._updates.take(update_info))

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Activate the received weights and return their version, by default the next one."""
        before = self.policy_version
        version = before + 1 if weight_version is None else int(weight_version)
        self._control(self._updates.finish(version))
        self.lacks_weights &= version == before  # the same version means that the update was cancelled
        return version

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the engine's process and thread; requests in flight raise EngineError. May be called twice."""
        self._finalizer()

    def __enter__(self) -> AsyncVLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Never:
        raise TypeError("AsyncVLLM holds a running process and cannot be pickled; start it where it is used.")

    def _require_weight_transfer(self) -> None:
        if self.weight_transfer_backend is None:
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
