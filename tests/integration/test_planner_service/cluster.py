"""A real server, planner shells in this process, and agents that only pull and complete."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qlm.api.v1 import request_pb2
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_planner.config import PlannerConfig, PlannerSettings
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.process import PlannerShell
from qlm_process.config import load_config
from qlm_process.queue.leases import LeaseKeeper
from qlm_process.wire.instance import to_body
from qlm_queue.overview import Overview
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Acceptance, Completion, Emission, Lease, PullBudget, Pulled

DEADLINE_S = 60.0
POLL_S = 0.02
LEASE_S = 5.0
"""None is lost where others use the cores."""
SHORT_LEASE_S = 1.0
RENEW_S = 0.25
MODELS = ("mistral-7b", "mistral-7b-code", "vicuna-13b")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

CONFIG = {
    "models": [
        {"name": "mistral-7b", "profile": "Mistral-7B"},
        {"name": "mistral-7b-code", "profile": "Mistral-7B"},
        {"name": "vicuna-13b", "profile": "Vicuna-13B"},
    ],
    "planner": {"listen": "127.0.0.1:0"},
}


async def until(condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition; fails at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not await condition():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(POLL_S)


def config_of(url: str, folder: Path, lease_s: float) -> Path:
    """The file that planner processes are started with."""
    path = folder / "qlm.yaml"
    queue = {"name": "test", "url": url, "lease_ttl_s": lease_s, "lease_renew_s": RENEW_S}
    path.write_text(yaml.safe_dump({**CONFIG, "queue": queue}), encoding="utf-8")
    return path


@dataclass
class Cluster:
    """One queue on one server."""

    url: str
    folder: Path
    queue: RedisQueue
    lease_s: float = LEASE_S
    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    metrics: PlannerMetrics = field(default_factory=PlannerMetrics)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _agents: dict[str, tuple[str, Lease]] = field(default_factory=dict)

    def config(self, **planner: object) -> PlannerConfig:
        config = load_config(PlannerConfig, str(config_of(self.url, self.folder, self.lease_s)), environment={})
        return config.model_copy(update={"planner": PlannerSettings(**planner)})

    @asynccontextmanager
    async def planner(self, **settings: object) -> AsyncIterator[PlannerShell]:
        """A planner in this process, ready as leader or standby."""
        config = self.config(**settings)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        own = RedisQueue(self.url, "test", call_timeout_s=config.queue.call_timeout_s)
        shell = PlannerShell(config, own, self.metrics, provider)
        stop = asyncio.Event()
        running = asyncio.create_task(shell.run(stop))
        try:
            await asyncio.wait_for(shell.ready.wait(), DEADLINE_S)
            yield shell
        finally:
            stop.set()
            await asyncio.wait_for(running, DEADLINE_S)
            provider.shutdown()

    # Agents and clients -----------------------------------------------------------------------------------------------

    async def join(self, name: str, gpu: str = "A100-80GB", models: Sequence[str] = MODELS, ttl_s: float = 3600.0) -> str:
        facts = InstanceFacts(name=name, incarnation="", gpu=gpu, n_gpu=1, engine="simulated", models=tuple(models))
        incarnation, lease = await self.queue.register(name, f"{name}-{next(self._numbers)}", to_body(facts), ttl_s)
        self._agents[name] = (incarnation, lease)
        return incarnation

    @asynccontextmanager
    async def agent(self, name: str) -> AsyncIterator[str]:
        """An agent whose lease is as short as the planner's, and renewed for as long as the server answers in time."""
        incarnation = await self.join(name, ttl_s=self.lease_s)
        keeper = LeaseKeeper(self.queue, self._agents[name][1], ttl_s=self.lease_s, renew_s=RENEW_S)
        await keeper.start()
        try:
            yield incarnation
        finally:
            await keeper.stop()

    async def describe(self, name: str, body: bytes) -> None:
        await self.queue.describe(self._agents[name][1], body)

    async def deregister(self, name: str) -> None:
        await self.queue.deregister(self._agents[name][1])

    async def submit(self, model: str, slo_s: float = 60.0, count: int = 1, expire_after_s: float | None = None) -> list[RequestKey]:
        keys = []
        for _ in range(count):
            key = RequestKey("tenant", f"r{next(self._numbers)}")
            slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=slo_s)
            body = request_pb2.Request(
                model=model,
                text="x",
                tenant=key.tenant,
                request_id=key.request_id,
                trace=request_pb2.TraceContext(traceparent=TRACEPARENT),
                admission=request_pb2.Admission(prompt_tokens=100, output_tokens_max=100, slo=slo),
            )
            await self.queue.accept(
                Acceptance(
                    key=key,
                    body=body.SerializeToString(),
                    digest=bytes(16),
                    gateway="gateway",
                    slo_class="64s",
                    prompt_tokens=100,
                    expire_after_s=expire_after_s,
                )
            )
            keys.append(key)
        return keys

    async def pull(self, name: str, model: str, count: int = 100) -> list[Pulled]:
        budget = PullBudget(requests_max=count, kv_tokens=10_000_000, output_reserve_tokens=0)
        return list((await self.queue.pull(self._agents[name][1], model, budget)).pulled)

    async def complete(self, name: str, pulled: Sequence[Pulled]) -> None:
        done = [
            Completion(
                last=Emission(queue_id=each.queue_id, key=each.key, attempt=each.attempt, offset=0, progress=b"", frame=b""),
                state=RequestState.COMPLETED,
                result=b"",
                event=b"",
            )
            for each in pulled
        ]
        await self.queue.complete(self._agents[name][0], done)

    async def serve(self, name: str) -> int:
        """Takes all that waits on a queue, whatever its model, and completes it; returns how many."""
        done = 0
        for model in MODELS:
            while pulled := await self.pull(name, model):
                await self.complete(name, pulled)
                done += len(pulled)
        return done

    # Conditions -------------------------------------------------------------------------------------------------------

    async def all_placed(self) -> bool:
        return (await self.queue.overview()).unplaced == 0

    async def waiting_on(self, name: str) -> int:
        overview = await self.queue.overview()
        return sum(group.waiting for group in overview.groups.values() if group.instance == name)

    async def ended(self, keys: Sequence[RequestKey]) -> bool:
        for key in keys:
            if not (await self.queue.find(key)).state.terminal:
                return False
        return True

    async def overview(self) -> Overview:
        return await self.queue.overview()
