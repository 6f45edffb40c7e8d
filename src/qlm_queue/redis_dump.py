"""The whole state of a queue on a server as a `QueueDump`, read key by key. For tests: neither atomic nor bounded."""

from __future__ import annotations

from typing import Any

from qlm.api.v1.request_pb2 import Request
from qlm_core.request import RequestState
from qlm_queue.dump import (
    GroupDump,
    InstanceDump,
    QueueDump,
    RequestDump,
    TerminalDump,
    VirtualQueueDump,
)
from qlm_queue.keys import Keys
from qlm_queue.port import PLANNER_ROLE, ControlEntry, ControlKind, Overview
from qlm_queue.redis_link import RedisLink

_PAGE = 10_000


async def dump_queue(link: RedisLink, keys: Keys, overview: Overview) -> QueueDump:
    """Raises ValueError for a key that `keys.py` does not name: nothing may be kept in the dark."""
    reader = _Reader(link, keys)
    await reader.sort_keys()
    requests = await reader.requests()
    return QueueDump(
        accepted_count=overview.accepted_count,
        plan_version=overview.plan_version,
        requests=requests,
        groups=await reader.groups(overview),
        virtual_queues=tuple(
            VirtualQueueDump(instance=queue.instance, version=queue.version, group_ids=tuple(queue.group_ids))
            for queue in overview.virtual_queues
        ),
        running={name: tuple(sorted(await reader.texts("smembers", key))) for name, key in reader.found("running").items()},
        incarnations=tuple(overview.incarnations),
        instances=tuple(InstanceDump(name=record.name, incarnation=record.incarnation, body=record.body) for record in overview.instances),
        leases=await reader.leases(),
        terminals=await reader.terminals(),
        frames={name: await reader.stream_values(key, b"f") for name, key in reader.found("frames").items()},
        control={name: await reader.control(key) for name, key in reader.found("ctl").items()},
        events=await reader.stream_values(keys("events"), b"e"),
        profiles=await reader.profiles(),
        **await reader.counts(),
        **await reader.arrivals(requests),
    )


_WITH_SUFFIX = ("req", "result", "progress", "group", "group_meta", "vq", "running", "lease", "fence", "frames", "ctl")
_WHOLE = frozenset(
    {"queue", "groups", "vq_version", "address", "instances", "registered", "incarnations", "events", "acceptance"}
) | frozenset({"expiry", "counts", "plan_version", "profiles"})


