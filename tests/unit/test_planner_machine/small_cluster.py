"""Engines that pull from their virtual queues, swap models and evict for an urgent head by the agents' own rule, in steps of time.

A request occupies a seat for its decode time, whatever runs beside it; an evicted request goes on where it was, and pays for its KV.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from qlm_core.operations.preemption import Contender, Occupant, Room, Rule, Urgency, clear
from qlm_planner.machine.events import LoadReported
from qlm_planner.policy import Policy
from qlm_queue.values import LiveRequest, Owned, Pulled, RequeueCause

from .world import LEASE_S, START_S, World, hardware

STEP_S = 0.25
SEATS = 50
REQUEST_S = 4.0
SWAP_S = 3.0
KV_TOKENS = 300


@dataclass(frozen=True)
class Job:
    arrival_s: float
    model: str
    slo_s: float
    tenant: str = "tenant"


@dataclass
class Run:
    pulled: Pulled
    end_s: float
    displacements: int


@dataclass
class Engine:
    name: str
    incarnation: str
    model: str = ""
    swapping_until_s: float = -math.inf
    runs: dict[str, Run] = field(default_factory=dict)


@dataclass
class Served:
    """`order`: models in the order in which each engine loaded them. `late`, `longest_wait_s` (to the first start): by SLO seconds.
    `waits_s`: all such waits by tenant. `ended_s`: when the last one ended, from the start."""

    late: dict[float, int] = field(default_factory=dict)
    count: dict[float, int] = field(default_factory=dict)
    longest_wait_s: dict[float, float] = field(default_factory=dict)
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    ended_s: float = 0.0
    order: list[str] = field(default_factory=list)
    evictions: int = 0

    @property
    def swaps(self) -> int:
        return len(self.order)

    def attained(self, slo_s: float) -> float:
        return 1.0 - self.late.get(slo_s, 0) / self.count[slo_s]


class SmallCluster:
    """`evicting`: engines evict."""

    def __init__(self, policy: Policy | None = None, *, engines: Sequence[str] = ("a",), evicting: bool = True) -> None:
        self.world = World(policy or Policy(lease_ttl_s=LEASE_S))
        self.names = engines
        self.evicting = evicting
        self.engines: list[Engine] = []
        self.served = Served()
        self._slos: dict[str, float] = {}
        self._left_s: dict[str, tuple[float, int]] = {}

    async def serve(self, jobs: Sequence[Job], until_s: float = 100_000.0) -> Served:
        world = self.world
        for name in self.names:
            self.engines.append(Engine(name=name, incarnation=await world.join(name)))
        await world.lead()
        waiting = sorted(jobs, key=lambda job: job.arrival_s)
        done = itertools.count()
        while (waiting or len(self._slos) > sum(self.served.count.values())) and world.now_s - START_S < until_s:
            while waiting and waiting[0].arrival_s <= world.now_s - START_S:
                job = waiting.pop(0)
                [key] = await world.submit(job.model, job.slo_s, tenant=job.tenant)
                self._slos[key.request_id] = job.slo_s
            for engine in self.engines:
                await self._step(engine)
            await world.advance(STEP_S)
            assert next(done) < 1_000_000
        return self.served

    async def _step(self, engine: Engine) -> None:
        world = self.world
        ended = [run for run in engine.runs.values() if run.end_s <= world.now_s]
        for run in ended:
            del engine.runs[run.pulled.queue_id]
            slo_s = self._slos[run.pulled.key.request_id]
            self.served.count[slo_s] = self.served.count.get(slo_s, 0) + 1
            self.served.ended_s = world.now_s - START_S
            if world.now_s > run.pulled.accepted_s + slo_s:
                self.served.late[slo_s] = self.served.late.get(slo_s, 0) + 1
        if ended:
            await world.complete(engine.name, [run.pulled for run in ended])
        if world.now_s < engine.swapping_until_s:
            return
        await self._pull(engine)
        head = await self._head(engine)
        if head is None or head[0] == engine.model:
            return
        if engine.runs and self.evicting:
            await self._evict_for(engine, *head)
        if not engine.runs:
            if engine.model:
                self.served.order.append(head[0])
            engine.model, engine.swapping_until_s = head[0], world.now_s + SWAP_S
            await world.deliver(LoadReported(incarnation=engine.incarnation, active_model=engine.model))

    async def _pull(self, engine: Engine) -> None:
        room = SEATS - len(engine.runs)
        if engine.model and room > 0:
            for pulled in await self.world.pull(engine.name, engine.model, room):
                if pulled.queue_id not in self._left_s:
                    slo_s = self._slos[pulled.key.request_id]
                    wait_s = self.world.now_s - pulled.accepted_s
                    self.served.waits_s.setdefault(pulled.key.tenant, []).append(wait_s)
                    self.served.longest_wait_s[slo_s] = max(wait_s, self.served.longest_wait_s.get(slo_s, 0.0))
                left_s, displacements = self._left_s.pop(pulled.queue_id, (REQUEST_S, 0))
                engine.runs[pulled.queue_id] = Run(pulled=pulled, end_s=self.world.now_s + left_s, displacements=displacements)

    async def _head(self, engine: Engine) -> tuple[str, LiveRequest, int] | None:
        overview = await self.world.queue.overview()
        ids = next(queue.group_ids for queue in overview.virtual_queues if queue.instance == engine.name)
        if not ids:
            return None
        group = overview.groups[ids[0]]
        [first] = await self.world.queue.waiting(ids[0], 0, 1)
        return group.meta["model"], first, group.waiting

    async def _evict_for(self, engine: Engine, model: str, first: LiveRequest, requests: int) -> None:
        now_s = self.world.now_s
        head = Contender(
            urgency=Urgency(0, first.accepted_s + self._slos[first.key.request_id]),
            requests=requests,
            kv_tokens=KV_TOKENS,
            service_s=SWAP_S + REQUEST_S,
        )
        batch = [
            Occupant(
                run_id=run_id,
                urgency=Urgency(0, run.pulled.accepted_s + self._slos[run.pulled.key.request_id]),
                left_s=run.end_s - now_s,
                kv_tokens=KV_TOKENS,
                context_tokens=KV_TOKENS,
                offloadable=False,
                displacements=run.displacements,
            )
            for run_id, run in engine.runs.items()
        ]
        profile = hardware("big", model)
        victims = clear(now_s, head, batch, Room(seats=0, kv_tokens=0), profile, Rule())
        owned = []
        for victim in victims:
            run = engine.runs.pop(victim.run_id)
            self._left_s[victim.run_id] = (run.end_s - now_s + victim.cost_s, run.displacements + 1)
            owned.append(Owned(queue_id=run.pulled.queue_id, key=run.pulled.key, attempt=run.pulled.attempt))
        if owned:
            self.served.evictions += len(owned)
            await self.world.queue.requeue(engine.incarnation, owned, RequeueCause.EVICTED, b"")
            await self.world.settle()
