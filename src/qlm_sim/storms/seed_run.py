"""One run by seed: a small cluster, a workload, a storm, and the invariants."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from qlm_core.vocabulary.errors import QlmError
from qlm_planner.policy import Policy
from qlm_queue.memory.queue import MemoryQueue
from qlm_sim.cluster import START_S, Cluster, MakeQueue, quiet_logs
from qlm_sim.processes.client import SimClient
from qlm_sim.storms.generator import scenario_of
from qlm_sim.storms.invariants import Oracle, Violation
from qlm_sim.storms.storm import Meetings, Storm
from qlm_sim.storms.weather import Weather, weather_of
from qlm_sim.world.chance import Chance
from qlm_sim.world.network import Command
from qlm_sim.world.process import Process
from qlm_sim.world.server import READ_ONLY
from qlm_sim.world.transcript import in_words

QUIET_S = 120.0
"""Virtual seconds after the end of all faults by which every request has ended. Most of it is for the work itself: a load that a straggler
began may take a minute. A lost call or lease costs a few lease periods."""

SETTLE_S = 20.0
"""Wait after the last end: by then no agent, planner or gateway holds anything of a request."""

LINES_KEPT = 400
"""Lines of a failing seed's transcript that are printed."""

DEFAULTS = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedReport:
    """`problem`: the violation, "" for none. `states`: how requests ended. `meetings`: faults that hit work under way. `effects`: as in
    `Site`. `stale_calls`: calls with a lost lease."""

    seed: int
    problem: str
    virtual_s: float
    events: int
    states: Counter[str]
    meetings: Meetings
    effects: Counter[str]
    stale_calls: int
    weather: Weather
    lines: tuple[str, ...] = field(repr=False, default=())
    digest: str = ""


def run_seed(
    seed: int,
    *,
    lines_max: int = 0,
    hashed: bool = False,
    make_queue: MakeQueue = MemoryQueue,
    policy: Policy = DEFAULTS,
) -> SeedReport:
    """Runs a seed to its end or to the first violation. `make_queue`: for planted faults. `policy`: the planners'."""
    with quiet_logs():
        run = _Run(seed, lines_max, hashed, make_queue, policy)
        try:
            run.go()
            problem = ""
        except (AssertionError, KeyError, ValueError, IndexError, AttributeError, TypeError, QlmError) as error:
            problem = f"{type(error).__name__}: {error}"
            if not isinstance(error, Violation):
                frame = traceback.extract_tb(error.__traceback__)[-1]
                problem += f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
            run.cluster.transcript.line(run.cluster.schedule.now_s, "", f"!!! {problem}")
        finally:
            run.cluster.stop()
        return run.report(problem)


