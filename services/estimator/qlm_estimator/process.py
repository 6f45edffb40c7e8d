"""One estimator process: the leader's loop, the service and its health, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qlm.api.v1.estimator_pb2_grpc import add_EstimatorServicer_to_server
from qlm_core.profiles.hardware_prior import model_facts
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_estimator.config import EstimatorConfig
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.service import EstimatorService
from qlm_estimator.shell import EstimatorShell
from qlm_process.grpc_server import GrpcServer
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.connection import reach_queue
from qlm_process.queue.leases import RoleElection
from qlm_queue.port import Queue
from qlm_queue.values import ESTIMATOR_ROLE

SERVICE_NAME = "qlm.api.v1.Estimator"
HEALTH_EVERY_S = 1.0
"""How often health follows whether the queue's server answers."""


class EstimatorProcess:
    """Runs one estimator on a queue, which its caller stops."""

    def __init__(self, config: EstimatorConfig, queue: Queue, metrics: EstimatorMetrics) -> None:
        """Raises ConfigError for a model of which neither a hardware profile nor facts are known."""
        self._config = config
        self._queue = queue
        self._metrics = metrics
        self._shipped = shipped_snapshot()
        self._catalogue = config.catalogue()
        known = sorted({row.model for row in self._shipped.hardware} | set(model_facts()))
        for model in config.models:
            if model.profile not in known and model.facts is None:
                raise ConfigError(
                    f"models.{model.name}.profile: nothing is known of {model.profile!r}; may be one of {', '.join(known)}, or give facts"
                )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Serves and learns until `stop`; `on_ready` gets the address. The server of the queue is waited for."""
        settings = self._config.estimator
        clock = ServerClock(self._queue)
        shell = EstimatorShell(
            queue=self._queue,
            clock=clock,
            settings=settings,
            catalogue=self._catalogue,
            shipped=self._shipped,
            metrics=self._metrics,
        )
        service = EstimatorService(queue=self._queue, clock=clock, shipped=self._shipped, leader=shell)
        add = [lambda to: add_EstimatorServicer_to_server(service, to)]
        server = GrpcServer(settings.listen, add, [SERVICE_NAME], settings.grpc, self._config.security)
        try:
            if not await reach_queue(self._queue, clock, stop):
                return
            await server.start()
            address = settings.advertise or server.address
            queue = self._config.queue
            election = RoleElection(self._queue, ESTIMATOR_ROLE, address, ttl_s=queue.lease_ttl_s, renew_s=queue.lease_renew_s)
            await server.set_serving(True)
            on_ready(address)
            async with asyncio.TaskGroup() as group:
                leader = group.create_task(shell.run(election), name="estimator-leader")
                health = group.create_task(self._follow_health(server), name="estimator-health")
                await stop.wait()
                health.cancel()
                await asyncio.wait([health])
                # Nobody is sent here any more before the lease is given back, so that the standby leads without waiting for it to expire.
                await server.set_serving(False)
                leader.cancel()
        finally:
            await server.stop()
            await clock.stop()

    async def _follow_health(self, server: GrpcServer) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                await self._queue.server_time_s()
            except Unavailable:  # health reports it; the leader's loop logs it
                await server.set_serving(False)
            else:
                await server.set_serving(True)
