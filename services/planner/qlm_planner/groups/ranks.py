"""Who comes before others of its band, whatever an order by deadlines or by cost would say.

1. Groups that have waited too long: nobody waits more than `wait_max_slos` x its SLO, or `wait_max_s` where that is longer, while others of
   its band are served in time. A group whose first request has waited all but `MARGIN_SLOS` of that comes before its band; the margin is
   for what has to happen until it runs.
2. All others, but for
3. groups of tenants that have had more than their share of the served work: they wait behind, and are served where nobody else waits.

The bound is for what a tenant sends within its share. Who floods the queue waits too long by its own doing, and comes back into the bound
whenever its share falls below the limit; otherwise a flood, or SLOs that nobody can meet, would be a way around the limit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from qlm_planner.board.board import Board
from qlm_planner.board.group import AGED, BEHIND, USUAL, Group
from qlm_planner.policy import Policy

MARGIN_SLOS = 0.75
"""Of the longest wait, what is left for those that waited too long: for others of them, for what runs, and for loading their model."""


def set_tiers(board: Board, above: Collection[str], policy: Policy, now_s: float) -> None:
    """Gives every open group its place within its band. `above`: classes of tenants that have had too much."""
    for queue in board.queues.values():
        for group_id in queue:
            group = board.groups[group_id]
            group.tier = tier_of(group, above, policy, now_s)


def tier_of(group: Group, above: Collection[str], policy: Policy, now_s: float) -> int:
    """Where a group stands within its band now."""
    if group.traits.key.tenant_class in above:
        return BEHIND
    slo_s = group.slo_least_s
    bound_s = max(policy.wait_max_slos * slo_s, policy.wait_max_s)
    aged = math.isfinite(slo_s) and now_s >= group.first_deadline_s - slo_s + bound_s - MARGIN_SLOS * slo_s
    return AGED if aged else USUAL


def in_rank(board: Board, queues: Mapping[str, list[str]]) -> dict[str, list[str]] | None:
    """The queues with every group in its rank, and otherwise as they are; None where they are so already."""
    ranked = {name: sorted(queue, key=lambda group_id: board.groups[group_id].rank) for name, queue in queues.items()}
    return None if all(ranked[name] == queue for name, queue in queues.items()) else ranked
