"""`qlm gateway|planner|estimator|agent`: each hands its arguments to the service's own command."""

from __future__ import annotations

import sys
from importlib import import_module

import click

PASS_ON = {"ignore_unknown_options": True, "help_option_names": []}
"""The service's command reads all options itself, --help too."""


def _run(service: str, arguments: tuple[str, ...]) -> None:
    main = import_module(f"qlm_{service}.__main__").main
    sys.exit(main(list(arguments)))


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gateway(arguments: tuple[str, ...]) -> None:
    """Run one gateway."""
    _run("gateway", arguments)


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def planner(arguments: tuple[str, ...]) -> None:
    """Run one planner (leader or standby)."""
    _run("planner", arguments)


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def estimator(arguments: tuple[str, ...]) -> None:
    """Run one estimator (leader or standby)."""
    _run("estimator", arguments)


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(arguments: tuple[str, ...]) -> None:
    """Run the agent of one instance."""
    _run("agent", arguments)
