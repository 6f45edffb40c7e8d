"""One frame of `qlm top`, from what an observer saw. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qlm_cli.console import columns
from qlm_cli.top.calibration import calibration_table
from qlm_core.vocabulary.request import SloKind
from qlm_process.cluster.view import AgentView, ClassView, ClusterView, GroupView, InstanceView, OutcomesView, PartView

GROUPS_SHOWN_MAX = 6
"""Groups of one virtual queue in a frame; the rest is counted."""
BAR_CELLS = 12
UNKNOWN = "-"
OPERATION_NAMES = {
    "pulled": "pulled",
    "unpulled": "unpulled",
    "evicted": "evicted",
    "kv_offloaded": "KV out",
    "kv_restored": "KV in",
    "models_swapped": "models swapped",
    "models_activated": "activations",
    "models_warmed": "warmed",
    "groups_moved": "groups moved",
    "recovered": "recovered from lost agents",
}


def frame(view: ClusterView) -> RenderableType:
    """All of it, top down: totals, instances, outcomes of requests."""
    parts: list[RenderableType] = [_totals(view), _parts(view)]
    if view.advice:
        parts.append(Text.assemble(("advice ", "dim"), (view.advice, "yellow")))
    parts += [_instance(instance, view.at_s) for instance in view.instances]
    if view.unassigned:
        parts.append(Panel(_groups(view.unassigned, view.at_s), title="no instance can serve", title_align="left", border_style="red"))
    if not view.instances:
        parts.append(Text("no instance is known", style="dim"))
    if view.outcomes is not None:
        parts.append(Columns([_attainment(view.outcomes), calibration_table(view.outcomes.calibration)], padding=(0, 3)))
        parts.append(_operations(view.outcomes))
    return Group(*parts)


def _totals(view: ClusterView) -> Text:
    when = datetime.fromtimestamp(view.at_s, UTC).strftime("%H:%M:%S")
    text = Text.assemble(("queue ", "dim"), (view.queue or UNKNOWN, "bold"), f"  {when} UTC   ")
    if view.live is not None and view.unplaced is not None and view.running is not None:
        waiting = max(0, view.live - view.unplaced - view.running)
        text.append(f"{view.live:,} live", style="bold")
        text.append(f" = {view.unplaced:,} not placed + {waiting:,} waiting + {view.running:,} running   ")
    outcomes = view.outcomes
    if outcomes is not None and outcomes.window_s > 0.0:
        text.append(
            f"in {outcomes.accepted / outcomes.window_s:,.1f}/s  out {outcomes.completed / outcomes.window_s:,.1f}/s  "
            f"{outcomes.output_tokens / outcomes.window_s:,.0f} tokens/s"
        )
    return text


def _parts(view: ClusterView) -> Text:
    text = Text()
    for part in view.parts:
        text.append_text(_mark(part))
        text.append(f" {part.name} ", style="" if part.answered else "red")
        plan = f" plan {view.plan_version:,}" if part.name == "planner" and view.plan_version is not None else ""
        text.append(f"{part.address}{plan}" if part.answered else f"{part.problem} {part.address}".rstrip(), style="dim")
        text.append("   ")
    return text


def _mark(part: PartView) -> Text:
    return Text("●", style="green") if part.answered else Text("✗", style="bold red")


def _instance(instance: InstanceView, now_s: float) -> Panel:
    lost = instance.alive is False or not instance.part.answered
    title = Text.assemble(_mark(instance.part), " ", (instance.name, "bold"))
    if instance.alive is False:
        title.append(" lease lost", style="red")
    if not instance.part.answered:
        title.append(f" {instance.part.problem}", style="red")
    agent = instance.agent
    if agent is not None:
        title.append(f"  {agent.n_gpu} x {agent.gpu}, {agent.engine}" + (", draining" if agent.draining else ""), style="dim")
    body = Group(_engine(instance, agent), _groups(instance.groups, now_s))
    return Panel(body, title=title, title_align="left", border_style="red" if lost else "blue", padding=(0, 1))


def _engine(instance: InstanceView, agent: AgentView | None) -> Text:
    text = Text()
    if agent is None:
        text.append(f"{instance.active_model or UNKNOWN}", style="bold")
        text.append(f"   {_number(instance.owned)} owned")
        return text
    text.append(agent.active_model or "no model", style="bold cyan")
    if agent.swapping_to:
        text.append(f" → {agent.swapping_to}", style="bold yellow")
    if agent.warm_models:
        text.append(f"  warm: {', '.join(agent.warm_models)}", style="yellow")
    offloaded = f" + {agent.offloaded:,} in host memory" if agent.offloaded else ""
    text.append(f"   {agent.running:,} running{offloaded}   KV ")
    text.append_text(_bar(agent.kv_used_tokens, agent.kv_capacity_tokens))
    text.append("\n")
    if agent.host_memory_bytes:
        text.append("host memory ", style="dim")
        text.append_text(_bar(agent.host_memory_used_bytes, agent.host_memory_bytes))
        text.append("   ")
    text.append(f"completed {agent.completed:,}", style="dim")
    for name, count in agent.operations.items():
        text.append(f"   {OPERATION_NAMES.get(name, name)} {count:,}", style="dim")
    if agent.eviction_choice:
        text.append(f"\nevicts by {agent.eviction_choice}", style="dim")
    return text


def _bar(used: int, capacity: int) -> Text:
    if capacity <= 0:
        return Text(UNKNOWN)
    share = min(1.0, used / capacity)
    cells = round(share * BAR_CELLS)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(("█" * cells, style), ("░" * (BAR_CELLS - cells), "dim"), f" {share:.0%}")


def _groups(groups: Sequence[GroupView], now_s: float) -> Table:
    figures = ("waiting", "done in (p90)", "due in")
    headings = columns(("", "group of", "objective", *figures), figures, no_wrap=True)
    table = Table(*headings, box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for number, group in enumerate(groups[:GROUPS_SHOWN_MAX], start=1):
        head = "head" if number == 1 else f"{number}."
        table.add_row(head, group.model, _objective(group), f"{group.waiting:,}", _done(group, now_s), _due(group, now_s))
    rest = groups[GROUPS_SHOWN_MAX:]
    if rest:
        table.add_row("", f"... {len(rest):,} more", "", f"{sum(group.waiting for group in rest):,}", "", "")
    if not groups:
        table.add_row("", Text("nothing waits", style="dim"), "", "", "", "")
    return table


def _objective(group: GroupView) -> str:
    return (
        f"priority {group.slo_class[1:]}" if group.slo_kind is SloKind.PRIORITY else f"{group.slo_kind} {group.slo_class}".replace("_", " ")
    )


def _done(group: GroupView, now_s: float) -> Text:
    """The predicted end of the whole group."""
    if group.completion_p50_s is None or group.completion_p90_s is None:
        return Text(UNKNOWN, style="dim")
    return Text(f"{max(0.0, group.completion_p50_s - now_s):,.0f} s ({max(0.0, group.completion_p90_s - now_s):,.0f} s)")


def _due(group: GroupView, now_s: float) -> Text:
    if not 0.0 < group.first_deadline_s < math.inf:
        return Text(UNKNOWN, style="dim")
    left_s = group.first_deadline_s - now_s
    return Text(f"{left_s:,.0f} s") if left_s >= 0.0 else Text(f"{-left_s:,.0f} s ago", style="red")


def _attainment(outcomes: OutcomesView) -> Table:
    title = f"SLO attainment, last {outcomes.window_s:,.0f} s"
    headings = columns(("SLO", "ended", "attained"), ("ended", "attained"), header_style="dim")
    table = Table(*headings, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), min_width=len(title))
    for each in outcomes.classes:
        table.add_row(each.slo_class, f"{each.completed:,}", _share(each))
    if not outcomes.classes:
        table.add_row(Text("nothing ended", style="dim"))
    return table


def _share(each: ClassView) -> Text:
    if not each.judged:
        return Text(UNKNOWN, style="dim")
    share = each.attained / each.judged
    return Text(f"{share:.1%}", style="green" if share >= 0.99 else "yellow" if share >= 0.9 else "red")


def _operations(outcomes: OutcomesView) -> Text:
    text = Text("LSOs, same time: ", style="dim")
    text.append("  ".join(f"{OPERATION_NAMES.get(name, name)} {count:,}" for name, count in outcomes.operations.items()))
    ended = {"failed": outcomes.failed, "cancelled": outcomes.cancelled, "expired": outcomes.expired}
    for name, count in ended.items():
        if count:
            text.append(f"  {name} {count:,}", style="red")
    return text


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"
