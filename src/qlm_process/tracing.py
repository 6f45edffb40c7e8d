"""OpenTelemetry traces: one per request, across all processes. The provider is passed in, never global."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from qlm_core.errors import ConfigError

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def configure_tracing(service: str, instance: str) -> TracerProvider:
    """The process's tracer provider, of the OpenTelemetry service "qlm-<service>".

    It samples always (the parent decides where there is one) unless OTEL_TRACES_SAMPLER says otherwise, and exports by OTLP over gRPC where
    one of ENDPOINT_VARIABLES is set. Shut it down at the end: that flushes. Raises ConfigError where another protocol is asked for.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": f"qlm-{service}", "service.instance.id": instance}))
    if any(os.environ.get(variable) for variable in ENDPOINT_VARIABLES):
        protocol = next((os.environ[variable] for variable in PROTOCOL_VARIABLES if os.environ.get(variable)), "grpc")
        if protocol != "grpc":
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: may be grpc (given: {protocol!r})")
        # Only a process that exports pays for loading the exporter.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """The context that a W3C trace header pair stands for; an empty or malformed one starts a new trace."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent, "tracestate": tracestate}, context=Context())


def traceparent_of(span: Span) -> str:
    """The W3C traceparent of a span, "" for one that is not valid."""
    return _injected(span).get("traceparent", "")


def tracestate_of(span: Span) -> str:
    """The W3C tracestate of a span, "" for none."""
    return _injected(span).get("tracestate", "")


def record_span(
    tracer: Tracer,
    name: str,
    context: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[Link] = (),
) -> Span:
    """Records a span after the fact, as a child of `context`. Times in seconds since the epoch; an end before its start is taken as
    the start (the server's clock and an estimate of it differ by less than a millisecond)."""
    span = tracer.start_span(name, context=context, attributes=attributes, links=links, start_time=_nanoseconds(start_s))
    span.end(end_time=_nanoseconds(max(start_s, end_s)))
    return span


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _injected(span: Span) -> dict[str, str]:
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span, Context()))
    return carrier
