"""The queue on Redis 7.0+ or Valkey: each operation of the port is one server-side script (lua/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis.asyncio as redis

from qlm_core.vocabulary.errors import NotFound, OffsetOutOfRange, QueueFull
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.bounds import HeldBytes, held_bytes, with_name
from qlm_queue.damage import DAMAGED_RESULT
from qlm_queue.event_entry import events_entry
from qlm_queue.expired import EXPIRED_RESULT
from qlm_queue.operator_values import PAUSES_MAX, LivePage, too_many_pauses
from qlm_queue.overview import Overview, WaitsRecord, check_waits
from qlm_queue.redis import answers, arguments
from qlm_queue.redis.calls import CONSUMER_GROUP, Answer, RedisCalls
from qlm_queue.values import (
    BATCH_MAX,
    Acceptance,
    AcceptReceipt,
    AppliedChunk,
    Attached,
    Completion,
    ControlEntry,
    Emission,
    GroupPlacement,
    Lease,
    LiveRequest,
    Owned,
    PlanChunk,
    PullBudget,
    Pulled,
    PullResult,
    RequestPlacement,
    RequeueCause,
    StepStatus,
    StreamEntry,
    TerminalRecord,
    WaitingRequest,
)

READ_MAX = 1_000
_CONSUMER = "leader"


class RedisQueue(RedisCalls):
    """See `qlm_queue.port.Queue`, and `RedisCalls` for how it is made."""

    async def server_time_s(self) -> float:
        seconds, microseconds = await self._link.run(self._link.client.time)
        return int(seconds) + int(microseconds) / 1e6

    # Leases -----------------------------------------------------------------------------------------------------------

    async def acquire_lease(self, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
        token = await self._call("acquire_lease", role, nonce, _ms(ttl_s), address, read=answers.text_of)
        return Lease(role=role, token=token) if token else None

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        await self._call("renew_lease", lease.role, lease.token, _ms(ttl_s), within_s=within_s)

    async def release_lease(self, lease: Lease) -> None:
        await self._call("release_lease", lease.role, lease.token)

    async def leader_address(self, role: str) -> str:
        return await self._call("leader_address", role, read=answers.text_of)

    # Instances --------------------------------------------------------------------------------------------------------

    async def register(self, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
        incarnation, token = await self._call("register", instance, nonce, body, _ms(ttl_s), read=answers.texts_of)
        return incarnation, Lease(role=incarnation, token=token)

    async def describe(self, lease: Lease, body: bytes) -> None:
        await self._call("describe", lease.role, lease.token, body)

    async def deregister(self, lease: Lease) -> None:
        await self._call("deregister", lease.role, lease.token)

    async def forget_instance(self, lease: Lease, instance: str) -> bool:
        return bool(await self._call("forget_instance", lease.token, instance))

    # Gateway ----------------------------------------------------------------------------------------------------------

    async def accept(self, acceptance: Acceptance) -> AcceptReceipt:
        if len(acceptance.digest) != 16:
            raise ValueError(f"a digest has 16 bytes, not {len(acceptance.digest)}")
        refusal = await self._watch.refusal()
        if refusal is not None:
            try:
                await self.find(acceptance.key)  # a request accepted earlier is answered again
            except NotFound:
                raise refusal from None
        before = self._watch.accepted_count
        expire_ms: Any = "" if acceptance.expire_after_s is None else _ms(acceptance.expire_after_s)
        try:
            receipt = await self._call(
                "accept",
                self._keys.request(acceptance.key),
                acceptance.body,
                acceptance.digest,
                acceptance.gateway,
                acceptance.slo_class,
                acceptance.prompt_tokens,
                expire_ms,
                self._bounds.queue_max,
                self._bounds.tenant_max,
                self._bounds.class_max,
                self._bounds.queue_bytes_max,
                self._bounds.tenant_bytes_max,
                self._bounds.class_bytes_max,
                read=answers.receipt,
            )
        except QueueFull as error:
            raise with_name(error, acceptance.key.tenant, acceptance.slo_class) from error
        await self._watch.confirm()
        if not receipt.duplicate:
            self._watch.acknowledged(acceptance.key, before, receipt.acceptance_number)
        return receipt

    async def held(self) -> Sequence[HeldBytes]:
        return held_bytes(self._bounds, *await self._call("held", read=answers.held))

    async def refusal(self) -> str:
        refusal = await self._watch.refusal()
        return "" if refusal is None else str(refusal)

    async def loss(self) -> str:
        await self._watch.refusal()
        return self._watch.loss

    async def attach(self, key: RequestKey, gateway: str, offset: int) -> Attached:
        if offset < 0:
            raise OffsetOutOfRange("an offset is at least 0", details={"offset": str(offset)})
        try:
            return await self._named("attach", key, gateway, offset, read=partial(answers.attached, self._keys))
        except OffsetOutOfRange as error:
            error.details["offset"] = str(offset)
            raise

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        return await self._named("cancel", key, result, read=answers.state_of)

    async def erase(self, key: RequestKey, result: bytes) -> RequestState:
        return await self._named("erase", key, result, read=answers.state_of)

    async def expire(self, result: bytes) -> int:
        return int(await self._call("expire", result))

    async def read_frames(self, gateway: str, after: str, block_s: float) -> Sequence[StreamEntry]:
        return await self._lasting(lambda: self._read_stream(self._keys("frames", gateway), b"f", after, block_s, READ_MAX))

    # Planner ----------------------------------------------------------------------------------------------------------

    async def read_arrivals(self, block_s: float, count: int) -> Sequence[LiveRequest]:
        _check_batch(count)
        try:
            return await self._read_arrivals(block_s, count)
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            await self._make_consumer_group()
            return []

    async def _read_arrivals(self, block_s: float, count: int) -> list[LiveRequest]:
        found: list[LiveRequest] = []
        while len(found) < count:  # reads on only where requests that were placed unread took up the room
            read = partial(self._link.read_group, self._keys("queue"), CONSUMER_GROUP, _CONSUMER, block_s, count - len(found))
            entries = await self._sound(read, answers.arrivals)
            named = [part for queue_id, (hash_key, _) in entries.items() for part in (queue_id, hash_key)]
            page = await self._call("arrived", *named, read=partial(answers.arrived, self._keys, entries)) if entries else []
            found += page
            if len(page) == len(entries):
                break
            block_s = 0.0 if found else block_s
        return found

    async def read_unplaced(self, after: str, count: int) -> Sequence[LiveRequest]:
        _check_batch(count)
        found: list[LiveRequest] = []
        while len(found) < count:  # a page may hold few requests that are not placed; the end of the queue ends it
            after, page = await self._call("unplaced", after, count, read=self._page)
            found += page
            if not after:
                break
        return found[:count]

    async def place(self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> Sequence[StepStatus]:
        _check_batch(len(requests))
        _check_batch(len(groups))
        return await self._steps("place", lease.token, *arguments.placements(self._keys, groups, requests))

    async def regroup(self, lease: Lease, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]) -> Sequence[StepStatus]:
        _check_batch(len(requests))
        if into.group_id == source:
            raise ValueError("the groups are one")
        return await self._steps("regroup", lease.token, *arguments.regrouped(self._keys, source, into, requests))

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        named = [group_id for segment in chunk.segments for group_id in segment.group_ids]
        _check_batch(len(named))
        if len(set(named)) < len(named):
            raise ValueError("a chunk names a group twice")
        return await self._call("apply_plan", lease.token, *arguments.plan_chunk(chunk), read=answers.applied_chunk)

    async def reclaim(self, lease: Lease, incarnation: str, failure: bytes) -> int:
        return int(await self._call("reclaim", lease.token, incarnation, failure))

    async def shed(self, lease: Lease, group_id: str, keep: int, count: int, oldest: bool, failure: bytes) -> int:
        _check_batch(count)
        return int(await self._call("shed", lease.token, group_id, keep, count, "old" if oldest else "new", failure))

    # Agent ------------------------------------------------------------------------------------------------------------

    async def pull(self, lease: Lease, model: str, budget: PullBudget) -> PullResult:
        _check_batch(budget.requests_max)
        return await self._call(
            "pull",
            lease.role,
            lease.token,
            model,
            budget.requests_max,
            budget.kv_tokens,
            budget.output_reserve_tokens,
            budget.owned_aside,
            EXPIRED_RESULT,
            "1" if budget.suspects else "",
            min(budget.behind_max, BATCH_MAX),
            read=partial(answers.pull_result, self._keys),
        )

    async def owned(self, incarnation: str) -> Sequence[Pulled]:
        ids = await self._sound(lambda: self._link.run(self._link.client.smembers, self._keys("running", incarnation)), sorted)
        found: list[Pulled] = []
        for first in range(0, len(ids), BATCH_MAX):
            page = ids[first : first + BATCH_MAX]
            found += await self._call("owned", incarnation, *page, read=partial(answers.pulled_all, self._keys))
        return sorted(found, key=lambda request: request.acceptance_number)

    async def unpull(self, incarnation: str, requests: Sequence[Owned], behind_head: bool = False) -> Sequence[StepStatus]:
        return await self._give_back(incarnation, "unpulled", behind_head, b"", requests)

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        _check_batch(len(emissions))
        if not emissions:
            return []
        return await self._steps("emit", incarnation, *arguments.emissions(self._keys, emissions))

    async def complete(self, incarnation: str, completions: Sequence[Completion]) -> Sequence[StepStatus]:
        _check_batch(len(completions))
        if not completions:
            return []
        return await self._steps("complete", incarnation, *arguments.completions(self._keys, completions))

    async def requeue(self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes) -> Sequence[StepStatus]:
        return await self._give_back(incarnation, cause.value, cause is RequeueCause.EVICTED, failure, requests)

    async def read_control(self, instance: str, after: str, block_s: float) -> Sequence[ControlEntry]:
        stream = self._keys("ctl", instance)
        return await self._sound(lambda: self._link.read_streams(stream, after, block_s, READ_MAX), answers.control_entries)

    # Operator ---------------------------------------------------------------------------------------------------------

    async def live_requests(self, after: str, count: int) -> LivePage:
        _check_batch(count)
        behind, requests = await self._call("live_requests", after, count, read=self._page)
        return LivePage(after=behind, requests=requests)

    async def pause(self, kind: PauseKind, name: str) -> bool:
        added = await self._call("pause", self._keys.pause(kind, name), PAUSES_MAX, read=int)
        if added < 0:
            raise too_many_pauses()
        await self._watch.confirm()
        return bool(added)

    async def resume(self, kind: PauseKind, name: str) -> bool:
        ended = await self._call("resume", self._keys.pause(kind, name), read=int)
        await self._watch.confirm()
        return bool(ended)

    # Everyone ---------------------------------------------------------------------------------------------------------

    async def find(self, key: RequestKey) -> LiveRequest | TerminalRecord:
        return await self._named("find", key, read=partial(answers.live_or_ended, self._keys))

    async def requests_ahead(self, key: RequestKey) -> tuple[str, int]:
        instance, ahead = await self._named("requests_ahead", key, read=tuple)
        return instance.decode(), int(ahead)

    async def waiting(self, group_id: str, after: int, count: int) -> Sequence[LiveRequest]:
        _check_batch(count)
        return await self._call("waiting", group_id, after, count, read=self._live)

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        _check_batch(len(group_ids or ()))
        await self._watch.refusal()  # also where nobody sends requests, a log that fills its disk is rewritten
        before = self._watch.accepted_count
        overview = await self._call("overview", "all" if group_ids is None else "some", *(group_ids or ()), read=answers.overview)
        self._watch.counted(before, overview.accepted_count)
        return overview

    async def read_events(self, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        return await self._read_stream(self._keys("events"), b"e", after, block_s, count)

    async def report(self, events: Sequence[bytes]) -> None:
        _check_batch(len(events))
        if events:
            entry, keys = {"e": events_entry(events)}, self._keys("events")
            add = partial(self._link.run, self._link.client.xadd, keys, entry, maxlen=self._bounds.events_max, approximate=True)
            await self._sound(add)

    async def publish_waits(self, lease: Lease, body: bytes) -> None:
        await self._call("publish_waits", lease.token, check_waits(body))

    async def read_waits(self) -> WaitsRecord:
        return await self._call("read_waits", read=answers.waits)

    async def publish_profiles(self, lease: Lease, version: int, body: bytes) -> None:
        await self._call("publish_profiles", lease.role, lease.token, version, body)

    async def read_profiles(self) -> tuple[int, bytes]:
        ask = partial(self._link.run, self._link.client.hmget, self._keys("profiles"), ["version", "body"])
        return await self._sound(ask, answers.profiles)

    async def condemn(self, queue_ids: Sequence[str]) -> int:
        _check_batch(len(queue_ids))
        return len(await self._call("condemn", "1", DAMAGED_RESULT, *queue_ids)) // 3 if queue_ids else 0

    async def _give_back(
        self, incarnation: str, cause: str, behind_head: bool, failure: bytes, requests: Sequence[Owned]
    ) -> Sequence[StepStatus]:
        _check_batch(len(requests))
        if not requests:
            return []
        where = "second" if behind_head else "head"
        return await self._steps("give_back", incarnation, cause, where, failure, *arguments.owned(self._keys, requests))

    async def _named(self, function: str, key: RequestKey, *args: Any, read: Callable[[Any], Answer]) -> Answer:
        """Calls a function about one request. Raises NotFound with its names."""
        try:
            return await self._call(function, self._keys.request(key), *args, read=read)
        except NotFound as error:
            raise NotFound("no such request", details={"tenant": key.tenant, "request_id": key.request_id}) from error

    def _live(self, answer: Sequence[Any]) -> list[LiveRequest]:
        return [answers.live_request(self._keys, each) for each in answer]

    def _page(self, answer: Sequence[Any]) -> tuple[str, list[LiveRequest]]:
        return answers.text_of(answer[0]), self._live(answer[1:])


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _check_batch(size: int) -> None:
    if size > BATCH_MAX:
        raise ValueError(f"one call touches at most {BATCH_MAX} ids, not {size}")
