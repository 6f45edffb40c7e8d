"""Prometheus metrics of the planner."""

from __future__ import annotations

from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_planner.board.group import AGED
from qlm_planner.board.tenants import limited_tenant
from qlm_planner.machine import events
from qlm_planner.machine.effects import Effect, JobEnded, Outcome, Place
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.overload.advice import Advice
from qlm_process.metrics import Metrics

STEP_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SOLVE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PLACEMENT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)


class PlannerMetrics(Metrics):
    """Counters grow from the process's start; gauges are 0 on a standby."""

    def __init__(self) -> None:
        super().__init__()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.leader = gauge("qlm_planner_leader", "1 while this process leads, 0 as a standby.")
        self.arrivals = counter("qlm_planner_arrivals_total", "Requests read from the global queue.")
        self.placed = counter("qlm_planner_placed_total", "Requests put into groups.")
        self.stale = counter("qlm_planner_stale_total", "Requests that had ended or were placed before their placement.")
        self.damaged = counter("qlm_planner_damaged_records_total", "Damaged records of the queue that this process repaired.")
        acceptance_to_placement = "Time from acceptance to placement."
        self.placement_seconds = histogram("qlm_planner_placement_seconds", acceptance_to_placement, buckets=PLACEMENT_BUCKETS_S)
        self.step_seconds = histogram("qlm_planner_step_seconds", "Time of one step of the machine.", buckets=STEP_BUCKETS_S)
        self.groups = gauge("qlm_planner_groups", "Open request groups.")
        self.aged = gauge("qlm_planner_aged_groups", "Open groups that precede others because they waited too long.")
        share = "Recent share of the served work, of limited tenants named in the settings."
        self.tenant_share = gauge("qlm_planner_tenant_share_ratio", share, ["tenant"])
        self.tenants_above = gauge("qlm_planner_tenants_above_share", "Tenants behind others of their band, above their share.")
        self.unassigned = gauge("qlm_planner_unassigned_groups", "Open groups that no instance can serve.")
        self.plan_version = gauge("qlm_planner_plan_version", "Version of the plan.")
        self.late = gauge("qlm_planner_predicted_late_requests", "Requests expected to be late under the plan.")
        self.swaps = gauge("qlm_planner_planned_swaps", "Model swaps in the plan.")
        self.reclaims = counter("qlm_planner_reclaims_total", "Requests reclaimed from lost agents.")
        self.expired = counter("qlm_planner_expired_total", "Requests ended because their expiry had passed.")
        self.conflicts = counter("qlm_planner_conflicts_total", "Changes of the plan that found changed queues.")
        self.groups_moved = counter("qlm_planner_groups_moved_total", "Groups moved to another queue.")
        self.regrouped = counter("qlm_planner_regrouped_total", "Waiting requests moved to another group by a split.")
        self.regroup_calls = counter("qlm_planner_regroup_calls_total", "Calls that split a group.")
        self.groups_placed = counter("qlm_planner_group_placements_total", "Groups named in placements.")
        self.shed = counter("qlm_planner_shed_total", "Late requests failed under overload.")
        attainment = "Expected share of requests in time on the serving instances, by the last advice; 1 without any."
        self.attainment = gauge("qlm_planner_forecast_attainment", attainment)
        advised = "Instances of one kind to add so that the SLOs are met, by GPU."
        self.advised = gauge("qlm_planner_advised_instances", advised, ["gpu", "n_gpu"])
        self.spare = gauge("qlm_planner_spare_instances", "Instances without which the SLOs would still be met.")
        fallbacks = "Orders since the election in which the comparison policy used a simpler rule (SHEPHERD's program not solved in time)."
        self.policy_fallbacks = gauge("qlm_planner_policy_fallbacks", fallbacks)
        self.call_failures = counter("qlm_planner_call_failures_total", "Calls to the queue that failed.", ["call"])

        self.solves = counter("qlm_planner_solves_total", "Jobs of the solver.", ["stage", "cause", "outcome"])
        seconds = "Time of a job of the solver, from its question until its answer is judged."
        self.solve_seconds = histogram("qlm_planner_solve_seconds", seconds, ["stage"], buckets=SOLVE_BUCKETS_S)
        self.solve_gain = counter("qlm_planner_solve_gain_total", "Predicted cost saved by applied plans of the solver.")
        self.solver_up = gauge("qlm_planner_solver_up", "1 while the solver's process takes jobs, 0 while groups are only inserted.")

    def count(self, event: events.Event) -> None:
        match event:
            case events.ArrivalsRead(arrivals=arrivals) | events.UnplacedRead(arrivals=arrivals):
                self.arrivals.inc(len(arrivals))
            case events.PlaceAnswered(done=done):
                self.placed.inc(sum(done))
                self.stale.inc(len(done) - sum(done))
            case events.Reclaimed(count=count):
                self.reclaims.inc(count)
            case events.ExpirySwept(count=count):
                self.expired.inc(count)
            case events.ShedAnswered(count=count):
                self.shed.inc(count)
            case events.Regrouped(count=count):
                self.regroup_calls.inc()
                self.regrouped.inc(count)
            case events.ChunkAnswered(applied=True, moved=moved):
                self.groups_moved.inc(moved)
            case events.ChunkAnswered():
                self.conflicts.inc()

    def count_job(self, ended: JobEnded, ended_s: float) -> None:
        self.solves.labels(stage=ended.stage.value, cause=ended.cause.value, outcome=ended.outcome.value).inc()
        if ended.outcome is not Outcome.FAILED:
            self.solve_seconds.labels(stage=ended.stage.value).observe(max(0.0, ended_s - ended.began_s))
        if ended.outcome is Outcome.APPLIED:
            self.solve_gain.inc(max(0.0, ended.gain))

    def count_effect(self, effect: Effect) -> None:
        if isinstance(effect, Place):
            self.groups_placed.inc(len(effect.groups))

    def show(self, machine: PlannerMachine) -> None:
        board = machine.board
        self.groups.set(board.open_groups)
        self.unassigned.set(len(machine.board.queues[UNASSIGNED]))
        self.plan_version.set(board.plan_version)
        self.late.set(machine.changes.predicted.late)
        self.swaps.set(machine.changes.predicted.swaps)
        self.policy_fallbacks.set(0 if machine.baseline is None else machine.baseline.fallbacks)

    def show_advice(self, advice: Advice | None) -> None:
        """Shows the advice; None: there is none."""
        self.attainment.set(1.0 if advice is None else advice.attainment)
        self.spare.set(0 if advice is None else len(advice.spare))
        self.advised.clear()
        for option in reversed(() if advice is None else advice.options):  # the best of each GPU is set last
            self.advised.labels(gpu=option.gpu, n_gpu=str(option.n_gpu)).set(option.instances)

    def show_ranks(self, machine: PlannerMachine) -> None:
        """Shows ranks of groups and shares of tenants. O(groups), so only after overviews. Only tenants of the settings are named: clients
        may invent any number of names."""
        self.aged.set(sum(machine.board.groups[each].tier == AGED for queue in machine.board.queues.values() for each in queue))
        self.tenants_above.set(len(machine.tenant_shares.above))
        in_use = {limited_tenant(name): share for name, share in machine.tenant_shares.in_use().items()}
        for tenant in machine.policy.tenants.named:
            if tenant.limited:
                self.tenant_share.labels(tenant=tenant.name).set(in_use.get(tenant.name, 0.0))

    def standby(self) -> None:
        self.show_advice(None)
        for gauge in (self.leader, self.groups, self.unassigned, self.late, self.swaps, self.aged, self.tenants_above):
            gauge.set(0)
        self.tenant_share.clear()
