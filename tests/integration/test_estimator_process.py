"""Estimator processes on a real queue, over gRPC: learning, standby, restart, gaps, a queue server that dies, hostile calls."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc, prediction_pb2, request_pb2
from qlm.internal.v1.events_pb2 import RequestEvent
from qlm.wire_errors import from_rpc_error
from qlm_core.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from qlm_core.instance import InstanceFacts
from qlm_core.request import RequestKey, RequestState
from qlm_estimator.config import EstimatorConfig
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.process import EstimatorProcess
from qlm_process import instance_wire, profile_wire
from qlm_process.metrics import serve_metrics
from qlm_queue.embedded import EmbeddedServer
from qlm_queue.redis_queue import RedisQueue
from qlm_queue.values import (
    ESTIMATOR_ROLE,
    PLANNER_ROLE,
    Acceptance,
    Bounds,
    Completion,
    Emission,
    GroupPlacement,
    Lease,
    PullBudget,
    Pulled,
    RequestPlacement,
)

PATIENCE_S = 20.0
LEASE_S = 600.0
MODELS = ("chat", "big")
A100 = InstanceFacts(
    name="a100-0", incarnation="", gpu="A100-80GB", n_gpu=1, engine="simulated", models=MODELS, time_scale=1_000.0, active_model=MODELS[0]
)


class Rig:
    """The rest of the cluster: accepts, places, runs and ends requests."""

    def __init__(self, queue: RedisQueue) -> None:
        self.queue = queue
        self._numbers = itertools.count()
        self._planner: Lease | None = None
        self._agent: Lease | None = None
        self.incarnation = ""

    async def start(self, facts: InstanceFacts = A100) -> None:
        await self.queue.start()
        self._planner = await self.queue.acquire_lease(PLANNER_ROLE, "test", LEASE_S, "")
        self.incarnation, self._agent = await self.queue.register(facts.name, "test", instance_wire.to_body(facts), LEASE_S)

    async def accept(self, count: int, *, model: str = "chat", prompt_tokens: int = 500, deadline_in_s: float = 3_600.0) -> str:
        """Requests in a group of their own."""
        assert self._planner is not None
        group_id = f"g{next(self._numbers)}"
        placements = []
        receipt = None
        for _ in range(count):
            key = RequestKey("default", f"r{next(self._numbers)}")
            receipt = await self.queue.accept(
                Acceptance(
                    key=key,
                    body=request_pb2.Request(model=model, text="x").SerializeToString(),
                    digest=hashlib.blake2b(key.request_id.encode(), digest_size=16).digest(),
                    gateway="gw",
                    slo_class="64s",
                    prompt_tokens=prompt_tokens,
                )
            )
            placements.append(RequestPlacement(queue_id=receipt.queue_id, key=key, group_id=group_id))
        assert receipt is not None
        meta = {"model": model, "slo_kind": "completion", "slo_class": "64s", "token_class": "1024", "tenant_class": "1"}
        group = GroupPlacement(
            group_id=group_id,
            instance=A100.name,
            before="",
            first_deadline_s=receipt.accepted_s + deadline_in_s,
            meta=meta,
        )
        await self.queue.place(self._planner, [group], placements)
        return group_id

    async def pull(self, model: str = "chat") -> list[Pulled]:
        assert self._agent is not None
        budget = PullBudget(requests_max=500, kv_tokens=100_000_000, output_reserve_tokens=1)
        return list((await self.queue.pull(self._agent, model, budget)).pulled)

    async def complete(self, pulled: list[Pulled], output_tokens: int, *, model: str = "chat", slo_class: str = "64s") -> None:
        completions = [
            Completion(
                last=Emission(queue_id=each.queue_id, key=each.key, attempt=each.attempt, offset=0, progress=b"", frame=b""),
                state=RequestState.COMPLETED,
                result=b"",
                event=RequestEvent(model=model, output_tokens=output_tokens, slo_class=slo_class).SerializeToString(),
            )
            for each in pulled
        ]
        await self.queue.complete(self.incarnation, completions)

    async def serve(self, count: int, output_tokens: int, *, seconds: float = 0.02) -> None:
        """Some requests from their acceptance to their end; each runs for so long."""
        await self.accept(count)
        pulled = await self.pull()
        assert len(pulled) == count
        await asyncio.sleep(seconds)
        await self.complete(pulled, output_tokens)


def _config(url: str, **settings: object) -> EstimatorConfig:
    fast = {"publish_every_s": 0.1, "overview_every_s": 0.1, "overview_fresh_s": 0.01, "read_block_s": 0.05, "retry_s": 0.1}
    return EstimatorConfig.model_validate(
        {
            "queue": {"url": url, "lease_ttl_s": 1.0, "lease_renew_s": 0.2},
            "models": [{"name": "chat", "profile": "Mistral-7B"}, {"name": "big", "profile": "Vicuna-13B"}],
            "estimator": {**fast, **settings},
        }
    )


class Estimator:
    """One process of ours, in this one."""

    def __init__(self, url: str, **settings: object) -> None:
        self.config = _config(url, **settings)
        self.queue = RedisQueue(url)
        self.metrics = EstimatorMetrics()
        self.address = ""
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        process = EstimatorProcess(self.config, self.queue, self.metrics)
        self._task = asyncio.create_task(process.run(self._stop, ready.set_result))
        first: list[asyncio.Future[Any]] = [self._task, ready]
        done, _ = await asyncio.wait(first, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert ready in done, self._task
        self.address = ready.result()

    async def stop(self) -> None:
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await task
        await self.queue.stop()

    async def kill(self) -> None:
        """As SIGKILL does it, as far as the queue can see: nothing is given back."""
        await self.queue.stop()
        task, self._task = self._task, None
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[estimator_pb2_grpc.EstimatorAsyncStub]:
        async with grpc.aio.insecure_channel(self.address) as channel:
            yield estimator_pb2_grpc.EstimatorStub(channel)

    async def profiles(self) -> estimator_pb2.ProfileSnapshot:
        async with self.stub() as stub:
            return await stub.GetProfiles(estimator_pb2.GetProfilesRequest(), timeout=PATIENCE_S)

    async def predict(self, **fields: object) -> prediction_pb2.Prediction:
        known = {"model": "chat", "prompt_tokens": 500, "output_tokens_max": 1_000, **fields}
        async with self.stub() as stub:
            try:
                answer = await stub.Predict(estimator_pb2.PredictRequest(**known), timeout=PATIENCE_S)  # type: ignore[arg-type]
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            return answer.prediction

    async def healthy(self) -> bool:
        async with grpc.aio.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service="qlm.api.v1.Estimator")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until(condition: Callable[[], Awaitable[object]], what: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.02)


def _of_model(snapshot: estimator_pb2.ProfileSnapshot, model: str = "chat") -> estimator_pb2.WorkloadProfile | None:
    rows = [row for row in snapshot.workload if (row.model, row.slo_class, row.token_class) == (model, "", "")]
    return rows[0] if rows else None


async def _learned(estimator: Estimator, samples: int) -> estimator_pb2.WorkloadProfile:
    async def enough() -> bool:
        row = _of_model(await estimator.profiles())
        return row is not None and row.samples >= samples

    await until(enough, f"{samples} samples published")
    row = _of_model(await estimator.profiles())
    assert row is not None
    return row


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "state")
    await server.start()
    yield server
    await server.stop()


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
    await _learned(estimator, 20)
    # The instance is known to the estimator now, so the durations of these are learned as well: 0.05 s at 1,000 times are 50 s.
    await rig.serve(20, 300, seconds=0.05)
    row = await _learned(estimator, 38)
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


async def test_prediction_follows_the_queue(rig: Rig, estimator: Estimator) -> None:
    idle = await estimator.predict()
    assert idle.requests_ahead == 0
    assert idle.wait_p50_s == 0.0 < idle.completion_p50_s < idle.completion_p90_s
    await rig.accept(400)
    await rig.pull()
    await rig.accept(400, deadline_in_s=30.0)
    await asyncio.sleep(0.05)  # older than a reading that answers again
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=3_600.0)
    behind = await estimator.predict(slo=slo)
    assert behind.requests_ahead == 400
    assert behind.wait_p50_s > idle.wait_p50_s
    urgent = await estimator.predict(slo=request_pb2.Slo(kind=request_pb2.SLO_KIND_FIRST_TOKEN, seconds=1.0))
    assert urgent.requests_ahead == 0
    assert urgent.completion_p90_s < behind.completion_p90_s
    lowest = await estimator.predict(slo=request_pb2.Slo(kind=request_pb2.SLO_KIND_PRIORITY, priority=7))
    assert lowest.requests_ahead == 400


async def test_a_standby_answers_and_takes_over(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    await rig.serve(30, 123)
    await _learned(estimator, 30)
    standby = Estimator(server.url)
    await standby.start()
    assert _of_model(await standby.profiles()) == _of_model(await estimator.profiles())
    assert (await standby.predict()).profile_version > 0
    assert standby.metric("qlm_estimator_leader") == 0

    version = (await estimator.profiles()).version
    await estimator.kill()

    async def leads() -> bool:
        return standby.metric("qlm_estimator_leader") == 1

    await until(leads, "the standby leads")
    await rig.serve(30, 123)
    row = await _learned(standby, 55)
    assert row.output_tokens_mean == pytest.approx(123.0)
    assert row.samples <= 60, "what the first had learned from was not learned again"
    assert (await standby.profiles()).version > version
    await standby.stop()


async def test_a_restart_keeps_what_was_learned(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    await rig.serve(50, 77)
    await _learned(estimator, 48)
    await estimator.stop()
    await rig.serve(10, 77)
    again = Estimator(server.url)
    await again.start()
    assert (await _learned(again, 57)).output_tokens_mean == pytest.approx(77.0)
    await again.stop()


async def test_without_anything_published_it_learns_from_the_kept_events(server: EmbeddedServer, rig: Rig) -> None:
    await rig.serve(25, 64)
    estimator = Estimator(server.url)
    await estimator.start()
    assert (await _learned(estimator, 24)).output_tokens_mean == pytest.approx(64.0)
    await estimator.stop()


async def test_trimmed_events_are_noticed(server: EmbeddedServer) -> None:
    """The stream keeps few entries, and much happens while no estimator runs."""
    rig = Rig(RedisQueue(server.url, bounds=Bounds(events_max=100)))
    await rig.start()
    first = Estimator(server.url)
    await first.start()
    await rig.serve(5, 10)
    await _learned(first, 4)
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
    await _learned(estimator, 10)
    assert estimator.metric("qlm_estimator_malformed_entries_total") == 1


async def test_an_unreadable_instance_leaves_the_others(rig: Rig, estimator: Estimator) -> None:
    await rig.queue.register("broken", "test", b"\xff\xff\xff", LEASE_S)
    await rig.serve(10, 40)
    await _learned(estimator, 10)
    assert (await estimator.predict()).completion_p50_s > 0.0


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


async def test_outlives_the_queue_server(server: EmbeddedServer, rig: Rig, estimator: Estimator) -> None:
    await rig.serve(10, 40)
    await _learned(estimator, 10)
    assert await estimator.healthy()
    await server.stop()

    async def unhealthy() -> bool:
        return not await estimator.healthy()

    await until(unhealthy, "health tells that the server is away")
    with pytest.raises(Unavailable):
        await estimator.predict()
    await server.start()
    await until(estimator.healthy, "healthy again")
    await rig.serve(10, 40)
    assert (await _learned(estimator, 19)).output_tokens_mean == pytest.approx(40.0)


SLO = request_pb2.Slo
COMPLETION = request_pb2.SLO_KIND_COMPLETION


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"model": "nobody"}, NotFound, "UNKNOWN_MODEL"),
        ({"model": ""}, NotFound, "UNKNOWN_MODEL"),
        ({"prompt_tokens": 0}, InvalidRequest, "INVALID_FIELD"),
        ({"output_tokens_max": 0}, InvalidRequest, "INVALID_FIELD"),
        ({"prompt_tokens": 8_192}, InvalidRequest, "PROMPT_TOO_LONG"),
        ({"prompt_tokens": 2**32 - 1}, InvalidRequest, "PROMPT_TOO_LONG"),
        ({"slo": SLO()}, InvalidRequest, "INVALID_FIELD"),
        ({"slo": SLO(kind=COMPLETION)}, InvalidRequest, "INVALID_FIELD"),
        ({"slo": SLO(kind=COMPLETION, seconds=-1.0)}, InvalidRequest, "INVALID_FIELD"),
        ({"slo": SLO(kind=COMPLETION, seconds=math.nan)}, InvalidRequest, "INVALID_FIELD"),
        ({"slo": SLO(kind=COMPLETION, seconds=math.inf)}, InvalidRequest, "INVALID_FIELD"),
        ({"slo": SLO(kind=request_pb2.SLO_KIND_PRIORITY, priority=5_000)}, InvalidRequest, "INVALID_FIELD"),
        ({"slo": SLO(kind=99, seconds=1.0)}, InvalidRequest, "INVALID_FIELD"),  # type: ignore[arg-type]
    ],
)
async def test_hostile_predictions_are_refused(
    estimator: Estimator, fields: dict[str, object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error) as caught:
        await estimator.predict(**fields)
    assert caught.value.reason == reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields", [{"output_tokens_max": 2**32 - 1}, {"slo": SLO(kind=COMPLETION, seconds=1e-9)}, {"prompt_tokens": 8_191}]
)
async def test_extreme_predictions_are_answered(estimator: Estimator, fields: dict[str, object]) -> None:
    assert (await estimator.predict(**fields)).completion_p50_s > 0.0


async def test_no_instance_no_prediction(server: EmbeddedServer) -> None:
    estimator = Estimator(server.url)
    await estimator.start()
    with pytest.raises(Unavailable) as caught:
        await estimator.predict()
    assert caught.value.reason == "NO_PREDICTION"
    assert caught.value.retry_after_s == 1.0
    await estimator.stop()


async def test_stops_while_it_waits_for_the_server(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    process = EstimatorProcess(_config(url), RedisQueue(url, call_timeout_s=0.2), EstimatorMetrics())
    stop = asyncio.Event()
    told: list[str] = []
    task = asyncio.create_task(process.run(stop, told.append))
    await asyncio.sleep(0.3)
    stop.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert told == []


def test_a_model_without_profile_is_refused_at_start() -> None:
    config = EstimatorConfig.model_validate({"models": [{"name": "chat", "profile": "Mistal-7B"}]})
    with pytest.raises(ConfigError, match=r"models\.chat\.profile.*Mistral-7B"):
        EstimatorProcess(config, RedisQueue("redis://127.0.0.1:1"), EstimatorMetrics())


async def test_metrics_are_served(rig: Rig, estimator: Estimator) -> None:
    await rig.serve(10, 40)
    await _learned(estimator, 10)
    endpoint = serve_metrics(estimator.metrics.registry, "127.0.0.1", 0)
    try:
        with await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{endpoint.port}/metrics", None, PATIENCE_S) as answer:
            text = answer.read().decode()
    finally:
        await asyncio.to_thread(endpoint.stop)
    for name in ("profile_version", "slowdown_ratio", "events_total", "missed_requests_total", "predict_seconds"):
        assert f"# HELP qlm_estimator_{name}" in text
