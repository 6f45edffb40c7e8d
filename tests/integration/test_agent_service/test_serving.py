"""An agent serves its virtual queue: pull, stream, complete, swap, cancel."""

from __future__ import annotations

import asyncio

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm_core.vocabulary.request import RequestState
from qlm_process.queue.instances import instances_in
from qlm_process.wire import running as running_wire
from qlm_queue.values import ControlKind, TerminalRecord

from .rig import DEADLINE_S, TRACEPARENT, Rig, until


async def test_requests_are_served_whole(rig: Rig) -> None:
    agent = await rig.agent()
    names = await rig.accept(40, answer=60)
    await rig.place(names)
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    for result in results:
        assert result.state == request_pb2.REQUEST_STATE_COMPLETED
        assert result.finish_reason == request_pb2.FINISH_REASON_STOP
        assert (result.usage.prompt_tokens, result.usage.output_tokens) == (30, 60)
        assert (result.incarnation, result.attempts) == (agent.incarnation, 1)
        timing = result.timing
        assert timing.accepted_s <= timing.started_s + 0.01 <= timing.first_token_s + 0.01 <= timing.finished_s + 0.02
    await until(lambda: agent.owned == 0, "the agent forgets what ended")
    assert agent.metrics.registry.get_sample_value("qlm_agent_ended_requests_total", {"state": "COMPLETED"}) == 40
    assert agent.metrics.registry.get_sample_value("qlm_agent_emitted_tokens_total") == 40 * 60
    assert agent.lso("pull") == 40


async def test_later_requests_wake_the_agent(rig: Rig) -> None:
    await rig.agent(poll_s=60.0)
    for _ in range(3):
        names = await rig.accept(2)
        await rig.place(names)
        await rig.results_of(names)
        await rig.assert_whole(names)


