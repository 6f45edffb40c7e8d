"""`qlm gateway`, `python -m qlm_gateway`: one gateway process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from uuid import uuid4

import click
import structlog

from qlm_core.errors import ConfigError
from qlm_gateway.config import GatewayConfig
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.shell import Gateway
from qlm_process.config import load_config, parse_override
from qlm_process.logs import configure_logging
from qlm_process.metrics import serve_metrics
from qlm_process.queue_connection import open_queue
from qlm_process.runner import EXIT_CONFIG, run_service
from qlm_process.tracing import configure_tracing


@click.command(name="gateway")
@click.option("--config", "path", type=click.Path(), default=None, help="YAML file with the sections queue, models, gateway(s), telemetry.")
@click.option("--name", default=None, help="Entry of the list `gateways` to run; without the list, this gateway's name.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Overrides one setting, such as gateway.listen=127.0.0.1:0.")
def command(path: str | None, name: str | None, settings: Sequence[str]) -> int:
    """Takes requests over gRPC, puts them in the queue and streams their tokens back.

    Stops on SIGTERM or SIGINT: refuses new requests, lets open streams go on for gateway.drain_grace_s seconds, then ends them so that
    clients go on at another gateway.
    """
    try:
        overrides = dict(parse_override(setting) for setting in settings)
        config = load_config(GatewayConfig, path, "gateways" if name else None, name, overrides)
    except ConfigError as error:
        click.echo(f"gateway: {error.message}", err=True)
        return EXIT_CONFIG
    configure_logging(config.telemetry, "gateway", config.gateway.name)
    return run_service(lambda stop: _serve(config, stop))


async def _serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    provider = configure_tracing("gateway", config.gateway.name)
    metrics = GatewayMetrics()
    queue = open_queue(config.queue)
    endpoint = serve_metrics(metrics.registry, config.telemetry.metrics_host, config.telemetry.metrics_port)
    gateway = Gateway(config, queue, provider, lambda: uuid4().hex, metrics)

    def on_ready(address: str) -> None:
        structlog.get_logger().info("ready", address=address, metrics_port=endpoint.port, gateway=gateway.gateway_id)

    try:
        await gateway.run(stop, on_ready)
    finally:
        await queue.stop()
        await asyncio.to_thread(endpoint.stop)
        await asyncio.to_thread(provider.shutdown)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        result: object = command.main(args=list(sys.argv[1:] if argv is None else argv), prog_name="qlm gateway", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
