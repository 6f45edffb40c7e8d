"""A collector of traces: a real OTLP gRPC service that keeps what it receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as it came over the wire; times in seconds since the epoch."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, object]
    links: tuple[str, ...]


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans; `named` finds them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[ReceivedSpan] = []
        self.endpoint = ""

    @property
    def spans(self) -> tuple[ReceivedSpan, ...]:
        with self._lock:
            return tuple(self._spans)

    def trace(self, trace_id: str) -> tuple[ReceivedSpan, ...]:
        return tuple(span for span in self.spans if span.trace_id == trace_id)

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            self._spans.extend(_spans(request))
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def running_sink() -> Iterator[OtlpSink]:
    sink = OtlpSink()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    add: Callable[[OtlpSink, grpc.Server], None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(sink, server)
    sink.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sink
    finally:
        server.stop(0).wait()


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    service=str(resource.get("service.name", "")),
                    instance=str(resource.get("service.instance.id", "")),
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_s=span.start_time_unix_nano / 1e9,
                    end_s=span.end_time_unix_nano / 1e9,
                    attributes=_attributes(span.attributes),
                    links=tuple(link.trace_id.hex() for link in span.links),
                )


def _attributes(pairs: Any) -> dict[str, object]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> object:
    kind = pair.value.WhichOneof("value")
    return None if kind is None else getattr(pair.value, kind)
