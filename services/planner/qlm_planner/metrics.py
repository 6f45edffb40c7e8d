"""Prometheus metrics of the planner."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from qlm_planner.effects import Effect, Place
from qlm_planner.events import ArrivalsRead, ChunkAnswered, Event, ExpirySwept, PlaceAnswered, Reclaimed, UnplacedRead
from qlm_planner.machine import PlannerMachine
from qlm_process.metrics import Metrics

STEP_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
PLACEMENT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)


class PlannerMetrics(Metrics):
    """Counters grow from the process's start; gauges hold for the leader and are 0 on a standby."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = Gauge("qlm_planner_leader", "1 while this process leads, 0 as a standby.", registry=self.registry)
        self.arrivals = Counter("qlm_planner_arrivals_total", "Requests read from the global queue.", registry=self.registry)
        self.placed = Counter("qlm_planner_placed_total", "Requests put into groups.", registry=self.registry)
        self.stale = Counter(
            "qlm_planner_stale_total", "Requests that had ended or were placed when they were to be placed.", registry=self.registry
        )
        self.placement_seconds = Histogram(
            "qlm_planner_placement_seconds",
            "Time from acceptance to placement.",
            buckets=PLACEMENT_BUCKETS_S,
            registry=self.registry,
        )
        self.step_seconds = Histogram(
            "qlm_planner_step_seconds", "Time of one step of the machine.", buckets=STEP_BUCKETS_S, registry=self.registry
        )
        self.groups = Gauge("qlm_planner_groups", "Open request groups.", registry=self.registry)
        self.unassigned = Gauge("qlm_planner_unassigned_groups", "Open groups that no instance can serve.", registry=self.registry)
        self.plan_version = Gauge("qlm_planner_plan_version", "Version of the plan.", registry=self.registry)
        self.late = Gauge("qlm_planner_predicted_late_requests", "Requests expected to be late under the plan.", registry=self.registry)
        self.swaps = Gauge("qlm_planner_planned_swaps", "Model swaps in the plan.", registry=self.registry)
        self.reclaims = Counter("qlm_planner_reclaims_total", "Requests taken back from lost agents.", registry=self.registry)
        self.expired = Counter("qlm_planner_expired_total", "Requests ended because their expiry had passed.", registry=self.registry)
        self.conflicts = Counter(
            "qlm_planner_conflicts_total", "Changes of the plan that found the queues changed meanwhile.", registry=self.registry
        )
        self.groups_moved = Counter("qlm_planner_groups_moved_total", "Groups moved to another queue.", registry=self.registry)
        self.groups_placed = Counter("qlm_planner_group_placements_total", "Groups named in placements.", registry=self.registry)
        self.call_failures = Counter("qlm_planner_call_failures_total", "Calls to the queue that failed.", ["call"], registry=self.registry)

    def count(self, event: Event) -> None:
        match event:
            case ArrivalsRead(arrivals=arrivals) | UnplacedRead(arrivals=arrivals):
                self.arrivals.inc(len(arrivals))
            case PlaceAnswered(done=done):
                self.placed.inc(sum(done))
                self.stale.inc(len(done) - sum(done))
            case Reclaimed(count=count):
                self.reclaims.inc(count)
            case ExpirySwept(count=count):
                self.expired.inc(count)
            case ChunkAnswered(applied=True, moved=moved):
                self.groups_moved.inc(moved)
            case ChunkAnswered():
                self.conflicts.inc()
            case _:
                pass

    def count_effect(self, effect: Effect) -> None:
        if isinstance(effect, Place):
            self.groups_placed.inc(len(effect.groups))

    def show(self, machine: PlannerMachine) -> None:
        board = machine.board
        self.groups.set(board.open_groups)
        self.unassigned.set(machine.unassigned_groups)
        self.plan_version.set(board.plan_version)
        self.late.set(machine.reshaping.predicted.late)
        self.swaps.set(machine.reshaping.predicted.swaps)

    def standby(self) -> None:
        for gauge in (self.leader, self.groups, self.unassigned, self.late, self.swaps):
            gauge.set(0)
