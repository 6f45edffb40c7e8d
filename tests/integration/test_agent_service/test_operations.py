"""LLM serving operations of an agent (QLM section 5): each leaves output whole, and shows as a span, a metric and an event."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2

from .rig import TRACEPARENT, Rig, RunningAgent, until

_, TRACE_ID, PARENT_ID, _ = TRACEPARENT.split("-")

TIME_SCALE = 4.0
LONG_TOKENS = 2500
"""4.6 s alone, as fast as the engine runs here."""
URGENT_SLO_S = 2.0


def assert_of_requests(spans: Sequence[ReadableSpan], names: Sequence[str], agent: RunningAgent) -> None:
    """One span for each request, in the request's own trace, with what it is about."""
    assert sorted(str((span.attributes or {})["qlm.request_id"]) for span in spans) == sorted(names)
    for span in spans:
        assert span.context is not None
        assert span.parent is not None
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
        attributes = span.attributes or {}
        assert (attributes["qlm.instance"], attributes["qlm.model"]) == (agent.config.agent.name, "m")
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


async def full(rig: Rig, agent: RunningAgent, *, seed: int | None = None) -> list[str]:
    """Long requests without a near deadline take all seats."""
    names = await rig.accept(agent.config.agent.batch_max, answer=LONG_TOKENS, slo_s=3600.0, seed=seed)
    await rig.place(names, group="long", slo_s=3600.0)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "the batch is full")
    return names


async def urgent(rig: Rig, count: int = 1, *, answer: int = 20) -> list[str]:
    """Requests at the head that the batch would make late."""
    names = await rig.accept(count, answer=answer, slo_s=URGENT_SLO_S)
    await rig.place(names, group="urgent", before="long", slo_s=URGENT_SLO_S)
    return names


async def events_of(rig: Rig, kind: events_pb2.EventKind.ValueType, count: int = 1) -> list[events_pb2.RequestEvent]:
    """Events of a kind, as soon as there are so many."""
    found: list[events_pb2.RequestEvent] = []

    async def poll() -> bool:
        found[:] = [event for event in await rig.events() if event.kind == kind]
        return len(found) >= count

    while not await poll():
        await rig.read_frames()
    return found


async def test_kv_swap_and_back(rig: Rig) -> None:
    agent = await rig.agent(batch_max=4, simulated={"time_scale": TIME_SCALE})
    long = await full(rig, agent)
    soon = await urgent(rig, 2)
    results = await rig.results_of(soon)
    assert [result.state for result in results] == [request_pb2.REQUEST_STATE_COMPLETED] * 2
    assert not rig.results.keys() & set(long), "what is urgent ends first"
    await until(lambda: agent.lso("kv_restore") == 2, "displaced requests are restored")
    moved = [str((span.attributes or {})["qlm.request_id"]) for span in agent.spans_named("qlm.kv_offload")]
    assert len(set(moved)) == 2
    assert set(moved) <= set(long)
    for lso, kind in (("kv_offload", events_pb2.EVENT_KIND_KV_OFFLOADED), ("kv_restore", events_pb2.EVENT_KIND_KV_RESTORED)):
        assert agent.lso(lso) == 2
        spans = agent.spans_named(f"qlm.{lso}")
        assert_of_requests(spans, moved, agent)
        events = await events_of(rig, kind, 2)
        assert {(event.instance, event.incarnation, event.model, event.attempt) for event in events} == {("a", "a/1", "m", 1)}
        assert sorted(event.kv_tokens for event in events) == sorted(int(str((span.attributes or {})["qlm.kv_tokens"])) for span in spans)
        assert all(30 < event.kv_tokens <= 30 + LONG_TOKENS and 0.0 < event.started_s <= event.finished_s for event in events)
    load = agent.process.shell.load()
    assert (load.kv_offloads, load.kv_restores, load.evictions, load.offloaded) == (2, 2, 0, 0)
    results = await rig.results_of(long)
    await rig.assert_whole(long + soon)
    assert {result.attempts for result in results} == {1}, "they stayed the agent's"


