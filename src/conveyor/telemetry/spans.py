"""Sends spans to a collector, by OTLP over HTTP. Needs the extra `otel`; imported only if an endpoint is set."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from conveyor import __version__
from conveyor.telemetry import traces

_PATH = "/v1/traces"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Ids(RandomIdGenerator):
    """The ids of the next span; random if none are set."""

    def __init__(self) -> None:
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        return self.trace_id or super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self.span_id or super().generate_span_id()


class OtlpSink:
    """Passes spans to the SDK, which sends them in batches from its own thread."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._ids = _Ids()
        # Sampling was decided before.
        resource = Resource.create({"service.name": "conveyor", "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("conveyor", __version__)

    @classmethod
    @asynccontextmanager
    async def open(cls, endpoint: str) -> AsyncIterator[Self]:
        url = endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        sink = cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        try:
            yield sink
        finally:
            # Sends the remaining spans.
            await asyncio.to_thread(sink.close)

    def close(self) -> None:
        self._provider.shutdown()

    def emit(self, span: traces.Span) -> int:
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        parent = None
        if span.parent_id is not None:
            parent = NonRecordingSpan(SpanContext(span.trace_id, span.parent_id, is_remote=True, trace_flags=_SAMPLED))
        sdk_span = self._tracer.start_span(
            span.name,
            # Without a parent, an empty context rather than the current one.
            context=Context() if parent is None else set_span_in_context(parent, Context()),
            attributes=span.attributes,
            links=[] if span.link is None else [_link(span.link)],
            start_time=_nanoseconds(span.began),
        )
        if span.error is not None:
            sdk_span.set_status(Status(StatusCode.ERROR, span.error))
        sdk_span.end(_nanoseconds(max(span.began, span.ended)))
        return sdk_span.get_span_context().span_id


def _link(traceparent: str) -> Link:
    _, trace_id, span_id, flags = traceparent.split("-")
    context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return Link(context)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
