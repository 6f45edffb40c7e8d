"""The command `campaign`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_load.campaign.campaign import OVERRIDES, Assault, print_campaign, run_campaign
from qlm_load.campaign.strikes import parse_strikes
from qlm_load.demo.settings import DemoConfig, demo_config_path
from qlm_load.interruptible import run_interruptible
from qlm_load.workload.options import demo_workload
from qlm_load.workload.workload import REQUESTS_MAX
from qlm_process.config import load_config, parse_override

EXIT_FAILED = 1


@click.command()
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX), default=1500, show_default=True, help="Requests to replay.")
@click.option(
    "--kills", type=click.IntRange(0, 500), default=12, show_default=True, help="SIGKILLs at agents, planner, estimator, gateways."
)
@click.option("--server-kills", type=click.IntRange(0, 100), default=2, show_default=True, help="SIGKILLs at the queue's server.")
@click.option(
    "--strike",
    "written",
    multiple=True,
    metavar="ACTION:NAME[+NAME...][:SECONDS]@SHARE",
    help="One more strike, when SHARE of the requests have ended; may be repeated. kill:gateway-0+gateway-1@0.4 kills both at once, "
    "term: asks it to end, stop:server:5@0.5 stops the server for 5 s and lets it go on, stopkill:planner-0:6@0.3 kills what was stopped.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the workload and the strikes.")
@click.option("--rate", "rate_per_s", type=float, help="Mean arrivals per trace second (load.rate_per_s).")
@click.option("--time-scale", type=float, help="Trace seconds in a real second (load.time_scale).")
@click.option("--drain-timeout", "drain_timeout_s", type=float, help="Real seconds after the last arrival; open beyond: hung.")
@click.option("--config", "config_path", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Another YAML file.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/campaign"), show_default=True, help="Folder.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.NAME=VALUE", help="Override one setting; may be repeated.")
def campaign(
    requests: int,
    kills: int,
    server_kills: int,
    written: tuple[str, ...],
    seed: int,
    rate_per_s: float | None,
    time_scale: float | None,
    drain_timeout_s: float | None,
    config_path: str | None,
    out: Path,
    settings: tuple[str, ...],
) -> None:
    """Start a cluster, replay a workload, kill processes at random all through it, and account for every token.

    The last line is one JSON object. Exit codes: 0 nothing was lost, doubled, wrong, hung, failed or refused; 1 otherwise; 2 wrong use.
    """
    console = plain_console()
    path = str(Path(config_path or demo_config_path()).resolve())
    given = {
        "load.requests": requests,
        "load.seed": seed,
        "load.rate_per_s": rate_per_s,
        "load.time_scale": time_scale,
        "load.drain_timeout_s": drain_timeout_s,
    }
    try:
        overrides: dict[str, object] = dict(parse_override(text) for text in settings)
        overrides |= {name: value for name, value in given.items() if value is not None}
        config = load_config(DemoConfig, path, overrides=overrides)
        workload = demo_workload(config, None, None)
        strikes = tuple(strike for text in written for strike in parse_strikes(text))
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    out.mkdir(parents=True, exist_ok=True)
    raised = ", ".join(f"{name}={value}" for name, value in OVERRIDES.items())
    console.print(
        f"{requests:,} requests over {workload.duration_s / config.load.time_scale:,.0f} s, {kills} kills, {server_kills} of the server, "
        f"{len(strikes)} written strikes; seed {seed}; hung: open {config.load.drain_timeout_s:g} s after the last arrival; {raised}, so "
        "that requests which were on killed agents often do not end FAILED",
        highlight=False,
        soft_wrap=True,
    )
    assault = Assault(seed=seed, kills=kills, server_kills=server_kills, written=strikes)
    try:
        outcome = run_interruptible(run_campaign(console, config, workload, path, overrides, out, assault))
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    except QlmError as error:
        raise click.ClickException(error.message) from error
    print_campaign(console, outcome, seed)
    click.echo(outcome.as_json(seed))
    if outcome.failures:
        sys.exit(EXIT_FAILED)
