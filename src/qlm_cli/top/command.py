"""The command `qlm top`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict

import click
from rich.console import Console
from rich.live import Live

from qlm.credentials import Credentials
from qlm_cli.console import json_text, plain_console
from qlm_cli.options import address_option, credentials
from qlm_cli.top.frame import frame
from qlm_process.cluster.observer import ClusterObserver
from qlm_process.cluster.view import ClusterView

EXIT_AWAY = 1
WINDOW_MAX_S = 3600.0


@click.command()
@click.option(
    "--every", "every_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="SECONDS", help="Time between two frames."
)
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(min=1, max=WINDOW_MAX_S),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="What attainment, rates, LSOs and calibration are for, up to now.",
)
@click.option("--once", is_flag=True, help="Print one frame and end; so it does where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and end.")
@address_option
def top(every_s: float, window_s: float, once: bool, as_json: bool, addresses: tuple[str, ...]) -> None:
    """Watch the whole cluster: virtual queues in order with predicted ends, models and KV of each instance, LLM serving operations,
    SLO attainment, and how predictions compare with what happened.

    Everything comes over the public gRPC APIs; what does not answer is shown as such. Ctrl-C ends it.

    Exit codes: 0 done; 1 no gateway answered (with --once and --json); 2 wrong use.
    """
    console, access = plain_console(), credentials()
    if as_json or once or not console.is_terminal:
        view = asyncio.run(_poll(addresses, window_s, access))
        if as_json:
            click.echo(json_text(asdict(view)))
        else:
            console.print(frame(view))
        sys.exit(0 if view.gateway_answered else EXIT_AWAY)
    try:
        asyncio.run(_watch(addresses, window_s, every_s, console, access))
    except KeyboardInterrupt:
        return  # how a watch is meant to end


async def _poll(addresses: tuple[str, ...], window_s: float, access: Credentials) -> ClusterView:
    """Polls twice: the first poll may have to find the leader."""
    async with ClusterObserver(addresses, window_s=window_s, credentials=access) as observer:
        view = await observer.poll()
        return view if all(part.answered for part in view.parts) else await observer.poll()


async def _watch(addresses: tuple[str, ...], window_s: float, every_s: float, console: Console, access: Credentials) -> None:
    async with ClusterObserver(addresses, window_s=window_s, credentials=access) as observer:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(await observer.poll()), refresh=True)
                await asyncio.sleep(every_s)
