"""A collector of traces and metrics on loopback: a real OTLP gRPC service that passes each export to its owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

Export = trace_service_pb2.ExportTraceServiceRequest
MetricsExport = metrics_service_pb2.ExportMetricsServiceRequest
THREADS = 4
MESSAGE_BYTES_MAX = 64 << 20


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, take: Callable[[Export], None]) -> None:
        self._take = take

    def Export(self, request: Export, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:  # noqa: N802
        self._take(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, take: Callable[[MetricsExport], None]) -> None:
        self._take = take

    def Export(self, request: MetricsExport, context: Any) -> metrics_service_pb2.ExportMetricsServiceResponse:  # noqa: N802
        self._take(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def served_collector(take: Callable[[Export], None], take_metrics: Callable[[MetricsExport], None] = lambda _: None) -> Iterator[str]:
    """Serves while the context is open and yields the endpoint for OTEL_EXPORTER_OTLP_ENDPOINT. Both are called from several threads."""
    server = grpc.server(ThreadPoolExecutor(max_workers=THREADS), options=(("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),))
    add: Callable[[_Collector, grpc.Server], None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(_Collector(take), server)
    add_metrics: Callable[[_MetricsCollector, grpc.Server], None] = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_metrics(_MetricsCollector(take_metrics), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def attributes_of(pairs: Any) -> dict[str, object]:
    """The attributes of a span or a resource."""
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> object:
    kind = pair.value.WhichOneof("value")
    return None if kind is None else getattr(pair.value, kind)
