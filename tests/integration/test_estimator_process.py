"""Estimator processes on a real queue, over gRPC: learning, standby, restart, gaps, a queue server that dies, hostile calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis

from qlm.api.v1 import estimator_pb2
from qlm.internal.v1.events_pb2 import EVENT_KIND_PREDICTED, RequestEvent
from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_estimator.config import EstimatorConfig
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.process import EstimatorProcess
from qlm_process.wire import profile as profile_wire
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import (
    ESTIMATOR_ROLE,
    Bounds,
)

from .estimator_rig import A100, LEASE_S, PATIENCE_S, Estimator, Rig, config_of, learned, row_of_model, until


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(RedisQueue(server.url))
    await rig.start()
    yield rig
    await rig.queue.stop()


@pytest.fixture
async def estimator(server: EmbeddedServer, rig: Rig) -> AsyncIterator[Estimator]:
    estimator = Estimator(server.url)
    await estimator.start()
    yield estimator
    await estimator.stop()


async def test_learns_and_publishes(rig: Rig, estimator: Estimator) -> None:
    before = await estimator.profiles()
    assert (before.version, len(before.hardware), len(before.workload)) == (0, 10, 0)

    async def leads() -> bool:
        return await rig.queue.leader_address(ESTIMATOR_ROLE) == estimator.address

    await until(leads, "leadership")
    await asyncio.wait_for(rig.serve(20, 100), PATIENCE_S)
    await learned(estimator, 20)
    # The instance is known to the estimator now, so the durations of these are learned as well: 0.05 s at 1,000 times are 50 s.
    await rig.serve(20, 300, seconds=0.05)
    row = await learned(estimator, 38)
    assert row.output_tokens_mean == pytest.approx(200.0, rel=0.02)
    assert row.prompt_tokens_mean == 500.0
    snapshot = await estimator.profiles()
    assert {(each.slo_class, each.token_class) for each in snapshot.workload} == {("", ""), ("", "1024"), ("64s", "1024")}
    (hardware,) = [each for each in snapshot.hardware if each.instance]
    assert (hardware.instance, hardware.model, hardware.gpu) == ("a100-0", "Mistral-7B", "A100-80GB")
    assert hardware.slowdown > 2.0, "at 1,000 times the speed, 50 s for 300 tokens are slow"

    version, body = await rig.queue.read_profiles()
    assert profile_wire.from_body(body).version == version
    assert estimator.metric("qlm_estimator_profile_version") == version
    assert estimator.metric("qlm_estimator_leader") == 1
    assert estimator.metric("qlm_estimator_length_samples_total") == 40
    assert estimator.metric("qlm_estimator_events_total") == 40 * 3
    assert estimator.metric("qlm_estimator_slowdown_ratio", instance="a100-0", model="Mistral-7B") == hardware.slowdown
    assert estimator.metric("qlm_estimator_output_mean_tokens", model="chat") == row.output_tokens_mean
    assert estimator.metric("qlm_estimator_event_gaps_total") == 0


async def test_a_standby_answers_and_takes_over(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    await rig.serve(30, 123)
    await learned(estimator, 30)
    standby = Estimator(server.url)
    await standby.start()
    assert row_of_model(await standby.profiles()) == row_of_model(await estimator.profiles())
    assert (await standby.profiles()).version > 0
    assert standby.metric("qlm_estimator_leader") == 0

    version = (await estimator.profiles()).version
    await estimator.kill()

    async def leads() -> bool:
        return standby.metric("qlm_estimator_leader") == 1

    await until(leads, "the standby leads")
    await rig.serve(30, 123)
    row = await learned(standby, 55)
    assert row.output_tokens_mean == pytest.approx(123.0)
    assert row.samples <= 60, "what the first had learned from was not learned again"
    assert (await standby.profiles()).version > version
    await standby.stop()


async def test_a_restart_keeps_learned_profiles(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    await rig.serve(50, 77)
    await learned(estimator, 48)
    await estimator.stop()
    await rig.serve(10, 77)
    again = Estimator(server.url)
    await again.start()
    assert (await learned(again, 57)).output_tokens_mean == pytest.approx(77.0)
    await again.stop()


async def test_without_anything_published_it_learns_from_the_kept_events(server: EmbeddedServer, rig: Rig) -> None:
    await rig.serve(25, 64)
    estimator = Estimator(server.url)
    await estimator.start()
    assert (await learned(estimator, 24)).output_tokens_mean == pytest.approx(64.0)
    await estimator.stop()


async def test_trimmed_events_are_noticed(server: EmbeddedServer) -> None:
    """The stream keeps few entries, and much happens while no estimator runs."""
    rig = Rig(RedisQueue(server.url, bounds=Bounds(events_max=100)))
    await rig.start()
    first = Estimator(server.url)
    await first.start()
    await rig.serve(5, 10)
    await learned(first, 4)
    assert first.metric("qlm_estimator_event_gaps_total") == 0
    # Stalled: it reads nothing while its queue connection is held up, and keeps its lease.
    held = asyncio.Event()
    read = first.queue.read_events

    async def held_up(after: str, block_s: float, count: int):  # type: ignore[no-untyped-def]
        await held.wait()
        return await read(after, block_s, count)

    first.queue.read_events = held_up  # type: ignore[method-assign]
    await asyncio.sleep(0.2)
    for _ in range(30):
        await rig.serve(10, 10, seconds=0.0)
    held.set()

    async def noticed() -> bool:
        return bool(first.metric("qlm_estimator_event_gaps_total"))

    await until(noticed, "the gap")
    missed = first.metric("qlm_estimator_missed_requests_total")
    assert missed is not None
    assert 100 < missed < 300
    await first.stop()
    await rig.queue.stop()


async def test_malformed_entries_are_counted_and_skipped(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    client = redis.Redis.from_url(server.url)
    for payload in (b"\xff\xff\xff", b"", b"\x0a\x02\x08\x63"):
        await client.xadd("{default}:events", {"e": payload})
    await client.aclose()
    await rig.serve(10, 40)
    await learned(estimator, 10)
    assert estimator.metric("qlm_estimator_malformed_entries_total") == 1


async def test_an_unreadable_instance_leaves_the_others(rig: Rig, estimator: Estimator) -> None:
    await rig.queue.register("broken", "test", b"\xff\xff\xff", LEASE_S)
    await rig.serve(10, 40)
    await learned(estimator, 10)


async def test_unreadable_profiles_are_replaced(server: EmbeddedServer, rig: Rig) -> None:
    lease = await rig.queue.acquire_lease(ESTIMATOR_ROLE, "other", LEASE_S, "")
    assert lease is not None
    await rig.queue.publish_profiles(lease, 41, b"\xff\xff\xff")
    await rig.queue.release_lease(lease)
    estimator = Estimator(server.url)
    await estimator.start()
    await rig.serve(10, 40)

    async def replaced() -> bool:
        return (await rig.queue.read_profiles())[0] >= 42

    await until(replaced, "a readable snapshot")
    assert (await estimator.profiles()).version >= 42
    await estimator.stop()


async def test_a_standby_answers_with_the_last_profiles_that_it_could_read(server: EmbeddedServer, rig: Rig) -> None:
    lease = await rig.queue.acquire_lease(ESTIMATOR_ROLE, "other", LEASE_S, "")
    assert lease is not None
    standby = Estimator(server.url)
    await standby.start()
    await rig.queue.publish_profiles(lease, 41, b"\xff\xff\xff")
    assert (await standby.profiles()).version == 0
    await standby.stop()


async def test_outlives_the_queue_server(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    await rig.serve(10, 40)
    await learned(estimator, 10)
    assert await estimator.healthy()
    await server.stop()

    async def unhealthy() -> bool:
        return not await estimator.healthy()

    await until(unhealthy, "health reports that the server is away")
    with pytest.raises(Unavailable):
        await estimator.profiles()
    await server.start()
    await until(estimator.healthy, "healthy again")
    await rig.serve(10, 40)
    assert (await learned(estimator, 19)).output_tokens_mean == pytest.approx(40.0)


async def test_stops_while_it_waits_for_the_server(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    process = EstimatorProcess(config_of(url), RedisQueue(url, call_timeout_s=0.2), EstimatorMetrics())
    stop = asyncio.Event()
    announced: list[str] = []
    task = asyncio.create_task(process.run(stop, announced.append))
    await asyncio.sleep(0.3)
    stop.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert announced == []


def test_a_model_without_profile_is_refused_at_start() -> None:
    config = EstimatorConfig.model_validate({"models": [{"name": "chat", "profile": "Mistal-7B"}]})
    with pytest.raises(ConfigError, match=r"models\.chat\.profile.*Mistral-7B"):
        EstimatorProcess(config, RedisQueue("redis://127.0.0.1:1"), EstimatorMetrics())


async def test_calibration_is_reported_by_depth(rig: Rig, estimator: Estimator) -> None:
    await rig.accept(12)
    pulled = await rig.pull()
    reports = [
        RequestEvent(
            kind=EVENT_KIND_PREDICTED, queue_id=each.queue_id, model="chat", gpu="A100-80GB", n_gpu=1, instance=A100.name,
            requests_ahead=number, predicted_p50_s=3_000.0, predicted_p90_s=4_000.0, predicted_p99_s=5_000.0,
        ).SerializeToString()
        for number, each in enumerate(pulled)
    ]  # fmt: skip
    await rig.queue.report(reports)
    await rig.complete(pulled, 10)

    async def judged() -> bool:
        async with estimator.stub() as stub:
            outcomes = await stub.GetOutcomes(estimator_pb2.GetOutcomesRequest(), timeout=PATIENCE_S)
        rows = {row.depth: row for row in outcomes.calibration}
        if not rows or rows[""].samples < 12:
            return False
        assert list(rows) == ["", "0", "1", "4", "16"]
        assert {row.time for row in rows.values()} == {estimator_pb2.PREDICTED_TIME_COMPLETION}
        assert (rows[""].samples, rows["16"].samples) == (12, 7)
        assert rows[""].within_p50 == 1.0
        assert rows[""].bias_s < -2_900.0
        return True

    await until(judged, "all predictions are judged")
    assert estimator.metric("qlm_estimator_judged_samples_total") == 12.0

    async def shown() -> bool:
        labels = {"time": "completion", "depth": "16"}
        return estimator.metric("qlm_estimator_calibration_samples", **labels) == 7.0

    await until(shown, "the metrics show them")
