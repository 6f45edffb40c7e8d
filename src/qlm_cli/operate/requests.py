"""The commands `qlm requests`: what waits and runs, one request, and the end of some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict

import click
from rich.table import Table

import qlm
from qlm_cli.console import json_text, plain_console
from qlm_cli.operate.status import due, request_table
from qlm_cli.options import address_option, credentials, tenant_option
from qlm_core.vocabulary.errors import NotFound

PAGE = 500
LIMIT_MAX = 10_000
LIVE = tuple(str(state) for state in qlm.RequestState if not state.terminal)
EXIT_UNKNOWN = 1


@click.group("requests")
def requests() -> None:
    """List, show or cancel requests. Prompts and outputs are never shown.

    Exit codes: 0 done, 1 an error, or a request that is not known, 2 wrong use.
    """


@requests.command("list")
@click.option("--model", "-m", default="", metavar="MODEL", help="Requests for this model alone.")
@click.option("--tenant", default="", metavar="NAME", help="Requests of this tenant alone. Default: of all.")
@click.option("--state", type=click.Choice(LIVE), help="Requests in this state alone.")
@click.option("--limit", type=click.IntRange(1, LIMIT_MAX), default=100, show_default=True, metavar="COUNT", help="Most requests listed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@address_option
def list_(model: str, tenant: str, state: str | None, limit: int, as_json: bool, addresses: tuple[str, ...]) -> None:
    """List the requests that have not ended, the oldest first: id, tenant, model, class, state, age, deadline, instance.

    It reads the queue from its oldest request on until COUNT are found, which costs its server some 15 us a request, 100 at a time. One
    that has ended is not listed; `qlm requests show` knows it while its result is kept.
    """
    found: list[qlm.ListedRequest] = []
    with qlm.Client(list(addresses), credentials=credentials()) as client:
        for page in _pages(client, tenant=tenant, model=model, state=None if state is None else qlm.RequestState(state), limit=limit):
            found += page.requests
    more = bool(page.next_after)
    if as_json:
        click.echo(json_text({"requests": [asdict(each) for each in found], "more": more, "now_s": page.now_s}))
        return
    plain_console().print(_table(found, page.now_s))
    if more:
        click.echo(f"the first {len(found):,}; more may follow (--limit)")


def _pages(client: qlm.Client, *, tenant: str, model: str, state: qlm.RequestState | None, limit: int) -> Iterator[qlm.RequestPage]:
    """Pages with `limit` requests together, or up to the end of the queue; at least one."""
    after = ""
    while True:
        page = client.requests(tenant=tenant, model=model, state=state, after=after, limit=min(PAGE, limit))
        yield page
        limit, after = limit - len(page.requests), page.next_after
        if not after or not limit:
            return


def _table(found: list[qlm.ListedRequest], now_s: float) -> Table:
    table = Table()
    for heading in ("request", "tenant", "model", "class", "state", "age", "due", "instance"):
        table.add_column(heading, no_wrap=heading != "request", overflow="fold")
    for each in found:
        age = f"{max(0.0, now_s - each.accepted_s):,.0f} s"
        deadline = "-" if each.deadline_s is None else due(each.deadline_s, now_s)
        table.add_row(each.request_id, each.tenant, each.model, each.slo_class, str(each.state), age, deadline, each.instance or "-")
    return table


@requests.command()
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@tenant_option
@address_option
def show(request_id: str, as_json: bool, tenant: str, addresses: tuple[str, ...]) -> None:
    """Show one request, also one that has ended, while its result is kept: state, model, place, objective, expected start and end, why it
    ended."""
    with qlm.Client(list(addresses), tenant=tenant, credentials=credentials()) as client:
        found = client.status(request_id).request
    assert found is not None, "requested by its id"
    if as_json:
        click.echo(json_text(asdict(found)))
    else:
        plain_console().print(request_table(request_id, found))


@requests.command()
@click.argument("request_ids", metavar="ID...", nargs=-1, required=True)
@tenant_option
@address_option
def cancel(request_ids: tuple[str, ...], tenant: str, addresses: tuple[str, ...]) -> None:
    """End requests as CANCELLED, whether they wait or run; one that has ended keeps its end, and that is said."""
    unknown = False
    with qlm.Client(list(addresses), tenant=tenant, credentials=credentials()) as client:
        for request_id in request_ids:
            try:
                state = client.cancel(request_id)
            except NotFound as error:
                unknown = True
                click.echo(f"{request_id}: no such request of tenant {error.details.get('tenant', tenant)}", err=True)
                continue
            click.echo(f"{request_id}: {state if state is qlm.RequestState.CANCELLED else f'has ended already: {state}'}")
    if unknown:
        sys.exit(EXIT_UNKNOWN)