async def test_output_of_its_runs_is_reported(rig: Rig) -> None:
    """As those who predict waits see it."""
    await rig.agent(heartbeat_s=0.05)
    names = await rig.accept(3, answer=4_000)
    await rig.place(names)

    async def made(more_than: int) -> int:
        """The most that one of them has made, once all have made more than that."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                (record,) = (await rig.queue.overview()).instances
                reported = running_wire.from_body(record.body)
                found = [output for runs in reported.groups.values() for output in runs.output_tokens] if reported else []
                if len(found) == 3 and min(found) > more_than:
                    return max(found)
                await asyncio.sleep(0.01)

    await made(await made(0))


async def test_models_are_swapped_by_the_order_of_the_queue(rig: Rig) -> None:
    agent = await rig.agent()
    first, second, third = await rig.accept(5, model="m"), await rig.accept(5, model="n"), await rig.accept(5, model="m")
    await rig.place(first, group="g1", model="m")
    await rig.place(second, group="g2", model="n")
    await rig.place(third, group="g3", model="m")
    results = await rig.results_of(first + second + third)
    await rig.assert_whole(first + second + third)
    finished = [result.timing.finished_s for result in results]
    assert max(finished[:5]) <= min(finished[5:10])
    assert max(finished[5:10]) <= min(finished[10:])
    load = agent.process.shell.load()
    assert (load.active_model, list(load.warm_models), load.model_swaps) == ("m", ["n"], 3)
    shell = agent.process.shell
    await until(
        lambda: (shell.facts.active_model, shell.facts.warm_models, shell.facts.loading_since_s) == ("m", ("n",), 0.0),
        "the queue knows where the models are",
    )
    (instance,) = instances_in(await agent.queue.overview())
    assert (instance.active_model, instance.warm_models, instance.loading_since_s) == ("m", ("n",), 0.0)
    swaps = [agent.metrics.registry.get_sample_value("qlm_agent_model_swaps_total", {"model": model}) for model in "mn"]
    assert swaps == [2.0, 1.0]


async def test_kv_bounds_pulling(rig: Rig) -> None:
    agent = await rig.agent(simulated={"kv_capacity_tokens": 2000})
    names = await rig.accept(20, prompt=200, answer=100)
    await rig.place(names)
    seen: list[int] = []

    def served() -> bool:
        seen.append(agent.process.shell.load().running)
        return all(name in rig.results for name in names)

    await rig.read_until(served, "all are served")
    await rig.assert_whole(names)
    assert 2 <= max(seen) <= 2000 // (200 + 60)  # prompt and a part of the expected output at least


async def test_a_cancelled_request_is_aborted(rig: Rig) -> None:
    agent = await rig.agent()
    names = await rig.accept(2, answer=3000)
    await rig.place(names)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "both run")
    await rig.cancel(names[0])
    await until(lambda: agent.owned == 1, "the agent drops it")
    (cancelled,) = await rig.results_of(names[:1])
    assert cancelled.state == request_pb2.REQUEST_STATE_CANCELLED
    await rig.results_of(names[1:])
    await rig.assert_whole(names[1:])
    assert agent.metrics.registry.get_sample_value("qlm_agent_dropped_requests_total") == 1
    assert agent.process.shell.load().kv_used_tokens == 0


async def test_a_run_that_is_cancelled_as_its_output_is_being_sent_disturbs_nobody(rig: Rig) -> None:
    agent = await rig.agent(coalesce_s=0.5)
    names = await rig.accept(2, answer=3000)
    await rig.place(names)
    await rig.read_until(lambda: all(len(rig.outputs.get(name, [])) > 1 for name in names), "both run")
    live = await rig.request(names[0])
    assert not isinstance(live, TerminalRecord)
    await until(lambda: agent.process.shell.machine.runs.held_tokens > 100, "output is held")
    async with rig.client.pipeline(transaction=True) as both:  # the agent reads the two at once: it sends the output, and drops the run
        for kind in (ControlKind.GATEWAY_REBOUND, ControlKind.CANCEL):
            both.xadd(rig.keys("ctl", "a"), {"k": kind.value, "i": live.queue_id, "a": live.attempt})
        await both.execute()
    await rig.cancel(names[0])
    await until(lambda: agent.owned == 1, "the agent drops it")
    await rig.results_of(names)
    await rig.assert_whole(names[1:])
    record = await rig.request(names[1])
    assert isinstance(record, TerminalRecord)
    assert record.attempt == 1, "the agent continued"


async def test_a_body_that_cannot_be_read_fails_and_blocks_nobody(rig: Rig) -> None:
    await rig.agent()
    names = [await rig.accept_body("bad", b"\xff\xff", 30), *await rig.accept(1)]
    await rig.place(names)
    bad, good = await rig.results_of(names)
    assert (bad.state, bad.error.reason) == (request_pb2.REQUEST_STATE_FAILED, "ENGINE_FAILURE")
    assert good.state == request_pb2.REQUEST_STATE_COMPLETED


async def test_a_request_that_can_never_fit_fails_and_blocks_nobody(rig: Rig) -> None:
    await rig.agent(simulated={"kv_capacity_tokens": 1000})
    too_long, too_much, good = await rig.accept(1, prompt=1500), await rig.accept(1, answer=1500), await rig.accept(1)
    await rig.place(too_long + too_much + good)
    results = await rig.results_of(too_long + too_much + good)
    assert [result.error.reason for result in results] == ["KV_CAPACITY_EXCEEDED", "KV_CAPACITY_EXCEEDED", ""]
    assert len(rig.outputs[too_much[0]]) > 900
    await rig.assert_whole(good)


async def test_events_report_the_figures_that_the_estimator_learns_from(rig: Rig) -> None:
    agent = await rig.agent()
    names = await rig.accept(3, answer=15)
    await rig.place(names)
    await rig.results_of(names)
    entries = await rig.queue.read_events("0", 0.0, 1000)
    events = [event for entry in entries for event in events_pb2.RequestEvents.FromString(entry.payload).events]
    completed = [event for event in events if event.kind == events_pb2.EVENT_KIND_COMPLETED]
    assert len(completed) == 3
    for event in completed:
        assert (event.model, event.output_tokens, event.incarnation, event.prompt_tokens) == ("m", 15, agent.incarnation, 30)
        assert event.slo_class == "64s"
        assert 0.0 < event.started_s < event.first_token_s <= event.finished_s


async def test_spans_are_children_of_the_request(rig: Rig) -> None:
    agent = await rig.agent()
    names = await rig.accept(1, answer=15)
    await rig.place(names)
    await rig.results_of(names)
    await until(lambda: agent.owned == 0, "the end is written")
    spans = {span.name: span for span in agent.spans.get_finished_spans()}
    wanted = ["qlm.queue_wait", "qlm.pull", "qlm.prefill", "qlm.decode", "qlm.complete"]
    assert set(wanted) | {"qlm.model_swap"} == set(spans)
    _, trace_id, parent_id, _ = TRACEPARENT.split("-")
    starts: list[int] = []
    for name in wanted:
        span = spans[name]
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == trace_id
        assert f"{span.parent.span_id:016x}" == parent_id
        assert span.attributes is not None
        assert (span.attributes["qlm.request_id"], span.attributes["qlm.instance"], span.attributes["qlm.attempt"]) == (names[0], "a", 1)
        assert span.start_time is not None
        starts.append(span.start_time)
    # It waited for its model: the swap has a trace of its own, which the wait is linked to.
    assert [link.context for link in spans["qlm.queue_wait"].links] == [spans["qlm.model_swap"].context]
    assert spans["qlm.model_swap"].parent is None
    assert starts[0] <= starts[2] <= starts[3] <= starts[4]


async def test_the_state_is_running_while_it_runs(rig: Rig) -> None:
    agent = await rig.agent()
    names = await rig.accept(1, answer=3000)
    await rig.place(names)
    await rig.read_until(lambda: rig.outputs.get(names[0]), "it runs")
    live = await rig.request(names[0])
    assert not isinstance(live, TerminalRecord)
    assert (live.state, live.incarnation, live.attempt) == (RequestState.RUNNING, agent.incarnation, 1)
    await rig.cancel(names[0])
