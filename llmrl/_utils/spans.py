"""OpenTelemetry spans of rollouts: what their time went on, by the names of its GenAI conventions.

They are off until `trace_spans`, and then cost a comparison each. `llmrl` makes them; who keeps them is a provider of
OpenTelemetry's SDK, the program's own or the one that `run.spans` sets up.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from llmrl._utils.imports import require

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

_OFF: AbstractContextManager[None] = contextlib.nullcontext()
_tracer: Tracer | None = None


def trace_spans(provider: TracerProvider | None = None) -> None:
    """Make spans of this process's rollouts from now on: rollout, turn, and in it the engine, tools, and rewards.

    They hold names, counts and scores, but no text of a conversation.

    Args:
        provider: makes the spans; None is the program's own, as `opentelemetry-instrument` sets it, or one that
            sends them by OTLP where it has none, to where `OTEL_EXPORTER_OTLP_ENDPOINT` says.

    Raises MissingExtraError if OpenTelemetry is not installed, naming the extra.
    """
    global _tracer
    trace = require("opentelemetry.trace", extra="spans")
    if provider is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        provider = _sending_provider()
        trace.set_tracer_provider(provider)
    _tracer = trace.get_tracer("llmrl", tracer_provider=provider)


def stop_spans() -> None:
    """Make none any more."""
    global _tracer
    _tracer = None


def _sending_provider() -> TracerProvider:
    sdk = require("opentelemetry.sdk.trace", extra="spans")
    export = require("opentelemetry.sdk.trace.export", extra="spans")
    otlp = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", extra="spans")
    os.environ.setdefault("OTEL_SERVICE_NAME", "llmrl")
    provider: TracerProvider = sdk.TracerProvider()
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))  # type: ignore[attr-defined]
    return provider


def span(operation: str, subject: str = "", *, parent: str = "") -> AbstractContextManager[Span | None]:
    """Return a context manager of a span, which it gives; of None while spans are off.

    Args:
        operation: the first word of its name, and its `gen_ai.operation.name`.
        subject: the rest of its name: a model, a tool.
        parent: `here()` of another thread; by default the span that this is in.

    Example:
        >>> with span("execute_tool", "search") as current:
        ...     print(current)
        None
    """
    if _tracer is None:
        return _OFF
    name = f"{operation} {subject}" if subject else operation
    return _tracer.start_as_current_span(
        name, _context(parent) if parent else None, attributes={"gen_ai.operation.name": operation}
    )


def here() -> str:
    """Return what names this place among spans, for a thread that this one's context does not reach; "" while off."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def _context(parent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})
