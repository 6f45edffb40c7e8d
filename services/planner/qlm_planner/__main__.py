"""`qlm planner`: starts one planner process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click

from qlm_core.errors import ConfigError
from qlm_planner.config import PlannerConfig
from qlm_planner.metrics import PlannerMetrics
from qlm_planner.shell import PlannerShell
from qlm_process.config import load_config, parse_override
from qlm_process.logs import configure_logging
from qlm_process.metrics import serve_metrics
from qlm_process.queue_connection import open_queue
from qlm_process.runner import EXIT_CONFIG, run_service
from qlm_process.tracing import configure_tracing


@click.command(name="planner", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_path", type=click.Path(), default=None, help="YAML file with the settings of all processes.")
@click.option("--name", default=None, help="Name of this planner: its entry of the list `planners` of the file.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One setting over the file's, such as planner.delta=2.")
def command(config_path: str | None, name: str | None, settings: Sequence[str]) -> int:
    """Groups requests and orders the groups on the instances' virtual queues.

    Several planners may run for one queue: one leads, the others stand by and take over when its lease ends.
    """
    try:
        overrides: dict[str, object] = dict(parse_override(each) for each in settings)
        config = load_config(PlannerConfig, config_path, section="planners", entry=name, overrides=overrides)
    except ConfigError as error:
        click.echo(f"planner: {error.message}", err=True)
        return EXIT_CONFIG
    configure_logging(config.telemetry, "planner", config.planner.name)

    async def serve(stop: asyncio.Event) -> None:
        metrics = PlannerMetrics()
        endpoint = serve_metrics(metrics.registry, config.telemetry.metrics_host, config.telemetry.metrics_port)
        try:
            provider = configure_tracing("planner", config.planner.name)
            try:
                await PlannerShell(config, open_queue(config.queue), metrics, provider).run(stop, endpoint.port)
            finally:
                provider.shutdown()
        finally:
            await asyncio.to_thread(endpoint.stop)

    return run_service(serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 stopped, 1 failed, 2 wrong configuration or usage."""
    try:
        code: int = command.main(args=None if argv is None else list(argv), prog_name="qlm planner", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_CONFIG
    except click.Abort:
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
