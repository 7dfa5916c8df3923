"""`Session`: the requests and answers of one client, which form one rollout."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from llmrl._utils.failure import as_exception, describe
from llmrl.data import StopReason, text_of
from llmrl.endpoint.exchange import Exchange, Sampled
from llmrl.endpoint.prompt_length import num_characters, sample_of, texts_of
from llmrl.endpoint.replies import RecordedReplies, continued
from llmrl.endpoint.requests import (
    ASIDE,
    AnswerForm,
    FinishReason,
    ModelAnswer,
    ModelReply,
    ModelRequest,
    RefusedRequest,
)
from llmrl.endpoint.tree import ChainKey, RecordedTurn, TurnTree
from llmrl.engines import Completion, EngineError, SamplingConfig
from llmrl.engines.token_stream import TokenStream
from llmrl.rendering import Conversation, RenderingError
from llmrl.rendering.answer_text import AnswerText
from llmrl.rendering.tool_calls import Json, ToolCall

Complete = Callable[..., Awaitable[Completion]]
"""Function that samples one completion of prompt ids, `[num_prompt_tokens]`, by a `SamplingConfig`; the optional
`stream=` is a `TokenStream` for clients that read the answer while it is sampled."""

_TOKEN_CHARACTERS = 512
"""Upper bound on the characters per token; longer prompts are refused without rendering."""
_USUAL_CHARACTERS = 16
"""Usual upper bound on the characters per token; of longer prompts, a sample is tokenized first."""
_STOP_SECONDS = 5.0
"""Time limit for an engine to end requests that clients stopped reading."""
_THREAD_CHARACTERS = 1 << 14
"""Number of new characters from which a prompt is tokenized in a thread, beside other sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a session."""

    max_prompt_tokens: int
    max_turns: int | None = None
    """Maximum number of answers."""
    max_completion_tokens: int | None = None
    """Maximum number of sampled tokens; each concurrent request may use the remainder."""


class Session:
    """The requests of one client or several, and their answers; runs on one event loop.

    Args:
        tree: tree that records the turns.
        complete: function that samples.
        sampling: sampling parameters of the run; clients may add stop strings and shorten answers.
        does_client_sample: whether clients set temperature and the like; only if nothing is trained.
        check_sampling: function that raises ValueError for what the engine does not support.
        is_recorded: whether answers are recorded.
    """

    def __init__(
        self,
        session_id: str,
        tree: TurnTree,
        complete: Complete,
        sampling: SamplingConfig,
        limits: SessionLimits,
        *,
        does_client_sample: bool = False,
        check_sampling: Callable[[SamplingConfig], None] = lambda sampling: None,
        is_recorded: bool = True,
    ) -> None:
        self.session_id = session_id
        self.tree = tree
        self.limits = limits
        self._complete = complete
        self._sampling = sampling
        self._does_client_sample = does_client_sample
        self._check_sampling = check_sampling
        self._is_recorded = is_recorded
        self.reason: str = StopReason.NONE
        """Budget that ended the session, a `StopReason`; empty if none did."""
        self.last_refusal: str = StopReason.NONE
        """Limit of the run by which the last request was refused; empty once a later one was answered."""
        self.failure: Exception | None = None
        """The last error of the engine; None once a later request was answered."""
        self.info: dict[str, object] = {}
        """Entries that the agent adds to the rollout's record."""
        self.overridden: Counter[str] = Counter()
        """Number of requests per option that the run overrides."""
        self.counts: Counter[str] = Counter()
        """`num_answered`, `num_failed`, `num_aside` and `num_repeated` requests, `num_stopped` ones that clients read
        in part, and `num_lost` answers that no client received."""
        self.refusals: Counter[str] = Counter()
        """Number of refused requests by code."""
        self.last_message = ""
        """Message of the last request that was refused or failed."""
        self.num_completion_tokens = 0
        self.is_ended = False
        self.last_used_s = time.monotonic()
        self._num_begun = 0
        self._num_troubles = 0
        self.exchanges: dict[bytes, list[Exchange]] = {}
        """Requests and their answers, by the digests of the requests."""
        self.replies = RecordedReplies()
        """The replies so far, which later requests may name."""

    # Requests

    def begin(self, request: ModelRequest, digest: bytes, *, is_repeated: bool = False) -> Exchange:
        """Begin a request, or join one with the same `digest` that its client abandoned or now repeats (`is_repeated`).

        Raises RefusedRequest if the session has ended, a budget is used up, or the request cannot be answered.
        """
        self.check_open()
        self.last_used_s = time.monotonic()
        same = [one for one in self.exchanges.get(digest, ()) if not one.is_lost]
        before = [one for one in same if one.is_abandoned] or (same if is_repeated else [])
        if before:
            self.counts["num_repeated"] += 1
            before[-1].num_clients += 1
            return before[-1]
        self._check_budgets(request)
        is_long = self._check_length(request)
        prompt = None if is_long else self._prompt(request)
        sampling = self._sampling_of(request)
        self.overridden.update(request.overridden)
        if not self._does_client_sample:
            self.overridden.update(request.sampling.keys())
        num_counted = request.num_answers
        if self._is_aside(request):
            num_counted = 0
            self.counts["num_aside"] += 1
        self._num_begun += num_counted
        exchange = Exchange(request, num_troubles=self._num_troubles)
        task = asyncio.create_task(self._sample(exchange, prompt, sampling))

        def give_back(task: asyncio.Task[Sampled]) -> None:
            if task.cancelled() or task.exception() is not None:  # also marks the error as retrieved
                self._num_begun -= num_counted  # no answer was given, so another request may have its turn

        task.add_done_callback(give_back)
        exchange.begin(task)
        self.exchanges[digest] = [*same, exchange]
        return exchange

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return a prompt's number of tokens. Raises RefusedRequest if it cannot be rendered."""
        self.check_open()
        if self._check_length(request):
            return await self._measured(request)
        return self._render(request)[0].num_tokens

    @property
    def _all_exchanges(self) -> list[Exchange]:
        return list(itertools.chain(*self.exchanges.values()))

    @property
    def is_asked(self) -> bool:
        """Whether a client waits for an answer."""
        return any(one.num_clients for one in self._all_exchanges)

    def check_open(self) -> None:
        """Raise RefusedRequest if the session has ended."""
        if self.is_ended:
            raise RefusedRequest(
                "this session has ended; its key is no longer valid.", status=403, code="session_ended"
            )

    def _check_budgets(self, request: ModelRequest) -> None:
        limits = self.limits
        spent = self.num_completion_tokens
        is_aside = self._is_aside(request)
        if limits.max_turns is not None and not is_aside and self._num_begun + request.num_answers > limits.max_turns:
            raise self._over(StopReason.MAX_TURNS, f"its {limits.max_turns} answers")
        if limits.max_completion_tokens is not None and spent >= limits.max_completion_tokens:
            raise self._over(StopReason.LENGTH, f"the {limits.max_completion_tokens} tokens of its answers")

    def _check_length(self, request: ModelRequest) -> bool:
        """Return whether a request takes long to tokenize; refuse one that must be too long."""
        most = self.limits.max_prompt_tokens
        messages = self.replies.with_earlier(request)
        if len(messages) > most:  # each has at least one token
            raise self._too_long(f"{len(messages)} messages")
        size = num_characters((*messages, *request.tools))
        if size > _TOKEN_CHARACTERS * most:
            raise self._too_long(f"{size} characters")
        if size <= _THREAD_CHARACTERS:
            return False
        num_known = self.tree.num_known(messages, request.tools)
        return num_characters((*messages[num_known:], *(() if num_known else request.tools))) > _THREAD_CHARACTERS

    async def _measured(self, request: ModelRequest) -> int:
        """Return a long prompt's number of tokens, counted in a thread; estimated if it is far too long."""
        self._check_last(request)
        messages = self.replies.with_earlier(request)

        def measure() -> int:
            # A token may have many characters, so a sample suffices only for far too long prompts.
            text = "".join(texts_of((*messages, *request.tools)))
            if len(text) > _USUAL_CHARACTERS * most and len(sample := sample_of(text)) < len(text):
                estimate = len(self.tree.encode(sample)) * len(text) // len(sample)
                if estimate > 2 * most:
                    return estimate
            # Counting also leaves the tokens of whole turns in the renderer's cache.
            return self.tree.count_tokens(messages, request.tools)

        most = self.limits.max_prompt_tokens
        try:
            return await asyncio.to_thread(measure)
        except RenderingError as error:
            raise RefusedRequest(str(error)) from error

    def _prompt(self, request: ModelRequest) -> tuple[Conversation, ChainKey]:
        prompted, prompt_key = self._render(request)
        if prompted.num_tokens > self.limits.max_prompt_tokens:
            raise self._too_long(f"{prompted.num_tokens} tokens")
        return prompted, prompt_key

    def _over(self, reason: str, budget: str) -> RefusedRequest:
        self.reason = self.last_refusal = reason
        self._num_troubles += 1
        return RefusedRequest(f"this session has used up {budget}: finish.", status=403, code="insufficient_quota")

    def _too_long(self, length: str) -> RefusedRequest:
        self.last_refusal = StopReason.PROMPT_TOO_LONG
        self._num_troubles += 1
        most = self.limits.max_prompt_tokens
        return RefusedRequest(  # in the words of both APIs, which clients search for
            f"prompt is too long: {length} > {most} tokens maximum. This model's maximum context length is {most + 1} "
            "tokens, including one of the answer.",
            code="context_length_exceeded",
        )

    @staticmethod
    def _check_last(request: ModelRequest) -> None:
        if request.messages[-1]["role"] == "assistant":
            raise RefusedRequest("the last message is the assistant's: continuing a partial answer is not supported.")

    def _render(self, request: ModelRequest) -> tuple[Conversation, ChainKey]:
        self._check_last(request)
        try:
            return self.tree.prompt(self.replies.with_earlier(request), request.tools)
        except RenderingError as error:
            raise RefusedRequest(str(error)) from error

    def _is_aside(self, request: ModelRequest) -> bool:
        return not self._is_recorded or not request.is_trained or request.model.endswith(ASIDE)

    def _sampling_of(self, request: ModelRequest) -> SamplingConfig:
        budgets = [self._sampling.max_new_tokens, request.max_tokens]
        if self.limits.max_completion_tokens is not None:
            budgets.append(self.limits.max_completion_tokens - self.num_completion_tokens)
        changes: dict[str, Json] = dict(request.sampling) if self._does_client_sample else {}
        if (budget := min(budget for budget in budgets if budget is not None)) != self._sampling.max_new_tokens:
            changes["max_new_tokens"] = budget
        if request.stop:
            changes["stop"] = tuple(dict.fromkeys((*self._sampling.stop, *request.stop)))
        if not changes:
            return self._sampling
        try:
            return self._supported(self._sampling.with_changes(**changes))
        except (TypeError, ValueError, OverflowError) as error:
            raise RefusedRequest(str(error)) from error

    def _supported(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return sampling parameters, without an unsupported seed. Raises ValueError for others."""
        try:
            self._check_sampling(sampling)
        except ValueError:
            if sampling.seed == self._sampling.seed:
                raise
            sampling = sampling.with_changes(seed=self._sampling.seed)
            self._check_sampling(sampling)
            self.overridden["seed"] += 1
        return sampling

    async def _formed(self, request: ModelRequest, form: AnswerForm, sampling: SamplingConfig) -> SamplingConfig:
        """Return sampling parameters with the grammar of a form, unless an optional form is not supported."""

        def with_grammar() -> SamplingConfig:
            formed = sampling.with_changes(grammar=self.tree.grammar(form, request.tools, may_call=request.may_call))
            self._check_sampling(formed)
            return formed

        try:
            return await asyncio.to_thread(with_grammar)  # a large schema takes time to compile
        except ValueError as error:
            if form.is_required:
                raise RefusedRequest(f"{form.option} of type json_schema is not supported here: {error}") from error
            self.overridden[form.option] += 1
            return sampling

    async def _sample(
        self, exchange: Exchange, prompt: tuple[Conversation, ChainKey] | None, sampling: SamplingConfig
    ) -> Sampled:
        request = exchange.request
        if prompt is None and (num_tokens := await self._measured(request)) > self.limits.max_prompt_tokens:
            raise self._too_long(f"{num_tokens} tokens")
        prompted, prompt_key = self._prompt(request) if prompt is None else prompt
        asked: list[asyncio.Future[Completion]] = []
        try:
            if request.form is not None:
                sampling = await self._formed(request, request.form, sampling)
            ids = prompted.prompt_ids
            streamed: list[dict[str, TokenStream]] = [{} for _ in range(request.num_answers)]
            # A weight update restarts a grammar's answer, and calls read as text change a whole answer.
            if request.is_streamed and sampling.grammar is None and request.may_call:
                texts = [self.tree.answer_text(prompted, sampling.stop) for _ in streamed]
                streamed = [{"stream": stream} for stream in exchange.open_streams(texts, prompted.num_tokens)]
            samplings = [sampling] * len(streamed)
            if sampling.seed != self._sampling.seed:  # from the run's seed, each request derives its own
                samplings = sampling.for_answers(len(streamed))
            pairs = zip(samplings, streamed, strict=True)
            asked += [asyncio.ensure_future(self._complete(ids, one, **options)) for one, options in pairs]
            completions = [await one for one in asked]
        except (asyncio.CancelledError, RefusedRequest):
            raise
        except BaseException as error:
            if self._does_client_sample and isinstance(error, ValueError):  # invalid sampling parameters
                raise RefusedRequest(describe(error)) from error
            self.failure = as_exception(error)
            self._num_troubles += 1
            raise RefusedRequest(describe(error), status=500, code="engine_error") from error
        finally:
            for one in asked:
                one.cancel()
        if not exchange.is_stopped and any(completion.finish_reason == "abort" for completion in completions):
            self.reason = StopReason.ABORTED
            self._num_troubles += 1
            raise RefusedRequest("the answer was aborted.", status=500, code="aborted")
        return Sampled(prompted, prompt_key, completions)

    # Answers

    def deliver(self, exchange: Exchange) -> ModelReply:
        """Record a finished exchange, and return its reply. Raises RefusedRequest if it failed."""
        self.last_used_s = time.monotonic()
        if exchange.reply is not None:
            return exchange.reply
        if exchange.task.cancelled():
            self.check_open()
            raise RefusedRequest("the client of the request disconnected.", status=499)
        sampled = exchange.task.result()
        self.check_open()
        request = exchange.request
        prompted = sampled.prompted
        completions, texts = self._completions(exchange, sampled)
        turns = [self.tree.turn(prompted, sampled.prompt_key, completion) for completion in completions]
        is_stopped = exchange.is_stopped
        answers = [self._answer(turn, request, text, is_stopped) for turn, text in zip(turns, texts, strict=True)]
        reply = replace(
            exchange.head,
            answers=tuple(answers),
            num_prompt_tokens=prompted.num_tokens,
            num_cached_tokens=int(completions[0].metrics.get("num_cached_tokens", 0)),
        )
        exchange.reply = reply
        self.counts["num_answered"] += 1
        exchange.request = replace(request, messages=request.messages[:0], tools=())  # not kept for every turn
        exchange.streams, exchange.texts = [], []
        if exchange.num_troubles == self._num_troubles:
            self._forgive()
        if is_stopped:
            self.counts["num_stopped"] += 1
        if not self._is_aside(request):
            for turn, answer, text in zip(turns, answers, texts, strict=True):
                if text is not None and is_stopped:
                    self.tree.add_stopped(turn, answer.message(), prompted, text)
                else:
                    self.tree.add(turn, answer.message())
            self.num_completion_tokens += reply.num_completion_tokens
            self.replies.add(reply, turns, request.num_instructions)
        return reply

    def _completions(
        self, exchange: Exchange, sampled: Sampled
    ) -> tuple[list[Completion], Sequence[AnswerText] | list[None]]:
        """Return the completions and their texts that clients read early, to which stopped ones are cut.

        Raises RefusedRequest if a completion does not begin with the text that was sent.
        """
        completions, texts = sampled.completions, exchange.texts
        if not all(text.is_of(one.token_ids) for text, one in zip(texts, completions, strict=False)):
            self.failure = EngineError("The engine failed after a part of the answer was sent; repeat the request.")
            self._num_troubles += 1
            raise RefusedRequest(str(self.failure), status=500, code="engine_error")
        if not exchange.is_stopped:
            return completions, texts or [None for _ in completions]
        num_prompt_tokens = sampled.prompted.num_tokens
        read = [(text, one) for text, one in zip(texts, completions, strict=True) if text.num_characters]
        return [one.cut(text.num_tokens(), num_prompt_tokens) for text, one in read], [text for text, _ in read]

    def _forgive(self) -> None:
        """Clear the failures before a request that was answered; a used-up budget stays."""
        self.failure = None
        self.last_refusal = StopReason.NONE
        if self.reason == StopReason.ABORTED:
            self.reason = StopReason.NONE

    def _answer(
        self, turn: RecordedTurn, request: ModelRequest, text: AnswerText | None, is_stopped: bool
    ) -> ModelAnswer:
        """Return a turn's answer for clients, which begins with the `text` that was sent."""
        parsed = turn.conversation.last
        completion = turn.completion
        assert parsed is not None
        content = text_of(parsed.message.get("content"))
        reasoning = parsed.message.get("reasoning_content") or ""
        calls: Sequence[ToolCall] = parsed.message.get("tool_calls") or ()
        if calls and not request.may_call:
            ids = completion.token_ids[: len(completion.token_ids) - parsed.is_complete]
            content = self.tree.decode(ids)
            calls = ()
        if completion.stop_string is not None:
            content = content.partition(completion.stop_string)[0]
        if text is not None and is_stopped:
            content, reasoning, calls = text.content, text.reasoning, ()
        elif text is not None:
            content, reasoning = continued(text.content, content), continued(text.reasoning, reasoning)
        finish: FinishReason = "length" if completion.finish_reason == "length" else "stop"
        return ModelAnswer(
            content=content,
            reasoning=reasoning,
            tool_calls=tuple({**call, "id": f"call_{uuid.uuid4().hex[:24]}"} for call in calls),
            finish_reason="tool_calls" if calls else finish,
            stop_string=completion.stop_string,
            token_texts=[self.tree.decode([one]) for one in completion.token_ids] if request.wants_log_probs else (),
            log_probs=completion.log_probs if request.wants_log_probs else (),
            num_tokens=len(completion.token_ids),
        )

    def note_refusal(self, refused: RefusedRequest) -> None:
        """Count a request that was refused or failed, for the record."""
        self.last_message = refused.message
        if refused.status >= 500:
            self.counts["num_failed"] += 1
        else:
            self.refusals[refused.code] += 1

    def record(self) -> dict[str, object]:
        """Return the agent's entries and, under `requests`, the outcomes of its requests."""
        entries = {
            **self.counts, "refused": dict(self.refusals), "last_message": self.last_message,
            "overridden": dict(self.overridden),
        }  # fmt: skip
        did = {name: entry for name, entry in entries.items() if entry}
        return {**self.info, "requests": did} if did else dict(self.info)

    def leave(self, exchange: Exchange) -> None:
        """Record that a client disconnected, and the part that it read of an answer that stops here."""
        exchange.leave()
        if exchange.is_stopped:
            exchange.task.add_done_callback(lambda task: self._settle(exchange))

    def _settle(self, exchange: Exchange) -> None:
        with contextlib.suppress(RefusedRequest):  # the engine failed, which is recorded
            if not self.is_ended:
                self.deliver(exchange)

    async def finish(self) -> None:
        """Record what clients have read of unfinished answers, and end the session."""
        begun = [one for one in self._all_exchanges if one.is_begun and not one.is_lost]
        stopped = [one for one in self._all_exchanges if one.is_stopped]
        for exchange in begun:
            exchange.stop()
        if tasks := [one.task for one in (*begun, *stopped) if not one.task.done()]:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        for exchange in (*begun, *stopped):
            if exchange.task.done():
                self._settle(exchange)
        self.end()

    def end(self) -> None:
        """End the session and cancel its sampling."""
        self.is_ended = True
        for exchange in self._all_exchanges:
            if exchange.reply is None and not exchange.has_failed:
                self.counts["num_lost"] += exchange.request.num_answers
                exchange.task.cancel()
        self.exchanges.clear()
