"""A planner process in virtual time: the live machine, calls, election and solver; the inbox is the order of events.

The solver runs at once and its answer arrives later, by its time on a core: a stated time for each group and each move.
"""

from __future__ import annotations

from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_planner.machine.effects import Call, Solve
from qlm_planner.machine.events import CallFailed, Event, ProfilesRead, Tick
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.shell.queue_calls import perform
from qlm_planner.shell.solver_requests import answer
from qlm_process.queue.leases import LeaseKeeper
from qlm_process.wire.profile import from_body
from qlm_queue.values import PLANNER_ROLE
from qlm_sim.world.leases import election
from qlm_sim.world.process import OwnAlarm, Task, suspend
from qlm_sim.world.site import Site

TICK_MAX_S = 1.0
"""Longest time between two steps, as live."""

SOLVE_S = 0.002
SOLVE_GROUP_S = 10e-6
SOLVE_MOVE_S = 2e-6
"""Time of a solver's job: transfer to the worker and back, each group and each move (measured on one core, rounded up)."""

TERM_TASKS_KEPT = 64
"""With more tasks, ended ones are forgotten."""


class SimPlanner:
    """One process over all its lives. `machine`: of the term that runs, None on a standby."""

    def __init__(self, site: Site, name: str) -> None:
        self.process = site.process(name)
        self.address = f"{name}:0"
        self.machine: PlannerMachine | None = None
        self.fence = 0
        self.calls_under_way: list[str] = []
        self._site = site
        self._queue = site.link(self.process)
        self._keeper: LeaseKeeper | None = None
        self._alarm: OwnAlarm | None = None
        self._loss: Task | None = None  # waits for the end of the term
        self._term_tasks: dict[Task, None] = {}

    def start(self) -> None:
        self.process.begin()
        self._forget_term()
        self.process.spawn(self._work())

    def receive(self, event: Event) -> None:
        """An event from outside; a standby refuses it."""
        if self.machine is not None:
            self._step(event)

    # Terms ------------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        roles = election(self._site, self.process, self._queue, PLANNER_ROLE, self._lose)
        while True:
            await self._lead(await roles.win())

    async def _lead(self, keeper: LeaseKeeper) -> None:
        """One term, until the lease is lost. Only its calls under way remain then."""
        self._keeper = keeper
        self.fence = keeper.lease.fence
        self.machine = PlannerMachine(self._site.policy, keeper.lease.fence, self.process.now_s())
        self._alarm = self.process.alarm(lambda: self._step(Tick()))
        self._term_tasks[self.process.spawn(self._read_profiles())] = None
        self._site.transcript.line(self._site.schedule.now_s, self.process.name, f"leads with fence {keeper.lease.fence}")
        self._step(Tick())
        await suspend(self._wait_for_loss)
        self._alarm.set(None)
        for task in self._term_tasks:
            task.cancel()
        self._forget_term()
        await keeper.stop(release=True)

    def _forget_term(self) -> None:
        self.machine = None
        self.calls_under_way = []
        self._term_tasks = {}
        self._loss = None

    def _wait_for_loss(self, task: Task) -> None:
        self._loss = task

    def _lose(self) -> None:
        """The lease is lost: the server reported it to the keeper, or to a call."""
        loss, self._loss = self._loss, None
        if loss is not None:
            self.process.deliver(0.0, loss.resume)

    async def _read_profiles(self) -> None:
        version = -1
        while True:
            try:
                found, body = await self._queue.read_profiles()
            except Unavailable:
                pass
            else:
                profiles = from_body(body) if found else self._site.shipped
                if profiles.version != version:
                    version = profiles.version
                    self._step(ProfilesRead(catalogue=self._site.catalogue, profiles=profiles))
            await self.process.sleep(self._site.description.profiles_every_s)

    # The machine ------------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        machine = self.machine
        if machine is None:
            return  # an answer after the end of the term
        now_s = self.process.now_s()
        effects = machine.step(now_s, event)
        self._site.stepped(self.process, event, effects)
        for effect in effects:
            if isinstance(effect, Call):
                self.calls_under_way.append(type(effect).__name__)
                task = self.process.spawn(self._call(effect))
                self._term_tasks[task] = None
            elif isinstance(effect, Solve):
                self._term_tasks[self.process.spawn(self._solve(effect))] = None
        if len(self._term_tasks) > TERM_TASKS_KEPT:
            self._term_tasks = {task: None for task in self._term_tasks if not task.over}
        assert self._alarm is not None
        self._alarm.set(min(max(machine.wake_s, now_s), now_s + TICK_MAX_S))

    async def _solve(self, job: Solve) -> None:
        await self.process.sleep(SOLVE_S + SOLVE_GROUP_S * job.problem.groups + SOLVE_MOVE_S * job.moves)
        self._step(answer(job))

    async def _call(self, call: Call) -> None:
        assert self._keeper is not None
        try:
            event = await perform(self._queue, self._keeper.lease, call)
        except Unavailable:
            event = CallFailed(call=call)
        except LeaseLost:
            self._lose()
            return
        self.calls_under_way.remove(type(call).__name__)
        self._step(event)
