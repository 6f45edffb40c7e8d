"""The command `qlm up`."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import structlog
from rich.table import Table

from qlm_cli.console import columns, plain_console
from qlm_cli.options import config_option, default_config_path, set_option
from qlm_cli.up.cluster import Cluster
from qlm_cli.up.config import UpConfig
from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.cluster.state import ClusterState
from qlm_process.config import load_config
from qlm_process.logs import configure_logging
from qlm_process.runner import EXIT_FAILED, EXIT_STOPPED, run_service

LOCK_FILE = "up.lock"


@click.command()
@config_option
@set_option
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder of the queue's data, the logs and the state file up.json (as --set queue.state_dir=DIR). It survives restarts.",
)
def up(config_path: str | None, overrides: dict[str, str], state_dir: str | None) -> None:
    """Run everything on this machine: the queue's server, gateways, planner, estimator and agents, each a process of its own.

    A process that ends is started again. Ctrl-C or SIGTERM drains and stops: gateways refuse new requests, agents finish or give back what
    they run, then planner, estimator and the server end. Accepted, unfinished requests continue at the next start. A second Ctrl-C
    kills everything at once; nothing accepted is lost by that either.

    Exit codes: 0 stopped, 1 failed, 2 wrong configuration.
    """
    path = str(Path(config_path or default_config_path()).resolve())
    given = {**overrides, **({"queue.state_dir": state_dir} if state_dir else {})}
    config = load_config(UpConfig, path, overrides=given)
    configure_logging(config.telemetry, "up", config.queue.name)
    with locked(Path(config.queue.state_dir)):
        run = ClusterRun(Cluster(config, path, given))
        sys.exit(run_service(run.main) or run.exit_code)


class ClusterRun:
    """Runs a cluster until `stop` is set, and logs why it failed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.exit_code = EXIT_STOPPED

    async def main(self, stop: asyncio.Event) -> None:
        """Runs the cluster until `stop`, then stops it in order, also where it failed."""
        ready = asyncio.Event()
        running = asyncio.create_task(self._cluster.run(ready), name="cluster")
        announcing = asyncio.create_task(self._announce(ready), name="announce")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            stopping.cancel()
            clean = await self._cluster.stop()
            running.cancel()
            await asyncio.wait({running, announcing, stopping})
            await self._cluster.stop()  # what was just being started
        failure = None if running.cancelled() else running.exception()
        if failure is not None:
            self._report(failure)
        elif not clean:
            self._fail("some processes did not stop in time and were killed")
        else:
            structlog.get_logger().info("stopped")

    def _report(self, failure: BaseException) -> None:
        """Reports a failure of the environment in a line; bugs and wrong settings are for the caller."""
        if isinstance(failure, Unavailable):
            self._fail(failure.message)
            return
        if isinstance(failure, BaseExceptionGroup):
            away, others = failure.split(Unavailable)
            if others is None and away is not None:
                for each in away.exceptions:
                    self._report(each)
                return
        raise failure

    def _fail(self, message: str) -> None:
        structlog.get_logger().error("failed", error=message)
        self.exit_code = EXIT_FAILED

    async def _announce(self, ready: asyncio.Event) -> None:
        await ready.wait()
        console = plain_console()
        console.print(_table(self._cluster.state))
        gateways = self._cluster.state.of("gateway")
        urls = ", ".join(f"{process.http}/v1" for process in gateways if process.http)
        http = f" OpenAI API on {urls}." if urls else ""
        click.echo(f"Ready. Gateway on {', '.join(process.address for process in gateways)}.{http} Ctrl-C drains and stops.")


def _table(state: ClusterState) -> Table:
    headings = columns(("process", "service", "pid", "address", "metrics", "state"), no_wrap=True)
    table = Table(*headings, title=f"queue {state.queue}", title_justify="left")
    for process in state.processes:
        table.add_row(
            process.name,
            process.service,
            str(process.pid),
            process.address,
            f":{process.metrics_port}/metrics" if process.metrics_port else "",
            "serving" if process.serving else "standby",
        )
    return table


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Two clusters must not share a state folder: two servers would write one log."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(state_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"queue.state_dir: cannot be used: {error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"queue.state_dir: another `qlm up` or `qlm serve` runs in {state_dir}") from None
        yield
    finally:
        os.close(handle)
