"""The commands `qlm pause` and `qlm resume`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

import qlm
from qlm_cli.options import address_option, credentials

F = TypeVar("F", bound=Callable[..., Any])


def _whose(command: F) -> F:
    tenant = click.option("--tenant", metavar="NAME", help="A tenant, in place of a model.")
    return click.argument("model", metavar="[MODEL]", required=False)(tenant(address_option(command)))


@click.command()
@_whose
def pause(model: str | None, tenant: str | None, addresses: tuple[str, ...]) -> None:
    """Let the requests for MODEL, or of a tenant, wait until `qlm resume`: running ones continue, new ones are accepted and wait too.

    A pause is kept in the queue, over restarts of every service; `qlm status` shows it. Exit codes: 0 paused, 1 an error, 2 wrong use.
    """
    whose = _said(model, tenant)
    with qlm.Client(list(addresses), credentials=credentials()) as client:
        changed = client.pause(model=model, tenant=tenant)
    click.echo(f"{whose} is paused" if changed else f"{whose} is paused already")


@click.command()
@_whose
def resume(model: str | None, tenant: str | None, addresses: tuple[str, ...]) -> None:
    """End the pause of MODEL, or of a tenant: its requests go back to the instances' queues within seconds.

    Exit codes: 0 it is not paused now, 1 an error, 2 wrong use.
    """
    whose = _said(model, tenant)
    with qlm.Client(list(addresses), credentials=credentials()) as client:
        changed = client.resume(model=model, tenant=tenant)
    click.echo(f"{whose} goes on" if changed else f"{whose} is not paused")


def _said(model: str | None, tenant: str | None) -> str:
    """In words. Raises UsageError unless one is given."""
    if (model is None) == (tenant is None):
        raise click.UsageError("give MODEL or --tenant")
    return f"model {model}" if tenant is None else f"tenant {tenant}"
