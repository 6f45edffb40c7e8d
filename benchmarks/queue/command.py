"""The command `queue`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from benchmarks.parts import bench_options
from benchmarks.queue.figures import FIGURES, LEASE_TTL_S
from benchmarks.queue.front import measure_accepts, measure_added, measure_fanout
from benchmarks.queue.losses import measure_campaign, measure_failover, measure_recovery
from benchmarks.queue.run import SEED, Measure, out_option, run_bench
from benchmarks.queue.store import measure_bytes, measure_pulls

MEASURES: Mapping[str, Measure] = {
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
@bench_options(FIGURES, SEED)
@out_option
def queue(as_json: bool, only: tuple[str, ...], seed: int, quick: bool, out: Path) -> None:
    """Measure the live system: accepts, added latency (and that of a bare chain of the same messages), fan-out, pulls, bytes in the server,
    failover, recovery and a campaign of kills.

    Real processes, real kills, a quarter of the streams traced. Progress goes to stderr. A full run takes about ten minutes.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    context = {"lease_ttl_s": LEASE_TTL_S}
    run_bench("benchmark queue", FIGURES, MEASURES, context, as_json=as_json, only=only, seed=seed, quick=quick, out=out)
