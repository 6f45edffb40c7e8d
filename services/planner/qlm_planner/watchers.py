"""Those who watch the plan. Each has room for one plan that it has not taken yet: a slow one skips to the newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from qlm.api.v1 import planner_pb2
from qlm_core.errors import Unavailable


class Watchers:
    """At most `watchers_max` of them."""

    def __init__(self, watchers_max: int) -> None:
        self._most = watchers_max
        self._rooms: list[asyncio.Queue[planner_pb2.Plan | None]] = []

    @property
    def any(self) -> bool:
        return bool(self._rooms)

    @contextmanager
    def watch(self) -> Iterator[AsyncIterator[planner_pb2.Plan]]:
        """Plans as they come, until `end`. Raises Unavailable where too many watch."""
        if len(self._rooms) >= self._most:
            raise Unavailable(f"{self._most} watch the plan already", details={"retry_after_s": "5"})
        room: asyncio.Queue[planner_pb2.Plan | None] = asyncio.Queue(maxsize=1)
        self._rooms.append(room)
        try:
            yield _plans(room)
        finally:
            self._rooms.remove(room)

    def send(self, plan: planner_pb2.Plan) -> None:
        for room in self._rooms:
            _replace(room, plan)

    def end(self) -> None:
        """This process leads no more."""
        for room in self._rooms:
            _replace(room, None)


async def _plans(room: asyncio.Queue[planner_pb2.Plan | None]) -> AsyncIterator[planner_pb2.Plan]:
    while (plan := await room.get()) is not None:
        yield plan


def _replace(room: asyncio.Queue[planner_pb2.Plan | None], plan: planner_pb2.Plan | None) -> None:
    if room.full():
        room.get_nowait()
    room.put_nowait(plan)
