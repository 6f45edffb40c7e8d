"""One agent, put together from its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from opentelemetry.sdk.trace import TracerProvider

from qlm.api.v1 import agent_pb2_grpc
from qlm_agent.config import AgentConfig, instance_facts, machine_settings
from qlm_agent.engines.choice import engine_of
from qlm_agent.shell.reports import Reporter
from qlm_agent.shell.service import AgentService
from qlm_agent.shell.shell import AgentShell
from qlm_agent.telemetry.metrics import AgentMetrics, AgentTelemetry
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.grpc_server import GrpcServer
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.connection import reach_queue
from qlm_queue.port import Queue

SERVICE_NAME = "qlm.api.v1.Agent"


class AgentProcess:
    """An agent and its gRPC server on a queue. Raises ConfigError for settings that do not fit each other."""

    def __init__(self, config: AgentConfig, queue: Queue, metrics: AgentMetrics, provider: TracerProvider) -> None:
        agent = config.agent
        if config.security.key_file and not config.security.service_key_file:
            raise ConfigError("security.service_key_file: an agent needs one beside key_file, to report to the planner")
        made = engine_of(config, shipped_snapshot())
        models = made.models
        self._queue = queue
        self._advertise = agent.advertise
        self._clock = ServerClock(queue)
        self._reporter = Reporter(queue, metrics.dropped_events)
        self._serving: asyncio.Queue[bool] = asyncio.Queue()  # changes not yet set in the health service; each is taken at once
        self.shell = AgentShell(
            queue,
            made.engine,
            instance_facts(agent, tuple(models), address=""),
            machine_settings(agent, models),
            config,
            AgentTelemetry(agent.name, metrics, provider, self._reporter.add),
            profiles={name: model.spec.profile for name, model in models.items()},
            now_s=self._clock.now_s,
            on_serving=self._serving.put_nowait,
        )
        service = AgentService(self.shell)
        self._server = GrpcServer(
            agent.listen,
            [lambda server: agent_pb2_grpc.add_AgentServicer_to_server(service, server)],
            [SERVICE_NAME],
            agent.grpc,
            config.security,
        )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Serves until `stop` is set and all work is finished or given back. `on_ready` gets the address of the Agent service."""
        try:
            if not await reach_queue(self._queue, self._clock, stop):
                return
            await self._server.start()
            beside = [
                asyncio.create_task(self._update_health(), name="health"),
                asyncio.create_task(self._reporter.run(), name="reporter"),
            ]
            try:
                on_ready(self._server.address)
                await self.shell.run(stop, self._advertise or self._server.address)
                await self._reporter.flush()
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.wait(beside)
        finally:
            await self._server.stop()
            await self._clock.stop()

    async def _update_health(self) -> None:
        while True:
            await self._server.set_serving(await self._serving.get())
