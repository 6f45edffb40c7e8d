"""The command `qlm assess`: what the plan is expected to come to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from qlm.api.v1 import estimator_pb2
from qlm.api.v1.request_pb2 import SloKind
from qlm_cli.console import plain_console
from qlm_cli.json_text import json_text
from qlm_cli.options import address_option
from qlm_cli.profiles.estimator_calls import asked, estimator_option

GROUPS_SHOWN = 20

Row = tuple[str, estimator_pb2.GroupAssessment]
"""A group, and the instance on whose virtual queue it is."""


@click.command()
@click.argument("instances", nargs=-1, metavar="[INSTANCE]...")
@click.option(
    "--groups",
    "groups_max",
    type=click.IntRange(1, 10_000),
    default=GROUPS_SHOWN,
    show_default=True,
    metavar="COUNT",
    help="Most groups to show; the sums are over all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@estimator_option
@address_option
def assess(instances: tuple[str, ...], groups_max: int, as_json: bool, estimator: str | None, addresses: tuple[str, ...]) -> None:
    """Show how many requests are expected to miss their objectives under the plan, of all instances or of those named: by group, the most
    late first. Times are in seconds from now.

    Exit codes: 0 done; 1 no estimator answered, or an instance is not alive; 2 wrong use.
    """
    request = estimator_pb2.AssessRequest(instances=instances, groups_max=groups_max)
    found = asked(estimator, addresses, lambda stub: stub.Assess, request)
    rows = [(queue.instance, group) for queue in found.queues for group in queue.groups]
    rows.sort(key=lambda row: -row[1].late_expected)
    unpredictable = [queue.instance for queue in found.queues if queue.unpredictable]
    if as_json:
        click.echo(json_text(_document(found, rows, unpredictable)))
        return
    note = Text(f"nothing is known of a model on {', '.join(unpredictable)}: not assessed", style="yellow")
    plain_console().print(Group(_table(found, rows), *([note] if unpredictable else [])))


def _document(found: estimator_pb2.Assessment, rows: Sequence[Row], unpredictable: Sequence[str]) -> dict[str, object]:
    groups = [
        {
            "instance": instance,
            "group_id": group.group_id,
            "model": group.model,
            "slo_kind": _kind(group),
            "slo_class": group.slo_class,
            "waiting": group.waiting,
            "first_deadline_s": group.first_deadline_s,
            "wait_p50_s": group.wait_p50_s,
            "wait_p90_s": group.wait_p90_s,
            "completion_p50_s": group.completion_p50_s,
            "completion_p90_s": group.completion_p90_s,
            "late_expected": group.late_expected,
            "tardiness_expected_s": group.tardiness_expected_s,
        }
        for instance, group in rows
    ]
    return {
        "made_s": found.made_s,
        "profile_version": found.profile_version,
        "plan_version": found.plan_version,
        "waiting": found.waiting,
        "late_expected": found.late_expected,
        "tardiness_expected_s": found.tardiness_expected_s,
        "groups_assessed": found.groups_assessed,
        "unpredictable": list(unpredictable),
        "groups": groups,
    }


def _table(found: estimator_pb2.Assessment, rows: Sequence[Row]) -> Table:
    caption = (
        f"{found.waiting:,} wait in {found.groups_assessed:,} groups: {found.late_expected:,.1f} expected to be late, "
        f"by {found.tardiness_expected_s:,.0f} s in all"
    )
    table = Table(title=f"plan {found.plan_version}", title_justify="left", min_width=72, caption=caption, caption_justify="left")
    for heading in ("instance", "model", "objective"):
        table.add_column(heading, no_wrap=True)
    for heading in ("due in", "waiting", "first starts in: p50, p90", "last ends in: p50, p90", "late"):
        table.add_column(heading, justify="right", no_wrap=True)
    for instance, group in rows:
        due_s = group.first_deadline_s - found.made_s
        table.add_row(
            instance,
            group.model,
            f"{_kind(group)} {group.slo_class}",
            f"{due_s:,.0f} s" if math.isfinite(due_s) else "-",
            f"{group.waiting:,}",
            f"{group.wait_p50_s:,.1f}, {group.wait_p90_s:,.1f} s",
            f"{group.completion_p50_s:,.1f}, {group.completion_p90_s:,.1f} s",
            f"{group.late_expected:,.1f}",
        )
    return table


def _kind(group: estimator_pb2.GroupAssessment) -> str:
    return SloKind.Name(group.slo_kind).removeprefix("SLO_KIND_").lower()
