"""A planner, two agents and a client as loops over the queue's port, in one task: what drives a damaged queue to its end."""

from __future__ import annotations

import contextlib
import random
import struct
from hashlib import blake2b

from qlm.api.v1.request_pb2 import Request, TokenPrompt
from qlm_core.vocabulary.errors import LeaseLost, NotFound, QueueFull, RequestIdConflict, Unavailable
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.port import Queue
from qlm_queue.values import (
    PLANNER_ROLE,
    Acceptance,
    Completion,
    Emission,
    GroupPlacement,
    Lease,
    Owned,
    PlanChunk,
    PullBudget,
    Pulled,
    QueueSegment,
    RequestPlacement,
    RequeueCause,
    StepStatus,
    TerminalRecord,
)

TTL_S = 3_600.0
BUDGET = PullBudget(requests_max=3, kv_tokens=100_000, output_reserve_tokens=1)
OUTPUT = struct.pack("<3I", 1, 2, 3)
ROUNDS_MAX = 60


class SmallCluster:
    """`keys`: requests that were accepted. Each call may raise Unavailable, as of a server that is away: the next round tries again."""

    def __init__(self, queue: Queue, chance: random.Random) -> None:
        self.keys: list[RequestKey] = []
        self._queue = queue
        self._chance = chance
        self._planner: Lease | None = None
        self._agents: dict[str, Lease] = {}
        self._owned: dict[str, list[Pulled]] = {"a": [], "b": []}
        self._leaving: set[str] = set()
        self._lives = 0

    async def submit(self, count: int) -> None:
        for number in range(len(self.keys), len(self.keys) + count):
            key = RequestKey(f"t{number % 3}", f"r{number}")
            body = Request(model="m", tokens=TokenPrompt(ids=[7] * 8), tenant=key.tenant, request_id=key.request_id).SerializeToString()
            accepted = Acceptance(
                key=key,
                body=body,
                digest=blake2b(body, digest_size=16).digest(),
                gateway="g",
                slo_class=f"{2 ** (number % 2)}s",
                prompt_tokens=8,
                expire_after_s=TTL_S if number % 4 == 0 else None,
            )
            try:
                await self._queue.accept(accepted)
            except (Unavailable, RequestIdConflict, QueueFull):  # full: by a count that is to be mended
                continue
            self.keys.append(key)

    async def round(self) -> None:
        """A turn of everybody, in some order."""
        parts = [self._plan, self._leave, *(lambda name=name: self._serve(name) for name in self._owned)]
        self._chance.shuffle(parts)
        for part in parts:
            try:
                await part()
            except Unavailable:
                await self.mend()

    async def mend(self) -> None:
        """Repairs the queue, as the leading planner does at intervals."""
        with contextlib.suppress(Unavailable):
            await self._queue.repair(True)

    async def finish(self, rounds_max: int = ROUNDS_MAX) -> int:
        """Continues until nothing is live; returns how many rounds that took. Raises AssertionError where something waits for ever."""
        for rounds in range(rounds_max):
            await self.round()
            await self.mend()
            if not (await self._queue.overview()).live and rounds:
                return rounds
        raise AssertionError(f"requests wait for ever: {[key for key in self.keys if await self.end_of(key) is None]}")

    async def end_of(self, key: RequestKey) -> RequestState | None:
        """The terminal state of a request, None without one."""
        try:
            found = await self._queue.find(key)
        except NotFound:
            return None
        return found.state if isinstance(found, TerminalRecord) else None

    async def _plan(self) -> None:
        queue = self._queue
        try:
            if self._planner is None:
                self._lives += 1
                self._planner = await queue.acquire_lease(PLANNER_ROLE, f"n{self._lives}", TTL_S, "x:1")
                if self._planner is None:
                    return
            overview = await queue.overview()
            for incarnation, alive in overview.incarnations.items():
                if not alive:
                    await queue.reclaim(self._planner, incarnation, b"")
            found = [*await queue.read_arrivals(0.0, 100), *await queue.read_unplaced("", 100)]
            unplaced = {request.queue_id: request for request in found}
            if unplaced:
                groups = [f"g{self._chance.randrange(4)}" for _ in unplaced]
                await queue.place(
                    self._planner,
                    [
                        GroupPlacement(
                            group_id=group_id,
                            instance=self._chance.choice("ab"),
                            before="",
                            first_deadline_s=100.0,
                            meta={"model": "m"},
                            slo_least_s=9.0,
                        )
                        for group_id in sorted(set(groups))
                    ],
                    [
                        RequestPlacement(queue_id=request.queue_id, key=request.key, group_id=group_id)
                        for request, group_id in zip(unplaced.values(), groups, strict=True)
                    ],
                )
            await self._relocate(self._planner)
        except LeaseLost:
            self._planner = None

    async def _relocate(self, lease: Lease) -> None:
        """Moves unassigned groups to an instance."""
        overview = await self._queue.overview()
        versions = {queue.instance: queue.version for queue in overview.virtual_queues}
        homeless = next(queue.group_ids for queue in overview.virtual_queues if queue.instance == UNASSIGNED)
        if homeless and "a" in versions:
            segments = [QueueSegment(instance="a", start=0, group_ids=homeless)]
            await self._queue.apply_plan(lease, PlanChunk(plan_version=overview.plan_version + 1, versions=versions, segments=segments))

    async def _serve(self, name: str) -> None:
        queue = self._queue
        try:
            if name not in self._agents:
                self._lives += 1
                self._owned[name] = []
                _, self._agents[name] = await queue.register(name, f"n{self._lives}", b"\x0a\x01" + name.encode(), TTL_S)
            lease = self._agents[name]
            await queue.describe(lease, b"\x0a\x01" + name.encode())
            await self._work(name, lease)
            mine = self._owned[name]
            known = {request.queue_id for request in mine}
            mine += (await queue.pull(lease, "m", BUDGET)).pulled
            mine += [request for request in await queue.owned(lease.role) if request.queue_id not in known | {r.queue_id for r in mine}]
        except LeaseLost:
            self._leaving.add(self._agents.pop(name).role)

    async def _leave(self) -> None:
        """Agents that lost their lease give back what they own."""
        for incarnation in sorted(self._leaving):
            found = await self._queue.owned(incarnation)
            await self._queue.unpull(incarnation, [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in found])
            self._leaving.discard(incarnation)

    async def _work(self, name: str, lease: Lease) -> None:
        queue, mine = self._queue, self._owned[name]
        for request in list(mine):
            stored = len(request.progress)
            last = _emission(request, OUTPUT[stored:])
            match self._chance.randrange(4):
                case 0:
                    status = (await queue.emit(lease.role, [_emission(request, OUTPUT[stored:4])]))[0]
                    if status is not StepStatus.DONE:
                        mine.remove(request)
                    elif not stored:
                        owned = Owned(queue_id=request.queue_id, key=request.key, attempt=request.attempt)
                        await queue.requeue(lease.role, [owned], RequeueCause.EVICTED, b"")
                        mine.remove(request)
                case 1:
                    owned = Owned(queue_id=request.queue_id, key=request.key, attempt=request.attempt)
                    await queue.unpull(lease.role, [owned])
                    mine.remove(request)
                case _:
                    await queue.complete(lease.role, [Completion(last=last, state=RequestState.COMPLETED, result=b"", event=b"")])
                    mine.remove(request)


def _emission(request: Pulled, output: bytes) -> Emission:
    """The next output of a request."""
    at = len(request.progress)
    return Emission(queue_id=request.queue_id, key=request.key, attempt=request.attempt, offset=at, progress=output, frame=b"")
