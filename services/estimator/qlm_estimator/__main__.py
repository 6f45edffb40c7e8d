"""`qlm estimator`, `python -m qlm_estimator`: one estimator process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from qlm_estimator.config import EstimatorConfig
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.process import EstimatorProcess
from qlm_process.metrics import serve_metrics
from qlm_process.queue.connection import open_queue
from qlm_process.service_command import run_command, service_command


async def _serve(config: EstimatorConfig, stop: asyncio.Event) -> None:
    metrics = EstimatorMetrics()
    queue = open_queue(config.queue)
    process = EstimatorProcess(config, queue, metrics)
    endpoint = serve_metrics(metrics.registry, config.telemetry.metrics_host, config.telemetry.metrics_port)

    def on_ready(address: str) -> None:
        structlog.get_logger().info("ready", address=address, metrics_port=endpoint.port)

    try:
        await process.run(stop, on_ready)
    finally:
        await queue.stop()
        await asyncio.to_thread(endpoint.stop)


TEXT = """Learn output lengths and engine speeds from what happens to requests, publish them as profiles, and predict waits over gRPC.

One of several leads and learns, the others stand by and answer too. Stops on SIGTERM or SIGINT."""

COMMAND = service_command("estimator", EstimatorConfig, text=TEXT, example="estimator.publish_every_s=5", serve=_serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 stopped, 1 failed, 2 wrong configuration or usage."""
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
