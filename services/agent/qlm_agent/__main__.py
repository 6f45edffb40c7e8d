"""`qlm agent`, `python -m qlm_agent`: one agent process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from qlm_agent.config import AgentConfig
from qlm_agent.shell.process import AgentProcess
from qlm_agent.telemetry.metrics import AgentMetrics
from qlm_process.gen_ai import configure_metering
from qlm_process.metrics import serve_metrics
from qlm_process.queue.connection import open_queue
from qlm_process.service_command import run_command, service_command
from qlm_process.tracing import configure_tracing


async def _serve(config: AgentConfig, stop: asyncio.Event) -> None:
    metrics = AgentMetrics()
    queue = open_queue(config.queue)
    provider = configure_tracing("agent", config.agent.name)
    metering = configure_metering("agent", config.agent.name)
    if metering is not None:
        metrics.gen_ai.export_to(metering)
    process = AgentProcess(config, queue, metrics, provider)
    endpoint = serve_metrics(metrics.registry, config.telemetry.metrics_host, config.telemetry.metrics_port)

    def on_ready(address: str) -> None:
        structlog.get_logger().info("ready", address=address, metrics_port=endpoint.port)

    try:
        await process.run(stop, on_ready)
    finally:
        await queue.stop()
        await asyncio.to_thread(endpoint.stop)
        await asyncio.to_thread(provider.shutdown)
        if metering is not None:
            await asyncio.to_thread(metering.shutdown)


TEXT = """Run one instance: pull requests from its virtual queue, drive its engine, and send the tokens.

SIGTERM or SIGINT drains it: it stops pulling, running requests go on for agent.drain_finish_s seconds, the rest go back to the queue."""

COMMAND = service_command("agent", AgentConfig, text=TEXT, example="agent.batch_max=64", serve=_serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 stopped, 1 failed, 2 wrong configuration or usage."""
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
