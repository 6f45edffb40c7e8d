"""The command `demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from qlm_core.errors import ConfigError, QlmError
from qlm_load.demo import demo_workload, print_outcome, run_demo, write_summary
from qlm_load.interruptible import run_interruptible
from qlm_load.settings import DemoConfig, demo_config_path
from qlm_load.workload import REQUESTS_MAX
from qlm_process.config import load_config, parse_override

EXIT_FAILED = 1


@click.command()
@click.option(
    "--trace", metavar="FILE", help="Replay this CSV or CSV.GZ instead of the generated workload; its first rows, at the rate set."
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Of the trace, only its first so many minutes.")
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX), help="Requests to replay (load.requests).")
@click.option("--rate", "rate_per_s", type=float, help="Mean arrivals per trace second (load.rate_per_s).")
@click.option("--time-scale", type=float, help="Trace seconds in a real second (load.time_scale).")
@click.option("--seed", type=click.IntRange(min=0), help="Of the workload and the kill plan (load.seed).")
@click.option("--config", "config_path", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Another YAML file.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/demo"), show_default=True, help="Output folder.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.NAME=VALUE", help="Override one setting; may be repeated.")
def demo(
    trace: str | None,
    minutes: float | None,
    requests: int | None,
    rate_per_s: float | None,
    time_scale: float | None,
    seed: int | None,
    config_path: str | None,
    out: Path,
    settings: tuple[str, ...],
) -> None:
    """Start a cluster, replay a workload on it, kill an agent, the planner and a gateway half way, and account for every token.

    Exit codes: 0 nothing was lost or doubled, and models were swapped and requests recovered; 1 otherwise; 2 wrong use or configuration.
    """
    console = Console()
    path = str(Path(config_path or demo_config_path()).resolve())
    given = {"load.requests": requests, "load.rate_per_s": rate_per_s, "load.time_scale": time_scale, "load.seed": seed}
    try:
        overrides: dict[str, object] = dict(parse_override(text) for text in settings)
        overrides |= {name: value for name, value in given.items() if value is not None}
        config = load_config(DemoConfig, path, overrides=overrides)
        workload = demo_workload(config, trace, minutes)
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    load = config.load
    out.mkdir(parents=True, exist_ok=True)
    for note in workload.notes:
        console.print(f"workload: {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"replaying {len(workload.requests):,} requests at {workload.rate_per_s:.2f} per trace second, {load.time_scale:g} trace seconds a "
        f"real second ({workload.duration_s:,.0f} s of trace in {workload.duration_s / load.time_scale:,.0f} s); seed {load.seed}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        outcome = run_interruptible(run_demo(console, config, workload, path, overrides, out))
    except QlmError as error:
        raise click.ClickException(error.message) from error
    write_summary(out / "summary.json", outcome, {**load.model_dump(mode="json"), "trace": trace, "notes": list(workload.notes)})
    print_outcome(console, outcome, config)
    console.print(f"{out / 'summary.json'}", highlight=False)
    if outcome.failures:
        sys.exit(EXIT_FAILED)
