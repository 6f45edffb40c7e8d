"""`qlm estimator`, `python -m qlm_estimator`: one estimator process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click
import structlog

from qlm_core.errors import ConfigError
from qlm_estimator.config import EstimatorConfig
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.process import EstimatorProcess
from qlm_process.config import load_config, parse_override
from qlm_process.logs import configure_logging
from qlm_process.metrics import serve_metrics
from qlm_process.queue_connection import open_queue
from qlm_process.runner import EXIT_CONFIG, run_service


@click.command(name="estimator")
@click.option(
    "--config", "path", type=click.Path(), default=None, help="YAML file with the sections queue, models, estimator(s), telemetry."
)
@click.option("--name", default=None, help="Entry of the list `estimators` to run; without the list, this estimator's name.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Overrides one setting, such as estimator.publish_every_s=5.")
def command(path: str | None, name: str | None, settings: Sequence[str]) -> int:
    """Learns output lengths and engine speeds from what happens to requests, publishes them as profiles, and predicts waits over gRPC.

    One of several leads and learns, the others stand by and answer too. Stops on SIGTERM or SIGINT.
    """
    try:
        overrides = dict(parse_override(setting) for setting in settings)
        config = load_config(EstimatorConfig, path, "estimators" if name else None, name, overrides)
    except ConfigError as error:
        click.echo(f"estimator: {error.message}", err=True)
        return EXIT_CONFIG
    configure_logging(config.telemetry, "estimator", config.estimator.name)
    return run_service(lambda stop: _serve(config, stop))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        result: object = command.main(args=list(sys.argv[1:] if argv is None else argv), prog_name="qlm estimator", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_CONFIG
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
