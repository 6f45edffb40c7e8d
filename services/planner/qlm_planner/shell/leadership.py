"""One term as the leader: the machine, its inbox, and its calls."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping

import structlog
from opentelemetry.trace import Tracer

from qlm.api.v1 import planner_pb2
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_core.vocabulary.model import ModelSpec
from qlm_planner.machine.effects import Call, Effect, JobEnded, Outcome, Placement, PlanApplied, PlanChanged, Solve, WaitsFailed
from qlm_planner.machine.events import (
    CallFailed,
    Event,
    OverviewRead,
    PlaceAnswered,
    ProfilesRead,
    ReplanRequested,
    Solved,
    SolveFailed,
    Tick,
)
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.overload.advice_question import Question, question_of
from qlm_planner.policy import Policy
from qlm_planner.shell.advice_watch import AdviceWatch, Work
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.plan_message import plan_message
from qlm_planner.shell.queue_calls import perform
from qlm_planner.shell.tracing import trace_job, trace_placements, trace_plan
from qlm_process.queue.leases import LeaseKeeper
from qlm_process.wire.profile import from_body
from qlm_queue.damage import log_damage
from qlm_queue.port import Queue

TICK_MAX_S = 1.0
"""Longest time between two steps."""
REPAIR_EVERY_S = 60.0
REPAIR_SHARE = 0.02
"""Period of the check of all records, and its largest share of the time."""
THREAD_GROUPS = 200
"""Open groups from which steps and plan views run in a thread, so that renewals and RPCs continue. With a slow policy all steps do."""
SPANS_AT_ONCE = 50
"""Spans created before other tasks run."""
UNTRACED_MAX = 16
"""Most calls whose placements wait for their spans; beyond it the next decision waits."""
Placed = tuple[list[Placement], float]
"""(requests placed by one call, seconds of the queue's clock)."""
Submit = Callable[[Solve, Callable[[Solved | SolveFailed], None]], None]
"""Submits a job to the solver, which calls back at most once."""
Replanned = tuple[int, int]
"""(plan version, groups moved)."""


class Leadership:
    """Runs from the election to the loss of the lease or the stop of the process."""

    def __init__(
        self,
        queue: Queue,
        keeper: LeaseKeeper,
        now_s: Callable[[], float],
        *,
        policy: Policy,
        catalogue: Mapping[str, ModelSpec],
        shipped: ProfileSnapshot,
        profiles_every_s: float,
        advice_every_s: float,
        inbox_max: int,
        solve: Submit,
        advise: Work,
        metrics: PlannerMetrics,
        tracer: Tracer,
    ) -> None:
        self._queue = queue
        self._keeper = keeper
        self._now_s = now_s
        self._catalogue = catalogue
        self._shipped = shipped
        self._profiles_every_s = profiles_every_s
        self._solve = solve
        self._metrics = metrics
        self._tracer = tracer
        self.machine = PlannerMachine(policy, keeper.lease.fence, now_s())
        # Answers to calls and profiles are always accepted; outside events are refused when the inbox is full.
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._inbox_max = inbox_max
        self._turn = asyncio.Lock()
        self.advice = AdviceWatch(self._question, advise, self._turn, advice_every_s, metrics.show_advice)
        self._replans: dict[int, asyncio.Future[Replanned]] = {}
        self._replan_numbers = itertools.count(1)
        self._incarnations: frozenset[str] = frozenset()
        self._untraced: asyncio.Queue[Placed] = asyncio.Queue(UNTRACED_MAX)
        self.caught_up = asyncio.Event()

    # For the gRPC service ---------------------------------------------------------------------------------------------

    @property
    def plan_version(self) -> int:
        return self.machine.board.plan_version

    def knows(self, incarnation: str) -> bool:
        """Whether an incarnation was registered at the last overview."""
        return incarnation in self._incarnations

    async def plan(self) -> planner_pb2.Plan:
        machine = self.machine
        async with self._turn:
            if machine.board.open_groups >= THREAD_GROUPS:
                return await asyncio.to_thread(plan_message, machine.board, machine.changes.table, self._now_s())
            return plan_message(machine.board, machine.changes.table, self._now_s())

    def _question(self) -> Question | None:
        machine = self.machine
        return question_of(machine.board, machine.changes.table, machine.demand, self._now_s()) if machine.ready else None

    def submit(self, event: Event) -> None:
        """Queues an outside event for the machine. Raises Unavailable if too many wait."""
        if self._inbox.qsize() >= self._inbox_max:
            raise Unavailable("the planner is overloaded", details={"retry_after_s": "1"})
        self._inbox.put_nowait(event)

    async def replan(self) -> Replanned:
        """Orders all groups anew; returns when that is applied. Raises Unavailable as `submit`, and LeaseLost at the end of the term."""
        number = next(self._replan_numbers)
        answer: asyncio.Future[Replanned] = asyncio.get_running_loop().create_future()
        self._replans[number] = answer
        try:
            self.submit(ReplanRequested(number=number))
            return await answer
        finally:
            del self._replans[number]

    # The term ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Leads until cancelled. Raises LeaseLost."""
        self._metrics.leader.set(1)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_lease(), name="planner-lease")
                tasks.create_task(self._read_profiles(), name="planner-profiles")
                tasks.create_task(self._trace_placements(), name="planner-spans")
                tasks.create_task(self._repair_damage(), name="planner-repairs")
                tasks.create_task(self.advice.run(), name="planner-advice")
                tasks.create_task(self._decide(tasks), name="planner-decide")
        except BaseExceptionGroup as group:
            lost, others = group.split(LeaseLost)
            if others is not None:
                raise others from None
            assert lost is not None
            raise LeaseLost("the planner's lease is lost") from lost
        finally:
            self._metrics.standby()
            while not self._untraced.empty():
                trace_placements(self._tracer, *self._untraced.get_nowait())
            for answer in self._replans.values():
                if not answer.done():
                    answer.set_exception(LeaseLost("the planner no longer leads"))

    async def _watch_lease(self) -> None:
        await self._keeper.lost.wait()
        raise LeaseLost("the planner's lease is lost")

    async def _read_profiles(self) -> None:
        """Reads the shipped profiles at once, then those that the estimator publishes."""
        version = unreadable = -1
        while True:
            found = -1
            try:
                found, body = await self._queue.read_profiles()
                profiles = from_body(body) if found else self._shipped
            except Unavailable as error:
                structlog.get_logger().debug("profiles_not_read", error=str(error))
            except ValueError as error:
                if found != unreadable:
                    structlog.get_logger().error("profiles_unreadable", version=found, error=str(error))
                unreadable = found
            else:
                if profiles.version != version:
                    version = profiles.version
                    self._inbox.put_nowait(ProfilesRead(catalogue=self._catalogue, profiles=profiles))
            await asyncio.sleep(self._profiles_every_s)

    async def _repair_damage(self) -> None:
        """Repairs records that fail no call: a request in no group would wait without end."""
        repair_s = 0.0
        while True:
            await asyncio.sleep(max(REPAIR_EVERY_S, repair_s / REPAIR_SHARE))
            began_s = time.monotonic()
            try:
                found = await self._queue.repair(True)
            except Unavailable as error:
                structlog.get_logger().warning("queue_not_repaired", error=str(error))
            else:
                log_damage(found)
                self._metrics.damaged.inc(len(found))
            repair_s = time.monotonic() - began_s

    async def _decide(self, tasks: asyncio.TaskGroup) -> None:
        event: Event = Tick()
        while True:
            async with self._turn:
                effects = await self._step(event)
            for effect in effects:
                self._carry_out(effect, tasks)
            if isinstance(event, PlaceAnswered):
                traced = self._placed(event)
                if traced:
                    await self._untraced.put((traced, self._now_s()))
            if self.machine.caught_up and not self.caught_up.is_set():
                board = self.machine.board
                structlog.get_logger().info("planner_caught_up", groups=board.open_groups, instances=len(board.slots))
                self.caught_up.set()
            event = await self._next_event()

    async def _next_event(self) -> Event:
        wait_s = min(TICK_MAX_S, max(0.0, self.machine.wake_s - self._now_s()))
        try:
            async with asyncio.timeout(wait_s):
                return await self._inbox.get()
        except TimeoutError:
            return Tick()

    async def _step(self, event: Event) -> list[Effect]:
        began_s = time.perf_counter()
        now_s = self._now_s()
        groups = self.machine.board.open_groups
        if isinstance(event, OverviewRead):
            groups = max(groups, len(event.snapshot.groups))  # the first overview of a term adds all groups
        baseline = self.machine.baseline
        if groups >= THREAD_GROUPS or (baseline is not None and baseline.slow):
            effects = await asyncio.to_thread(self.machine.step, now_s, event)
        else:
            effects = self.machine.step(now_s, event)
        if isinstance(event, OverviewRead):
            self._incarnations = frozenset(slot.facts.incarnation for slot in self.machine.board.slots.values())
            self._metrics.show_ranks(self.machine)
        self._metrics.step_seconds.observe(time.perf_counter() - began_s)
        self._metrics.count(event)
        self._metrics.show(self.machine)
        return effects

    def _carry_out(self, effect: Effect, tasks: asyncio.TaskGroup) -> None:
        self._metrics.count_effect(effect)
        match effect:
            case PlanChanged(plan_version=version, replans=replans):
                for number, moved in replans.items():
                    answer = self._replans.get(number)
                    if answer is not None and not answer.done():
                        answer.set_result((version, moved))
            case PlanApplied():
                trace_plan(self._tracer, effect, self._now_s())
            case Solve():
                self._solve(effect, self._inbox.put_nowait)
            case JobEnded():
                trace_job(self._tracer, effect, self._now_s())
                self._metrics.count_job(effect, self._now_s())
                if effect.outcome is Outcome.FAILED:
                    structlog.get_logger().warning(
                        "solver_failed", job=effect.job, stage=effect.stage, cause=effect.cause, groups=effect.groups, reason=effect.reason
                    )
            case WaitsFailed(reason=reason):
                structlog.get_logger().error("waits_not_predicted", reason=reason)
            case _:
                tasks.create_task(self._call(effect), name=f"planner-{type(effect).__name__}")

    async def _call(self, call: Call) -> None:
        try:
            event = await perform(self._queue, self._keeper.lease, call)
        except Unavailable as error:
            name = type(call).__name__
            structlog.get_logger().warning("planner_call_failed", call=name, error=str(error))
            self._metrics.call_failures.labels(call=name).inc()
            event = CallFailed(call=call)
        self._inbox.put_nowait(event)

    def _placed(self, event: PlaceAnswered) -> list[Placement]:
        """Measures the placements that were done; returns those of traced requests."""
        placed_s = self._now_s()
        placed = [placement for placement, done in zip(event.call.requests, event.done, strict=True) if done]
        for placement in placed:
            self._metrics.placement_seconds.observe(max(0.0, placed_s - placement.arrival.facts.accepted_s))
        return [placement for placement in placed if placement.arrival.traceparent]

    async def _trace_placements(self) -> None:
        """Creates spans beside the calls, a few at a time: they cost more than the decision, and no answer may wait for them."""
        while True:
            placed, placed_s = await self._untraced.get()
            for at in range(0, len(placed), SPANS_AT_ONCE):
                trace_placements(self._tracer, placed[at : at + SPANS_AT_ONCE], placed_s)
                await asyncio.sleep(0)