class _Reader:
    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys
        self._found: dict[str, dict[str, str]] = {kind: {} for kind in _WITH_SUFFIX}

    async def run(self, command: str, *args: Any, **options: Any) -> Any:
        return await self._link.run(getattr(self._link.client, command), *args, **options)

    async def texts(self, command: str, *args: Any) -> list[str]:
        return [item.decode() for item in await self.run(command, *args)]

    async def mapping(self, *parts: str) -> dict[str, bytes]:
        return {name.decode(): value for name, value in (await self.run("hgetall", self._keys(*parts))).items()}

    def found(self, kind: str) -> dict[str, str]:
        """Rest of the name -> key, sorted."""
        return self._found[kind]

    async def sort_keys(self) -> None:
        pattern = "".join(f"\\{letter}" if letter in "[]*?\\" else letter for letter in self._keys.prefix) + ":*"
        names: set[str] = set()
        cursor = 0
        while True:
            cursor, page = await self.run("scan", cursor, match=pattern, count=_PAGE)
            names.update(name.decode() for name in page)
            if cursor == 0:
                break
        for name in sorted(names):
            kind, _, rest = name[len(self._keys.prefix) + 1 :].partition(":")
            if rest and kind in self._found:
                self._found[kind][rest] = name
            elif rest or kind not in _WHOLE:
                raise ValueError(f"keys.py does not name {name!r}")

    async def requests(self) -> tuple[RequestDump, ...]:
        expiring = set(await self.texts("zrange", self._keys("expiry"), 0, -1))
        bodies = {entry.decode(): fields for entry, fields in await self.run("xrange", self._keys("queue"))}
        progress = {queue_id: await self.run("get", key) for queue_id, key in self.found("progress").items()}
        found = []
        for key in self.found("req").values():
            fields = {name.decode(): value for name, value in (await self.run("hgetall", key)).items()}
            queue_id = fields["i"].decode()
            entry = bodies.pop(queue_id)
            found.append(
                RequestDump(
                    queue_id=queue_id,
                    key=self._keys.request_key(entry[b"k"].decode()),
                    acceptance_number=int(fields["n"]),
                    state=RequestState(fields["s"].decode()),
                    digest=fields["d"],
                    body=entry[b"r"],
                    model=_model_of(entry[b"r"]),
                    slo_class=fields["c"].decode(),
                    prompt_tokens=int(fields["l"]),
                    group_id=fields.get("g", b"").decode(),
                    incarnation=fields.get("o", b"").decode(),
                    attempt=int(fields.get("a", 0)),
                    failed_attempts=int(fields.get("f", 0)),
                    gateway=fields["w"].decode(),
                    progress=progress.pop(queue_id, b""),
                    expires=queue_id in expiring,
                )
            )
            expiring.discard(queue_id)
        left = [*bodies, *progress, *expiring]
        if left:
            raise ValueError(f"entries, progress or expiries without a request: {left}")
        return tuple(sorted(found, key=lambda request: request.acceptance_number))

    async def groups(self, overview: Overview) -> tuple[GroupDump, ...]:
        unknown = (set(self.found("group")) | set(self.found("group_meta"))) - set(overview.groups)
        if unknown:
            raise ValueError(f"groups without a record: {sorted(unknown)}")
        return tuple(
            [
                GroupDump(
                    group_id=record.group_id,
                    members=tuple(await self.texts("zrange", self._keys("group", record.group_id), 0, -1)),
                    live=record.live,
                    instance=record.instance,
                    last_instance=record.last_instance,
                    waiting_prompt_tokens=record.waiting_prompt_tokens,
                    first_deadline_s=record.first_deadline_s,
                    version=record.version,
                    meta=record.meta,
                )
                for record in overview.groups.values()
            ]
        )

    async def leases(self) -> dict[str, tuple[str, str]]:
        addresses = await self.mapping("address")
        tokens = {role: await self.run("get", key) for role, key in self.found("lease").items()}
        return {role: (token.decode(), addresses.get(role, b"").decode()) for role, token in tokens.items() if token is not None}

    async def terminals(self) -> tuple[TerminalDump, ...]:
        found = []
        for rest, key in self.found("result").items():
            stored = await self.run("get", key)
            if stored is None:
                continue
            line, _, result = stored[17:].partition(b"\n")
            attempt, _, queue_id, _ = line.decode().split(" ")
            found.append(
                TerminalDump(
                    key=self._keys.request_key(self._keys("req", rest)),
                    state=RequestState(chr(stored[16])),
                    digest=stored[:16],
                    queue_id=queue_id,
                    attempt=int(attempt),
                    result=result,
                )
            )
        return tuple(sorted(found, key=lambda record: record.key))

    async def stream_values(self, key: str, field: bytes) -> tuple[bytes, ...]:
        return tuple(fields[field] for _, fields in await self.run("xrange", key))

    async def control(self, key: str) -> tuple[ControlEntry, ...]:
        return tuple(
            ControlEntry(
                entry_id=entry_id.decode(),
                kind=ControlKind(fields[b"k"].decode()),
                queue_id=fields[b"i"].decode(),
                attempt=int(fields[b"a"]),
            )
            for entry_id, fields in await self.run("xrange", key)
        )

    async def profiles(self) -> tuple[int, bytes]:
        stored = await self.mapping("profiles")
        return (int(stored["version"]), stored["body"]) if stored else (0, b"")

    async def counts(self) -> dict[str, Any]:
        stored = {name: int(value) for name, value in (await self.mapping("counts")).items()}
        return {
            "live_total": stored.get("live", 0),
            "live_by_tenant": {
                self._keys.request_key(f"{self._keys.prefix}:req:{name[2:]}:x").tenant: n for name, n in stored.items() if name[:2] == "t:"
            },
            "live_by_class": {name[2:]: number for name, number in stored.items() if name[:2] == "c:"},
        }

    async def arrivals(self, requests: tuple[RequestDump, ...]) -> dict[str, tuple[str, ...]]:
        pending: list[str] = []
        start = "-"
        while page := await self.run("xpending_range", self._keys("queue"), PLANNER_ROLE, start, "+", _PAGE):
            pending += (item["message_id"].decode() for item in page)
            start = "(" + pending[-1]
        groups = await self.run("xinfo_groups", self._keys("queue"))
        delivered = next(group["last-delivered-id"].decode() for group in groups if group["name"].decode() == PLANNER_ROLE)
        unread = (
            request.queue_id
            for request in requests
            if request.state is RequestState.ACCEPTED and _order(request.queue_id) > _order(delivered)
        )
        return {"arrivals_pending": tuple(pending), "arrivals_unread": tuple(unread)}


def _order(queue_id: str) -> tuple[int, int]:
    ms, _, sequence = queue_id.partition("-")
    return int(ms), int(sequence)


def _model_of(body: bytes) -> str:
    try:
        return Request.FromString(body).model
    except ValueError:
        return ""
