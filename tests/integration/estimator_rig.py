"""Estimator processes on a real queue, in this process, and the rest of their cluster."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc, request_pb2
from qlm.internal.v1.events_pb2 import RequestEvent
from qlm.wire_errors import from_rpc_error
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_estimator.config import EstimatorConfig
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.process import EstimatorProcess
from qlm_process.wire import instance as instance_wire
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import (
    PLANNER_ROLE,
    Acceptance,
    Completion,
    Emission,
    GroupPlacement,
    Lease,
    PullBudget,
    Pulled,
    RequestPlacement,
)

PATIENCE_S = 60.0
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

    async def accept(
        self, count: int, *, model: str = "chat", prompt_tokens: int = 500, deadline_in_s: float = 3_600.0, spread_s: float = 0.0
    ) -> str:
        """Requests in a group of their own, the last due `spread_s` after the first."""
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
            last_deadline_s=receipt.accepted_s + deadline_in_s + spread_s,
            meta=meta,
        )
        await self.queue.place(self._planner, [group], placements)
        return group_id

    async def pull(self, model: str = "chat") -> list[Pulled]:
        assert self._agent is not None
        budget = PullBudget(requests_max=500, kv_tokens=100_000_000, output_reserve_tokens=1)
        return list((await self.queue.pull(self._agent, model, budget)).pulled)

    async def complete(
        self, pulled: list[Pulled], output_tokens: int, *, model: str = "chat", slo_class: str = "64s", first_token_s: float = 0.0
    ) -> None:
        completions = [
            Completion(
                last=Emission(queue_id=each.queue_id, key=each.key, attempt=each.attempt, offset=0, progress=b"", frame=b""),
                state=RequestState.COMPLETED,
                result=b"",
                event=RequestEvent(
                    model=model, output_tokens=output_tokens, slo_class=slo_class, first_token_s=first_token_s
                ).SerializeToString(),
            )
            for each in pulled
        ]
        await self.queue.complete(self.incarnation, completions)

    async def serve(self, count: int, output_tokens: int, *, seconds: float = 0.02) -> None:
        """Some requests from their acceptance to their end; each runs for so long."""
        await self.accept(count)
        pulled = await self.pull()
        assert len(pulled) == count
        first_token_s = time.time()
        await asyncio.sleep(seconds)
        await self.complete(pulled, output_tokens, first_token_s=first_token_s)


def config_of(url: str, lease_ttl_s: float = 1.0, **settings: object) -> EstimatorConfig:
    fast = {"publish_every_s": 0.1, "overview_every_s": 0.1, "retry_s": 0.1, "read_block_s": 0.05}
    fast["read_gap_s"] = 0.01
    return EstimatorConfig.model_validate(
        {
            "queue": {"url": url, "lease_ttl_s": lease_ttl_s, "lease_renew_s": 0.2},
            "models": [{"name": "chat", "profile": "Mistral-7B"}, {"name": "big", "profile": "Vicuna-13B"}],
            "estimator": {**fast, **settings},
        }
    )


class Estimator:
    """One process of ours, in this one."""

    def __init__(self, url: str, lease_ttl_s: float = 1.0, **settings: object) -> None:
        self.config = config_of(url, lease_ttl_s, **settings)
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
            try:
                return await stub.GetProfiles(estimator_pb2.GetProfilesRequest(), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

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


def row_of_model(snapshot: estimator_pb2.ProfileSnapshot, model: str = "chat") -> estimator_pb2.WorkloadProfile | None:
    rows = [row for row in snapshot.workload if (row.model, row.slo_class, row.token_class) == (model, "", "")]
    return rows[0] if rows else None


async def learned(estimator: Estimator, samples: int) -> estimator_pb2.WorkloadProfile:
    async def enough() -> bool:
        row = row_of_model(await estimator.profiles())
        return row is not None and row.samples >= samples

    await until(enough, f"{samples} samples published")
    row = row_of_model(await estimator.profiles())
    assert row is not None
    return row
