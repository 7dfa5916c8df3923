"""OpenTelemetry spans of rollouts, named by the GenAI conventions.

Spans are off until `trace_spans` is called. They are exported by the program's own tracer provider,
or by one that `trace_spans` creates.
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
    """Create spans for rollouts of this process, without conversation text.

    The default `provider` is the program's own if it has set one, otherwise a new provider that exports by OTLP to
    `OTEL_EXPORTER_OTLP_ENDPOINT`. Raises MissingExtraError if OpenTelemetry is not installed.
    """
    global _tracer
    trace = require("opentelemetry.trace", extra="spans")
    if provider is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        provider = _sending_provider()
        trace.set_tracer_provider(provider)
    _tracer = trace.get_tracer("llmrl", tracer_provider=provider)


def stop_spans() -> None:
    """Stop creating spans."""
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
    """Return a context manager that yields a span named `operation subject`, or None if spans are off.

    `parent` is the result of `here()` in another thread; the default is the current span.
    """
    if _tracer is None:
        return _OFF
    name = f"{operation} {subject}" if subject else operation
    return _tracer.start_as_current_span(
        name, _context(parent) if parent else None, attributes={"gen_ai.operation.name": operation}
    )


def here() -> str:
    """Return an identifier of the current span for `span(parent=...)` in another thread; "" if spans are off."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def _context(parent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})
