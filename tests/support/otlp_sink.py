"""A collector of traces and metrics that keeps what it receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from benchmarks.queue.otlp_sink import Export, MetricsExport, attributes_of, served_collector


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as received over the wire; times in seconds since the epoch."""

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


class OtlpSink:
    """Keeps spans; `trace` finds those of one trace. For histograms it keeps the attributes and the count of the newest export."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[ReceivedSpan] = []
        self.histograms: dict[str, tuple[dict[str, object], int]] = {}
        self.endpoint = ""

    @property
    def spans(self) -> tuple[ReceivedSpan, ...]:
        with self._lock:
            return tuple(self._spans)

    def trace(self, trace_id: str) -> tuple[ReceivedSpan, ...]:
        return tuple(span for span in self.spans if span.trace_id == trace_id)

    def take(self, export: Export) -> None:
        with self._lock:
            self._spans.extend(_spans(export))

    def take_metrics(self, export: MetricsExport) -> None:
        found = [metric for resource in export.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics]
        for metric in found:
            for point in metric.histogram.data_points:
                self.histograms[metric.name] = (attributes_of(point.attributes), point.count)


@contextmanager
def running_sink() -> Iterator[OtlpSink]:
    sink = OtlpSink()
    with served_collector(sink.take, sink.take_metrics) as sink.endpoint:
        yield sink


def _spans(export: Export) -> Iterator[ReceivedSpan]:
    for resource_spans in export.resource_spans:
        resource = attributes_of(resource_spans.resource.attributes)
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
                    attributes=attributes_of(span.attributes),
                    links=tuple(link.trace_id.hex() for link in span.links),
                )
