"""Builders of the values that the suite passes, and the usual first steps on a mirrored queue."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from qlm.api.v1.request_pb2 import Logprobs, Request, Result, ResultError, TokenPrompt, Usage
from qlm.internal.v1.events_pb2 import EventKind, RequestEvent
from qlm.internal.v1.frames_pb2 import Frame, FrameBatch
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.values import (
    PLANNER_ROLE,
    Acceptance,
    AcceptReceipt,
    AppliedChunk,
    Completion,
    Emission,
    GroupPlacement,
    Lease,
    Owned,
    PlanChunk,
    PullBudget,
    Pulled,
    PullResult,
    QueueSegment,
    RequestPlacement,
    StepStatus,
)

from .mirror import Mirror

TTL_S = 3_600.0
ROOMY = PullBudget(requests_max=100, kv_tokens=1_000_000, output_reserve_tokens=16, behind_max=32)
CANCELLED = Result(error=ResultError(reason="CANCELLED", message="the client went")).SerializeToString()
EXPIRED = Result(error=ResultError(reason="EXPIRED", message="nobody waits")).SerializeToString()
FAILURE = Result(error=ResultError(reason="ATTEMPTS_EXHAUSTED", message="three times")).SerializeToString()


def key_of(name: str, tenant: str = "default") -> RequestKey:
    return RequestKey(tenant, name)


def acceptance(
    key: RequestKey,
    *,
    model: str = "m",
    gateway: str = "g1",
    slo_class: str = "32s",
    prompt_tokens: int = 10,
    expire_after_s: float | None = None,
    salt: str = "",
) -> Acceptance:
    body = Request(model=model, tokens=TokenPrompt(ids=[1] * prompt_tokens), tenant=key.tenant, request_id=key.request_id)
    digest = blake2b(f"{key.tenant}/{key.request_id}/{salt}".encode(), digest_size=16).digest()
    return Acceptance(
        key=key,
        body=body.SerializeToString(),
        digest=digest,
        gateway=gateway,
        slo_class=slo_class,
        prompt_tokens=prompt_tokens,
        expire_after_s=expire_after_s,
    )


def tokens(*ids: int) -> bytes:
    """Progress bytes of token ids."""
    return struct.pack(f"<{len(ids)}I", *ids)


def pieces(*texts: str) -> bytes:
    """Progress bytes of text pieces."""
    return Result(output_pieces=texts).SerializeToString()


def logprobs(ids: Sequence[int], top: int | None) -> bytes:
    """Made up ones of tokens, as an emission has them, with so many likeliest ones; None: none."""
    if top is None:
        return b""
    fields = (
        Logprobs(of_token=[-token / 8], top_token_ids=[token + n for n in range(top)], of_top=[-(token + n) / 8 for n in range(top)])
        for token in ids
    )
    return b"".join(Result(logprobs=field).SerializeToString() for field in fields)


def placement(
    group_id: str,
    instance: str = "a",
    before: str = "",
    first_deadline_s: float = 100.0,
    model: str = "m",
    slo_least_s: float = 20.0,
    last_deadline_s: float = -math.inf,
) -> GroupPlacement:
    return GroupPlacement(
        group_id=group_id,
        instance=instance,
        before=before,
        first_deadline_s=first_deadline_s,
        meta={"model": model, "slo_class": "32s"},
        slo_least_s=slo_least_s,
        last_deadline_s=last_deadline_s,
    )


def happening(kind: EventKind.ValueType = EventKind.EVENT_KIND_MODEL_SWAPPED, **fields: Any) -> bytes:
    """An event that an agent reports."""
    return RequestEvent(kind=kind, instance="a", **fields).SerializeToString()


def emission(request: Pulled, offset_tokens: int, ids: Sequence[int], *, shown: bool = True, top: int | None = None) -> Emission:
    """`top`: of its `logprobs`."""
    said = logprobs(ids, top)
    frame = Frame(queue_id=request.queue_id, attempt=request.attempt, offset=offset_tokens, token_ids=ids).SerializeToString() + said
    return Emission(
        queue_id=request.queue_id,
        key=request.key,
        attempt=request.attempt,
        offset=offset_tokens * 4,
        progress=tokens(*ids),
        frame=frame if shown else b"",
        logprobs=said,
    )


def completion(
    request: Pulled,
    offset_tokens: int = 0,
    ids: Sequence[int] = (),
    *,
    state: RequestState = RequestState.COMPLETED,
    shown: bool = True,
    top: int | None = None,
) -> Completion:
    result = Result(usage=Usage(prompt_tokens=10, output_tokens=offset_tokens + len(ids)))
    event = RequestEvent(model="m", output_tokens=offset_tokens + len(ids), started_s=1.5)
    return Completion(
        last=emission(request, offset_tokens, ids, shown=shown, top=top),
        state=state,
        result=result.SerializeToString(),
        event=event.SerializeToString(),
    )


def segment(instance: str, start: int, *group_ids: str) -> QueueSegment:
    return QueueSegment(instance=instance, start=start, group_ids=group_ids)


def owned(request: Pulled, attempt: int | None = None) -> Owned:
    return Owned(queue_id=request.queue_id, key=request.key, attempt=request.attempt if attempt is None else attempt)


class Scenario:
    """A mirrored queue on which a planner leads and instance "a" is registered. Requests are named by their request id."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.planner = Lease(role="", token="")
        self.agent = Lease(role="", token="")
        self.receipts: dict[str, AcceptReceipt] = {}
        self._nonces = 0

    async def open(self) -> Scenario:
        self.planner = await self.mirror("acquire_lease", PLANNER_ROLE, "p1", TTL_S, "host:1")
        self.agent = await self.register("a")
        return self

    @property
    def incarnation(self) -> str:
        return self.agent.role

    async def register(self, instance: str) -> Lease:
        self._nonces += 1
        _, lease = await self.mirror("register", instance, f"n{self._nonces}", b"body of " + instance.encode(), TTL_S)
        assert isinstance(lease, Lease)
        return lease

    async def accept(self, *names: str, **options: Any) -> None:
        for name in names:
            self.receipts[name] = await self.mirror("accept", acceptance(key_of(name), **options))

    def wanted(self, name: str, group_id: str) -> RequestPlacement:
        return RequestPlacement(queue_id=self.receipts[name].queue_id, key=key_of(name), group_id=group_id)

    async def place(self, group_id: str, *names: str, **options: Any) -> Sequence[StepStatus]:
        """Places accepted requests in one group."""
        statuses: Sequence[StepStatus] = await self.mirror(
            "place", self.planner, [placement(group_id, **options)], [self.wanted(name, group_id) for name in names]
        )
        return statuses

    async def queue_up(self, group_id: str, *names: str, **options: Any) -> None:
        """Accepts and places."""
        await self.accept(*names)
        assert await self.place(group_id, *names, **options) == [StepStatus.DONE] * len(names)

    async def pull(self, count: int = 100, lease: Lease | None = None, model: str = "m") -> dict[str, Pulled]:
        """Pulled requests, by request id."""
        budget = PullBudget(requests_max=count, kv_tokens=1_000_000, output_reserve_tokens=16)
        result: PullResult = await self.mirror("pull", lease or self.agent, model, budget)
        return {request.key.request_id: request for request in result.pulled}

    async def run(self, *names: str) -> dict[str, Pulled]:
        """Accepts, places in one group "g" and pulls."""
        await self.queue_up("g", *names)
        pulled = await self.pull()
        assert list(pulled) == list(names)
        return pulled

    async def queue_of(self, instance: str = "a") -> list[str]:
        overview = await self.mirror("overview")
        return next(list(queue.group_ids) for queue in overview.virtual_queues if queue.instance == instance)

    async def versions(self, *instances: str) -> dict[str, int]:
        overview = await self.mirror("overview")
        return {queue.instance: queue.version for queue in overview.virtual_queues if queue.instance in instances}

    async def apply(self, plan_version: int, *segments: QueueSegment, touching: Sequence[str] = ("a",)) -> AppliedChunk:
        """Applies a chunk that knows the versions of now."""
        chunk = PlanChunk(plan_version=plan_version, versions=await self.versions(*touching), segments=segments)
        applied = await self.mirror("apply_plan", self.planner, chunk)
        assert isinstance(applied, AppliedChunk)
        return applied


async def frames(scene: Scenario, gateway: str = "g1") -> list[list[Frame]]:
    """The frames of each entry."""
    entries = await scene.mirror("read_frames", gateway, "0", 0)
    return [list(FrameBatch.FromString(entry.payload).frames) for entry in entries]


async def result_of(scene: Scenario, name: str) -> Result:
    return Result.FromString((await scene.mirror("find", key_of(name))).result)
