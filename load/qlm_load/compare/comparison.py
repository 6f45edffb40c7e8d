"""The same workload under several policies, live runs beside runs in virtual time, in one table.

A simulated run steps the very machines of planner, estimator, gateways and agents over a simulated server and network (`qlm_sim`), with the
live run's kills of agents and planner. Agreement of QLM simulated with QLM live checks the simulator, and so its figures for first come
first served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

from qlm_cli.console import columns
from qlm_load.replay.ledger import Report
from qlm_load.replay.summary import ServerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One run, in trace seconds. `attainment`: share by SLO class, of all requests; `waits`: acceptance to first token; `run_s`: from the
    start to the last end; `ended` of `requests`; `swaps`: model swaps; `gave_way`: evictions and KV swaps, None if not counted."""

    policy: str
    simulated: bool
    requests: int
    ended: int
    attainment: dict[str, float]
    wait_p50_s: float
    wait_p99_s: float
    run_s: float
    swaps: int
    gave_way: int | None = None


def live_run(policy: str, report: Report, time_scale: float, counts: ServerCounts) -> PolicyRun:
    """A run from the client's ledger and the agents' counters."""
    return PolicyRun(
        policy=policy,
        simulated=False,
        requests=report.sent,
        ended=report.completed + report.failed,
        attainment={each.name: each.attainment for each in report.classes},
        wait_p50_s=report.wait_p50_s,
        wait_p99_s=report.wait_p99_s,
        run_s=report.run_s * time_scale,
        swaps=counts.swaps,
        gave_way=counts.evictions + counts.kv_offloads,
    )


NAMES = {
    "slo": "QLM",
    "fcfs": "FCFS",
    "edf": "EDF",
    "round_robin": "round robin",
    "random": "random",
    "power_of_two": "power of two",
    "least_loaded": "least loaded",
    "least_kv": "least KV",
    "sal": "SAL",
    "batched": "batched by model",
    "shepherd": "SHEPHERD",
}
"""Labels of the policies (`planner.policy`)."""


POLICY_METAVAR = f"[{'|'.join(NAMES)}|module:Class]"


def check_policy(name: str, param_hint: str | None = None) -> str:
    """A policy of QLM, or "module:Class" of the user's own, which the planner's settings check. Raises click.BadParameter."""
    if name not in NAMES and ":" not in name:
        raise click.BadParameter(f"{name!r} is unknown; may be {', '.join(NAMES)} or module:Class", param_hint=param_hint)
    return name


CAPTION = "the same trace under QLM and first come first served (FCFS), trace time"
LIVE_CAPTION = "the same requests under QLM and first come first served (FCFS), on the same engines, both with kills"
NOTE = "simulated: the same machines in virtual time, agent and planner killed as in the live run"


def comparison_rows(runs: Sequence[PolicyRun]) -> list[list[str]]:
    """Headings first; a row for each measure, a column for each run."""
    rows = [["", *(f"{NAMES.get(run.policy, run.policy)} {'simulated' if run.simulated else 'live'}" for run in runs)]]
    classes = runs[0].attainment if runs else ()
    rows += [[f"attained, {name}", *(f"{run.attainment.get(name, 0.0):.1%}" for run in runs)] for name in classes]
    rows += [
        ["waiting p50", *(f"{run.wait_p50_s:,.1f} s" for run in runs)],
        ["waiting p99", *(f"{run.wait_p99_s:,.1f} s" for run in runs)],
        ["all ended after", *(f"{run.run_s:,.0f} s" if run.ended == run.requests else f"{run.ended:,} ended" for run in runs)],
        ["model swaps", *(f"{run.swaps:,}" for run in runs)],
    ]
    if any(run.gave_way is not None for run in runs):
        rows.append(["evictions, KV swaps", *("" if run.gave_way is None else f"{run.gave_way:,}" for run in runs)])
    return rows


POLICIES_CAPTION = "the same trace under each policy of the planner, simulated, trace time"


def print_policies(console: Console, runs: Sequence[PolicyRun]) -> None:
    """One row a run: for more runs than fit side by side."""
    head, *body = zip(*comparison_rows(runs), strict=True)
    labels = [NAMES.get(run.policy, run.policy) for run in runs]
    _print(console, POLICIES_CAPTION, head, [[label, *row[1:]] for label, row in zip(labels, body, strict=True)])


def print_comparison(console: Console, runs: Sequence[PolicyRun], caption: str = CAPTION) -> None:
    """Prints the table; it marks simulated runs."""
    head, *body = comparison_rows(runs)
    _print(console, caption, head, body)
    if any(run.simulated for run in runs):
        console.print(NOTE, highlight=False, soft_wrap=True)


def _print(console: Console, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns(head, head[1:]))
    for row in rows:
        table.add_row(*row)
    console.print(caption, style="italic", highlight=False, soft_wrap=True)
    console.print(table)
