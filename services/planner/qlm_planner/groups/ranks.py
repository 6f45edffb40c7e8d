"""Ranks: groups that precede or follow others of their band, whatever their deadlines or costs.

1. Groups that have waited too long: no request waits more than `wait_max_slos` x its SLO, or `wait_max_s` if longer, while others of its
   band are served in time. A group precedes its band once less than `MARGIN_SLOS` of that is left.
2. All other groups, except
3. groups of tenants above their share of the served work: they follow, and are served when no others wait.

The bound holds for requests within a tenant's share. A tenant that floods the queue is bound again once its share falls below the limit;
otherwise a flood, or an impossible SLO, would bypass the limit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from qlm_planner.board.board import Board
from qlm_planner.board.group import AGED, BEHIND, USUAL, Group
from qlm_planner.policy import Policy

MARGIN_SLOS = 0.75
"""SLOs of the longest wait reserved for loading the model and for other requests in front."""


def set_tiers(board: Board, above: Collection[str], policy: Policy, now_s: float) -> None:
    """Sets the tier of every open group. `above`: classes of tenants above their share."""
    for queue in board.queues.values():
        for group_id in queue:
            group = board.groups[group_id]
            group.tier = tier_of(group, above, policy, now_s)


def tier_of(group: Group, above: Collection[str], policy: Policy, now_s: float) -> int:
    """The tier of a group now."""
    if group.traits.key.tenant_class in above:
        return BEHIND
    slo_s = group.slo_least_s
    bound_s = max(policy.wait_max_slos * slo_s, policy.wait_max_s)
    aged = math.isfinite(slo_s) and now_s >= group.first_deadline_s - slo_s + bound_s - MARGIN_SLOS * slo_s
    return AGED if aged else USUAL


def in_rank(board: Board, queues: Mapping[str, list[str]]) -> dict[str, list[str]] | None:
    """The queues sorted by rank, otherwise unchanged; None if they are sorted already."""
    ranked = {name: sorted(queue, key=lambda group_id: board.groups[group_id].rank) for name, queue in queues.items()}
    return None if all(ranked[name] == queue for name, queue in queues.items()) else ranked
