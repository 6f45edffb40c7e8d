"""The whole state of a queue on a server as a `QueueDump`, read key by key: neither atomic nor bounded."""

from __future__ import annotations

import asyncio
from typing import Any

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.request import RequestState
from qlm_queue.keys import Keys, unescape
from qlm_queue.overview import Overview
from qlm_queue.redis import answers
from qlm_queue.redis.answers import DIGEST_BYTES, fixed_fields, state_fields
from qlm_queue.redis.link import RedisLink
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import PLANNER_ROLE, ControlEntry, ControlKind
from queue_dump import GroupDump, InstanceDump, QueueDump, RequestDump, TerminalDump, VirtualQueueDump

_PENDING_MAX = 1_000_000
_READS_AT_ONCE = 1_000


async def dump_redis(queue: RedisQueue) -> QueueDump:
    """Raises ValueError for a key that `keys.py` does not name: nothing may be kept in the dark."""
    link, keys, overview = queue._link, queue._keys, await queue.overview()
    reader = _Reader(link, keys)
    await reader.read()
    requests = reader.requests()
    total, by_tenant, by_class = reader.counts()
    held_total, held_by_tenant, held_by_class = answers.held(await link.call("held", [keys.prefix], []))
    pending, unread = reader.arrivals(requests)
    return QueueDump(
        accepted_count=overview.accepted_count,
        plan_version=overview.plan_version,
        requests=requests,
        groups=reader.groups(overview),
        virtual_queues=tuple(
            VirtualQueueDump(instance=queue.instance, version=queue.version, group_ids=tuple(queue.group_ids))
            for queue in overview.virtual_queues
        ),
        running={name: tuple(sorted(item.decode() for item in ids)) for name, ids in reader.found("running").items()},
        incarnations=tuple(overview.incarnations),
        instances=tuple(InstanceDump(name=record.name, incarnation=record.incarnation, body=record.body) for record in overview.instances),
        leases=reader.leases(),
        live_total=total,
        live_by_tenant=by_tenant,
        live_by_class=by_class,
        held_total=held_total,
        held_by_tenant=held_by_tenant,
        held_by_class=held_by_class,
        kept=reader.kept(),
        arrivals_pending=pending,
        arrivals_unread=unread,
        terminals=reader.terminals(),
        frames={name: tuple(fields[b"f"] for _, fields in entries) for name, entries in reader.found("frames").items()},
        control={name: tuple(map(_control_entry, entries)) for name, entries in reader.found("ctl").items()},
        events=tuple(fields[b"e"] for _, fields in reader.whole("events", [])),
        profiles=reader.profiles(),
        waits=reader.whole("waits", b""),
    )


_COMMANDS: dict[str, tuple[Any, ...]] = {
    "req": ("hgetall",), "result": ("get",), "progress": ("get",), "logprobs": ("get",), "group": ("zrange", 0, -1),
    "group_meta": ("hlen",), "vq": ("llen",), "running": ("smembers",), "lease": ("get",), "fence": ("get",), "frames": ("xrange",),
    "ctl": ("xrange",), "queue": ("xrange",), "groups": ("hlen",), "vq_version": ("hlen",), "address": ("hgetall",),
    "instances": ("hlen",), "registered": ("hlen",), "incarnations": ("scard",), "events": ("xrange",), "acceptance": ("get",),
    "expiry": ("zrange", 0, -1), "kept": ("zrange", 0, -1, False, True), "counts": ("hgetall",), "plan_version": ("get",),
    "profiles": ("hgetall",), "damaged": ("exists",), "damage_count": ("get",),
    "paused": ("hlen",), "version": ("get",), "waits": ("get",),
}  # fmt: skip
"""How each kind of key is read. Content of the overview is only counted."""
_WITH_SUFFIX = frozenset(
    {"req", "result", "progress", "logprobs", "group", "group_meta", "vq", "running", "lease", "fence", "frames", "ctl", "damaged"}
)


