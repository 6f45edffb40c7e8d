"""Holding a lease: renewing it while it is ours, and winning a role as its leader."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import structlog

from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_queue.port import Queue
from qlm_queue.values import Lease

NONCE_BYTES = 8

Sleep = Callable[[float], Awaitable[None]]
"""Waits so many seconds: those of the process, or virtual ones."""


def new_nonce() -> str:
    """Makes a nonce that distinguishes two holders of the same name."""
    return secrets.token_hex(NONCE_BYTES)


class LeaseKeeper:
    """Renews a lease every `renew_s`. A renewal has half of what is then left of the lease (a third of all, where it is renewed every
    third); without an answer it is sent again at once, on another connection: a lost answer does not cost the lease.

    `lost` is set when the server says so (or a bug ended the renewing); a lost lease is never renewed. While the server is away the
    keeper goes on trying: nobody can take a lease there, and scripts with an old one change nothing.

    A process that does not run for `ttl_s` - `renew_s`, or a server that takes so long, costs the lease. The log line of a loss says which:
    how late this process renewed, how long the last call was under way, and how long ago the lease was renewed.
    """

    def __init__(
        self,
        queue: Queue,
        lease: Lease,
        *,
        ttl_s: float,
        renew_s: float,
        sleep: Sleep = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`monotonic`: a clock for what the log says."""
        self.lease = lease
        self.lost = asyncio.Event()
        self._queue = queue
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._within_s = (ttl_s - renew_s) / 2.0
        self._sleep = sleep
        self._monotonic = monotonic
        self._renewed_s = monotonic()
        self._task: asyncio.Task[None] | None = None

    @property
    def renewed_before_s(self) -> float:
        """Seconds since the last answered renewal was sent, or since the lease was won."""
        return self._monotonic() - self._renewed_s

    async def start(self) -> None:
        """Begins to renew. Safe twice."""
        if self._task is None and not self.lost.is_set():
            self._task = asyncio.create_task(self._keep(), name=f"lease-{self.lease.role}")

    async def stop(self, *, release: bool = False) -> None:
        """Ends renewing, and gives the lease back if `release` (where the server is away it expires). Safe unstarted and twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # raises what ended the renewing, if it was not the loss of the lease
        if release and not self.lost.is_set():
            try:
                await self._queue.release_lease(self.lease)
            except Unavailable as error:
                structlog.get_logger().warning("lease_not_released", role=self.lease.role, error=str(error))

    async def _keep(self) -> None:
        try:
            await self._renew_until_lost()
        except Exception:
            self.lost.set()  # the holder must not go on as if it held the lease; stop() raises this error
            raise
        self.lost.set()

    async def _renew_until_lost(self) -> None:
        pause_s = self._renew_s
        while True:
            slept_s = self._monotonic()
            await self._sleep(pause_s)
            sent_s = self._monotonic()
            try:
                await self._queue.renew_lease(self.lease, self._ttl_s, self._within_s)
            except (LeaseLost, Unavailable) as error:
                lost = isinstance(error, LeaseLost)
                structlog.get_logger().warning(
                    "lease_lost" if lost else "lease_not_renewed",
                    role=self.lease.role,
                    error=str(error),
                    woke_late_s=round(max(0.0, sent_s - slept_s - pause_s), 3),
                    answered_after_s=round(self._monotonic() - sent_s, 3),
                    renewed_before_s=round(self.renewed_before_s, 3),
                )
                if lost:
                    return
                pause_s = max(0.0, min(self._renew_s, self._within_s) - (self._monotonic() - sent_s))
            else:
                self._renewed_s = sent_s
                pause_s = self._renew_s


class RoleElection:
    """Wins a role that one process of a queue may have at a time (planner, estimator)."""

    def __init__(
        self,
        queue: Queue,
        role: str,
        address: str,
        *,
        ttl_s: float,
        renew_s: float,
        make_nonce: Callable[[], str] = new_nonce,
        sleep: Sleep = asyncio.sleep,
        keep: Callable[[Lease], LeaseKeeper] | None = None,
    ) -> None:
        """`keep`: makes the keeper of a lease that was won."""
        self._queue = queue
        self._role = role
        self._address = address
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._make_nonce = make_nonce
        self._sleep = sleep
        self._keep = keep or self._kept

    async def win(self) -> LeaseKeeper:
        """Waits as a standby until the role is free, trying every `renew_s`, also while the server is away; returns the started keeper.
        One nonce for one wait, so that an acquisition whose answer was lost is found again."""
        nonce = self._make_nonce()
        announced = False
        while True:
            try:
                lease = await self._queue.acquire_lease(self._role, nonce, self._ttl_s, self._address)
            except Unavailable as error:
                structlog.get_logger().warning("lease_not_acquired", role=self._role, error=str(error))
                lease = None
            if lease is not None:
                keeper = self._keep(lease)
                await keeper.start()
                structlog.get_logger().info("lease_acquired", role=self._role, fence=lease.fence)
                return keeper
            if not announced:
                structlog.get_logger().info("lease_awaited", role=self._role)
                announced = True
            await self._sleep(self._renew_s)

    def _kept(self, lease: Lease) -> LeaseKeeper:
        return LeaseKeeper(self._queue, lease, ttl_s=self._ttl_s, renew_s=self._renew_s)
