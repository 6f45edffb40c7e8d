"""The demo: a whole cluster on this machine, a replay with kills half way, and the client's account of it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

import qlm
from qlm_core.vocabulary.errors import Unavailable
from qlm_load.campaign.chaos import Chaos, plan_kills
from qlm_load.compare.comparison import PolicyRun, comparison_rows
from qlm_load.counters import CounterSums
from qlm_load.cpu_time import CpuTime
from qlm_load.demo.cluster import Cluster, serving_pids
from qlm_load.demo.settings import DemoConfig
from qlm_load.demo.watch import Watch
from qlm_load.picture.command import NEEDS, can_draw, write_pictures
from qlm_load.picture.recorder import Recorder
from qlm_load.picture.recording import Recording
from qlm_load.replay.ledger import Ledger, Report
from qlm_load.replay.progress_bar import show_progress
from qlm_load.replay.replay import Replay, ReplaySettings
from qlm_load.replay.summary import ServerCounts, print_kills, print_report, summary_of
from qlm_load.workload.workload import Workload

LEAD_S = 1.0
"""Real seconds between the cluster's being ready and the first arrival."""
ACTIVATIONS_COUNTER = "qlm_agent_model_swaps_total"
"""Models made active, including the first of an agent's life, which replaces none."""
EVICTIONS_COUNTER = 'qlm_agent_returned_requests_total{cause="evicted"}'
KV_OFFLOADS_COUNTER = 'qlm_agent_lso_total{lso="kv_offload"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """`failures`: shortcomings of the demo; empty if it showed everything. `texts`: answers of real models by the request's index. `cpu`:
    of the cluster's processes, from the first arrival."""

    report: Report
    counts: ServerCounts
    chaos: Chaos
    recording: Recording
    texts: Mapping[int, str]
    cpu: CpuTime
    failures: tuple[str, ...]
    setup_s: float
    total_s: float


async def run_demo(
    console: Console, config: DemoConfig, workload: Workload, config_path: str, overrides: Mapping[str, object], out: Path
) -> DemoOutcome:
    """Starts the cluster, replays, kills, reads everything again, stops. Raises Unavailable if the cluster does not start."""
    load = config.load
    begun_s = time.monotonic()
    cluster = Cluster(out, config_path, overrides)
    try:
        state = await cluster.start(load.start_timeout_s)
        setup_s = time.monotonic() - begun_s
        addresses = tuple(gateway.address for gateway in state.of("gateway"))
        console.print(
            f"cluster of {len(state.processes)} processes up after {setup_s:.1f} s; logs in {out / 'state' / 'logs'}", highlight=False
        )
        if not workload.answers_known:
            await _warm_up(addresses, workload, load.start_timeout_s)
        settings = ReplaySettings(
            addresses=addresses, time_scale=load.time_scale, in_flight_max=load.in_flight_max, drain_timeout_s=load.drain_timeout_s
        )
        start_s = time.monotonic() + LEAD_S
        ledger = Ledger(workload, load.time_scale, start_s)
        replay = Replay(workload, ledger, settings)
        names = {service: [process.name for process in state.of(service)] for service in ("agent", "planner", "gateway")}
        plans = plan_kills(load.seed, names["agent"], names["planner"], names["gateway"])
        chaos = Chaos(plans, held_min=load.held_min, seed=load.seed, start_s=start_s)
        async with qlm.AsyncClient(addresses) as client:
            watch = Watch(cluster, client, replay, chaos, console)
            recorder = Recorder(addresses, cluster.state, workload, load.time_scale, start_s)
            await _replay(console, replay, ledger, watch, recorder, start_s)
            await _until_restarted(watch, cluster, chaos, load.restart_timeout_s)
            await replay.read_again()
            await watch.scrape()
        report = ledger.report(time.monotonic())
        counts = server_counts(watch.counters)
        failures = find_failures(report, counts, chaos)
        recording = recorder.recording(_title(workload), ledger, chaos.log)
    finally:
        stopped_well = await cluster.stop()
    if not stopped_well:
        failures = (*failures, f"the cluster did not stop in order (see {cluster.log_path})")
    return DemoOutcome(
        report=report,
        counts=counts,
        chaos=chaos,
        recording=recording,
        texts=ledger.texts,
        cpu=watch.cpu,
        failures=failures,
        setup_s=setup_s,
        total_s=time.monotonic() - begun_s,
    )


async def _warm_up(addresses: Sequence[str], workload: Workload, timeout_s: float) -> None:
    """Sends each real model one request: a real engine takes seconds to load its first model. Raises Unavailable."""
    async with qlm.AsyncClient(addresses) as client:
        for model in workload.vocabulary_sizes:
            accepted = await client.submit(model, [{"role": "user", "content": "Hello"}], slo_s=timeout_s, max_tokens=4)
            result = await client.result(accepted.request_id, timeout_s)
            if result is None or result.state is not qlm.RequestState.COMPLETED:
                raise Unavailable(f"{model} does not answer: {result.error_message if result else f'no result for {timeout_s:g} s'}")