async def test_eviction_where_host_memory_is_full(rig: Rig) -> None:
    agent = await rig.agent(batch_max=4, simulated={"time_scale": TIME_SCALE, "host_kv_gb": 0.0})
    long = await full(rig, agent)
    soon = await urgent(rig, 2)
    await rig.results_of(soon)
    assert agent.lso("evict") == 2
    spans = agent.spans_named("qlm.evict")
    evicted = [str((span.attributes or {})["qlm.request_id"]) for span in spans]
    assert set(evicted) <= set(long)
    assert_of_requests(spans, evicted, agent)
    events = [event for event in await events_of(rig, events_pb2.EVENT_KIND_REQUEUED, 2) if event.cause == "evicted"]
    assert len(events) == 2
    assert agent.value("qlm_agent_returned_requests_total", cause="evicted") == 2
    load = agent.process.shell.load()
    assert (load.kv_offloads, load.evictions) == (0, 2)
    results = dict(zip(long, await rig.results_of(long), strict=True))
    await rig.assert_whole(long + soon)
    assert {name: result.attempts for name, result in results.items()} == {name: 2 if name in evicted else 1 for name in long}


async def test_an_agent_that_is_lost_with_offloaded_requests(rig: Rig) -> None:
    agent = await rig.agent(batch_max=2, simulated={"time_scale": TIME_SCALE})
    long = await full(rig, agent)
    soon = await urgent(rig, 2, answer=2000)
    await until(lambda: agent.lso("kv_offload") > 0, "room is made")
    await agent.crash()
    await rig.expire_lease("a/1")
    await rig.reclaim("a/1")
    again = await rig.agent()
    results = await rig.results_of(long + soon)
    await rig.assert_whole(long + soon)
    assert {result.incarnation for result in results} == {again.incarnation}


async def test_unpull_of_the_lookahead(rig: Rig) -> None:
    agent = await rig.agent(batch_max=2, lookahead_requests=3, simulated={"time_scale": TIME_SCALE})
    names = await rig.accept(5, answer=1500, slo_s=3600.0)
    await rig.place(names, group="long", slo_s=3600.0)
    await until(lambda: agent.owned == 5, "the lookahead is pulled")
    await rig.read_until(lambda: sum(bool(rig.outputs.get(name)) for name in names) == 2, "two run")
    soon = await urgent(rig)
    await rig.results_of(soon)
    assert agent.lso("unpull") >= 1
    spans = agent.spans_named("qlm.unpull")
    given_back = [str((span.attributes or {})["qlm.request_id"]) for span in spans]
    assert set(given_back) <= set(names)
    assert_of_requests(spans, given_back, agent)
    await events_of(rig, events_pb2.EVENT_KIND_UNPULLED, len(spans))
    results = await rig.results_of(names)
    await rig.assert_whole(names + soon)
    assert {result.attempts for result in results} <= {1, 2}


async def test_model_swap_and_warming(rig: Rig) -> None:
    agent = await rig.agent(simulated={"time_scale": 10.0})
    first = await rig.accept(4, answer=LONG_TOKENS)
    await rig.place(first, group="g1")
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in first), "the first model serves")
    second = await rig.accept(2, model="n")
    await rig.place(second, group="g2", model="n")
    await until(lambda: agent.lso("model_warm") == 1, "the next model is warmed beside the batch")
    assert not rig.results, "before its turn"
    await rig.results_of(first + second)
    await rig.assert_whole(first + second)
    assert agent.lso("model_swap") == 2
    (warmed,) = await events_of(rig, events_pb2.EVENT_KIND_MODEL_WARMED)
    assert (warmed.model, warmed.instance, warmed.incarnation) == ("n", "a", "a/1")
    swapped = await events_of(rig, events_pb2.EVENT_KIND_MODEL_SWAPPED, 2)
    assert [(event.from_model, event.model, event.instance) for event in swapped] == [("", "m", "a"), ("m", "n", "a")]
    assert all(event.finished_s > event.started_s > 0.0 for event in swapped)
    (warm,) = agent.spans_named("qlm.model_warm")
    swaps = agent.spans_named("qlm.model_swap")
    assert [(span.attributes or {})["qlm.from_model"] for span in swaps] == ["", "m"]
    assert [span.parent for span in (warm, *swaps)] == [None] * 3
    assert [link.context for link in swaps[1].links] == [warm.context], "the swap names the warming that made it short"
    waits = [span for span in agent.spans_named("qlm.queue_wait") if (span.attributes or {})["qlm.model"] == "n"]
    assert [[link.context for link in span.links] for span in waits] == [[swaps[1].context]] * 2
    assert warm.start_time is not None
    assert swaps[1].start_time is not None
    assert swaps[1].end_time is not None
    swap_s, warm_s = (swaps[1].end_time - swaps[1].start_time), (warm.end_time or 0) - warm.start_time
    assert swap_s < warm_s / 2
