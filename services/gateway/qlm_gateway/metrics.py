"""Prometheus metrics of a gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from qlm_gateway.outlook.model_load import ModelLoadCollector
from qlm_process.metrics import Metrics

ACCEPT_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


class GatewayMetrics(Metrics):
    """One set a process, on its own registry."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts = Counter(
            "qlm_gateway_accepts_total",
            "Requests by outcome: accepted, duplicate, or the reason of the error that refused them.",
            ("outcome",),
            registry=self.registry,
        )
        self.accept_seconds = Histogram(
            "qlm_gateway_accept_seconds",
            "From a request's arrival to its durable acceptance.",
            buckets=ACCEPT_BUCKETS_S,
            registry=self.registry,
        )
        self.open_readers = Gauge(
            "qlm_gateway_open_readers", "Calls that follow a request: streams, and waits for its end.", registry=self.registry
        )
        self.http_answers = Counter(
            "qlm_gateway_http_answers_total", "Answers over HTTP, by route and status.", ("route", "status"), registry=self.registry
        )
        self.frames = Counter("qlm_gateway_frames_total", "Token frames read from the queue.", registry=self.registry)
        self.frames_unreadable = Counter(
            "qlm_gateway_frames_unreadable_total", "Entries of the frame stream that could not be parsed.", registry=self.registry
        )
        self.streamed_tokens = Counter("qlm_gateway_streamed_tokens_total", "Output tokens given to clients.", registry=self.registry)
        self.gaps = Counter("qlm_gateway_stream_gaps_total", "Frames that did not follow what a reader has.", registry=self.registry)
        self.overruns = Counter(
            "qlm_gateway_stream_overruns_total",
            "Times that a slow reader fell behind: its tokens are read from the queue again when it wants them.",
            registry=self.registry,
        )
        self.buffered_tokens = Gauge(
            "qlm_gateway_buffered_tokens", "Tokens that are kept for readers who have not taken them.", registry=self.registry
        )
        self.readers_refused = Counter(
            "qlm_gateway_readers_refused_total", "Streams and waits that were not taken, by reason.", ("reason",), registry=self.registry
        )
        self.attaches = Counter(
            "qlm_gateway_attaches_total",
            "Questions where a request is: bind (a stream is opened), again (gap, slow reader, silence), find (its end).",
            ("kind",),
            registry=self.registry,
        )
        self.expired = Counter("qlm_gateway_expired_total", "Requests ended as EXPIRED by this gateway's sweep.", registry=self.registry)
        self.predictions_failed = Counter(
            "qlm_gateway_predictions_failed_total",
            "Predictions that profiles or instances made impossible to work out: clients got none.",
            registry=self.registry,
        )
        self.drain_per_second = Gauge(
            "qlm_gateway_queue_drain_per_second", "Requests that end per second, behind retry hints.", registry=self.registry
        )
        self.queue_away = Counter(
            "qlm_gateway_queue_unavailable_total", "Background calls to the queue that failed, by call.", ("call",), registry=self.registry
        )
        self.model_loads = ModelLoadCollector()
        self.registry.register(self.model_loads)
        # Behind it: its reading sets them.
        self.oldest_request = Gauge(
            "qlm_gateway_oldest_request_seconds",
            "Age of the oldest request that has not ended, of the whole queue.",
            registry=self.registry,
        )
        self.held_ratio = Gauge(
            "qlm_gateway_held_ratio",
            "Largest share of a bound in bytes that requests and results hold: of the queue, a tenant or an SLO class.",
            registry=self.registry,
        )
