"""The queue on Redis 7.0+ or Valkey: each operation of the port is one server-side script (lua/)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis

from qlm_core.errors import NotFound, OffsetOutOfRange
from qlm_core.request import RequestKey, RequestState
from qlm_queue import redis_answers as answers
from qlm_queue import redis_arguments as arguments
from qlm_queue.dump import QueueDump
from qlm_queue.event_entry import events_entry
from qlm_queue.expired import EXPIRED_RESULT
from qlm_queue.keys import Keys
from qlm_queue.redis_dump import dump_queue
from qlm_queue.redis_link import RedisLink
from qlm_queue.redis_server_check import check_server, refusals_are_config_errors
from qlm_queue.scripts import Library, library_source
from qlm_queue.values import (
    BATCH_MAX,
    Acceptance,
    AcceptReceipt,
    AppliedChunk,
    Attached,
    Bounds,
    Completion,
    ControlEntry,
    ControlKind,
    Durability,
    Emission,
    GroupPlacement,
    Lease,
    LiveRequest,
    Overview,
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
_CONSUMER_GROUP = "planner"
_CONSUMER = "leader"


class RedisQueue:
    """See `qlm_queue.port.Queue`. `library`: other Lua source than the shipped one, for tests of the tests."""

    def __init__(
        self,
        url: str,
        name: str = "default",
        *,
        durability: Durability = Durability.PROCESS,
        bounds: Bounds | None = None,
        call_timeout_s: float = 2.0,
        library: str | None = None,
    ) -> None:
        self._name = name
        self._keys = Keys(name)
        self._durability = durability
        self._bounds = bounds or Bounds()
        self._link = RedisLink(url, Library(library or library_source()), call_timeout_s)
        self._bound_args: list[Any] = [
            self._bounds.attempts_max,
            round(self._bounds.result_ttl_s * 1000),
            self._bounds.frames_max,
            round(self._bounds.frames_ttl_s * 1000),
            self._bounds.control_max,
            self._bounds.events_max,
        ]

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Raises Unavailable, and ConfigError for a server that refuses what the settings say."""
        try:
            with refusals_are_config_errors():
                await self._link.start()
                await check_server(self._link, self._durability)
                await self._make_consumer_group()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self._link.stop()

    async def server_time_s(self) -> float:
        seconds, microseconds = await self._link.run(self._link.client.time)
        return int(seconds) + int(microseconds) / 1e6

    # Leases -----------------------------------------------------------------------------------------------------------

    async def acquire_lease(self, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
        token = await self._call("acquire_lease", role, nonce, _ms(ttl_s), address)
        return Lease(role=role, token=token.decode()) if token else None

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        await self._call("renew_lease", lease.role, lease.token, _ms(ttl_s), within_s=within_s)

    async def release_lease(self, lease: Lease) -> None:
        await self._call("release_lease", lease.role, lease.token)

    async def leader_address(self, role: str) -> str:
        return answers.text_of(await self._call("leader_address", role))

    # Instances --------------------------------------------------------------------------------------------------------

    async def register(self, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
        incarnation, token = await self._call("register", instance, nonce, body, _ms(ttl_s))
        return incarnation.decode(), Lease(role=incarnation.decode(), token=token.decode())

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
        expire_ms: Any = "" if acceptance.expire_after_s is None else _ms(acceptance.expire_after_s)
        queue_id, number, accepted_ms, state, duplicate = await self._call(
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
        )
        return AcceptReceipt(
            queue_id=queue_id.decode(),
            acceptance_number=int(number),
            accepted_s=int(accepted_ms) / 1000,
            state=RequestState(state.decode()),
            duplicate=duplicate == b"1",
        )

    async def attach(self, key: RequestKey, gateway: str, offset: int) -> Attached:
        if offset < 0:
            raise OffsetOutOfRange("an offset is at least 0", details={"offset": str(offset)})
        try:
            kind, record, output, produced, form = await self._call("attach", self._keys.request(key), gateway, offset)
        except OffsetOutOfRange as error:
            error.details["offset"] = str(offset)
            raise
        except NotFound as error:
            raise _not_found(key) from error
        progress, logprobs = answers.output_parts(output) if form.decode() == answers.LOGPROBS else (output, b"")
        return Attached(
            ended=answers.terminal_record(record) if kind == b"ended" else None,
            live=answers.live_request(self._keys, record) if kind == b"live" else None,
            progress=progress,
            produced=int(produced),
            logprobs=logprobs,
        )

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        try:
            return RequestState(answers.text_of(await self._call("cancel", self._keys.request(key), result)))
        except NotFound as error:
            raise _not_found(key) from error

    async def expire(self, result: bytes) -> int:
        return int(await self._call("expire", result))

    async def read_frames(self, gateway: str, after: str, block_s: float) -> Sequence[StreamEntry]:
        return await self._read_stream(self._keys("frames", gateway), b"f", after, block_s, READ_MAX)

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
            entries = await self._link.read_group(self._keys("queue"), _CONSUMER_GROUP, _CONSUMER, block_s, count - len(found))
            page = await self._call("arrived", *(entry_id for entry_id, _ in entries)) if entries else []
            found += (answers.live_request(self._keys, answer) for answer in page)
            if len(page) == len(entries):
                break
            block_s = 0.0 if found else block_s
        return found

    async def read_unplaced(self, after: str, count: int) -> Sequence[LiveRequest]:
        _check_batch(count)
        found: list[LiveRequest] = []
        while len(found) < count:  # a page may hold few requests that are not placed; the end of the queue ends it
            cursor, *page = await self._call("unplaced", after, count)
            found += (answers.live_request(self._keys, answer) for answer in page)
            after = answers.text_of(cursor)
            if not after:
                break
        return found[:count]

    async def place(self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> Sequence[StepStatus]:
        _check_batch(len(requests))
        _check_batch(len(groups))
        return answers.statuses(await self._call("place", lease.token, *arguments.placements(self._keys, groups, requests)))

    async def regroup(self, lease: Lease, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]) -> Sequence[StepStatus]:
        _check_batch(len(requests))
        if into.group_id == source:
            raise ValueError("the groups are one")
        return answers.statuses(await self._call("regroup", lease.token, *arguments.regrouped(self._keys, source, into, requests)))

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        named = [group_id for segment in chunk.segments for group_id in segment.group_ids]
        _check_batch(len(named))
        if len(set(named)) < len(named):
            raise ValueError("a chunk names a group twice")
        return answers.applied_chunk(await self._call("apply_plan", lease.token, *arguments.plan_chunk(chunk)))

    async def reclaim(self, lease: Lease, incarnation: str, failure: bytes) -> int:
        return int(await self._call("reclaim", lease.token, incarnation, failure))

    async def shed(self, lease: Lease, group_id: str, keep: int, count: int, oldest: bool, failure: bytes) -> int:
        _check_batch(count)
        return int(await self._call("shed", lease.token, group_id, keep, count, "old" if oldest else "new", failure))

    # Agent ------------------------------------------------------------------------------------------------------------

    async def pull(self, lease: Lease, model: str, budget: PullBudget) -> PullResult:
        _check_batch(budget.requests_max)
        answer = await self._call(
            "pull",
            lease.role,
            lease.token,
            model,
            budget.requests_max,
            budget.kv_tokens,
            budget.output_reserve_tokens,
            budget.owned_aside,
            EXPIRED_RESULT,
        )
        return answers.pull_result(self._keys, answer)

    async def owned(self, incarnation: str) -> Sequence[Pulled]:
        ids = sorted(await self._link.run(self._link.client.smembers, self._keys("running", incarnation)))
        found: list[Pulled] = []
        for first in range(0, len(ids), BATCH_MAX):
            page = await self._call("owned", incarnation, *ids[first : first + BATCH_MAX])
            found += (answers.pulled(self._keys, answer) for answer in page)
        return sorted(found, key=lambda request: request.acceptance_number)

    async def unpull(self, incarnation: str, requests: Sequence[Owned], behind_head: bool = False) -> Sequence[StepStatus]:
        return await self._give_back(incarnation, "unpulled", behind_head, b"", requests)

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        _check_batch(len(emissions))
        if not emissions:
            return []
        return answers.statuses(await self._call("emit", incarnation, *arguments.emissions(self._keys, emissions)))

    async def complete(self, incarnation: str, completions: Sequence[Completion]) -> Sequence[StepStatus]:
        _check_batch(len(completions))
        if not completions:
            return []
        return answers.statuses(await self._call("complete", incarnation, *arguments.completions(self._keys, completions)))

    async def requeue(self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes) -> Sequence[StepStatus]:
        return await self._give_back(incarnation, cause.value, cause is RequeueCause.EVICTED, failure, requests)

    async def read_control(self, instance: str, after: str, block_s: float) -> Sequence[ControlEntry]:
        entries = await self._link.read_streams(self._keys("ctl", instance), after, block_s, READ_MAX)
        return [
            ControlEntry(
                entry_id=entry_id.decode(),
                kind=ControlKind(fields[b"k"].decode()),
                queue_id=fields[b"i"].decode(),
                attempt=int(fields[b"a"]),
            )
            for entry_id, fields in entries
        ]

    # Everyone ---------------------------------------------------------------------------------------------------------

    async def find(self, key: RequestKey) -> LiveRequest | TerminalRecord:
        try:
            kind, record = await self._call("find", self._keys.request(key))
        except NotFound as error:
            raise _not_found(key) from error
        return answers.live_request(self._keys, record) if kind == b"live" else answers.terminal_record(record)

    async def requests_ahead(self, key: RequestKey) -> int:
        try:
            return int(await self._call("requests_ahead", self._keys.request(key)))
        except NotFound as error:
            raise _not_found(key) from error

    async def waiting(self, group_id: str, after: int, count: int) -> Sequence[LiveRequest]:
        _check_batch(count)
        found = await self._call("waiting", group_id, after, count)
        return [answers.live_request(self._keys, answer) for answer in found]

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        _check_batch(len(group_ids or ()))
        return answers.overview(await self._call("overview", "all" if group_ids is None else "some", *(group_ids or ())))

    async def read_events(self, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        return await self._read_stream(self._keys("events"), b"e", after, block_s, count)

    async def report(self, events: Sequence[bytes]) -> None:
        _check_batch(len(events))
        if events:
            entry = {"e": events_entry(events)}
            await self._link.run(self._link.client.xadd, self._keys("events"), entry, maxlen=self._bounds.events_max, approximate=True)

    async def publish_profiles(self, lease: Lease, version: int, body: bytes) -> None:
        await self._call("publish_profiles", lease.role, lease.token, version, body)

    async def read_profiles(self) -> tuple[int, bytes]:
        version, body = await self._link.run(self._link.client.hmget, self._keys("profiles"), ["version", "body"])
        return (int(version), body) if version is not None else (0, b"")

    async def dump(self) -> QueueDump:
        """The whole state, for tests: neither atomic nor bounded."""
        return await dump_queue(self._link, self._keys, await self.overview())

    # Inside -----------------------------------------------------------------------------------------------------------

    async def _call(self, function: str, *args: Any, within_s: float | None = None) -> Any:
        return await self._link.call(function, [self._keys.prefix], [*self._bound_args, *args], within_s)

    async def _give_back(
        self, incarnation: str, cause: str, behind_head: bool, failure: bytes, requests: Sequence[Owned]
    ) -> Sequence[StepStatus]:
        _check_batch(len(requests))
        if not requests:
            return []
        where = "second" if behind_head else "head"
        return answers.statuses(await self._call("give_back", incarnation, cause, where, failure, *arguments.owned(self._keys, requests)))

    async def _read_stream(self, stream: str, field: bytes, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        entries = await self._link.read_streams(stream, after, block_s, count)
        return [StreamEntry(entry_id=entry_id.decode(), payload=fields[field]) for entry_id, fields in entries]

    async def _make_consumer_group(self) -> None:
        try:
            await self._link.run(self._link.client.xgroup_create, self._keys("queue"), _CONSUMER_GROUP, "0", True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _check_batch(size: int) -> None:
    if size > BATCH_MAX:
        raise ValueError(f"one call touches at most {BATCH_MAX} ids, not {size}")


def _not_found(key: RequestKey) -> NotFound:
    return NotFound("no such request", details={"tenant": key.tenant, "request_id": key.request_id})
