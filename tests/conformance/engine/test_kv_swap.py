"""KV swap: runs whose KV is in host memory stay the engine's, silent, and continue exactly where they were."""

from __future__ import annotations

import asyncio

import pytest

from qlm_agent.engines.port import EngineBusy, Tier

from .conftest import Start
from .subjects import Can, Limits, Reader, Subject, needs, request, undisturbed

pytestmark = needs(Can.OFFLOAD)


async def test_an_engine_that_can_offload_says_how_much(subject: Subject) -> None:
    stats = subject.engine.stats()
    assert stats.host_kv_capacity_tokens > 0
    assert (stats.offloaded, stats.host_kv_used_tokens) == (0, 0)


async def test_an_offloaded_run_is_silent_and_uses_no_kv_while_others_continue(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "out", number=1, prompt=800, answer=600))
    await subject.engine.add(request(subject, "on", number=2, prompt=20, answer=1500))
    await reader.until_made(5, "out", "on")
    assert list(await subject.engine.offload(["out"])) == ["out"]
    await reader.for_s(0.05)  # what it made before
    reported, others = reader.made("out"), reader.made("on")
    after = subject.engine.stats()
    assert (after.running, after.waiting, after.offloaded) == (1, 0, 1)
    assert 805 <= after.host_kv_used_tokens <= 805 + 600
    for _ in range(2):  # what was made before `after`, however long ago it was read
        await reader.read()
    assert after.kv_used_tokens <= 20 + reader.made("on") + 100
    await reader.until_made(others + 50, "on")
    assert reader.made("out") == reported
    assert reader.runs["out"].ended is None


@pytest.mark.parametrize("times", [1, 4])
async def test_a_restored_run_continues_exactly(subject: Subject, reader: Reader, times: int) -> None:
    whole = await undisturbed(subject, reader, answer=500)
    await subject.engine.add(request(subject, "r", answer=500))
    for number in range(times):
        await reader.until_made(1 + 50 * number, "r")
        assert list(await subject.engine.offload(["r"])) == ["r"]
        assert list(await subject.engine.restore(["r"])) == ["r"]
    (run,) = await reader.ends("r")
    assert run.output == whole.output
    assert run.outputs[-1].finish is subject.finish
    assert len({output.started_s for output in run.outputs}) == 1
    stats = subject.engine.stats()
    assert (stats.offloaded, stats.host_kv_used_tokens, stats.kv_used_tokens, stats.preemptions) == (0, 0, 0, 0)


async def test_earlier_output_is_reported_while_it_is_away(subject: Subject, reader: Reader) -> None:
    whole = await undisturbed(subject, reader, answer=500)
    await subject.engine.add(request(subject, "r", answer=500))
    await reader.until_made(1, "r")
    await asyncio.sleep(0.03)  # the engine makes more, which nobody reads yet
    assert list(await subject.engine.offload(["r"])) == ["r"]
    await reader.for_s(0.05)
    reported = reader.made("r")
    assert reported > 1
    await subject.engine.restore(["r"])
    await reader.until_made(reported + 1, "r")
    (run,) = await reader.ends("r")
    assert run.output == whole.output


async def test_only_decoding_runs_are_offloaded(start: Start, subject: Subject, reader: Reader) -> None:
    await undisturbed(subject, reader, "ended")
    await subject.engine.add(request(subject, "aborted", answer=500))
    await subject.engine.add(request(subject, "runs", number=2, answer=500))
    await reader.until_made(1, "aborted", "runs")
    await subject.engine.abort(["aborted"])
    assert list(await subject.engine.offload(["unknown", "ended", "aborted", "runs", "runs"])) == ["runs"]
    assert list(await subject.engine.offload(["runs"])) == []
    assert list(await subject.engine.offload([])) == []


@needs(Can.LIMIT)
async def test_a_waiting_run_is_not_offloaded_and_continues_as_it_was(start: Start) -> None:
    subject = await start(Limits(batch_max=1))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "runs", answer=200))
    await subject.engine.add(request(subject, "waits", number=2, answer=20))
    await reader.until_made(1, "runs")
    assert list(await subject.engine.offload(["waits"])) == []
    runs, waits = await reader.ends("runs", "waits")
    assert (len(runs.output), len(waits.output)) == (200, 20)


@needs(Can.LIMIT)
async def test_a_free_seat_is_taken_by_a_waiting_run(start: Start) -> None:
    subject = await start(Limits(batch_max=1))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "first", answer=600))
    await reader.until_made(5, "first")
    await subject.engine.add(request(subject, "second", number=2, answer=300))
    assert list(await subject.engine.offload(["first"])) == ["first"]
    await reader.until_made(1, "second")
    assert list(await subject.engine.restore(["first"])) == [], "there is no seat"
    assert subject.engine.stats().offloaded == 1
    await reader.ends("second")
    assert list(await subject.engine.restore(["first"])) == ["first"]
    (first,) = await reader.ends("first")
    assert len(first.output) == 600