class _Reader:
    """All values of a queue, read in three round trips."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys
        self._values: dict[str, dict[str, Any]] = {kind: {} for kind in _COMMANDS}
        self._pending: list[Any] = []
        self._consumer_groups: list[Any] = []
        self._now_s = 0.0

    def found(self, kind: str) -> dict[str, Any]:
        """Rest of the name -> value, sorted; keys that expired meanwhile are left out."""
        return {rest: value for rest, value in self._values[kind].items() if value is not None}

    def whole(self, kind: str, default: Any) -> Any:
        """The value of a key without a rest."""
        return self._values[kind].get("", default)

    async def read(self) -> None:
        pattern = "".join(f"\\{letter}" if letter in "[]*?\\" else letter for letter in self._keys.prefix) + ":*"
        names = sorted(name.decode() for name in await self._link.run(self._link.client.keys, pattern))
        client = self._link.client
        reads, places = [], []
        for name in names:
            kind, _, rest = name[len(self._keys.prefix) + 1 :].partition(":")
            if kind not in _COMMANDS or bool(rest) != (kind in _WITH_SUFFIX):
                raise ValueError(f"keys.py does not name {name!r}")
            command, *args = _COMMANDS[kind]
            reads.append(getattr(client, command)(name, *args))
            places.append((kind, rest))
        queue = self._keys("queue")
        reads += [client.xpending_range(queue, PLANNER_ROLE, "-", "+", _PENDING_MAX), client.xinfo_groups(queue), client.time()]
        found: list[Any] = []
        for first in range(0, len(reads), _READS_AT_ONCE):
            found += await asyncio.gather(*reads[first : first + _READS_AT_ONCE])
        *values, self._pending, self._consumer_groups, (seconds, microseconds) = found
        self._now_s = seconds + microseconds / 1e6
        for (kind, rest), value in zip(places, values, strict=True):
            self._values[kind][rest] = value

    def requests(self) -> tuple[RequestDump, ...]:
        expiring = {queue_id.decode() for queue_id in self.whole("expiry", [])}
        bodies = {entry.decode(): fields for entry, fields in self.whole("queue", [])}
        progress, logprobs = self.found("progress"), self.found("logprobs")
        found = []
        for stored in self.found("req").values():
            queue_id, number, _, prompt_tokens, slo_class = fixed_fields(stored[b"f"])
            attempt, failed, _, _, _, incarnation = state_fields(stored[b"s"])
            entry = bodies.pop(queue_id)
            found.append(
                RequestDump(
                    queue_id=queue_id,
                    key=self._keys.request_key(entry[b"k"].decode()),
                    acceptance_number=int(number),
                    state=RequestState(attempt[0]),
                    digest=stored[b"f"][:DIGEST_BYTES],
                    body=entry[b"r"],
                    model=_model_of(entry[b"r"]),
                    slo_class=slo_class,
                    prompt_tokens=int(prompt_tokens),
                    group_id=stored.get(b"g", b"").decode(),
                    incarnation=incarnation,
                    attempt=int(attempt[1:]),
                    failed_attempts=int(failed),
                    gateway=stored[b"w"].decode(),
                    progress=progress.pop(queue_id, b""),
                    logprobs=logprobs.pop(queue_id, b""),
                    expires=queue_id in expiring,
                )
            )
            expiring.discard(queue_id)
        left = [*bodies, *progress, *logprobs, *expiring]
        if left:
            raise ValueError(f"entries, progress or expiries without a request: {left}")
        return tuple(sorted(found, key=lambda request: request.acceptance_number))

    def groups(self, overview: Overview) -> tuple[GroupDump, ...]:
        unknown = (set(self.found("group")) | set(self.found("group_meta"))) - set(overview.groups)
        if unknown:
            raise ValueError(f"groups without a record: {sorted(unknown)}")
        members = self.found("group")
        return tuple(
            [
                GroupDump(
                    members=tuple(queue_id.decode() for queue_id in members.get(record.group_id, ())),
                    **{name: getattr(record, name) for name in GroupDump.__slots__ if name != "members"},
                )
                for record in overview.groups.values()
            ]
        )

    def leases(self) -> dict[str, tuple[str, str]]:
        addresses = {role.decode(): address.decode() for role, address in self.whole("address", {}).items()}
        return {role: (token.decode(), addresses.get(role, "")) for role, token in self.found("lease").items()}

    def terminals(self) -> tuple[TerminalDump, ...]:
        found = []
        for rest, stored in self.found("result").items():
            if stored == b"erased":
                continue
            attempt, _, queue_id, length, rest_of_it = stored[17:].split(b" ", 4)
            found.append(
                TerminalDump(
                    key=self._keys.request_key(self._keys("req", rest)),
                    state=RequestState(chr(stored[16])),
                    digest=stored[:16],
                    queue_id=queue_id.decode(),
                    attempt=int(attempt),
                    result=rest_of_it[int(length) + 1 :],
                )
            )
        return tuple(sorted(found, key=lambda record: record.key))

    def profiles(self) -> tuple[int, bytes]:
        stored = self.whole("profiles", {})
        return (int(stored[b"version"]), stored[b"body"]) if stored else (0, b"")

    def counts(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """Live requests in all, by tenant and by class, as counted."""
        stored = {name.decode(): int(value) for name, value in self.whole("counts", {}).items()}
        by_tenant = {unescape(name[2:]): number for name, number in stored.items() if name[:2] == "t:"}
        return stored.get("live", 0), by_tenant, {name[2:]: number for name, number in stored.items() if name[:2] == "c:"}

    def kept(self) -> dict[str, tuple[str, str, int]]:
        """Results that are counted and in their window."""
        results = [answers.kept_result(member) for member, end_ms in self.whole("kept", []) if end_ms >= self._now_s * 1000]
        return {queue_id: (tenant, slo_class, size) for queue_id, tenant, slo_class, size in results}

    def arrivals(self, requests: tuple[RequestDump, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Queue ids that are pending, and those that were never read."""
        pending = tuple(item["message_id"].decode() for item in self._pending)
        delivered = next(group["last-delivered-id"].decode() for group in self._consumer_groups if group["name"].decode() == PLANNER_ROLE)
        unread = (
            request.queue_id
            for request in requests
            if request.state is RequestState.ACCEPTED and _order(request.queue_id) > _order(delivered)
        )
        return pending, tuple(unread)


def _control_entry(entry: tuple[bytes, dict[bytes, bytes]]) -> ControlEntry:
    entry_id, fields = entry
    return ControlEntry(
        entry_id=entry_id.decode(),
        kind=ControlKind(fields[b"k"].decode()),
        queue_id=fields[b"i"].decode(),
        attempt=int(fields[b"a"]),
    )


def _order(queue_id: str) -> tuple[int, int]:
    ms, _, sequence = queue_id.partition("-")
    return int(ms), int(sequence)


def _model_of(body: bytes) -> str:
    try:
        return Request.FromString(body).model
    except ValueError:
        return ""
