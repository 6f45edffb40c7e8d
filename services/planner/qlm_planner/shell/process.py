"""The planner process: waits for the lease as a standby, leads while it holds it, and waits again after its loss."""

from __future__ import annotations

import asyncio

import structlog
from opentelemetry.sdk.trace import TracerProvider

from qlm.api.v1 import planner_pb2_grpc
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import LeaseLost
from qlm_planner.config import PlannerConfig
from qlm_planner.policy import BATCH_MAX
from qlm_planner.shell.leadership import Leadership
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.rpc import PlannerService
from qlm_planner.shell.solver_client import SolverWorker
from qlm_process.grpc_server import GrpcServer
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.connection import reach_queue
from qlm_process.queue.leases import LeaseKeeper, RoleElection
from qlm_queue import values
from qlm_queue.port import Queue
from qlm_queue.values import PLANNER_ROLE

SERVICE_NAME = "qlm.api.v1.Planner"

assert values.BATCH_MAX == BATCH_MAX, "the machine's calls have the queue's size"


class PlannerShell:
    """Created in `__main__`; `run` once. `queue` is not started."""

    def __init__(self, config: PlannerConfig, queue: Queue, metrics: PlannerMetrics, provider: TracerProvider) -> None:
        self._config = config
        self._queue = queue
        self._metrics = metrics
        self._tracer = provider.get_tracer("qlm_planner")
        self._shipped = shipped_snapshot()
        self._clock = ServerClock(queue)
        self.solver = SolverWorker(config.planner.solver, config.planner.solve_timeout_s, on_ready=metrics.solver_up.set)
        self._term: Leadership | None = None
        service = PlannerService(lambda: self._term, lambda: queue.leader_address(PLANNER_ROLE))
        self._server = GrpcServer(
            config.planner.listen,
            [lambda server: planner_pb2_grpc.add_PlannerServicer_to_server(service, server)],
            [SERVICE_NAME],
            config.planner.grpc,
            config.security,
        )
        self.ready = asyncio.Event()

    @property
    def address(self) -> str:
        """Address for clients, once `ready`."""
        return self._config.planner.advertise or self._server.address

    @property
    def term(self) -> Leadership | None:
        """The present term, None on a standby."""
        return self._term

    async def run(self, stop: asyncio.Event, metrics_port: int = 0) -> None:
        """Runs until `stop` is set. Raises ConfigError if it cannot listen. `metrics_port`: for the log event `ready`."""
        await self._server.start()
        try:
            # A standby's solver is warm too, for a quick takeover.
            self.solver.start()
            if not await reach_queue(self._queue, self._clock, stop):
                return
            # A standby serves too: it answers with the leader's address.
            await self._server.set_serving(True)
            structlog.get_logger().info("ready", address=self.address, metrics_port=metrics_port)
            self.ready.set()
            work = asyncio.create_task(self._work(), name="planner-work")
            stopping = asyncio.create_task(stop.wait(), name="planner-stop")
            try:
                await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._server.set_serving(False)
                for task in (work, stopping):
                    task.cancel()
                await asyncio.wait([work, stopping])
            if not work.cancelled():
                work.result()
        finally:
            await self._server.stop()
            await self.solver.stop()
            await self._clock.stop()
            await self._queue.stop()

    async def _work(self) -> None:
        queue = self._config.queue
        election = RoleElection(self._queue, PLANNER_ROLE, self.address, ttl_s=queue.lease_ttl_s, renew_s=queue.lease_renew_s)
        while True:
            keeper = await election.win()
            try:
                await self._lead(keeper)
            except LeaseLost:
                unrenewed_s = round(keeper.renewed_before_s, 3)
                structlog.get_logger().warning("planner_leads_no_more", fence=keeper.lease.fence, renewed_before_s=unrenewed_s)

    async def _lead(self, keeper: LeaseKeeper) -> None:
        """Runs one term. Releases the lease at a stop, so that a standby need not wait for its expiry."""
        try:
            term = Leadership(
                self._queue,
                keeper,
                self._clock.now_s,
                policy=self._config.policy(),
                catalogue=self._config.catalogue(),
                shipped=self._shipped,
                profiles_every_s=self._config.planner.profiles_every_s,
                advice_every_s=self._config.planner.advice_every_s,
                inbox_max=self._config.planner.inbox_max,
                solve=self.solver.submit,
                advise=self.solver.advise,
                metrics=self._metrics,
                tracer=self._tracer,
            )
            self._term = term
            await term.run()
        finally:
            self._term = None
            await keeper.stop(release=True)
