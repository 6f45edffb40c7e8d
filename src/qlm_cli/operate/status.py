"""The command `qlm status`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click
import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import qlm
from qlm.api.v1 import planner_pb2, planner_pb2_grpc
from qlm.values import GroupStatus, HeldBytes
from qlm_cli.console import json_text, plain_console
from qlm_cli.options import address_option, credentials, tenant_option

UNASSIGNED = "unassigned"
"""The virtual queue of groups that no instance can serve now."""
ADVICE_TIMEOUT_S = 1.0
GROUPS_SHOWN_MAX = 8
"""Groups of one virtual queue that the table shows; the rest is counted."""


@click.command()
@click.argument("request_id", metavar="[REQUEST_ID]", required=False)
@click.option("--request", "named", metavar="ID", help="The same as REQUEST_ID.")
@click.option(
    "--watch", "every_s", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Show again every so many seconds until Ctrl-C."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@tenant_option
@address_option
def status(
    request_id: str | None, named: str | None, every_s: float | None, as_json: bool, tenant: str, addresses: tuple[str, ...]
) -> None:
    """Show the queue: virtual queues, their groups and models, what runs; or one request: its state, place and objective, when it is
    expected to start and to end, and how likely it is late."""
    if named is not None and request_id not in (None, named):
        raise click.UsageError("give REQUEST_ID or --request")
    request_id = request_id if request_id is not None else named
    console = plain_console()
    with qlm.Client(list(addresses), tenant=tenant, credentials=credentials()) as client:
        if as_json:
            document: dict[str, object] = asdict(client.status(request_id))
            document["models"] = [asdict(model) for model in client.models()]
            click.echo(json_text(document))
        elif every_s is None:
            console.print(_shown(client, request_id))
        else:
            _watch(client, request_id, every_s, console)


def _watch(client: qlm.Client, request_id: str | None, every_s: float, console: Console) -> None:
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_shown(client, request_id), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return  # how a watch is meant to end


def _shown(client: qlm.Client, request_id: str | None) -> RenderableType:
    queue = client.status(request_id)
    if queue.request is not None:
        return request_table(request_id or "", queue.request)
    advice = _advice(queue.planner)
    shown: list[RenderableType] = [_queues(queue, time.time()), _models(client.models())]
    if queue.held:
        shown.append(Text(f"held: {held_line(queue.held)}"))
    if queue.refusal:
        shown.append(Text(f"refuses: {queue.refusal}", style="red"))
    for pause in queue.pauses:
        whose = f"model {pause.model}" if pause.model else f"tenant {pause.tenant}"
        shown.append(Text(f"paused: {whose}, for {max(0.0, time.time() - pause.since_s):,.0f} s (qlm resume)", style="yellow"))
    if queue.loss:
        shown.append(Text(f"lost: {queue.loss}", style="red"))
    if queue.damage_count:
        shown.append(Text(f"damaged records mended so far: {queue.damage_count:,} (see `qlm doctor` and the logs)", style="yellow"))
    return Group(*shown, *([Text(f"advice: {advice}", style="yellow")] if advice else []))


def held_line(held: Sequence[HeldBytes]) -> str:
    """Shows the bytes held against each bound."""
    return "; ".join(
        f"{each.bound} {each.name}".rstrip() + f" {each.held / 1e6:,.1f} MB" + (f" of {each.limit / 1e6:,.0f} MB" if each.limit else "")
        for each in held
    )


def _advice(planner: str) -> str:
    """Returns the planner's advice in one line; "" where it has none, or does not answer in time."""
    if not planner:
        return ""
    try:
        access = credentials()
        with access.channel(planner) as channel:
            stub = planner_pb2_grpc.PlannerStub(channel)
            return stub.GetAdvice(planner_pb2.GetAdviceRequest(), timeout=ADVICE_TIMEOUT_S, metadata=access.metadata).line
    except grpc.RpcError:
        return ""


