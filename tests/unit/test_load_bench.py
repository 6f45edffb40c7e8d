"""The bench's own arithmetic: schedules, figures and their document, engine times from spans, gaps between messages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise

import pytest
from benchmarks import ROOT
from benchmarks.figures import document, parts_of
from benchmarks.gateway.chats import chats_of
from benchmarks.gateway.http_client import HttpConnection
from benchmarks.queue.collector import Collector
from benchmarks.queue.figures import BY_KEY, FIGURES
from benchmarks.queue.front import ENGINE_LEG, LEGS, leg_s
from benchmarks.queue.grpc_load import gaps_s
from benchmarks.queue.prompts import PROMPTS, PromptSource
from benchmarks.queue.schedule import poisson_times, summary_ms
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from qlm_core.vocabulary.simulated_model import answer_length, text_token_count
from qlm_load.workload.output_bounds import OUTPUT_BOUNDS

KEYS = {
    "accepts_per_s",
    "accepts_per_s_disk",
    "added_p50_ms",
    "added_p99_ms",
    "bare_p50_ms",
    "bare_p99_ms",
    "added_p50_ratio",
    "added_p99_ratio",
    "cpu_ms_per_request",
    "fanout_tokens_per_s",
    "itl_p99_ms",
    "pull_100_p99_ms",
    "redis_bytes_per_request",
    "failover_first_plan_s",
    "recover_p99_s",
    "lost",
    "doubled",
    "hung",
    "greedy_equal",
}


def test_poisson_times_are_ordered_within_the_time_and_of_the_rate() -> None:
    times_s = poisson_times(7, 200.0, 50.0)
    assert times_s == sorted(times_s)
    assert times_s[0] > 0.0
    assert times_s[-1] < 50.0
    assert len(times_s) == pytest.approx(10_000, rel=0.05)
    gaps = [later - earlier for earlier, later in pairwise(times_s)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)  # as of an exponential distribution


def test_poisson_times_depend_on_the_seed_alone() -> None:
    assert poisson_times(1, 100.0, 5.0) == poisson_times(1, 100.0, 5.0)
    assert poisson_times(1, 100.0, 5.0) != poisson_times(2, 100.0, 5.0)
    assert poisson_times(1, 100.0, 10.0)[:100] == poisson_times(1, 100.0, 5.0)[:100]
    with pytest.raises(ValueError, match="> 0"):
        poisson_times(1, 0.0, 5.0)


def test_summary_in_milliseconds() -> None:
    summary = summary_ms([number / 1e3 for number in range(101)])
    assert summary == {"n": 101, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert summary_ms([])["n"] == 0


def test_the_document_has_all_keys_whatever_was_measured() -> None:
    empty = document({}, {"seed": 3}, FIGURES)
    assert set(empty) == KEYS | {"context"}
    assert empty["context"] == {"seed": 3}
    assert empty["added_p50_ms"] == {"at_200": None, "at_400": None}
    assert empty["redis_bytes_per_request"] == {"full": None, "after_churn": None, "finished": None}
    assert empty["lost"] is None
    full = document({"lost": 0, "added_p50_ms": {"at_200": 2.5, "at_400": 3.0}}, {}, FIGURES)
    assert json.loads(json.dumps(full))["added_p50_ms"] == {"at_200": 2.5, "at_400": 3.0}
    assert full["lost"] == 0


def test_targets_are_judged_by_every_point_that_has_one() -> None:
    assert BY_KEY["accepts_per_s"].met(1_500) is True
    assert BY_KEY["accepts_per_s"].met(1_499.9) is False
    assert BY_KEY["accepts_per_s"].met(None) is None
    assert BY_KEY["accepts_per_s_disk"].met(10) is None  # stated, not required
    assert BY_KEY["added_p50_ms"].met({"at_200": 4.0, "at_400": 400.0}) is True
    sizes = BY_KEY["redis_bytes_per_request"]
    assert sizes.met({"full": 450.0, "after_churn": 600.0, "finished": 300.0}) is True
    assert sizes.met({"full": 400.0, "after_churn": 601.0, "finished": 300.0}) is False
    assert sizes.met({"full": 400.0, "after_churn": None, "finished": 300.0}) is None
    assert BY_KEY["lost"].met(0) is True
    assert BY_KEY["greedy_equal"].met(0.9999) is False


def test_parts_are_chosen_by_their_own_name_or_by_a_key_of_theirs() -> None:
    assert parts_of(FIGURES, ()) == ("accepts", "added", "fanout", "pulls", "bytes", "failover", "recover", "campaign")
    assert parts_of(FIGURES, ("itl_p99_ms",)) == ("fanout",)
    assert parts_of(FIGURES, ("lost", "accepts", "greedy_equal")) == ("accepts", "campaign")


def test_requests_give_the_engine_a_length_that_no_other_process_knows() -> None:
    source = PromptSource(seed=1, run_id="run", prompt_tokens=64, output_tokens=16, slo_s=20.0)
    prompts, stored = source.prompts(), source.admitted()
    assert len(prompts) == PROMPTS
    assert {len(each.tokens.ids) for each in prompts} == {64}
    assert {answer_length(list(each.tokens.ids)) for each in prompts} == {16}
    assert prompts == source.prompts()
    assert stored[3].tokens == prompts[3].tokens
    assert stored[3].admission.prompt_tokens == 64
    assert {each.sampling.max_tokens for each in prompts} == set(OUTPUT_BOUNDS), "none says how long its answer is"
    assert stored[3].admission.output_tokens_max == prompts[3].sampling.max_tokens
    assert stored[3].admission.slo.seconds == 20.0


async def test_the_collector_counts_spans_and_follows_requests_over_their_attempts() -> None:
    collector = Collector()
    collector.take(export(span("qlm.pull", "unseen", 0.0, 1.0)))
    async with collector.following():
        collector.take(export(span("qlm.pull", "a", 0.0, 1.0), span("qlm.prefill", "a", 1.0, 2.0), span("qlm.decode", "a", 2.0, 3.0)))
        collector.take(export(span("qlm.decode", "a", 4.0, 4.5), span("qlm.prefill", "b", 1.0, 2.0)))
        complete = {"a": {"qlm.pull": (0.0, 1.0), "qlm.prefill": (1.0, 2.0), "qlm.decode": (2.0, 4.5)}}
        assert await collector.times(["a"], ["qlm.decode"], 20.0) == complete
        assert await collector.times(["a", "b", "unseen"], ["qlm.decode"], 0.0) == complete, "that of b did not come in time"
    assert collector.counts() == {"qlm.decode": 2, "qlm.prefill": 2, "qlm.pull": 2}
    assert await collector.times(["a"], [], 0.0) == {}


def test_a_leg_runs_from_one_end_of_a_span_to_one_of_another() -> None:
    spans = {"qlm.prefill": (1.0, 2.0), "qlm.decode": (2.0, 4.5), "qlm.complete": (4.75, 5.0)}
    assert leg_s(spans, ENGINE_LEG) == 3.5
    assert leg_s(spans, LEGS["agent hears"]) == 0.25


def span(name: str, request_id: str, start_s: float, end_s: float) -> Span:
    return Span(
        name=name,
        start_time_unix_nano=round(start_s * 1e9),
        end_time_unix_nano=round(end_s * 1e9),
        attributes=[KeyValue(key="qlm.request_id", value=AnyValue(string_value=request_id))],
    )


def export(*spans: Span) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])])


def test_gaps_are_of_one_stream_each_and_end_in_the_window() -> None:
    streams = [[(0.0, 1), (1.0, 1), (3.0, 2)], [(0.5, 1), (2.0, 1), (9.0, 1)]]
    assert gaps_s(streams, 1.0, 5.0) == [1.0, 2.0, 1.5]


def test_chats_are_calls_of_their_own_id_and_the_same_for_a_seed() -> None:
    settings = {"address": "127.0.0.1:80", "seed": 1, "run_id": "run", "prompt_tokens": 64, "output_tokens": 16, "slo_s": 20.0}
    chats = chats_of(settings, headers="x-qlm-mode: enqueue\r\n", stream=True)
    head, _, body = chats.call(3, "traceparent: t\r\n").partition(b"\r\n\r\n")
    assert {b"Idempotency-Key: run-3", b"x-qlm-mode: enqueue", b"x-qlm-slo-seconds: 20", b"traceparent: t"} < set(head.split(b"\r\n"))
    document = json.loads(body)
    assert f"Content-Length: {len(body)}".encode() in head
    assert text_token_count(document["messages"][0]["content"]) == 64
    assert (document["max_tokens"], document["ignore_eos"], document["stream"]) == (16, True, True)
    assert chats_of(settings).call(7) == chats_of(settings).call(7) != chats_of({**settings, "seed": 2}).call(7)


async def test_events_are_counted_wherever_the_bytes_are_cut() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"id: 1\ndata: {}\n\n" * 5

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in answer:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, HttpConnection(f"127.0.0.1:{port}") as connection:
        assert sum([number async for number in connection.events(b"GET / HTTP/1.1\r\n\r\n")]) == 5


def test_the_benchmarks_start_without_the_solver_and_without_engines() -> None:
    """vLLM cannot start in a process that has loaded the solver's compiler."""
    code = "import sys, benchmarks.__main__; print(*sorted({'numba', 'torch', 'vllm'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert ran.stdout == "\n"
