"""Settings of the planner's decisions, with the reason for each default."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum

from qlm_core.vocabulary.overload import Overload
from qlm_planner.board.tenants import Tenants
from qlm_planner.search.problem import Weights

BATCH_MAX = 500
"""Most requests or group ids of one call (`qlm_queue.values.BATCH_MAX`; the shell checks that they are equal)."""


class Order(StrEnum):
    """Order of service. All but SLO are comparison policies (`qlm_planner.policies`)."""

    SLO = "slo"
    FCFS = "fcfs"
    EDF = "edf"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    LEAST_LOADED = "least_loaded"
    LEAST_KV = "least_kv"
    SAL = "sal"
    BATCHED = "batched"
    SHEPHERD = "shepherd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the machine; durations in seconds of the queue's clock. Raises ValueError for an invalid value."""

    order: str = Order.SLO
    """An `Order`, or "module:Class", a comparison policy of the user's own."""
    seed: int = 0
    """Seed of the random policies."""
    stay_s: float = 30.0
    """BATCHED: only other models' requests that arrive within this time overtake one: several loads of most models."""
    overload: Overload = Overload.BEST_EFFORT
    """Reaction when no order meets the SLOs."""
    shed_max: int = 50
    """Most requests shed in `shed_every_s`: the load is measured again before the next ones."""
    shed_every_s: float = 1.0

    delta: float = 4.0
    """A group holds at most delta x the average batch of its instance (QLM algorithm 1; section 8.3 finds 4 the best)."""
    group_service_fraction: float = 0.25
    """A group's service time is at most this share of its SLO, so that its last request is not late by its own group."""
    group_spread_fraction: float = 0.5
    """Deadlines in a group are at most this share of the SLO apart: a group is ordered by its first deadline."""
    group_overtake_fraction: float = 0.1
    """A request joins no group in front of others of its model and SLO class with deadlines earlier by more than this share of the wait of
    the first: first come, first served within a tenth of the wait, across token classes."""
    group_overtake_min_s: float = 1.0
    """Overtaking by this time is always allowed: each class opens at most a group a second."""
    group_min: int = 8
    """Least limit of a group: the cost of planning grows with the number of groups."""
    split_excess: float = 1.25
    """A group is split above this x its limit: it moved, or requests returned to it."""
    regroup_max: int = 250
    """Most requests moved by one split: the server's cost of a call grows with them."""
    regroup_every_s: float = 0.25
    """Least time between two splits."""
    regroup_checks: int = 100
    """Groups checked after an overview, in turn."""
    tenants: Tenants = field(default_factory=Tenants)
    """Weights and limits of tenants."""
    share_window_s: float = 60.0
    """Window of the shares of the served work."""
    wait_max_slos: float = 3.0
    wait_max_s: float = 600.0
    """No request within its tenant's share waits longer than the first x its SLO, or the second if longer, while others of its band are
    served in time: from 0.75 SLOs before that, its group precedes its band. The first is at least 2, so that only late requests do; the
    second keeps short SLOs, late anyway, from making all others late under overload."""
    unassigned_batch: int = 64
    """Average batch assumed where no instance can serve the model."""

    late_weight: float = 1000.0
    """Cost of one late request, in request-seconds of tardiness."""
    tardiness_weight: float = 1.0
    work_weight: float = 10.0
    """Cost of one GPU-second of swapping: 100 of them cost as much as a late request."""
    completion_weight: float = 0.3
    """Cost of a request-second before completion. Earliness is worth nothing by itself, but an idle GPU is lost for later requests."""

    lines_max: int = 12
    """Shortest queues on which a new group is tried; as many with its model active are tried too."""
    relocate_max: int = 200
    """Most groups that one change relocates; others follow in the next one."""

    publishes_waits: bool = True
    """False: publications hold no waits, for a simulation in which nobody reads them."""
    slo_band: int = 0
    """Priority band of requests with an SLO; PRIORITY requests have bands of their own."""

    replan_every_s: float = 0.5
    """Least time between two automatic replans (an idle instance, an expected miss)."""
    replan_gain: float = 0.02
    """Least share of the plan's cost that a replan saves."""
    replan_gain_min: float = 100.0
    """Least cost that it saves."""
    repair_every_s: float = 0.05
    """Least time between two repairs of the order around new groups."""
    repair_moves: int = 2_000
    """Moves of the solver in a repair."""
    moves_each: int = 40
    """Moves of the solver for each group of a replan."""
    moves_groups_min: int = 100
    """Least number of groups for `moves_each`."""
    moves_max: int = 200_000
    """Most moves of a plan."""
    solve_retry_first_s: float = 0.5
    solve_retry_max_s: float = 30.0
    """After a failed job the next one waits for the first pause, then twice that, up to the last."""

    lease_ttl_s: float = 3.0
    """Lifetime of agents' leases: after a reconnect nothing is reclaimed for this time."""
    overview_every_s: float = 0.5
    """Period of overviews, which compare the board with the queue and find lost leases, up to `overview_groups` groups; with more groups in
    proportion, up to `overview_every_max_s`."""
    overview_every_max_s: float = 5.0
    overview_groups: int = 1000
    overview_backlog_factor: float = 4.0
    """Factor of the period while more requests wait than one call places: an overview delays them."""
    overview_gap_s: float = 0.05
    """Least time between two overviews."""
    expire_every_s: float = 1.0
    expire_rounds_max: int = 20
    """Most expiry calls in one sweep."""
    forget_after_s: float = 300.0
    """A lost instance with an empty queue is forgotten after this time."""
    reclaim_rounds_max: int = 1000
    """Most calls to reclaim from one incarnation before the next overview."""

    apply_attempts_max: int = 5
    """Conflicts in a row after which a change of the plan waits for the next regular overview."""
    pending_max: int = 2000
    """Most requests that wait for `place`; beyond it reads pause."""
    arrivals_max: int = 500
    """Requests in one read."""
    events_max: int = 2000
    """Lifecycle entries in one read."""
    events_gap_s: float = 0.05
    """Least time between two reads, unless the last was full: events are not urgent, and a read costs the server as much as a request."""
    read_block_s: float = 1.0
    """Longest wait of a read for new entries."""
    replay_max: int = 50_000
    """Most lifecycle entries kept during an overview; beyond it the overview is read again."""
    retry_first_s: float = 0.05
    retry_max_s: float = 1.0
    """A failed call is repeated after the first pause, then twice that, up to the last, until the lease ends."""

    def replan_moves(self, groups: int) -> int:
        """Moves of a replan of a number of groups."""
        return min(self.moves_max, self.moves_each * max(self.moves_groups_min, groups))

    @property
    def weights(self) -> Weights:
        """The objective."""
        return Weights(late=self.late_weight, tardiness=self.tardiness_weight, work=self.work_weight, completion=self.completion_weight)

    def overview_period_s(self, groups: int, *, backlog: bool) -> float:
        """Seconds between two automatic overviews."""
        period_s = self.overview_every_s * max(1.0, groups / self.overview_groups)
        return min(period_s * (self.overview_backlog_factor if backlog else 1.0), self.overview_every_max_s)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value) or (value <= 0 and each.name not in NOT_POSITIVE):
                raise ValueError(f"{each.name}: must be finite and > 0, got {value}")
            if value < 0 and each.name != "slo_band":
                raise ValueError(f"{each.name}: must be >= 0, got {value}")
        if self.wait_max_slos < 2.0:
            raise ValueError(f"wait_max_slos: must be at least 2, got {self.wait_max_slos}")


NOT_POSITIVE = frozenset(
    {"slo_band", "seed", "events_gap_s", "completion_weight", "replan_gain", "replan_gain_min", "wait_max_s", "group_overtake_fraction"}
)
"""Fields that may be 0 (the band may be negative too)."""
