"""Traces by OpenTelemetry, where its SDK is installed and told where to send them; elsewhere nothing is imported.

The trace of a job is in its environment from its submission on: TRACEPARENT, as the W3C writes it. The client begins
it, the server adds what its log says, and ranks that are instrumented go on with it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

VARIABLE = "TRACEPARENT"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TIMEOUT_S = 2  # of one export: a command does not wait longer for a collector at its end


def is_wanted() -> bool:
    """Return whether the environment says where traces go, by OpenTelemetry's own variables."""
    return any(os.environ.get(name) for name in _ENDPOINTS) and os.environ.get("OTEL_SDK_DISABLED") != "true"


@contextmanager
def span(name: str, **attributes: str) -> Iterator[str | None]:
    """Trace what happens inside, as a part of the trace in the environment or as a new one.

    Yields:
        Its traceparent; None if nothing is traced.
    """
    tracer = _tracer() if is_wanted() else None
    if tracer is None:
        yield None
        return
    with tracer.start_as_current_span(name, _context(os.environ.get(VARIABLE)), attributes=_named(attributes)):
        yield _traceparent()


def note(name: str, traceparent: str, from_us: int, to_us: int, **attributes: str) -> None:
    """Add what happened between two moments to a trace, below the span that its traceparent names."""
    tracer = _tracer() if is_wanted() else None
    if tracer is not None:
        made = tracer.start_span(name, _context(traceparent), attributes=_named(attributes), start_time=from_us * 1000)
        made.end(max(from_us, to_us) * 1000)


def id_of(traceparent: str) -> str:
    """Return the id of a trace, as logs name it; "" if the text is no traceparent.

    >>> id_of("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    '0af7651916cd43dd8448eb211c80319c'
    """
    parts = traceparent.split("-")
    return parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""


def _named(attributes: Mapping[str, str]) -> dict[str, str]:
    return {f"cordee.{name}": value for name, value in attributes.items()}


@cache
def _tracer() -> "Tracer | None":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "cordee"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=_TIMEOUT_S)))
    return provider.get_tracer("cordee")


def _context(traceparent: str | None) -> "Context":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({} if traceparent is None else {"traceparent": traceparent})


def _traceparent() -> str | None:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")
