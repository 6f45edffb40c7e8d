"""Damages records of a memory queue, at random: lost, cut, of another request."""

from __future__ import annotations

import random
from typing import Any, cast

from qlm_queue.memory.state import MemoryState, StoredRequest


def damage(state: MemoryState, chance: random.Random) -> str:
    """One record. Returns the id of the request that it was of, "" where it was of none, as far as the request itself is hit."""
    tables: dict[str, Any] = {
        "by_key": state.by_key,
        "requests": state.requests,
        "groups": state.groups,
        "instances": state.instances,
        "leases": state.leases,
        "running": state.running,
        "unplaced": state.unplaced,
        "queues": {name: queue for name, queue in state.queues.items() if name != "unassigned"},
    }
    parts = ["members", "group ids", "owned", "progress", "group", "state", "tenants", "bytes", "expiries"]
    what = chance.choice([*(name for name, table in tables.items() if table), *parts])
    requests = list(state.requests.values())
    request = chance.choice(requests) if requests else None
    match what:
        case "members":
            for group in state.groups.values():
                group.members[:] = group.members[: chance.randrange(len(group.members) + 1)]
        case "group ids":
            for queue in state.queues.values():
                queue.group_ids[:] = [*queue.group_ids[:-1], "gone"]
        case "owned":
            for owned in state.running.values():
                owned.clear()
        case "tenants":
            state.live_by_tenant.clear()
        case "bytes":
            state.held_total = 0
        case "expiries":
            state.expiries.clear()
        case "progress" if request is not None and request.progress:
            del request.progress[-chance.randrange(1, len(request.progress) + 1) :]
            return request.key.request_id
        case "group" if request is not None:
            request.group_id = chance.choice(requests).group_id
        case "state" if request is not None:
            request.state = cast(Any, chance.choice([None, *(each.state for each in requests)]))
            return request.key.request_id
        case _ if what in tables:
            key = chance.choice(sorted(tables[what], key=str))
            lost = getattr(state, what).pop(key)
            return lost.key.request_id if isinstance(lost, StoredRequest) and what != "unplaced" else ""
        case _:
            pass
    return ""