def _title(workload: Workload) -> str:
    return f"{len(workload.requests):,} requests at {workload.rate_per_s:.1f} per trace second, seed {workload.seed}"


async def _replay(console: Console, replay: Replay, ledger: Ledger, watch: Watch, recorder: Recorder, start_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        beside = [
            group.create_task(watch.run(), name="watch"),
            group.create_task(recorder.run(), name="record"),
            group.create_task(show_progress(console, replay, ledger, start_s), name="progress"),
        ]
        await replay.run(start_s)
        for task in beside:
            task.cancel()


async def _until_restarted(watch: Watch, cluster: Cluster, chaos: Chaos, timeout_s: float) -> None:
    """Waits until all killed processes serve again; gives up after `timeout_s` (the kill log then shows it)."""
    deadline_s = time.monotonic() + timeout_s
    while any(kill.new_pid is None for kill in chaos.log) and time.monotonic() < deadline_s:
        chaos.note_restarts(time.monotonic(), serving_pids(cluster.state()))
        await asyncio.sleep(0.1)
    await watch.scrape()


def server_counts(counters: CounterSums) -> ServerCounts:
    """Sums over all agents and all their lives."""
    return ServerCounts(
        swaps=counters.total_beyond_first(ACTIVATIONS_COUNTER),
        evictions=counters.total(EVICTIONS_COUNTER),
        kv_offloads=counters.total(KV_OFFLOADS_COUNTER),
    )


def find_failures(report: Report, counts: ServerCounts, chaos: Chaos) -> tuple[str, ...]:
    """Why a run fails: anything lost, doubled or wrong, any expected event that did not happen."""
    checks = (
        (report.lost == 0, f"{report.lost:,} requests lost"),
        (report.doubled == 0, f"{report.doubled:,} requests doubled"),
        (report.wrong == 0, f"{report.wrong:,} requests with wrong tokens"),
        (report.refused == 0, f"{report.refused:,} requests never accepted"),
        (report.failed == 0, f"{report.failed:,} requests failed"),
        (counts.swaps > 0, "there was no model swap"),
        (report.recovered > 0, "no request was recovered"),
        (not chaos.spared, "no kill, since no process held enough, of: " + ", ".join(plan.role for plan in chaos.spared)),
        (
            all(kill.new_pid is not None for kill in chaos.log),
            "not restarted: " + ", ".join(kill.process for kill in chaos.log if kill.new_pid is None),
        ),
    )
    return tuple(text for passed, text in checks if not passed)


def write_summary(path: Path, outcome: DemoOutcome, compared: Sequence[PolicyRun], setting: dict[str, object]) -> None:
    """summary.json, with the keys that load/README.md names."""
    summary = summary_of(outcome.report, outcome.counts, outcome.chaos.log, setting)
    summary |= {"cpu_had_s": round(outcome.cpu.had_s, 2), "cpu_wanted_s": round(outcome.cpu.wanted_s, 2)}
    summary |= {"failures": list(outcome.failures), "setup_s": round(outcome.setup_s, 2), "total_s": round(outcome.total_s, 2)}
    summary["compared"] = [asdict(run) for run in compared]
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def print_outcome(console: Console, outcome: DemoOutcome, config: DemoConfig) -> None:
    print_kills(console, outcome.chaos.log, config.load.seed)
    print_report(console, outcome.report, outcome.counts, config.load.time_scale)
    cpu, run_s = outcome.cpu, outcome.report.run_s
    cores, wanted = os.cpu_count() or 1, cpu.wanted_s / run_s
    text = f"the cluster's processes had {cpu.had_s / run_s:.2f} of {cores} cores and wanted {wanted:.2f}"
    if wanted > cores:
        text += ": this machine was too busy for the figures above"
    console.print(text, highlight=False, style="bold yellow" if wanted > cores else "")
    if outcome.failures:
        for failure in outcome.failures:
            console.print(f"FAILED: {failure}", markup=False, style="bold red")
    else:
        console.print(f"Nothing lost, nothing doubled; {outcome.total_s:.0f} s in all.", style="bold green", highlight=False)


def draw_outcome(console: Console, outcome: DemoOutcome, compared: Sequence[PolicyRun], out: Path, caption: str) -> None:
    """The pictures, with the table of the runs compared under `caption`; without matplotlib, a note."""
    if not can_draw():
        console.print(NEEDS, highlight=False, markup=False)
        return
    table = (caption, comparison_rows(compared)) if compared else None
    for path in write_pictures(outcome.recording, out, table):
        console.print(f"{path}", highlight=False)
