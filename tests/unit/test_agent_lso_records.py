"""Records of an agent's operations, and the way of its events to the queue."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm_agent.decisions.runs import ReturnCause
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.delivery.requests import read_pulled
from qlm_agent.engines.port import EngineOutput, Tier
from qlm_agent.shell.reports import WAITING_MAX, Reporter
from qlm_agent.telemetry.metrics import AgentMetrics, AgentTelemetry
from qlm_agent.telemetry.operations import Lso, ModelMove
from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import BATCH_MAX, Bounds, Pulled

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def held_run(name: str, *, output: int = 0) -> HeldRun:
    """A run that was pulled at 10 s and has made `output` tokens."""
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=60.0)
    body = request_pb2.Request(
        model="m",
        tokens=request_pb2.TokenPrompt(ids=[1] * 50),
        trace=request_pb2.TraceContext(traceparent=PARENT),
        admission=request_pb2.Admission(prompt_tokens=50, output_tokens_max=100, slo=slo),
    )
    pulled = Pulled(
        queue_id=name,
        key=RequestKey("t", f"r-{name}"),
        group_id="g",
        acceptance_number=1,
        accepted_s=5.0,
        attempt=1,
        failed_attempts=0,
        gateway="gateway-0",
        body=body.SerializeToString(),
        progress=b"",
    )
    held = read_pulled(pulled, text_output=False, pulled_s=10.0, engine_clock_s=0.0)
    held.output.add(EngineOutput(held.run_id, struct.pack(f"<{output}I", *range(output)), 10.0, 11.0, 12.0))
    return held


class World:
    """Telemetry with all its records at hand."""

    def __init__(self) -> None:
        self.metrics = AgentMetrics()
        self.exporter = InMemorySpanExporter()
        self.events: list[events_pb2.RequestEvent] = []
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = AgentTelemetry("a", self.metrics, provider, self.events.append)

    def figures(self, lso: Lso) -> tuple[float, float, float]:
        """How many, in how many operations, in how many seconds."""
        names = ("qlm_agent_lso_total", "qlm_agent_lso_seconds_count", "qlm_agent_lso_seconds_sum")
        total, count, seconds = (self.metrics.registry.get_sample_value(name, {"lso": lso.value}) for name in names)
        assert total is not None
        assert count is not None
        assert seconds is not None
        return total, count, seconds

    def spans(self) -> list[str]:
        """Name, request and seconds of each span."""
        found = []
        for span in self.exporter.get_finished_spans():
            assert span.start_time is not None
            assert span.end_time is not None
            request_id = (span.attributes or {}).get("qlm.request_id", "-")
            found.append(f"{span.name} {request_id} {span.start_time / 1e9:g}-{span.end_time / 1e9:g}")
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_what_never_happened_reads_zero(world: World) -> None:
    assert {world.figures(lso) for lso in Lso} == {(0.0, 0.0, 0.0)}


def test_a_pull_counts_its_requests_and_its_time_once(world: World) -> None:
    world.telemetry.record_pull([held_run("1"), held_run("2")], 9.5, 10.0)
    assert world.figures(Lso.PULL) == (2, 1, 0.5)
    assert sorted(world.spans()) == ["qlm.pull r-1 9.5-10", "qlm.pull r-2 9.5-10", "qlm.queue_wait r-1 5-10", "qlm.queue_wait r-2 5-10"]
    world.telemetry.record_pull([], 10.0, 11.0)
    assert world.figures(Lso.PULL) == (2, 1, 0.5)
    assert world.events == [], "the script of `pull` reports it"


@pytest.mark.parametrize(
    ("cause", "lso"), [(ReturnCause.UNSTARTED, Lso.UNPULL), (ReturnCause.DISPLACED, Lso.UNPULL), (ReturnCause.EVICTED, Lso.EVICT)]
)
def test_a_give_back_begins_when_the_run_leaves_the_engine(world: World, cause: ReturnCause, lso: Lso) -> None:
    evicted, late = held_run("1", output=5), held_run("2")
    evicted.taken_off_s = 14.0
    world.telemetry.lso.record_return(cause, [evicted, late], 15.0, 16.0)
    assert world.figures(lso) == (2, 1, 2.0)
    assert world.spans() == [f"{lso.span} r-1 14-16", f"{lso.span} r-2 15-16"]


@pytest.mark.parametrize("cause", [ReturnCause.DRAINED, ReturnCause.FAILED])
def test_leaving_and_failing_are_no_operations(world: World, cause: ReturnCause) -> None:
    world.telemetry.lso.record_return(cause, [held_run("1")], 15.0, 16.0)
    assert world.spans() == []
    assert {world.figures(lso)[0] for lso in Lso} == {0.0}


@pytest.mark.parametrize(
    ("lso", "kind"), [(Lso.KV_OFFLOAD, events_pb2.EVENT_KIND_KV_OFFLOADED), (Lso.KV_RESTORE, events_pb2.EVENT_KIND_KV_RESTORED)]
)
def test_moved_kv_is_reported_for_each_request(world: World, lso: Lso, kind: events_pb2.EventKind.ValueType) -> None:
    world.telemetry.lso.record_kv_move(lso, [held_run("1", output=7), held_run("2")], "a/1", 20.0, 20.25)
    assert world.figures(lso) == (2, 1, 0.25)
    assert world.spans() == [f"{lso.span} r-1 20-20.25", f"{lso.span} r-2 20-20.25"]
    assert [(event.kind, event.queue_id, event.kv_tokens) for event in world.events] == [(kind, "1", 57), (kind, "2", 50)]
    first = world.events[0]
    assert (first.instance, first.incarnation, first.group_id, first.attempt, first.model) == ("a", "a/1", "g", 1, "m")
    assert (first.started_s, first.finished_s) == (20.0, 20.25)
    assert {(event.took_s, event.moved_requests, event.moved_tokens) for event in world.events} == {(0.0, 0, 0)}, "nobody measured it"
    world.telemetry.lso.record_kv_move(lso, [], "a/1", 21.0, 22.0, 1.0)
    assert world.figures(lso) == (2, 1, 0.25)


def model_move(model: str, from_tier: Tier, tier: Tier, took_s: float, *, from_model: str = "") -> ModelMove:
    return ModelMove(model=model, tier=tier, from_tier=from_tier, from_model=from_model, took_s=took_s)


@pytest.mark.parametrize(
    ("from_tier", "tier", "reported"),
    [
        (Tier.COLD, Tier.WARM, (0.25, False)),
        (Tier.WARM, Tier.ACTIVE, (0.25, True)),
        (Tier.COLD, Tier.ACTIVE, (0.25, False)),
        (Tier.ACTIVE, Tier.ACTIVE, (0.0, False)),
        (Tier.ACTIVE, Tier.WARM, (0.0, False)),
        (Tier.WARM, Tier.WARM, (0.0, False)),
    ],
)
def test_a_load_reports_its_time_by_the_engines_clock(world: World, from_tier: Tier, tier: Tier, reported: tuple[float, bool]) -> None:
    """The queue's clock, of the other two times, may be set meanwhile. Where the weights were there already nothing was loaded."""
    world.telemetry.lso.record_model_move(model_move("m", from_tier, tier, 0.25), "a/1", 100.0, 5.0)
    assert [(event.took_s, event.from_warm) for event in world.events] == [reported]


