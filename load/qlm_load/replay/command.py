"""The command `qlm load` (also `python -m qlm_load replay`)."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import click

from qlm_cli.console import plain_console
from qlm_cli.options import address_option, tenant_option
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_load.interruptible import run_interruptible
from qlm_load.replay.against import run_replay, served_models
from qlm_load.replay.replay import ReplaySettings
from qlm_load.replay.summary import print_report, summary_of
from qlm_load.workload.azure_shape import TRACE_RATE_PER_S
from qlm_load.workload.trace import read_trace
from qlm_load.workload.workload import REQUESTS_MAX, generate_rows, make_workload

EXIT_FAILED = 1
POSITIVE = click.FloatRange(min=0, min_open=True)


def _parse_shares(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for value in values:
        name, _, share = value.partition("=")
        try:
            shares[name] = float(share or 1)
        except ValueError as error:
            raise click.BadParameter(f"{value!r}: a model and its share are given as NAME or NAME=SHARE") from error
    return shares


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@address_option
@click.option(
    "--trace",
    metavar="FILE",
    help="CSV or CSV.GZ: arrival_s,input_tokens,output_tokens[,model][,client], or the Azure LLM "
    "inference trace as published. Default: a workload generated in the shape of the Azure conversation trace.",
)
@click.option("--minutes", type=POSITIVE, help="Of the trace, only its first so many minutes.")
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX), default=1000, show_default=True, help="Most requests to replay.")
@click.option("--rate", "rate_per_s", type=POSITIVE, help="Mean arrivals per trace second. Default: as in the trace.")
@click.option(
    "--time-scale",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Trace seconds in a real second: for arrivals and SLOs. Simulated engines should run at the same scale.",
)
@click.option(
    "--model",
    "shares",
    multiple=True,
    callback=_parse_shares,
    metavar="NAME[=SHARE]",
    help="A model of the requests, and its share of them; may be repeated. Default: all served ones, equally.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of lengths, classes, models and prompts.")
@tenant_option
@click.option(
    "--in-flight-max",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Most open requests; requests due beyond them are sent later, and counted as sent late.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    help="Seconds after the last arrival until open requests are given up.",
)
@click.option("--run-id", metavar="TEXT", help="Beginning of the request ids. Default: a random one, so that each run is a new one.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the report there too.")
def replay(
    addresses: tuple[str, ...],
    trace: str | None,
    minutes: float | None,
    requests: int,
    rate_per_s: float | None,
    time_scale: float,
    shares: dict[str, float],
    seed: int,
    tenant: str,
    in_flight_max: int,
    drain_timeout_s: float,
    run_id: str | None,
    json_path: Path | None,
) -> None:
    """Replay a workload on a running cluster of simulated models, open loop, and account for every token.

    Requests have three SLO classes by seed: interactive (20 s), batch-1 (60 s) and batch-2 (1 h), in trace time.

    Exit codes: 0 nothing was lost, doubled or wrong; 1 otherwise; 2 wrong use.
    """
    console = plain_console()
    settings = ReplaySettings(
        addresses=addresses, time_scale=time_scale, in_flight_max=in_flight_max, drain_timeout_s=drain_timeout_s, tenant=tenant
    )
    try:
        if trace is None:
            rows = generate_rows(requests, seed, rate_per_s or TRACE_RATE_PER_S)
        else:
            rows = read_trace(trace).head(requests, None if minutes is None else minutes * 60)
        models = run_interruptible(served_models(addresses, shares))
        scaled_to = None if trace is None else rate_per_s
        workload = make_workload(rows, models, seed, rate_per_s=scaled_to, run_id=run_id or f"load-{uuid.uuid4().hex[:12]}")
        for note in workload.notes:
            console.print(f"workload: {note}", highlight=False, markup=False, soft_wrap=True)
        report = run_interruptible(run_replay(console, workload, settings))
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    except QlmError as error:
        raise click.ClickException(f"{error.message} [{error.reason}]") from error
    print_report(console, report, None, time_scale)
    if json_path is not None:
        setting: dict[str, object] = {"time_scale": time_scale, "seed": seed, "trace": trace, "rate_per_s": workload.rate_per_s}
        json_path.write_text(json.dumps(summary_of(report, None, (), setting), indent=2) + "\n", encoding="utf-8")
    if not report.clean:
        sys.exit(EXIT_FAILED)
