"""Results of a run: one JSON document, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from qlm_cli.console import columns
from qlm_load.campaign.chaos import Kill
from qlm_load.replay.ledger import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """Counters of the agents over all their lives."""

    swaps: int
    evictions: int
    kv_offloads: int


def summary_of(report: Report, counts: ServerCounts | None, kills: Sequence[Kill], setting: dict[str, object]) -> dict[str, object]:
    """The content of summary.json. `wait_*` and latencies in trace seconds, `requests_per_s` in real time. `setting`: the run's
    settings."""
    summary: dict[str, object] = {
        "completed": report.completed,
        "failed": report.failed,
        "lost": report.lost,
        "doubled": report.doubled,
        "wrong": report.wrong,
        "recovered": report.recovered,
        "recovered_by_another_attempt": report.attempts_repeated,
        "recovered_by_another_stream": report.streams_resumed,
        "kills": [kill_entry(kill) for kill in kills],
        "attainment": {each.name: round(each.attainment, 4) for each in report.classes},
        "latency_p50_s": {each.name: round(each.latency_p50_s, 3) for each in report.classes},
        "latency_p99_s": {each.name: round(each.latency_p99_s, 3) for each in report.classes},
        "wait_p50_s": round(report.wait_p50_s, 3),
        "wait_p99_s": round(report.wait_p99_s, 3),
        "requests_per_s": round(report.requests_per_s, 3),
        "tokens_per_s": round(report.tokens_per_s, 1),
        "sent": report.sent,
        "accepted": report.accepted,
        "refused": report.refused,
        "sent_late": report.late_sends,
        "streams_broken": report.streams_broken,
        "results_read_again": report.verified,
        "run_s": round(report.run_s, 2),
        "problems": list(report.problems),
        "setting": setting,
    }
    if counts is not None:
        summary |= {"swaps": counts.swaps, "evictions": counts.evictions, "kv_offloads": counts.kv_offloads}
    return summary


def kill_entry(kill: Kill) -> dict[str, object]:
    return {
        "role": str(kill.role),
        "process": kill.process,
        "pid": kill.pid,
        "held": kill.held,
        "at_s": round(kill.at_s, 2),
        "at_utc": kill.at_utc,
        "ended_share": round(kill.ended_share, 3),
        "seed": kill.seed,
        "new_pid": kill.new_pid,
        "restarted_after_s": None if kill.restarted_s is None else round(kill.restarted_s, 2),
    }


def print_report(console: Console, report: Report, counts: ServerCounts | None, time_scale: float) -> None:
    """The table. Seconds are trace seconds unless they say "real"."""
    figures = ("SLO", "requests", "attained", "p50", "p99")
    title = f"SLO attainment (trace time = {time_scale:g} x real time; from due to the last token)"
    classes = Table(*columns(("class", *figures), figures), title=title)
    for each in report.classes:
        classes.add_row(
            each.name,
            f"{each.slo_s:,.0f} s",
            f"{each.requests:,}",
            f"{each.attainment:.1%}",
            f"{each.latency_p50_s:.1f} s",
            f"{each.latency_p99_s:.1f} s",
        )
    console.print(classes)
    rows: list[tuple[str, str]] = [
        (
            "requests sent / accepted / completed / failed",
            f"{report.sent:,} / {report.accepted:,} / {report.completed:,} / {report.failed:,}",
        ),
        ("waiting, acceptance to first token, p50 / p99", f"{report.wait_p50_s:.2f} s / {report.wait_p99_s:.2f} s"),
        ("throughput (real time)", f"{report.requests_per_s:.1f} requests/s, {report.tokens_per_s:,.0f} tokens/s"),
    ]
    if counts is not None:
        text = f"{counts.swaps:,} / {counts.evictions:,} / {counts.kv_offloads:,}"
        rows += [("model swaps / evictions / KV to host (agents' counters)", text)]
    rows += [
        ("recovered: run again / stream resumed", f"{report.recovered:,}: {report.attempts_repeated:,} / {report.streams_resumed:,}"),
        ("sent late by the client / refused / streams broken", f"{report.late_sends:,} / {report.refused:,} / {report.streams_broken:,}"),
        ("results read again and compared", f"{report.verified:,}"),
        ("lost / doubled / wrong tokens", f"{report.lost:,} / {report.doubled:,} / {report.wrong:,}"),
    ]
    print_account(console, rows, report.problems)


def print_account(console: Console, rows: Sequence[tuple[str, str]], problems: Sequence[str]) -> None:
    """The client's ledger: what was counted and its value, then the problems."""
    table = Table(*columns(("what", "value"), ("value",)), title="the client's ledger", show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for problem in problems:
        console.print(f"  {problem}", markup=False, style="red")


def print_kills(console: Console, kills: Sequence[Kill], seed: int) -> None:
    title = f"kill log (SIGKILL, seed {seed}; real time; ended: share of all requests)"
    figures = ("at", "UTC", "pid", "live held", "ended", "restarted after")
    table = Table(*columns(("at", "UTC", "process", "pid", "live held", "ended", "restarted after"), figures), title=title)
    for kill in kills:
        again = "-" if kill.restarted_s is None else f"{kill.restarted_s:.1f} s as {kill.new_pid}"
        row = (
            f"{kill.at_s:.1f} s",
            kill.at_utc[11:19],
            kill.process,
            str(kill.pid),
            str(kill.held),
            f"{kill.ended_share:.0%}",
            again,
        )
        table.add_row(*row)
    console.print(table)
