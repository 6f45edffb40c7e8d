"""The command `compare`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import click

from qlm_cli.console import plain_console
from qlm_load.compare.comparison import NAMES, POLICY_METAVAR, PolicyRun, check_policy, print_policies
from qlm_load.compare.simulations import FailedRun, simulated_runs
from qlm_load.workload.options import Choice, workload_options

TIMEOUT_S = 3_600.0
"""One workload under several policies, live and in virtual time: one table."""


@click.command()
@click.option(
    "--policy",
    "policies",
    metavar=POLICY_METAVAR,
    callback=lambda ctx, param, names: tuple(map(check_policy, names)),
    multiple=True,
    default=tuple(NAMES),
    help="A policy to compare; may be repeated. All by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of the table.")
@workload_options
def compare(choice: Choice, policies: tuple[str, ...], as_json: bool) -> None:
    """Run the same workload in virtual time under several policies of the planner, side by side.

    Attainment by class, waits, and model swaps; seconds are trace seconds. Exit codes: 0 done, 1 a run failed, 2 wrong use or
    configuration.
    """
    runs: list[PolicyRun] = []
    for policy in dict.fromkeys(policies):
        [run] = asyncio.run(simulated_runs((policy,), choice.arguments, TIMEOUT_S))
        if isinstance(run, FailedRun):
            raise click.ClickException(run.why)
        runs.append(run)
    if as_json:
        click.echo(json.dumps([asdict(run) for run in runs]))
    else:
        print_policies(plain_console(), runs)