class _Run:
    """The parts of one run."""

    def __init__(self, seed: int, lines_max: int, hashed: bool, make_queue: MakeQueue, policy: Policy) -> None:
        chance = Chance(seed, "run")
        self.seed = seed
        self.meetings: Meetings = Counter()
        self.scenario = scenario_of(chance.part("scenario"))
        self.weather = weather_of(chance.part("weather"), self.scenario.cluster.lease_ttl_s)
        self.cluster = Cluster(
            self.scenario.cluster, seed, policy, lines_max=lines_max, hashed=hashed, met=self._met, make_queue=make_queue
        )
        cluster = self.cluster
        self.oracle = Oracle(cluster.server.queue.state, dict(cluster.site.catalogue), lambda: cluster.schedule.now_s)
        cluster.server.watchers.append(self.oracle)
        if cluster.transcript.on:
            cluster.server.watchers.append(self)
        self.storm = Storm(cluster, self.weather, self.meetings)
        self.clients_process = cluster.site.process("clients")
        self.clients = [
            SimClient(cluster.site, self.clients_process, cluster.gateways, request, behaviour, chance.part(f"client {request.request_id}"))
            for request, behaviour in self.scenario.requests
        ]

    def go(self) -> None:
        """Raises AssertionError (a Violation, or a bug found by an assertion)."""
        cluster = self.cluster
        cluster.start()
        self.clients_process.begin()
        for client in self.clients:
            cluster.schedule.at(START_S + client.request.arrival_s, client.start)
        self.storm.begin()
        until_s = self.weather.trouble_s + QUIET_S
        while not self._ended():
            if not cluster.step(until_s):
                raise Violation(f"something waits for ever: {self._waiting()}")
        settle_s = max(cluster.elapsed_s, self.weather.trouble_s) + SETTLE_S
        while cluster.step(settle_s):
            pass
        self._check_left()

    def _ended(self) -> bool:
        state = self.cluster.server.queue.state
        return not state.requests and all(client.done for client in self.clients)

    def _waiting(self) -> str:
        state = self.cluster.server.queue.state
        live = [f"{request.key.request_id} {request.state.name} {request.incarnation}" for request in state.requests.values()]
        open_clients = [client.request.request_id for client in self.clients if not client.done]
        return f"live {', '.join(live) or 'none'}; clients {', '.join(open_clients) or 'none'}"

    def _check_left(self) -> None:
        """Every request ended once, clients and queue agree, and no process holds an ended request."""
        oracle, state = self.oracle, self.cluster.server.queue.state
        if set(oracle.ended) != set(oracle.accepted):
            raise Violation("a request that was accepted did not end")
        for client in self.clients:
            stored = state.terminal(client.request.key, self.cluster.schedule.now_s)
            kept = "" if stored is None else stored.state.name
            if client.state not in ("refused", kept):
                raise Violation(f"client {client.request.request_id} saw {client.state}, and the queue keeps {kept or 'nothing'}")
        if any(state.running.values()) or state.groups or state.unplaced or state.live_by_tenant.total() or state.live_by_class.total():
            raise Violation("the queue holds something of requests that ended")
        if state.held_total != sum(ended.held_bytes for ended in state.terminals.values()):
            raise Violation("the queue counts other bytes than those of its results")
        for agent in self.cluster.agents:
            runs = agent.machine.runs
            if agent.process.alive and (len(runs) or runs.held_tokens or runs.kv_reserved or runs.running):
                raise Violation(f"{agent.process.name} holds {len(runs)} runs, {runs.held_tokens} tokens, {runs.kv_reserved} KV")
        for gateway in self.cluster.gateways:
            if gateway.machine.reader_count:
                raise Violation(f"{gateway.process.name} holds {gateway.machine.reader_count} readers")

    def _met(self, fault: str, process: Process, call: str) -> None:
        self.meetings[(fault, call)] += 1
        if self.cluster.transcript.on:
            self.cluster.transcript.line(self.cluster.schedule.now_s, process.name, f"*** {fault}: {call}")

    # Transcript of the server -----------------------------------------------------------------------------------------

    def before(self, process: str, command: Command) -> None:
        """`after` logs it."""

    def after(self, process: str, command: Command, value: object, error: QlmError | None) -> None:
        """A line for each command that writes, or fails."""
        if command.name in READ_ONLY and error is None:
            return
        answer = f"{type(error).__name__}: {error}" if error is not None else in_words(value)
        arguments = " ".join(in_words(arg) for arg in command.args)
        self.cluster.transcript.line(self.cluster.schedule.now_s, "server", f"{process}: {command.name} {arguments} -> {answer}")

    def report(self, problem: str) -> SeedReport:
        cluster = self.cluster
        return SeedReport(
            seed=self.seed,
            problem=problem,
            virtual_s=cluster.elapsed_s,
            events=cluster.schedule.happened,
            states=Counter(client.state or "waiting" for client in self.clients),
            meetings=self.meetings,
            effects=cluster.site.effects,
            stale_calls=self.oracle.stale_calls,
            weather=self.weather,
            lines=cluster.transcript.lines if cluster.transcript.on else (),
            digest=cluster.transcript.digest if cluster.transcript.hashed else "",
        )


def run_seeds(seeds: Sequence[int], processes: int = 1) -> Iterator[SeedReport]:
    if processes <= 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, chunksize=4)


def met(reports: Iterable[SeedReport]) -> Meetings:
    """Faults and the work that they hit, over all runs."""
    total: Meetings = Counter()
    for report in reports:
        total.update(report.meetings)
    return total


def failure_text(report: SeedReport) -> str:
    """A failing seed for people: the end of its transcript, and how to see all of it."""
    again = run_seed(report.seed, lines_max=LINES_KEPT)
    header = f"seed {report.seed}: {report.problem}"
    if again.problem != report.problem:
        header += f"\nA SECOND RUN GIVES: {again.problem or 'no problem'} (something depends on more than the seed)"
    how = f"python -m qlm_sim --seed {report.seed} --transcript"
    return "\n".join((header, *again.lines, header, f"all of it: {how}"))
