"""Reports to the queue (tiers of models, running requests) and to the planner (this instance, its load). Best effort: the queue's own state
of requests counts, so a failure is only logged, and everything is reported again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc.aio
import structlog

from qlm.api.v1 import instance_pb2, planner_pb2, planner_pb2_grpc
from qlm.credentials import Credentials
from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.wire.instance import to_proto
from qlm_queue.port import Queue
from qlm_queue.values import PLANNER_ROLE

DEADLINE_S = 1.0


class Announcer:
    """Announces each incarnation once to each leader, and once more when it drains; then reports its load every `every_s`, and at once
    after `hurry`: a plan for a model that is being replaced would make it active again."""

    def __init__(
        self,
        queue: Queue,
        every_s: float,
        facts: Callable[[], InstanceFacts],
        load: Callable[[], instance_pb2.InstanceLoad],
        publish: Callable[[instance_pb2.InstanceLoad], Awaitable[None]],
        credentials: Credentials,
    ) -> None:
        """`publish`: reports to the queue, by the load. `load` is called every `every_s` in any case: it feeds the metrics.
        `credentials`: for planners."""
        self._queue = queue
        self._every_s = every_s
        self._facts = facts
        self._load = load
        self._publish = publish
        self._credentials = credentials
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._announced = ("", "", False)
        self._due = asyncio.Event()

    def hurry(self) -> None:
        """Has the load reported at once."""
        self._due.set()

    async def run(self) -> None:
        """Reports until it is cancelled."""
        try:
            while True:
                try:
                    await self._announce()
                except (Unavailable, LeaseLost, grpc.aio.AioRpcError) as error:
                    self._announced = ("", "", False)
                    structlog.get_logger().debug("load_report_failed", address=self._address, error=str(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._every_s):
                        await self._due.wait()
                self._due.clear()
        finally:
            await self._close()

    async def _announce(self) -> None:
        facts, load = self._facts(), self._load()
        if not facts.incarnation:
            return
        await self._publish(load)
        address = await self._queue.leader_address(PLANNER_ROLE)
        if address != self._address:
            await self._close()
            self._address = address
        if not address:
            return
        if self._channel is None:
            self._channel = self._credentials.aio_channel(address)
        stub: planner_pb2_grpc.PlannerAsyncStub = planner_pb2_grpc.PlannerStub(self._channel)
        metadata = self._credentials.metadata
        if self._announced != (address, facts.incarnation, facts.draining):
            register = planner_pb2.RegisterInstanceRequest(instance=to_proto(facts))
            await stub.RegisterInstance(register, timeout=DEADLINE_S, metadata=metadata)
            self._announced = (address, facts.incarnation, facts.draining)
        heartbeat = planner_pb2.HeartbeatRequest(incarnation=facts.incarnation, load=load)
        await stub.Heartbeat(heartbeat, timeout=DEADLINE_S, metadata=metadata)

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
