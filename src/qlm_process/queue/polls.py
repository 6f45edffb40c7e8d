"""Readings of the queue for those who read it again and again: all queues and instances each time, and the groups in pages.

A whole overview stops the queue's server for 11 us a group, which is a tenth of a second for 10,000 groups. So with many groups a reading
has only those that have changed most likely: groups that are new or left their queue, those that are served next, and those that requests
join; and of all others some in turn. These are as last seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from qlm_queue.overview import Overview
from qlm_queue.port import Queue
from qlm_queue.values import GroupRecord

WHOLE_GROUPS = 500
"""Groups that every poll reads."""
PAGE_GROUPS = 500
"""Groups of a poll where there are more."""
TURN_GROUPS = 100
"""Groups of a page that are read in turn, at the least."""
HEADS = 2
"""Groups of each queue that are served next."""
WHOLE_EVERY_S = 30.0
"""All groups are read so often: a group that opened and drained between two polls, while its requests run, is in no queue."""

_Key = tuple[str, ...]


@dataclass(slots=True)
class QueuePolls:
    """`poll` by one caller at a time."""

    queue: Queue
    _known: dict[str, GroupRecord] = field(default_factory=dict)
    _keys: dict[str, _Key] = field(default_factory=dict)
    _listed: dict[str, str] = field(default_factory=dict)
    _heads: list[str] = field(default_factory=list)
    _turn: deque[str] = field(default_factory=deque)
    _whole_s: float | None = None

    async def poll(self, now_s: float) -> Overview:
        """The present queue, without counts of groups that are not read this time. `now_s`: monotonic. Raises Unavailable."""
        due = self._whole_s is None or not 0.0 <= now_s - self._whole_s < WHOLE_EVERY_S
        if due or len(self._known) <= WHOLE_GROUPS:
            seen = await self.queue.overview()
            self._known, self._keys, self._whole_s = dict(seen.groups), {}, now_s
            self._place(seen)
            return seen
        page = self._page()
        seen = await self.queue.overview(page)
        for group_id in page:
            self._known.pop(group_id, None)
        self._known.update(seen.groups)
        self._place(seen)
        return replace(seen, groups=dict(self._known))

    def _place(self, seen: Overview) -> None:
        """Groups are where the poll found them."""
        self._keys = {group_id: self._keys.get(group_id) or _key(record.meta) for group_id, record in self._known.items()}
        self._listed = {group_id: record.instance for record in seen.virtual_queues for group_id in record.group_ids}
        self._heads = [group_id for record in seen.virtual_queues for group_id in record.group_ids[:HEADS]]
        for group_id, record in self._known.items():
            instance = self._listed.get(group_id, "")
            if record.instance != instance:
                self._known[group_id] = replace(record, instance=instance, waiting=record.waiting if instance else 0)

    def _page(self) -> tuple[str, ...]:
        known = self._known
        changed = dict.fromkeys(group_id for group_id in self._listed if group_id not in known)
        changed |= dict.fromkeys((*self._heads, *self._newest()))
        changed |= dict.fromkeys(group_id for group_id, record in known.items() if not record.instance)
        page = dict.fromkeys([*changed][: PAGE_GROUPS - TURN_GROUPS])
        if not self._turn:
            self._turn.extend(known)
        while self._turn and len(page) < PAGE_GROUPS:
            page[self._turn.popleft()] = None
        return tuple(page)

    def _newest(self) -> Iterable[str]:
        """The open group of each key that opened last, which new requests join."""
        newest: dict[_Key, GroupRecord] = {}
        for group_id, record in self._known.items():
            if record.instance:
                other = newest.get(self._keys[group_id])
                if other is None or record.first_deadline_s > other.first_deadline_s:
                    newest[self._keys[group_id]] = record
        return [record.group_id for record in newest.values()]


def _key(meta: Mapping[str, str]) -> _Key:
    return tuple(meta.get(name, "") for name in ("model", "slo_kind", "slo_class", "token_class"))
