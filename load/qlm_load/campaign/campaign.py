"""A campaign: a whole cluster on this machine, a replay, random kills of every kind of process and of the queue's server all through
it, and the client's account of the outcome.

Its cluster is the demo's with two settings raised (`OVERRIDES`), so that the check can be strict: by default a request that was on a
killed agent three times ends FAILED (ATTEMPTS_EXHAUSTED), and a process that ended too often within a minute stops `qlm up`; both are as
they should be, and neither is a finding of a campaign.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import qlm
from qlm_cli.console import columns
from qlm_load.campaign.strikes import SERVER, Strike, Striker, Struck, draw_strikes
from qlm_load.demo.cluster import POLL_S, Cluster, living_pids, serving_pids
from qlm_load.demo.settings import DemoConfig
from qlm_load.replay.ledger import Ledger, Report
from qlm_load.replay.replay import Replay, ReplaySettings
from qlm_load.replay.summary import print_account
from qlm_load.workload.workload import Workload
from qlm_process.cluster.state import ClusterState

OVERRIDES: Mapping[str, object] = {"queue.bounds.attempts_max": 1000, "up.restarts_max": 1000}
LEAD_S = 1.0
"""Real seconds between the cluster's being ready and the first arrival."""
SETTLE_TIMEOUT_S = 30.0
"""How long the cluster may take after the last answer until all serve again and the queue holds nothing."""
VICTIM_SERVICES = ("agent", "planner", "estimator", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assault:
    """Faults of the cluster: `kills` and `server_kills` drawn by seed, and strikes that the caller wrote."""

    seed: int
    kills: int
    server_kills: int
    written: tuple[Strike, ...] = ()

    def strikes(self, state: ClusterState) -> tuple[Strike, ...]:
        """Against this cluster. Raises ConfigError for a strike at a process that it does not have."""
        names = [process.name for service in VICTIM_SERVICES for process in state.of(service)]
        unknown = {strike.process for strike in self.written} - {*names, SERVER}
        if unknown:
            raise qlm.errors.ConfigError(f"no process {', '.join(sorted(unknown))}; may be {', '.join((*names, SERVER))}")
        return (*draw_strikes(self.seed, self.kills, self.server_kills, names), *self.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignOutcome:
    """`hung`: requests that had not ended `drain_timeout_s` after the last arrival; `left`: live requests in the queue at the very end;
    `greedy_equal`: requests whose whole answer, streamed and read again, is that of an undisturbed run; `seconds`: of the replay."""

    report: Report
    log: tuple[Struck, ...]
    requests: int
    hung: int
    left: int
    greedy_equal: int
    seconds: float
    failures: tuple[str, ...]

    @property
    def server_kills(self) -> int:
        return sum(struck.kills and struck.strike.process == SERVER for struck in self.log)

    @property
    def kills(self) -> int:
        return sum(struck.kills for struck in self.log) - self.server_kills

    def as_json(self, seed: int) -> str:
        report = self.report
        document = {
            "seed": seed,
            "requests": self.requests,
            "completed": report.completed,
            "lost": report.lost,
            "doubled": report.doubled,
            "wrong": report.wrong,
            "hung": self.hung,
            "failed": report.failed,
            "refused": report.refused,
            "streams_broken": report.streams_broken,
            "left": self.left,
            "greedy_equal": self.greedy_equal,
            "recovered": report.recovered,
            "kills": self.kills,
            "server_kills": self.server_kills,
            "other_strikes": len(self.log) - self.kills - self.server_kills,
            "seconds": round(self.seconds, 1),
            "failures": list(self.failures),
        }
        return json.dumps(document)


async def run_campaign(
    console: Console,
    config: DemoConfig,
    workload: Workload,
    config_path: str,
    overrides: Mapping[str, object],
    out: Path,
    assault: Assault,
    environment: Mapping[str, str] | None = None,
) -> CampaignOutcome:
    """Starts the cluster, replays, strikes, waits until all is quiet, reads everything again, stops. `environment`: of its processes,
    beside one's own. Raises Unavailable where the cluster does not start."""
    load = config.load
    simulated = {"agent.simulated.time_scale": load.time_scale, "agent.simulated.seed": load.seed}
    cluster = Cluster(out, config_path, {**OVERRIDES, **overrides, **simulated}, environment)
    try:
        state = await cluster.start(load.start_timeout_s)
        addresses = tuple(gateway.address for gateway in state.of("gateway"))
        strikes = assault.strikes(state)
        settings = ReplaySettings(
            addresses=addresses, time_scale=load.time_scale, in_flight_max=load.in_flight_max, drain_timeout_s=load.drain_timeout_s
        )
        start_s = time.monotonic() + LEAD_S
        ledger = Ledger(workload, load.time_scale, start_s)
        replay = Replay(workload, ledger, settings)
        striker = Striker(strikes, start_s=start_s)
        try:
            async with asyncio.TaskGroup() as group:
                striking = group.create_task(_strike(console, cluster, replay, striker))
                await replay.run(start_s)
                striking.cancel()
        finally:
            striker.wake(time.monotonic(), all_now=True)
        seconds = time.monotonic() - start_s
        hung = replay.progress().sent - ledger.ended
        async with qlm.AsyncClient(addresses) as client:
            unsettled, left = await _settle(cluster, striker, client)
        await replay.read_again()
        report = ledger.report(time.monotonic())
        failures = find_failures(report, hung, left, striker.waiting, unsettled, ended_by_themselves(cluster.state(), striker.log))
    finally:
        stopped_well = await cluster.stop()
    if not stopped_well:
        failures = (*failures, f"the cluster did not stop in order (see {cluster.log_path})")
    return CampaignOutcome(
        report=report,
        log=tuple(striker.log),
        requests=len(workload.requests),
        hung=hung,
        left=left,
        greedy_equal=sum(entry.whole for entry in ledger.entries),
        seconds=seconds,
        failures=failures,
    )


async def _strike(console: Console, cluster: Cluster, replay: Replay, striker: Striker) -> None:
    """Polls the run every POLL_S until cancelled."""
    while True:
        state, progress = cluster.state(), replay.progress()
        share = progress.ended / progress.total
        for struck in striker.poll(time.monotonic(), share, living_pids(state), serving_pids(state)):
            strike = struck.strike
            how = f"{strike.action} {strike.process} (pid {struck.pid})" + (f" after {strike.for_s:g} s" if strike.for_s else "")
            console.print(f"{struck.at_s:6.1f} s  {share:4.0%}  {progress.in_flight:5d} open  {how}", style="red", highlight=False)
        await asyncio.sleep(POLL_S)


async def _settle(cluster: Cluster, striker: Striker, client: qlm.AsyncClient) -> tuple[bool, int]:
    """Waits until all processes serve and the queue is empty: whether the former did not happen, and the live requests left."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        state = cluster.state()
        striker.poll(time.monotonic(), 0.0, {}, serving_pids(state))
        ready = state is not None and state.ready
        left = (await client.status()).live
        if (ready and left == 0) or time.monotonic() > deadline_s:
            return not ready, left
        await asyncio.sleep(POLL_S)


def ended_by_themselves(state: ClusterState | None, log: Sequence[Struck]) -> tuple[str, ...]:
    """Processes that were started again more often than somebody ended them: they crashed."""
    ended = Counter(struck.strike.process for struck in log if struck.ends)
    return tuple(process.name for process in (state.processes if state else ()) if process.restarts > ended[process.name])


def find_failures(
    report: Report, hung: int, left: int, undone: Sequence[Strike], unsettled: bool, crashed: Sequence[str]
) -> tuple[str, ...]:
    """Why a campaign fails; empty where it does not."""
    checks = (
        (report.lost == 0, f"{report.lost:,} requests lost"),
        (report.doubled == 0, f"{report.doubled:,} requests doubled"),
        (report.wrong == 0, f"{report.wrong:,} requests with wrong tokens"),
        (hung == 0, f"{hung:,} requests hung"),
        (report.failed == 0, f"{report.failed:,} requests failed"),
        (report.refused == 0, f"{report.refused:,} requests never accepted"),
        (report.streams_broken == 0, f"{report.streams_broken:,} streams broke off for good"),
        (left == 0, f"{left:,} live requests left in the queue"),
        (not undone, "did not happen: " + ", ".join(f"{strike.action} {strike.process}" for strike in undone)),
        (not unsettled, "not all processes serve again"),
        (not crashed, "ended by themselves: " + ", ".join(crashed)),
    )
    return tuple(text for passed, text in checks if not passed)


def print_campaign(console: Console, outcome: CampaignOutcome, seed: int) -> None:
    headings = columns(("at", "UTC", "strike", "process", "pid", "ended", "again after"), ("at", "UTC", "pid", "ended", "again after"))
    strikes = Table(*headings, title=f"strikes (seed {seed}; real time; ended: share of all requests)")
    for struck in outcome.log:
        again = (
            "-" if struck.again_s is None else f"{struck.again_s - struck.at_s:.1f} s" + (f" as {struck.new_pid}" if struck.new_pid else "")
        )
        strike = struck.strike
        row = (
            f"{struck.at_s:.1f} s",
            struck.at_utc[11:19],
            str(strike.action),
            strike.process,
            str(struck.pid),
            f"{struck.ended_share:.0%}",
            again,
        )
        strikes.add_row(*row)
    console.print(strikes)
    report = outcome.report
    rows = (
        (
            "requests / completed / failed / refused",
            f"{outcome.requests:,} / {report.completed:,} / {report.failed:,} / {report.refused:,}",
        ),
        (
            "kills / of the server / other strikes",
            f"{outcome.kills} / {outcome.server_kills} / {sum(not struck.kills for struck in outcome.log)}",
        ),
        ("recovered: run again / stream resumed", f"{report.recovered:,}: {report.attempts_repeated:,} / {report.streams_resumed:,}"),
        ("answers equal to those of an undisturbed run", f"{outcome.greedy_equal:,}"),
        ("lost / doubled / wrong / hung", f"{report.lost:,} / {report.doubled:,} / {report.wrong:,} / {outcome.hung:,}"),
        ("real seconds", f"{outcome.seconds:.1f}"),
    )
    print_account(console, rows, report.problems)
    for failure in outcome.failures:
        console.print(f"FAILED: {failure}", markup=False, style="bold red")
