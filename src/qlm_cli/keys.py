"""The commands `qlm keys`: the file that gateways and services check callers by."""

from __future__ import annotations

import os
from typing import Any

import click
from pydantic import ValidationError
from rich.table import Table

from qlm_cli.console import json_text, plain_console
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.identity.key_file import edited, read_keys
from qlm_process.identity.keys import Role, new_key

file_option = click.option(
    "--file",
    "-f",
    "path",
    envvar="QLM_SECURITY__KEY_FILE",
    required=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="The file of keys (security.key_file). QLM_SECURITY__KEY_FILE names it, too.",
)


@click.group("keys")
def keys() -> None:
    """Make, list or revoke API keys. A key is shown once: the file holds its salted hash. Processes follow the file within 5 s.

    Exit codes: 0 done, 1 no such key, 2 wrong use, or a file that cannot be used.
    """


@keys.command()
@file_option
@click.option("--tenant", required=True, metavar="NAME", help="Whose requests it sends and sees.")
@click.option(
    "--role",
    type=click.Choice([str(role) for role in Role]),
    default=str(Role.CLIENT),
    show_default=True,
    help="client: a tenant's requests; operator: control and the status of all, too; service: calls of agents to planners.",
)
@click.option("--model", "-m", "models", multiple=True, metavar="NAME", help="A model that it may use; may be repeated. Default: all.")
@click.option("--slo-min", "slo_s_min", type=float, default=0.0, metavar="SECONDS", help="The least SLO it may ask for. Default: any.")
@click.option("--priority-min", type=int, metavar="N", help="The most urgent strict priority it may ask for. Default: it has none.")
@click.option("--requests-per-min", type=float, metavar="N", help="Requests it may send in a minute, at each gateway. Default: any.")
@click.option("--prompt-tokens-per-min", type=float, metavar="N", help="Prompt tokens, the same. Default: any.")
@click.option("--streams-max", type=int, metavar="N", help="Streams and waits for an answer at once, the same. Default: any.")
@click.option("--to", "to", type=click.Path(dir_okay=False), metavar="FILE", help="Write the key to a new file that only you can read.")
def add(path: str, tenant: str, role: str, to: str | None, **bounds: Any) -> None:
    """Make a key and print it."""
    try:
        row, key = new_key(Role(role), tenant, **bounds)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise click.UsageError(f"{wrong['loc'][0]}: {wrong['msg']}") from None
    with edited(path) as rows:
        if to is not None:
            _write_new(to, key)
        rows.append(row)
    click.echo(f"{row.id}: in {to}" if to is not None else key)


@keys.command("list")
@file_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(path: str, as_json: bool) -> None:
    """List the keys by their ids, without what they are checked by."""
    rows = read_keys(path)
    if as_json:
        click.echo(json_text({"keys": [row.model_dump(mode="json", exclude={"salt", "hash"}) for row in rows]}))
        return
    table = Table("id", "role", "tenant", "models", "least SLO", "priorities", "at each gateway")
    for row in rows:
        priorities = "none" if row.priority_min is None else f"from {row.priority_min}"
        rate = ", ".join(f"{per_min:g} {name.removesuffix('_per_min').replace('_', ' ')} a minute" for name, per_min in row.rates.items())
        rate += f"{', ' if rate else ''}{row.streams_max} streams" if row.streams_max else ""
        cells = (row.id, str(row.role), row.tenant, ", ".join(row.models) or "all", f"{row.slo_s_min:g} s", priorities, rate or "any")
        table.add_row(*cells)
    plain_console().print(table)


@keys.command()
@click.argument("key_id", metavar="ID")
@file_option
def revoke(key_id: str, path: str) -> None:
    """Revoke the key with this ID: its calls are refused, and its open streams end."""
    with edited(path) as rows:
        left = [row for row in rows if row.id != key_id]
        if len(left) == len(rows):
            raise click.ClickException("no key has this id (see `qlm keys list`)")
        rows[:] = left
    click.echo(f"{key_id} is revoked")


def _write_new(path: str, key: str) -> None:
    """Raises ConfigError where there is such a file."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{key}\n")
    except OSError as error:
        raise ConfigError(f"--to: {path}: {error.strerror}") from None
