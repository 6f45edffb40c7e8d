"""A whole cluster in virtual time: its server, its network and its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_planner.machine.events import Event as PlannerEvent
from qlm_planner.policy import Policy
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds
from qlm_sim.description import ClusterDescription
from qlm_sim.processes.agent import SimAgent
from qlm_sim.processes.estimator import SimEstimator
from qlm_sim.processes.gateway import SimGateway
from qlm_sim.processes.planner import SimPlanner
from qlm_sim.world.chance import Chance
from qlm_sim.world.network import Network
from qlm_sim.world.process import Process
from qlm_sim.world.schedule import Schedule
from qlm_sim.world.server import SimServer
from qlm_sim.world.site import QUEUE_NAME, Site
from qlm_sim.world.transcript import Transcript

START_S = 1_700_000_000.0
"""The server's clock at the start of every run: a time of day, as live, since entry ids derive from it."""

EVENTS_AT_ONE_TIME_MAX = 100_000
"""This many events without progress of time are a loop."""

Met = Callable[[str, Process, str], None]
MakeQueue = Callable[[str, Bounds, Callable[[], float]], MemoryQueue]
Member = SimAgent | SimPlanner | SimEstimator | SimGateway


class Cluster:
    """`met`: called for every fault of the network with the affected call. `make_queue`: the server's queue (tests plant faults there)."""

    def __init__(
        self,
        description: ClusterDescription,
        seed: int,
        policy: Policy,
        *,
        lines_max: int = 0,
        hashed: bool = False,
        met: Met = lambda fault, process, call: None,
        make_queue: MakeQueue = MemoryQueue,
    ) -> None:
        self.description = description
        self.schedule = Schedule(START_S)
        self.chance = Chance(seed, "cluster")
        self.transcript = Transcript(START_S, lines_max=lines_max, hashed=hashed)
        self.server = SimServer(self.schedule, make_queue(QUEUE_NAME, description.bounds, lambda: self.schedule.now_s))
        self.network = Network(self.schedule, self.server, self.chance.part("network"), met)
        self.site = Site(
            description=description,
            schedule=self.schedule,
            network=self.network,
            chance=self.chance,
            transcript=self.transcript,
            shipped=shipped_snapshot() if description.profiles is None else description.profiles,
            planner_policy=policy,
        )
        self.agents = [SimAgent(self.site, instance, self._send_to_planner) for instance in description.instances]
        self.planners = [SimPlanner(self.site, f"planner-{number}") for number in range(description.planners)]
        self.estimators = [SimEstimator(self.site, f"estimator-{number}") for number in range(description.estimators)]
        self.gateways = [SimGateway(self.site, f"gateway-{number}") for number in range(description.gateways)]
        self._by_address = {planner.address: planner for planner in self.planners}
        self._seconds: list[SimAgent] = []
        self._instant_s = 0.0
        self._events_before = 0

    @property
    def members(self) -> list[Member]:
        return [*self.agents, *self.planners, *self.estimators, *self.gateways]

    @property
    def elapsed_s(self) -> float:
        return self.schedule.now_s - START_S

    def second_process(self, agent: SimAgent) -> SimAgent:
        """Another process with the name of an agent, not started."""
        second = SimAgent(self.site, agent.description, self._send_to_planner)
        self._seconds.append(second)
        return second

    def start(self) -> None:
        for member in self.members:
            member.start()

    def stop(self) -> None:
        """Ends all processes; nothing of the run is left to be cleaned up."""
        for member in (*self.members, *self._seconds):
            member.process.end()

    def step(self, until_s: float) -> bool:
        """Runs the next event within `until_s` seconds of the start; False without one, at that time."""
        going = self.schedule.step(START_S + until_s)
        if self.schedule.now_s > self._instant_s:
            self._instant_s = self.schedule.now_s
            self._events_before = self.schedule.happened
        assert self.schedule.happened - self._events_before < EVENTS_AT_ONE_TIME_MAX, "time stands still"
        return going

    def _send_to_planner(self, sender: Process, address: str, event: PlannerEvent) -> None:
        planner = self._by_address.get(address)
        if planner is not None and planner.process.alive:
            self.network.send(sender, planner.process, type(event).__name__, lambda: planner.receive(event))


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Drops the services' log lines, which carry real times, meanwhile."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), processors=[_drop], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(logger: object, name: str, event: object) -> str:
    raise structlog.DropEvent
