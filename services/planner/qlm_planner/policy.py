"""What an operator may change in the planner's decisions, with the reason for each default."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum

from qlm_core.overload import Overload
from qlm_planner.board.tenants import Tenants
from qlm_planner.search.problem import Weights

BATCH_MAX = 500
"""Most requests or group ids that one call of the queue takes (`qlm_queue.values.BATCH_MAX`; the shell checks that they are equal)."""


class Order(StrEnum):
    """What the order of service follows. All but SLO are there to compare with (`qlm_planner.policies`)."""

    SLO = "slo"
    FCFS = "fcfs"
    EDF = "edf"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    LEAST_LOADED = "least_loaded"
    BATCHED = "batched"
    SHEPHERD = "shepherd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the machine; durations in seconds of the queue's clock. Raises ValueError for a value that makes no sense."""

    order: str = Order.SLO
    """An `Order`, or "module:Class", a comparison policy of the user's own."""
    seed: int = 0
    """Of the policies that pick by chance."""
    stay_s: float = 30.0
    """Under BATCHED, requests are overtaken only by those of other models that came within so long: several loads of most models."""
    overload: Overload = Overload.BEST_EFFORT
    """What is done when no order meets the SLOs."""
    shed_max: int = 50
    """Most requests that are shed in `shed_every_s`: the load is measured again before more go."""
    shed_every_s: float = 1.0

    delta: float = 4.0
    """A group holds at most delta x the average batch of its instance (QLM algorithm 1; section 8.3 finds 4 the best)."""
    group_service_fraction: float = 0.25
    """A group's service time is at most this share of its SLO, so that its last request is not late by its own group."""
    group_spread_fraction: float = 0.5
    """Deadlines in a group are at most this share of the SLO apart: the order is by the first of them."""
    group_overtake_fraction: float = 0.1
    """A request joins no group in front of others of its model and SLO class with deadlines earlier than its own by more than this share
    of how long the first of them has waited: first come, first served to within a tenth of the wait, whatever the classes of tokens."""
    group_overtake_min_s: float = 1.0
    """But by so much it may always overtake: each class opens a group a second at the most."""
    group_min: int = 8
    """No limit makes a group smaller than this: the cost of planning grows with the groups."""
    split_excess: float = 1.25
    """A group is split when it holds more than this x what it may where it stands: it moved there, or requests came back to it."""
    regroup_max: int = 250
    """Most requests that one call takes from a group to another: what a call costs the server grows with them."""
    regroup_every_s: float = 0.25
    """Least time between two such calls."""
    regroup_checks: int = 100
    """Groups that are looked at for it after an overview, in turn."""
    tenants: Tenants = field(default_factory=Tenants)
    """What the lateness of each tenant counts, and which share of the served work it may have before others come first."""
    share_window_s: float = 60.0
    """Served work is counted over so long."""
    wait_max_slos: float = 3.0
    wait_max_s: float = 600.0
    """Nobody within its share waits longer than the first x its SLO, or than the second where that is longer, while others of its band are
    served in time: from 0.75 SLOs before that on, a group comes before its band. The first is at least 2, so that nobody does who is not
    late; the second keeps requests with short SLOs, which are late anyway, from making all others late under overload."""
    unassigned_batch: int = 64
    """Average batch that is assumed where no instance can serve the model."""

    late_weight: float = 1000.0
    """Cost of one late request, in request-seconds of tardiness."""
    tardiness_weight: float = 1.0
    work_weight: float = 10.0
    """Cost of one GPU-second of swapping: 100 of them weigh as much as a late request."""
    completion_weight: float = 0.3
    """Cost of a request-second before completion. Earliness earns nothing by itself, but an idle GPU is lost for what comes later: who is
    served just in time is late when something urgent arrives meanwhile."""

    lines_max: int = 12
    """A new group is tried on so many of the shortest queues, and on as many that have its model active."""
    relocate_max: int = 200
    """Most groups that get a new home in one change of the plan; the others follow in the next one."""

    slo_band: int = 0
    """Requests with an SLO are served in the order of this priority band; PRIORITY requests in that of their own."""

    replan_every_s: float = 0.5
    """Least time between two replans that nobody asked for (an idle instance, an expected miss)."""
    replan_gain: float = 0.02
    """Least share of the plan's cost that a replan must save to be applied."""
    replan_gain_min: float = 100.0
    """And the least cost."""
    repair_every_s: float = 0.05
    """Least time between two looks at the order around new groups."""
    repair_moves: int = 2_000
    """Moves of the solver in one of them."""
    moves_each: int = 40
    """Moves of the solver for each group of a replan."""
    moves_groups_min: int = 100
    """As if there were so many groups at least."""
    moves_max: int = 200_000
    """Most moves of a plan."""
    solve_retry_first_s: float = 0.5
    solve_retry_max_s: float = 30.0
    """After a job of the solver that failed the next one waits for the first pause, then for twice that, up to the last."""

    lease_ttl_s: float = 3.0
    """Life of the agents' leases: after a reconnect nothing is reclaimed for so long."""
    overview_every_s: float = 0.5
    """How often the machine compares its knowledge with the queue's (and finds lost leases), up to `overview_groups` groups; with more
    groups in proportion, up to `overview_every_max_s`."""
    overview_every_max_s: float = 5.0
    overview_groups: int = 1000
    overview_backlog_factor: float = 4.0
    """So many times more seldom while more requests wait than one call places: it keeps them waiting."""
    overview_gap_s: float = 0.05
    """Least time between two overviews, however much is in doubt."""
    expire_every_s: float = 1.0
    expire_rounds_max: int = 20
    """Most expiry calls in one sweep."""
    forget_after_s: float = 300.0
    """An instance that is gone for so long, and has nothing on its queue, is forgotten."""
    reclaim_rounds_max: int = 1000
    """Most calls to reclaim from one incarnation before the next overview."""

    apply_attempts_max: int = 5
    """Conflicts in a row after which a change of the plan waits for the next regular overview."""
    pending_max: int = 2000
    """Requests that wait for `place`; no more are read meanwhile."""
    arrivals_max: int = 500
    """Requests in one read."""
    events_max: int = 2000
    """Lifecycle entries in one read."""
    events_gap_s: float = 0.05
    """Least time from the end of one read of them to the next, unless it was full: nobody waits for what they tell, and each read costs the
    server as much as a request does."""
    read_block_s: float = 1.0
    """How long a read waits for something new."""
    replay_max: int = 50_000
    """Lifecycle entries kept while an overview is under way; beyond it the overview is read again."""
    retry_first_s: float = 0.05
    retry_max_s: float = 1.0
    """A failed call is repeated after the first pause, then after twice that, up to the last; the lease ends the repeating."""

    def replan_moves(self, groups: int) -> int:
        """How many moves a replan of so many groups may try."""
        return min(self.moves_max, self.moves_each * max(self.moves_groups_min, groups))

    @property
    def weights(self) -> Weights:
        """The objective."""
        return Weights(
            late=self.late_weight,
            tardiness=self.tardiness_weight,
            work=self.work_weight,
            completion=self.completion_weight,
        )

    def overview_period_s(self, groups: int, *, backlog: bool) -> float:
        """From one overview to the next that nothing else asks for."""
        period_s = self.overview_every_s * max(1.0, groups / self.overview_groups)
        return min(period_s * (self.overview_backlog_factor if backlog else 1.0), self.overview_every_max_s)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value) or (value <= 0 and each.name not in NOT_POSITIVE):
                raise ValueError(f"{each.name}: must be finite and > 0, got {value}")
            if value < 0 and each.name != "slo_band":
                raise ValueError(f"{each.name}: must be >= 0, got {value}")
        if self.wait_max_slos < 2.0:
            raise ValueError(f"wait_max_slos: must be at least 2, got {self.wait_max_slos}")


NOT_POSITIVE = frozenset(
    {
        "slo_band",
        "seed",
        "events_gap_s",
        "completion_weight",
        "replan_gain",
        "replan_gain_min",
        "wait_max_s",
        "group_overtake_fraction",
    }
)
"""Fields that may be 0 (the band may be negative too)."""
