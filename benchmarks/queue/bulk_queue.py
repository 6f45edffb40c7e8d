"""The queue for filling it with hundreds of thousands of requests in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.group import slo_class
from qlm_core.vocabulary.request import RequestKey, Slo, SloKind
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import BATCH_MAX, PLANNER_ROLE, Acceptance, AcceptReceipt, Bounds, GroupPlacement, Lease, RequestPlacement

CALLS_MAX = 200
"""Calls under way at a time."""
CALL_TIMEOUT_S = 30.0
LEASE_S = 7_200.0
FULL_BOUNDS = Bounds(queue_max=1_000_000, tenant_max=1_000_000, class_max=1_000_000)
"""Bounds that refuse nothing."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def acceptance_of(request: Request, gateway: str = "") -> Acceptance:
    """The acceptance of a request, as a gateway stores it."""
    body = request.SerializeToString()
    return Acceptance(
        key=RequestKey(request.tenant, request.request_id),
        body=body,
        digest=blake2b(body, digest_size=16).digest(),
        gateway=gateway,
        slo_class=slo_class(Slo(kind=SloKind.COMPLETION, seconds=request.admission.slo.seconds)),
        prompt_tokens=request.admission.prompt_tokens,
    )


class BulkQueue(RedisQueue):
    """As `RedisQueue`, which writes the calls of one turn together, with the bounds and deadlines of a filling."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name, bounds=FULL_BOUNDS, call_timeout_s=CALL_TIMEOUT_S)
        self.url = url

    async def accept_all(self, acceptance: Callable[[int], Acceptance], count: int) -> list[AcceptReceipt]:
        """Accepts the requests of the numbers from 0 on, in order."""
        found: list[AcceptReceipt] = []
        async for receipts in in_bulk(lambda number: self.accept(acceptance(number)), range(count)):
            found += receipts
        return found

    async def place_all(self, lease: Lease, groups: Iterable[tuple[GroupPlacement, Sequence[RequestPlacement]]]) -> None:
        """Puts groups with their requests at the ends of their virtual queues."""
        calls = [(group, part) for group, requests in groups for part in chunks(requests, BATCH_MAX)]
        async for _ in in_bulk(lambda call: self.place(lease, [call[0]], call[1]), calls):
            pass

    async def planner_lease(self) -> Lease:
        """The planner's lease of a new queue."""
        lease = await self.acquire_lease(PLANNER_ROLE, "bench", LEASE_S, "127.0.0.1:1")
        assert lease is not None, "a new server has no leases"
        return lease


@asynccontextmanager
async def bulk_queue(folder: Path, name: str) -> AsyncIterator[BulkQueue]:
    """A queue on a server of its own, whose folder is removed before and after: its log is long."""
    rmtree(folder, ignore_errors=True)
    server = EmbeddedServer(folder)
    queue = BulkQueue(await server.start(), name)
    try:
        await queue.start()
        yield queue
    finally:
        await queue.stop()
        await server.stop()
        rmtree(folder, ignore_errors=True)


def chunks(items: Iterable[Item], size: int) -> Iterable[list[Item]]:
    """Lists of `size` items, the last one perhaps shorter."""
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk


async def in_bulk(call: Callable[[Item], Awaitable[Answer]], items: Iterable[Item]) -> AsyncIterator[Sequence[Answer]]:
    """The answers to a call for each item, CALLS_MAX at a time."""
    for chunk in chunks(items, CALLS_MAX):
        yield await asyncio.gather(*(call(item) for item in chunk))
