"""Logs, traces and metrics of one process."""

from __future__ import annotations

import json
import logging
import sys
import time
import urllib.request

import pytest
import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Status, StatusCode, get_current_span, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter

from qlm_core.vocabulary.errors import ConfigError
from qlm_process.logs import configure_logging
from qlm_process.metrics import Metrics, serve_metrics
from qlm_process.settings import TelemetrySettings
from qlm_process.tracing import LateSpan, configure_tracing, context_of, record_span, traceparent_of, tracestate_of


def recording() -> tuple[TracerProvider, InMemorySpanExporter]:
    """A provider as of a process that exports, and what it exports."""
    provider, exporter = TracerProvider(resource=configure_tracing("gateway", "gateway-0").resource), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def test_json_lines_carry_service_instance_trace_and_traceback(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(TelemetrySettings(log_format="json"), "gateway", "gateway-0")
    tracer = configure_tracing("gateway", "gateway-0").get_tracer("test")
    log = structlog.get_logger()
    log.debug("not_shown")
    with tracer.start_as_current_span("one") as span:
        log.info("ready", address="127.0.0.1:1")
    logging.getLogger("library").warning("text %d", 7)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        log.error("failed", exc_info=error)
    ready, library, failed = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert ready["event"] == "ready"
    assert (ready["service"], ready["instance"], ready["address"]) == ("gateway", "gateway-0", "127.0.0.1:1")
    assert int(ready["trace_id"], 16) == span.get_span_context().trace_id
    assert (library["event"], library["level"], library["service"]) == ("text 7", "warning", "gateway")
    assert failed["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert root_logger.level == logging.INFO


def test_the_name_of_another_instance_stays(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(TelemetrySettings(log_format="json"), "estimator", "estimator-0")
    structlog.get_logger().warning("hardware_drift", instance="a100-0")
    line = json.loads(capsys.readouterr().err)
    assert (line["service"], line["instance"]) == ("estimator", "a100-0")


def test_console_lines_are_text(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(TelemetrySettings(log_level="debug"), "agent", "a-0")
    structlog.get_logger().debug("shown", n=1)
    line = capsys.readouterr().err
    assert "shown" in line
    assert "n=1" in line


def test_a_trace_crosses_processes_by_its_headers() -> None:
    provider, exporter = recording()
    tracer = provider.get_tracer("test")
    with use_span(tracer.start_span("qlm.gateway.accept"), end_on_exit=True) as parent:
        header = traceparent_of(parent)
    context = context_of(header, "vendor=1")
    child = record_span(tracer, "qlm.queue_wait", context, 10.0, 12.5, {"qlm.model": "m"})
    assert tracestate_of(child) == "vendor=1"
    first, second = exporter.get_finished_spans()
    assert second.parent is not None
    assert first.context is not None
    assert second.parent.span_id == first.context.span_id
    assert second.context is not None
    assert second.context.trace_id == first.context.trace_id
    assert (second.start_time, second.end_time) == (10_000_000_000, 12_500_000_000)
    assert provider.resource.attributes["service.name"] == "qlm-gateway"
    assert provider.resource.attributes["service.instance.id"] == "gateway-0"


@pytest.mark.parametrize(
    "header",
    [
        f"00-{'a' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-00",
        f"00-{'a' * 32}-{'b' * 16}-ff",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-01-more",
        f"01-{'a' * 32}-{'b' * 16}-01-more",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-01\n",
        "nonsense",
        "",
    ],
)
def test_a_header_is_read_as_the_propagator_reads_it(header: str) -> None:
    known = TraceContextTextMapPropagator().extract({"traceparent": header}, context=Context())
    read, expected = (get_current_span(context).get_span_context() for context in (context_of(header), known))
    assert (read, read.is_remote) == (expected, expected.is_remote)


def test_spans_after_the_fact_are_as_those_of_the_tracer() -> None:
    provider, exporter = recording()
    tracer = provider.get_tracer("test")
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    link = Link(tracer.start_span("other").get_span_context())
    for context in (context_of(header, "vendor=1"), context_of("")):
        exporter.clear()
        recorded = record_span(tracer, "qlm.pull", context, 1.5, 2.5, {"qlm.attempt": 1, "qlm.model": "m"}, [link])
        live = tracer.start_span(
            "qlm.pull", context, attributes={"qlm.attempt": 1, "qlm.model": "m"}, links=[link], start_time=1_500_000_000
        )
        live.end(2_500_000_000)
        found, expected = exporter.get_finished_spans()
        assert found.context == recorded.get_span_context()
        assert found.context is not None
        assert expected.context is not None
        assert (found.name, found.kind, found.parent, found.start_time, found.end_time, found.resource, found.links) == (
            (expected.name, expected.kind, expected.parent, expected.start_time, expected.end_time, expected.resource, expected.links)
        )
        assert dict(found.attributes or {}) == dict(expected.attributes or {})
        assert found.context.trace_state == expected.context.trace_state
        assert found.context.trace_flags.sampled
        assert (found.context.trace_id == expected.context.trace_id) == (found.parent is not None)
        assert encode_spans([found]).ByteSize() > 100


@pytest.mark.parametrize("disabled", [False, True])
def test_a_late_span_reports_its_outcome_at_its_end(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    if disabled:
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider, exporter = recording()
    began_ns = time.time_ns()
    late = LateSpan(provider.get_tracer("test"), "qlm.gateway.accept", context_of(""), attributes={"qlm.model": "m"})
    assert bool(traceparent_of(late.span)) is not disabled
    assert exporter.get_finished_spans() == ()
    late.end(attributes={"qlm.tenant": "t"}, status=Status(StatusCode.ERROR, "QUEUE_FULL"))
    if disabled:
        assert exporter.get_finished_spans() == ()
        return
    (found,) = exporter.get_finished_spans()
    assert found.context == late.span.get_span_context()
    assert dict(found.attributes or {}) == {"qlm.model": "m", "qlm.tenant": "t"}
    assert (found.status.status_code, found.status.description) == (StatusCode.ERROR, "QUEUE_FULL")
    assert found.start_time is not None
    assert found.end_time is not None
    assert began_ns <= found.start_time <= found.end_time <= time.time_ns()


def test_an_unsampled_span_is_not_recorded_after_the_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, exporter = recording()
    unsampled = context_of("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
    span = record_span(provider.get_tracer("test"), "qlm.pull", unsampled, 1.0, 2.0)
    assert traceparent_of(span) == ""
    assert exporter.get_finished_spans() == ()
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for variable, value in (("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_SDK_DISABLED", "true")):
        monkeypatch.setenv(variable, value)
        provider, exporter = recording()
        tracer = provider.get_tracer("test")
        assert traceparent_of(record_span(tracer, "qlm.pull", context_of(""), 1.0, 2.0)) == ""
        assert traceparent_of(record_span(tracer, "qlm.pull", context_of(header), 1.0, 2.0)) == header, "others go on with the trace"
        assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("header", ["", "00-zz-11-01", "nonsense"])
def test_a_bad_header_starts_a_new_trace(header: str) -> None:
    tracer = recording()[0].get_tracer("test")
    outer = tracer.start_span("outer")
    with use_span(outer):  # the context of the running code must not leak in
        span = record_span(tracer, "qlm.pull", context_of(header), 1.0, 0.5)
    assert span.get_span_context().trace_id != outer.get_span_context().trace_id
    assert set_span_in_context(span, context_of(header))


def test_another_protocol_than_grpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ConfigError, match="may be grpc"):
        configure_tracing("agent", "a-0")


def test_traces_are_kept_where_they_are_exported_and_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not configure_tracing("a", "b").get_tracer("t").start_span("x").is_recording()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    interval_s = sys.getswitchinterval()
    for sampler, share, kept in (("", "", True), ("parentbased_traceidratio", "0.0", False), ("parentbased_traceidratio", "1.0", True)):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
        provider = configure_tracing("a", "b")
        assert provider.get_tracer("t").start_span("x").is_recording() is kept  # not ended, so it is never sent
        provider.shutdown()
    sys.setswitchinterval(interval_s)


def test_metrics_are_served_from_their_own_registry() -> None:
    first, second = Metrics(), Metrics()
    counter = Counter("qlm_things_total", "Things.", registry=first.registry)
    Counter("qlm_things_total", "Things.", registry=second.registry)
    counter.inc(3)
    server = serve_metrics(first.registry, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as response:
        text = response.read().decode()
    assert "qlm_things_total 3.0" in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(ConfigError, match="metrics_port"):
        serve_metrics(second.registry, "127.0.0.1", server.port)
    server.stop()
    server.stop()
