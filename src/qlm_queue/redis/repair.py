"""A repair of a whole queue on a server: all keys, all requests, all groups, page by page (lua/repair.lua)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from qlm_queue.damage import DAMAGED_RESULT, Damage
from qlm_queue.keys import Keys
from qlm_queue.redis.answers import kept_parts, text_of
from qlm_queue.redis.link import RecordDamaged, RedisLink

PAGE = 200
"""Requests or keys that one call checks."""
ROUNDS_MAX = 4
"""Most rounds: a repair may uncover more damage (a group that is dissolved leaves requests without one)."""

Call = Callable[..., Awaitable[Any]]


async def repair_queue(link: RedisLink, keys: Keys, call: Call, make_consumer_group: Call, *, mend: bool) -> list[Damage]:
    """Checks every record, and repairs the damaged ones where `mend`. Safe beside all other calls, and twice."""
    repair = _Repair(link, keys, call, make_consumer_group if mend else None)
    found: list[Damage] = []
    for _ in range(ROUNDS_MAX if mend else 1):
        seen = await repair.round()
        found += seen
        if not seen:
            break
    return found


class _Repair:
    """`make_consumer_group`: None where nothing is to be mended."""

    def __init__(self, link: RedisLink, keys: Keys, call: Call, make_consumer_group: Call | None) -> None:
        self._link = link
        self._keys = keys
        self._call = call
        self._make_consumer_group = make_consumer_group
        self._found: list[Damage] = []

    async def round(self) -> list[Damage]:
        self._found = []
        names = await self._names()
        of_requests = [name for name in names if name.startswith(self._keys("req", "").encode())]
        await self._scan(sorted(set(names) - set(of_requests), key=lambda name: (name.count(b":"), name)))
        if self._make_consumer_group is not None:
            await self._make_consumer_group()
        after, highest = "", 0
        while True:
            last, number, *report = await self._ask("repair_requests", after, PAGE)
            self._note(report)
            after, highest = text_of(last), max(highest, int(number))
            if not after:
                break
        await self._scan(of_requests)
        await self._count_results({name for name in names if name.startswith(self._keys("result", "").encode())})
        self._note(await self._ask("repair_groups"))
        for gid in sorted(await self._link.run(self._link.client.hkeys, self._keys("groups"))):
            number = b"0"
            while number:
                number, *report = await self._ask("repair_members", gid, number)
                self._note(report)
        self._note(await self._ask("repair_counts", "1" if self._found else "", highest))
        return self._found

    async def _ask(self, function: str, *args: Any) -> Any:
        return await self._call(function, "1" if self._make_consumer_group else "", DAMAGED_RESULT, *args)

    def _note(self, report: Sequence[bytes]) -> None:
        self._found += (
            Damage(record=text_of(record), problem=text_of(problem), remedy=text_of(remedy))
            for record, problem, remedy in zip(*[iter(report)] * 3, strict=True)
        )

    async def _scan(self, names: Sequence[bytes]) -> None:
        for first in range(0, len(names), PAGE):
            self._note(await self._ask("repair_keys", *names[first : first + PAGE]))

    async def _count_results(self, names: set[bytes]) -> None:
        """Compares the results with those that are counted; mismatches are checked again in a step."""
        uncounted, doubtful = set(names), list[bytes]()
        cursor = 0
        while True:
            try:
                cursor, page = await self._link.run(self._link.client.zscan, self._keys("kept"), cursor, None, PAGE)
            except RecordDamaged:  # of another type: set aside where that is mended
                break
            for member, _ in page:
                try:
                    name = self._keys("result", "").encode() + kept_parts(member)[-1]
                except ValueError:
                    name = b""
                if name not in names:
                    doubtful.append(member)
                uncounted.discard(name)
            if not cursor:
                break
        pairs = [*((member, b"") for member in doubtful), *((b"", name) for name in sorted(uncounted))]
        for first in range(0, len(pairs), PAGE):
            self._note(await self._ask("repair_kept", *(part for pair in pairs[first : first + PAGE] for part in pair)))

    async def _names(self) -> set[bytes]:
        pattern = "".join(f"\\{letter}" if letter in "[]*?\\" else letter for letter in self._keys.prefix) + ":*"
        names: set[bytes] = set()
        cursor = 0
        while True:
            cursor, page = await self._link.run(self._link.client.scan, cursor, pattern, 1000)
            names.update(page)
            if not cursor:
                return names
