"""The command `gateway`."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import click

from benchmarks.gateway.figures import FIGURES
from benchmarks.gateway.front import measure_accepts, measure_added, measure_events, measure_memory
from benchmarks.gateway.kills import measure_kills
from benchmarks.gateway.scale import measure_scale
from benchmarks.parts import bench_options
from benchmarks.queue.run import SEED, Measure, out_option, run_bench

MEASURES: Mapping[str, Measure] = {
    "accepts": measure_accepts,
    "added": measure_added,
    "events": measure_events,
    "memory": measure_memory,
    "scale": measure_scale,
    "kills": measure_kills,
}


@click.command()
@bench_options(FIGURES, SEED)
@out_option
def gateway(as_json: bool, only: tuple[str, ...], seed: int, quick: bool, out: Path) -> None:
    """Measure the OpenAI API of one gateway that is held to one core: durable accepts, added latency, events of streams, and memory with
    open streams. Then of clusters on all cores: throughput by the number of gateways, agents and queues, and streams through kills.

    Real processes, load over loopback from processes of its own. Progress goes to stderr. A full run takes about a quarter of an hour.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # the gateway and its clients inherit it
    context = {"gateway_cores": 1, "files_max": files}
    run_bench("benchmark gateway", FIGURES, MEASURES, context, as_json=as_json, only=only, seed=seed, quick=quick, out=out)