def test_a_move_of_kv_is_measured_once_over_all_its_requests(world: World) -> None:
    world.telemetry.lso.record_kv_move(Lso.KV_OFFLOAD, [held_run("1", output=7), held_run("2")], "a/1", 20.0, 19.0, 0.125)
    assert [(event.took_s, event.moved_requests, event.moved_tokens) for event in world.events] == [(0.125, 2, 107), (0.0, 0, 0)]


def test_a_swap_is_linked_to_its_warming_and_waits_to_their_swap(world: World) -> None:
    lso = world.telemetry.lso
    lso.record_model_move(model_move("m", Tier.COLD, Tier.WARM, 3.75, from_model="n"), "a/1", 1.0, 5.0)
    lso.record_model_move(model_move("m", Tier.WARM, Tier.ACTIVE, 0.25, from_model="n"), "a/1", 6.0, 6.5)
    lso.record_model_move(model_move("n", Tier.WARM, Tier.COLD, 0.0, from_model="m"), "a/1", 7.0, 7.0)
    assert world.spans() == ["qlm.model_warm - 1-5", "qlm.model_swap - 6-6.5"]
    warm, swap = world.exporter.get_finished_spans()
    assert (warm.parent, swap.parent) == (None, None)
    assert [link.context for link in swap.links] == [warm.context]
    assert [(event.kind, event.model, event.from_model, event.instance, event.finished_s) for event in world.events] == [
        (events_pb2.EVENT_KIND_MODEL_WARMED, "m", "", "a", 5.0),
        (events_pb2.EVENT_KIND_MODEL_SWAPPED, "m", "n", "a", 6.5),
    ]
    assert (world.figures(Lso.MODEL_WARM), world.figures(Lso.MODEL_SWAP)) == ((1, 1, 4.0), (1, 1, 0.5))
    waited, later = held_run("1"), held_run("2")
    later.pulled = Pulled(**{**{name: getattr(later.pulled, name) for name in Pulled.__slots__}, "accepted_s": 7.0})
    assert [link.context for link in lso.model_swap_links(waited)] == [swap.context]
    assert lso.model_swap_links(later) == (), "it was accepted after the swap"


