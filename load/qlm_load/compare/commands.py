"""The commands `simulate` and `compare`."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.compare.comparison import NAMES, POLICY_METAVAR, PolicyRun, check_policy, print_policies
from qlm_load.compare.simulations import FailedRun, simulated_runs
from qlm_load.workload.options import Choice, workload_options

if TYPE_CHECKING:
    from qlm_sim.comparison import PlannedKill

KILL = re.compile(r"([A-Za-z0-9_.-]+)@(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)")


TIMEOUT_S = 3_600.0
"""Limit of one run of `compare`, in real seconds."""


@click.command()
@click.option(
    "--policy",
    metavar=POLICY_METAVAR,
    callback=lambda ctx, param, name: check_policy(name),
    default="slo",
    show_default=True,
    help="How the planner orders groups.",
)
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="NAME@AT+DOWN",
    help='Kill an agent or an estimator ("planner": the leader at that time) AT real seconds after the start, and restart it DOWN '
    "seconds later; may be repeated.",
)
@workload_options
def simulate(choice: Choice, policy: str, kills: tuple[str, ...]) -> None:
    """Run the demo's workload in virtual time and print one JSON object: attainment, waits, time, model swaps.

    Seconds of the object are trace seconds. Exit codes: 0 done, 1 failed, 2 wrong use or configuration.
    """
    from qlm_load.compare.virtual_run import ClusterFile, simulated_run  # late: it loads all services

    config = choice.config
    try:
        run = simulated_run(
            policy,
            choice.workload,
            config.load.time_scale,
            ClusterFile(
                path=choice.path,
                overrides=choice.overrides,
                agents=[agent.name for agent in config.agents],
                gateways=len(config.gateways),
                planners=len(config.planners),
            ),
            [_planned(text) for text in kills],
        )
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--kill") from error
    click.echo(json.dumps(asdict(run)))


def _planned(text: str) -> PlannedKill:
    from qlm_sim.comparison import PlannedKill

    found = KILL.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not NAME@AT+DOWN, such as a100-0@45+2.5")
    return PlannedKill(process=found[1], at_s=float(found[2]), down_s=float(found[3]))


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
