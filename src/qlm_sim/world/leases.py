"""Leases of simulated processes: the live keeper and election, on tasks in place of asyncio's."""

from __future__ import annotations

from collections.abc import Callable

from qlm_core.vocabulary.errors import Unavailable
from qlm_process.queue.leases import LeaseKeeper, RoleElection
from qlm_queue.port import Queue
from qlm_queue.values import Lease
from qlm_sim.world.process import Process, Task


class SimLeaseKeeper(LeaseKeeper):
    """`on_lost`: called once when the lease is lost."""

    def __init__(
        self, process: Process, queue: Queue, lease: Lease, *, ttl_s: float, renew_s: float, on_lost: Callable[[], None] | None = None
    ) -> None:
        super().__init__(queue, lease, ttl_s=ttl_s, renew_s=renew_s, sleep=process.sleep, monotonic=process.now_s)
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


def election(
    process: Process,
    queue: Queue,
    role: str,
    address: str,
    *,
    ttl_s: float,
    renew_s: float,
    make_nonce: Callable[[], str],
    on_lost: Callable[[], None] | None = None,
) -> RoleElection:
    """The live election of a role, for a simulated process."""

    def keep(lease: Lease) -> LeaseKeeper:
        return SimLeaseKeeper(process, queue, lease, ttl_s=ttl_s, renew_s=renew_s, on_lost=on_lost)

    return RoleElection(queue, role, address, ttl_s=ttl_s, renew_s=renew_s, make_nonce=make_nonce, sleep=process.sleep, keep=keep)