class Refusing(MemoryQueue):
    """Does not take events while `away`."""

    away = False

    async def report(self, events: Sequence[bytes]) -> None:
        if self.away:
            raise Unavailable("away")
        await super().report(events)


@pytest.fixture
def queue() -> Refusing:
    return Refusing("q", Bounds(), lambda: 100.0)


async def reported(queue: MemoryQueue) -> list[int]:
    entries = await queue.read_events("0", 0.0, 1_000)
    assert all(len(events_pb2.RequestEvents.FromString(entry.payload).events) <= BATCH_MAX for entry in entries)
    return [event.attempt for entry in entries for event in events_pb2.RequestEvents.FromString(entry.payload).events]


def event(number: int) -> events_pb2.RequestEvent:
    return events_pb2.RequestEvent(kind=events_pb2.EVENT_KIND_MODEL_WARMED, attempt=number)


def dropped(metrics: AgentMetrics) -> float:
    return metrics.registry.get_sample_value("qlm_agent_dropped_events_total") or 0.0


async def test_events_arrive_in_order_in_bounded_entries(queue: Refusing) -> None:
    metrics = AgentMetrics()
    reporter = Reporter(queue, metrics.dropped_events)
    for number in range(1_200):
        reporter.add(event(number))
    await reporter.flush()
    assert await reported(queue) == list(range(1_200))
    assert dropped(metrics) == 0


async def test_the_oldest_go_when_too_many_wait(queue: Refusing) -> None:
    metrics = AgentMetrics()
    reporter = Reporter(queue, metrics.dropped_events)
    for number in range(WAITING_MAX + 10):
        reporter.add(event(number))
    await reporter.flush()
    assert await reported(queue) == list(range(10, WAITING_MAX + 10))
    assert dropped(metrics) == 10


async def test_events_that_the_queue_does_not_take_are_not_reported_twice(queue: Refusing) -> None:
    metrics = AgentMetrics()
    reporter = Reporter(queue, metrics.dropped_events)
    running = asyncio.create_task(reporter.run())
    queue.away = True
    reporter.add(event(1))
    async with asyncio.timeout(30.0):
        while dropped(metrics) < 1:
            await asyncio.sleep(0.01)
        queue.away = False
        reporter.add(event(2))
        while await reported(queue) != [2]:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
