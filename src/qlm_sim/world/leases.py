"""Leases of simulated processes: the live keeper and election, on tasks in place of asyncio's."""

from __future__ import annotations

from collections.abc import Callable

from qlm_core.vocabulary.errors import Unavailable
from qlm_process.queue.leases import LeaseKeeper, RoleElection
from qlm_queue.port import Queue
from qlm_queue.values import Lease
from qlm_sim.world.process import Process, Task
from qlm_sim.world.site import Site


class SimLeaseKeeper(LeaseKeeper):
    """`on_lost`: called once when the lease is lost."""

    def __init__(self, site: Site, process: Process, queue: Queue, lease: Lease, on_lost: Callable[[], None] | None = None) -> None:
        described = site.description
        super().__init__(
            queue, lease, ttl_s=described.lease_ttl_s, renew_s=described.lease_renew_s, sleep=process.sleep, monotonic=process.now_s
        )
        self._process = process
        self._on_lost = on_lost
        self._renewing: Task | None = None

    async def start(self) -> None:
        self._renewing = self._process.spawn(self._renew())

    async def _renew(self) -> None:
        await self._keep()
        if self._on_lost is not None:
            self._on_lost()

    async def stop(self, *, release: bool = False) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if release and not self.lost.is_set():
            try:
                await self._queue.release_lease(self.lease)
            except Unavailable:
                return  # it expires


def election(site: Site, process: Process, queue: Queue, role: str, on_lost: Callable[[], None] | None = None) -> RoleElection:
    """The live election of a role, for a simulated process, whose address is its name with port 0."""
    return RoleElection(
        queue,
        role,
        f"{process.name}:0",
        ttl_s=site.description.lease_ttl_s,
        renew_s=site.description.lease_renew_s,
        make_nonce=lambda: f"{process.name}-{site.new_id()}",
        sleep=process.sleep,
        keep=lambda lease: SimLeaseKeeper(site, process, queue, lease, on_lost),
    )
