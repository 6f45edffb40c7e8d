"""`qlm agent`, `python -m qlm_agent`: one agent process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click
import structlog

from qlm_agent.config import AgentConfig
from qlm_agent.process import AgentProcess
from qlm_agent.telemetry import AgentMetrics
from qlm_core.errors import ConfigError
from qlm_process.config import load_config, parse_override
from qlm_process.logs import configure_logging
from qlm_process.metrics import serve_metrics
from qlm_process.queue_connection import open_queue
from qlm_process.runner import EXIT_CONFIG, run_service
from qlm_process.tracing import configure_tracing


@click.command(name="agent")
@click.option("--config", "path", type=click.Path(), default=None, help="YAML file with the sections queue, models, agent(s), telemetry.")
@click.option("--name", default=None, help="Entry of the list `agents` to run; without the list, this instance's name.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Overrides one setting, such as agent.batch_max=64.")
def command(path: str | None, name: str | None, settings: Sequence[str]) -> int:
    """Runs one instance: pulls requests from its virtual queue, drives its engine, and sends the tokens.

    SIGTERM or SIGINT drains it: it stops pulling, running requests go on for agent.drain_finish_s seconds, the rest go back to the queue.
    """
    try:
        overrides = dict(parse_override(setting) for setting in settings)
        config = load_config(AgentConfig, path, "agents" if name else None, name, overrides)
    except ConfigError as error:
        click.echo(f"agent: {error.message}", err=True)
        return EXIT_CONFIG
    configure_logging(config.telemetry, "agent", config.agent.name)
    return run_service(lambda stop: _serve(config, stop))


async def _serve(config: AgentConfig, stop: asyncio.Event) -> None:
    metrics = AgentMetrics()
    queue = open_queue(config.queue)
    provider = configure_tracing("agent", config.agent.name)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        result: object = command.main(args=list(sys.argv[1:] if argv is None else argv), prog_name="qlm agent", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_CONFIG
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
