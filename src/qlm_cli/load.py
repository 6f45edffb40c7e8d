"""`qlm load`, `qlm tune`: hand their arguments to `qlm_load`."""

from __future__ import annotations

import click

from qlm_cli.services import PASS_ON


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def load(arguments: tuple[str, ...]) -> None:
    """Replay a workload against a running cluster and report its outcome."""
    from qlm_load.replay.command import replay

    replay.main(args=list(arguments), prog_name="qlm load")


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(arguments: tuple[str, ...]) -> None:
    """Choose policies of planner and engines for the traffic of a trace."""
    from qlm_load.tune.command import tune_command

    tune_command.main(args=list(arguments), prog_name="qlm tune")