@needs(Can.LIMIT)
async def test_free_kv_is_taken_by_a_waiting_run(start: Start) -> None:
    subject = await start(Limits(kv_capacity_tokens=640))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "first", prompt=400, answer=200))
    await reader.until_made(5, "first")
    await subject.engine.add(request(subject, "second", number=2, prompt=500, answer=100))
    assert list(await subject.engine.offload(["first"])) == ["first"]
    await reader.until_made(1, "second")
    assert list(await subject.engine.restore(["first"])) == [], "there is no KV"
    await reader.ends("second")
    assert list(await subject.engine.restore(["first"])) == ["first"]
    (first,) = await reader.ends("first")
    assert len(first.output) == 200
    assert subject.engine.stats().preemptions == 0


@needs(Can.LIMIT)
async def test_host_memory_bounds_offloading(start: Start) -> None:
    subject = await start(Limits(host_kv_tokens=1000))
    reader = Reader(subject)
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        await subject.engine.add(request(subject, name, number=number, prompt=400, answer=500))
    await reader.until_made(1, *names)
    done = list(await subject.engine.offload(names))
    stats = subject.engine.stats()
    assert done == ["a", "b"][: len(done)]
    assert 1 <= len(done) < 3
    assert stats.host_kv_used_tokens <= stats.host_kv_capacity_tokens <= 1000
    (left,) = await reader.ends("c")
    assert len(left.output) == 500
    await subject.engine.abort(["a"])
    assert subject.engine.stats().host_kv_used_tokens < stats.host_kv_used_tokens


async def test_aborted_where_it_is_it_stays_silent(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "there", answer=500))
    await subject.engine.add(request(subject, "moving", number=2, prompt=1000, answer=500))
    await reader.until_made(1, "there", "moving")
    await subject.engine.offload(["there"])
    async with asyncio.TaskGroup() as group:
        moving = group.create_task(subject.engine.offload(["moving"]))
        await asyncio.sleep(0)
        await subject.engine.abort(["moving", "there"])
    assert list(moving.result()) == []
    heard = (reader.made("there"), reader.made("moving"))
    assert list(await subject.engine.restore(["there", "moving"])) == []
    await reader.for_s(0.1)
    assert (reader.made("there"), reader.made("moving")) == heard
    stats = subject.engine.stats()
    assert (stats.running, stats.offloaded, stats.kv_used_tokens, stats.host_kv_used_tokens) == (0, 0, 0, 0)


@needs(Can.SWAP)
async def test_offloaded_runs_survive_a_model_swap_and_back(subject: Subject, reader: Reader) -> None:
    first, second = subject.models[:2]
    whole = await undisturbed(subject, reader, answer=800)
    await subject.engine.add(request(subject, "r", answer=800))
    await reader.until_made(20, "r")
    with pytest.raises(EngineBusy):
        await subject.engine.load_model(second, Tier.ACTIVE)
    assert list(await subject.engine.offload(["r"])) == ["r"]
    await subject.engine.load_model(second, Tier.ACTIVE)
    await undisturbed(subject, reader, "other", model=second)
    assert list(await subject.engine.restore(["r"])) == [], "its model is not active"
    await reader.for_s(0.05)
    assert subject.engine.stats().offloaded == 1
    await subject.engine.load_model(first, Tier.ACTIVE)
    assert list(await subject.engine.restore(["r"])) == ["r"]
    (run,) = await reader.ends("r")
    assert run.output == whole.output


@needs(Can.SWAP)
async def test_weights_leave_host_memory_rather_than_kv(subject: Subject, reader: Reader) -> None:
    first, second = subject.models[:2]
    await subject.engine.add(request(subject, "r", answer=300))
    await reader.until_made(20, "r")
    await subject.engine.offload(["r"])
    await subject.engine.load_model(first, Tier.COLD)
    await subject.engine.load_model(second, Tier.WARM)
    await subject.engine.load_model(first, Tier.ACTIVE)
    assert list(await subject.engine.restore(["r"])) == ["r"]
    (run,) = await reader.ends("r")
    assert len(run.output) == 300


async def test_a_stop_ends_offloaded_runs_too(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=500))
    await reader.until_made(1, "r")
    await subject.engine.offload(["r"])
    await subject.engine.stop()
    assert subject.engine.stats().offloaded == 0


class TestAnEngineThatCannot:
    """Engines without host memory for KV say so, and refuse without harm."""

    @needs(Can.LIMIT)
    async def test_offloads_nothing(self, start: Start) -> None:
        subject = await start(Limits(host_kv_tokens=0))
        reader = Reader(subject)
        await subject.engine.add(request(subject, "r", answer=100))
        await reader.until_made(1, "r")
        assert subject.engine.stats().host_kv_capacity_tokens == 0
        assert list(await subject.engine.offload(["r"])) == []
        assert list(await subject.engine.restore(["r"])) == []
        (run,) = await reader.ends("r")
        assert len(run.output) == 100
