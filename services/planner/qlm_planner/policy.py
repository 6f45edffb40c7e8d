"""What an operator may change in the planner's decisions, with the reason for each default."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

BATCH_MAX = 500
"""Most requests or group ids that one call of the queue takes (`qlm_queue.values.BATCH_MAX`; the shell checks that they are equal)."""


class Order(StrEnum):
    """What the order of service follows. FCFS is a baseline to compare with (`qlm_planner.arrival_order`)."""

    SLO = "slo"
    FCFS = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the machine; durations in seconds of the queue's clock. Raises ValueError for a value that makes no sense."""

    order: Order = Order.SLO

    delta: float = 4.0
    """A group holds at most delta x the average batch of its instance (QLM algorithm 1; section 8.3 finds 4 the best)."""
    group_service_fraction: float = 0.25
    """A group's service time is at most this share of its SLO, so that its last request is not late by its own group."""
    group_spread_fraction: float = 0.5
    """Deadlines in a group are at most this share of the SLO apart: the order is by the first of them."""
    group_min: int = 8
    """No limit makes a group smaller than this: the cost of planning grows with the groups."""
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
    starvation_slos: float = 1.0
    """A group is put in front of one with an earlier deadline only while that one is expected to end less than so many SLOs late."""
    head_gain: float = 500.0
    """Least gain in cost for which a group with another model displaces the head of a queue that runs."""

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
    replan_pairs: int = 1_250
    """Pairs of a group and an instance for each `replan_every_s` between two replans."""
    replan_pairs_max: int = 50_000
    """Above so many pairs a replan only comes on request."""
    reinsert_max: int = 16
    """Groups that would be late for which a replan looks for a better place one by one."""
    portfolio_pairs_max: int = 2_000
    """Above so many pairs a replan tries fewer constructions."""

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

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Order):
                continue
            if not math.isfinite(value) or (value <= 0 and each.name not in NOT_POSITIVE):
                raise ValueError(f"{each.name}: must be finite and > 0, got {value}")
            if value < 0 and each.name != "slo_band":
                raise ValueError(f"{each.name}: must be >= 0, got {value}")


NOT_POSITIVE = frozenset(
    {"slo_band", "events_gap_s", "completion_weight", "head_gain", "replan_gain", "replan_gain_min", "starvation_slos"}
)
"""Fields that may be 0 (the band may be negative too)."""
