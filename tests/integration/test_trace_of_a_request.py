"""One trace per request, across all processes: SDK, gateway, placement, queue wait, pull, prefill, decode and completion."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import qlm
from otlp_sink import OtlpSink, ReceivedSpan, running_sink
from qlm_process.tracing import configure_tracing
from running_cluster import RunningCluster

MODEL = "mistral-7b"
ANSWER_TIMEOUT_S = 60.0
SPANS_TIMEOUT_S = 20.0
CLOCK_TOLERANCE_S = 0.25
"""Spans of different processes are ordered by an estimate of the server's clock."""

ROOT = "qlm.client.request"
ACCEPT = "qlm.gateway.accept"
UNDER_ACCEPT = ("qlm.placement", "qlm.queue_wait", "qlm.pull", "qlm.prefill", "qlm.decode", "qlm.complete")
SERVICE_OF = {ROOT: "qlm-sdk", ACCEPT: "qlm-gateway", "qlm.placement": "qlm-planner"} | {
    name: "qlm-agent" for name in UNDER_ACCEPT if name != "qlm.placement"
}


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with running_sink() as sink:
        yield sink


@pytest.fixture
def cluster(sink: OtlpSink, tmp_path: Path) -> Iterator[RunningCluster]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
    with RunningCluster(tmp_path / "state", {"agent.simulated.time_scale": "20"}, environment) as cluster:
        yield cluster


async def test_the_spans_of_one_request(cluster: RunningCluster, sink: OtlpSink) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "qlm-sdk"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sink.endpoint, insecure=True)))
    async with qlm.AsyncClient(cluster.address, tracer_provider=provider) as client, asyncio.timeout(ANSWER_TIMEOUT_S):
        stream = client.generate(MODEL, "Follow me.", slo_s=30, max_tokens=40, request_id="traced")
        tokens = sum([chunk.count async for chunk in stream])
    assert stream.result is not None
    assert tokens == stream.result.output_tokens > 0
    await asyncio.to_thread(provider.shutdown)

    spans = await spans_of_request(sink, "traced")
    root, accept = spans[ROOT], spans[ACCEPT]
    assert root.parent_id == ""
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    assert accept.parent_id == root.span_id
    assert {spans[name].parent_id for name in UNDER_ACCEPT} == {accept.span_id}
    assert {name: spans[name].service for name in spans} == SERVICE_OF
    assert [span.name for span in sink.trace(root.trace_id) if span.name not in spans] == []
    # The model had to be loaded first: a trace of its own, since it serves many requests.
    (swap,) = [span for span in sink.spans if span.name == "qlm.model_swap"]
    assert swap.trace_id != root.trace_id
    assert swap.attributes["qlm.model"] == MODEL
    wait = spans["qlm.queue_wait"]
    assert wait.start_s - CLOCK_TOLERANCE_S <= swap.start_s <= swap.end_s <= wait.end_s + CLOCK_TOLERANCE_S

    check_times(spans, stream.result)
    for name in (ACCEPT, *UNDER_ACCEPT):
        assert spans[name].attributes["qlm.request_id"] == "traced"
        assert spans[name].attributes["qlm.model"] == MODEL
    said = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "qlm", "gen_ai.request.model": MODEL}
    for name, more in (
        (ACCEPT, {"gen_ai.request.max_tokens": 40}),
        ("qlm.complete", {"gen_ai.response.id": "traced", "gen_ai.usage.output_tokens": tokens}),
    ):
        attributes = spans[name].attributes
        assert {key: attributes.get(key) for key in (*said, *more)} == said | more
        assert attributes["gen_ai.usage.input_tokens"] == stream.result.prompt_tokens
    async with asyncio.timeout(SPANS_TIMEOUT_S):
        while len(sink.histograms) < 3:
            await asyncio.sleep(0.05)
    assert set(sink.histograms) == {
        f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
    }
    assert all(found == (said, 1) for found in sink.histograms.values())
    instances = {spans[name].attributes["qlm.instance"] for name in UNDER_ACCEPT if name != "qlm.placement"}
    assert instances == {spans["qlm.decode"].instance}
    assert {spans[name].attributes["qlm.attempt"] for name in ("qlm.pull", "qlm.decode", "qlm.complete")} == {1}


async def spans_of_request(sink: OtlpSink, request_id: str) -> dict[str, ReceivedSpan]:
    """The spans of a request's trace by name, when all have arrived; each name occurs once."""
    wanted = {ROOT, ACCEPT, *UNDER_ACCEPT}
    try:
        async with asyncio.timeout(SPANS_TIMEOUT_S):
            while True:
                roots = [span for span in sink.spans if span.name == ROOT and span.attributes.get("qlm.request_id") == request_id]
                spans = sink.trace(roots[0].trace_id) if roots else ()
                if wanted <= {span.name for span in spans}:
                    break
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"arrived: {[(span.service, span.name) for span in sink.spans]}") from None
    names = [span.name for span in spans if span.name in wanted]
    assert sorted(names) == sorted(wanted)
    return {span.name: span for span in spans if span.name in wanted}


def check_times(spans: dict[str, ReceivedSpan], result: qlm.Result) -> None:
    """They follow each other as the request did, and inside of what the client saw."""
    for span in spans.values():
        assert span.start_s <= span.end_s, span.name
    order = [ROOT, ACCEPT, "qlm.queue_wait", "qlm.prefill", "qlm.decode", "qlm.complete"]
    starts = [spans[name].start_s for name in order]
    assert all(later >= earlier - CLOCK_TOLERANCE_S for earlier, later in itertools.pairwise(starts)), starts
    wait, prefill, decode, complete = (spans[name] for name in order[2:])
    assert wait.end_s <= prefill.start_s + CLOCK_TOLERANCE_S
    assert prefill.end_s <= decode.start_s + CLOCK_TOLERANCE_S
    assert decode.end_s <= complete.end_s + CLOCK_TOLERANCE_S
    assert complete.end_s <= spans[ROOT].end_s + CLOCK_TOLERANCE_S
    timing = result.timing
    assert wait.start_s == pytest.approx(timing.accepted_s, abs=CLOCK_TOLERANCE_S)
    assert decode.end_s == pytest.approx(timing.finished_s, abs=CLOCK_TOLERANCE_S)
    assert prefill.end_s == pytest.approx(timing.first_token_s, abs=CLOCK_TOLERANCE_S)


def test_no_collector_is_used_without_the_variable() -> None:
    assert not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    provider = configure_tracing("sdk", "test")
    assert provider._active_span_processor._span_processors == ()
