"""OpenTelemetry traces: one per request, across all processes. The provider is passed in, never global."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from qlm_core.vocabulary.errors import ConfigError

EXPORT_BATCH_SPANS = 64
"""Spans that the exporter's thread encodes at a time. It takes about 30 us a span, and the event loop waits for it: 17 ms at the 512 of
OpenTelemetry's default, ten times a second in a busy process."""

SWITCH_INTERVAL_S = 0.0005
"""How long that thread may keep the interpreter from the event loop; Python's default of 5 ms is more than a request may be delayed."""

_SCOPE = InstrumentationScope("qlm")
_UNSET = Status()

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class _ProcessResource(Resource):
    """Hashed once. The exporter looks it up for every span, and the base class serializes it to JSON for that."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash


def configure_tracing(service: str, instance: str) -> TracerProvider:
    """The process's tracer provider, of the OpenTelemetry service "qlm-<service>".

    It exports by OTLP over gRPC where one of ENDPOINT_VARIABLES is set, and samples nothing elsewhere. The parent decides where there is
    one, then OTEL_TRACES_SAMPLER; the default keeps all. Shut it down at the end: that flushes. Raises ConfigError for another protocol.
    """
    resource = Resource.create({"service.name": f"qlm-{service}", "service.instance.id": instance})
    exports = any(os.environ.get(variable) for variable in ENDPOINT_VARIABLES)
    provider = TracerProvider(resource=_ProcessResource(resource), sampler=None if exports else ALWAYS_OFF)
    if exports:
        protocol = next((os.environ[variable] for variable in PROTOCOL_VARIABLES if os.environ.get(variable)), "grpc")
        if protocol != "grpc":
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: may be grpc (given: {protocol!r})")
        # Only a process that exports pays for loading the exporter.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_export_batch_size=EXPORT_BATCH_SPANS))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    return provider


_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
"""The one version that there is, with ids that are not zero; all else is the propagator's to judge."""


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """The context that a W3C trace header pair stands for; an empty or malformed one starts a new trace."""
    if not traceparent:
        return Context()
    plain = None if tracestate else _TRACEPARENT.fullmatch(traceparent)
    if plain is not None:  # as good as all are, and the propagator takes five times as long
        trace_id, span_id, flags = (int(part, 16) for part in plain.groups())
        parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
        return set_span_in_context(NonRecordingSpan(parent), Context())
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent, "tracestate": tracestate}, context=Context())


def stored_context(traceparent: str, tracestate: str) -> Context | None:
    """The context of a stored request, None without a trace: a gateway stores those that are kept."""
    return context_of(traceparent, tracestate) if traceparent else None


def traceparent_of(span: Span) -> str:
    """The W3C traceparent of a span, "" for one that is not valid."""
    # By hand: the propagator takes five times as long, and every request passes here.
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def tracestate_of(span: Span) -> str:
    """The W3C tracestate of a span, "" for none."""
    return span.get_span_context().trace_state.to_header()


class LateSpan:
    """A span that is made at its end: one that lives meanwhile takes five times as long (16 us), and every request has some. A child of
    `context`. `start_s`: seconds since the epoch, None for now. `span` stands for it in other spans; where it is not kept, a sampled
    parent does, or an invalid span."""

    __slots__ = ("_attributes", "_links", "_name", "_parent", "_start_ns", "_tracer", "span")

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        context: Context,
        start_s: float | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        parent = get_current_span(context).get_span_context()
        self.span: Span = NonRecordingSpan(parent) if parent.trace_flags.sampled else INVALID_SPAN
        self._tracer: SdkTracer | None = None
        if not isinstance(tracer, SdkTracer):  # OTEL_SDK_DISABLED
            return
        # As the tracer would do.
        trace_id = parent.trace_id if parent.is_valid else tracer.id_generator.generate_trace_id()
        sampling = tracer.sampler.should_sample(context, trace_id, name, SpanKind.INTERNAL, attributes, links)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return
        self._tracer, self._name, self._links, self._attributes = tracer, name, links, sampling.attributes
        self._parent = parent if parent.is_valid else None
        self._start_ns = time.time_ns() if start_s is None else _nanoseconds(start_s)
        span_id, flags = tracer.id_generator.generate_span_id(), TraceFlags(TraceFlags.SAMPLED)
        self.span = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=sampling.trace_state))

    def end(self, end_s: float | None = None, attributes: Mapping[str, AttributeValue] | None = None, status: Status | None = None) -> None:
        """Records it; call it once. An end before its start is taken as the start (the server's clock and an estimate of it differ by less
        than a millisecond). `attributes`: beside those of its beginning."""
        if self._tracer is None:
            return
        self._tracer.span_processor.on_end(
            ReadableSpan(
                self._name,
                self.span.get_span_context(),
                self._parent,
                self._tracer.resource,
                {**self._attributes, **attributes} if attributes else self._attributes,
                links=self._links,
                status=status or _UNSET,
                start_time=self._start_ns,
                end_time=max(self._start_ns, time.time_ns() if end_s is None else _nanoseconds(end_s)),
                instrumentation_scope=_SCOPE,
            )
        )


def record_span(
    tracer: Tracer,
    name: str,
    context: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[Link] = (),
) -> Span:
    """Records a span after the fact (see `LateSpan`) and returns what stands for it in other spans."""
    late = LateSpan(tracer, name, context, start_s, attributes, links)
    late.end(end_s)
    return late.span


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
