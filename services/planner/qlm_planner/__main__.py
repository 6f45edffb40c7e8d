"""`qlm planner`: starts one planner process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from qlm_planner.config import PlannerConfig
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.process import PlannerShell
from qlm_process.metrics import serve_metrics
from qlm_process.queue.connection import open_queue
from qlm_process.service_command import run_command, service_command
from qlm_process.tracing import configure_tracing


async def _serve(config: PlannerConfig, stop: asyncio.Event) -> None:
    metrics = PlannerMetrics()
    provider = configure_tracing("planner", config.planner.name)
    endpoint = serve_metrics(metrics.registry, config.telemetry.metrics_host, config.telemetry.metrics_port)
    try:
        await PlannerShell(config, open_queue(config.queue), metrics, provider).run(stop, endpoint.port)
    finally:
        await asyncio.to_thread(endpoint.stop)
        await asyncio.to_thread(provider.shutdown)


TEXT = """Group requests and order the groups on the instances' virtual queues.

Several planners may run for one queue: one leads, the others take over when its lease ends. Stops on SIGTERM or SIGINT."""

COMMAND = service_command("planner", PlannerConfig, text=TEXT, example="planner.delta=2", serve=_serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 stopped, 1 failed, 2 wrong configuration or usage."""
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