def _queues(queue: qlm.QueueStatus, now_s: float) -> Table:
    caption = f"{queue.live:,} live: {queue.unplaced:,} not placed yet, {queue.running:,} running"
    table = Table(title=f"queue {queue.queue}", title_justify="left", min_width=72, caption=caption, caption_justify="left")
    for heading in ("instance", "active model", "groups in order", "objective", "due"):
        table.add_column(heading, no_wrap=True)
    for name in ("waiting", "running"):
        table.add_column(name, justify="right")
    for virtual_queue in queue.virtual_queues:
        if virtual_queue.instance == UNASSIGNED and not virtual_queue.groups:
            continue
        alive = "" if virtual_queue.alive or virtual_queue.instance == UNASSIGNED else " (gone)"
        head = [f"{virtual_queue.instance}{alive}", virtual_queue.active_model or "-"]
        running = f"{virtual_queue.running:,}" if virtual_queue.instance != UNASSIGNED else ""
        rows = list(_groups(virtual_queue.groups, now_s)) or [("-", "", "", "0")]
        for index, row in enumerate(rows):
            first = index == 0
            table.add_row(*(head if first else ("", "")), *row, running if first else "", end_section=index == len(rows) - 1)
    return table


def _groups(groups: tuple[GroupStatus, ...], now_s: float) -> Iterator[tuple[str, str, str, str]]:
    for group in groups[:GROUPS_SHOWN_MAX]:
        yield group.model, f"{group.slo_kind} {group.slo_class}", due(group.first_deadline_s, now_s), f"{group.waiting:,}"
    rest = groups[GROUPS_SHOWN_MAX:]
    if rest:
        yield f"... {len(rest):,} more", "", "", f"{sum(group.waiting for group in rest):,}"


def due(deadline_s: float, now_s: float) -> str:
    """When a deadline is, from now; "-" for none."""
    if not 0 < deadline_s < float("inf"):
        return "-"
    left_s = deadline_s - now_s
    return f"in {left_s:,.0f} s" if left_s >= 0 else f"{-left_s:,.0f} s ago"


def _models(models: tuple[qlm.ModelInfo, ...]) -> Table:
    table = Table("model", "context tokens", "token count", "instances", title="models", title_justify="left")
    for model in models:
        table.add_row(model.name, f"{model.context_tokens_max:,}", model.token_count, str(model.instances))
    return table


def request_table(request_id: str, request: qlm.RequestStatus) -> Table:
    """One request, without its prompt and output."""
    table = Table(title=f"request {request_id}", title_justify="left", show_header=False)
    prediction = request.prediction
    waits = not request.state.terminal and request.state is not qlm.RequestState.RUNNING
    late = None if prediction is None else prediction.probability_late
    rows = {
        "state": str(request.state),
        "why": f"{request.error_message} [{request.error_reason}]" if request.error_reason else "",
        "model": request.model,
        "queue id": request.queue_id,
        "group": request.group_id,
        "instance": request.instance,
        "objective": "" if request.slo is None else _objective(request.slo),
        "age": "" if request.finished_s is not None else f"{max(0.0, time.time() - request.accepted_s):,.0f} s",
        "ended after": "" if request.finished_s is None else f"{request.finished_s - request.accepted_s:,.1f} s",
        "due": "" if request.deadline_s is None else due(request.deadline_s, time.time()),
        "ahead": "" if request.requests_ahead is None else f"{request.requests_ahead:,} served before it on its instance",
        "starts in": _span(prediction.wait_p50_s, prediction.wait_p90_s) if prediction is not None and waits else "",
        "ends in": "" if prediction is None else _span(prediction.completion_p50_s, prediction.completion_p90_s),
        "late": "" if late is None else f"with probability {late:.1%}",
        "outlook": "paused until an operator resumes it" if request.paused else "no prediction yet" if waits and prediction is None else "",
        "output tokens": f"{request.output_tokens:,}",
        "attempts": str(request.attempts),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _span(p50_s: float, p90_s: float) -> str:
    return f"{p50_s:,.1f} s (p50), {p90_s:,.1f} s (p90)"


def _objective(slo: qlm.Slo) -> str:
    return f"priority {slo.priority}" if slo.kind == "priority" else f"{slo.kind.replace('_', ' ')} in {slo.seconds:,g} s"
