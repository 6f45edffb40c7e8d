"""`qlm gateway`, `python -m qlm_gateway`: one gateway process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from uuid import uuid4

import structlog

from qlm_gateway.config import GatewayConfig
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.shell import Gateway
from qlm_process.metrics import serve_metrics
from qlm_process.queue.connection import open_queue
from qlm_process.service_command import run_command, service_command
from qlm_process.tracing import configure_tracing


async def _serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    provider = configure_tracing("gateway", config.gateway.name)
    metrics = GatewayMetrics()
    queue = open_queue(config.queue)
    endpoint = serve_metrics(metrics.registry, config.telemetry.metrics_host, config.telemetry.metrics_port)
    gateway = Gateway(config, queue, provider, lambda: uuid4().hex, metrics)

    def on_ready(address: str) -> None:
        urls = {"http": gateway.http_url, "admin": gateway.admin_url}
        structlog.get_logger().info("ready", address=address, **urls, metrics_port=endpoint.port, gateway=gateway.gateway_id)

    try:
        await gateway.run(stop, on_ready)
    finally:
        await queue.stop()
        await asyncio.to_thread(endpoint.stop)
        await asyncio.to_thread(provider.shutdown)


TEXT = """Take requests over gRPC and HTTP, put them in the queue and stream their tokens back.

Stops on SIGTERM or SIGINT: refuses new requests, lets open streams go on for gateway.drain_grace_s seconds, then ends them so that
clients go on at another gateway."""

COMMAND = service_command("gateway", GatewayConfig, text=TEXT, example="gateway.listen=127.0.0.1:0", serve=_serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 stopped, 1 failed, 2 wrong configuration or usage."""
    return run_command(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
