"""Which group a request joins: the online part of QLM algorithm 1, O(1) while its group is open (or as a comparison policy says)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from qlm_core.group import GroupKey
from qlm_core.instance import UNASSIGNED
from qlm_core.pauses import is_paused
from qlm_core.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group, GroupTraits, group_id_of, group_of_one, to_meta, traits_of
from qlm_planner.board.slot import Slot
from qlm_planner.board.snapshot import Arrival
from qlm_planner.board.tenants import TenantClasses
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of
from qlm_planner.groups.cheapest_place import best_place
from qlm_planner.groups.ranks import tier_of
from qlm_planner.machine.effects import GroupOpening, Place, Placement
from qlm_planner.policies.baseline import Baseline, Seating
from qlm_planner.policy import Policy

SPREAD_MIN_S = 0.1
"""Deadlines that are nearer than this may always share a group: else each request with an SLO of a millisecond would open one."""
CROWDED = 1.1
"""Steps that differ by less are alike: else each request would open a group."""
OVERTAKEN_LOOK = 32
"""Groups behind an open one, and from the head of its queue, among which those are looked for that a request would overtake."""


@dataclass(slots=True, kw_only=True)
class GroupAssignment:
    """Makes the groups of one leader. `fence`: that of its lease. `above`: classes of tenants that have had more than their share.
    `baseline`: the comparison policy that decides instead, if any."""

    policy: Policy
    table: ClassTable
    fence: int
    tenant_classes: TenantClasses
    above: Collection[str] = ()
    baseline: Baseline | None = None
    made: int = 0

    @classmethod
    def of(cls, policy: Policy, table: ClassTable, fence: int, baseline: Baseline | None = None) -> GroupAssignment:
        tenant_classes = TenantClasses(tenants=policy.tenants, forget_s=policy.share_window_s)
        return cls(policy=policy, table=table, fence=fence, tenant_classes=tenant_classes, baseline=baseline)

    def place(self, arrivals: Sequence[Arrival], board: Board, estimates: Estimates, now_s: float) -> Place:
        """Puts requests into groups, on the board at once, and says how the queue does it."""
        used: dict[str, Group] = {}
        newer = (self.fence, self.made)
        placements: list[Placement] = []
        seating = None if self.baseline is None else self.baseline.seating(board, self.table, now_s)
        for arrival in arrivals:
            facts = arrival.facts
            if seating is None or (board.pauses and is_paused(board.pauses, facts.model, facts.key.tenant)):
                group = self.join(facts, board, estimates, now_s)
            else:
                group = self.follow(facts, seating)
            used[group.group_id] = group
            placements.append(Placement(arrival=arrival, group_id=group.group_id))
        # From the last position to the first: a group is opened, with its first request, in front of one that is there already.
        groups = sorted(used.values(), key=lambda group: -board.queues[group.instance].index(group.group_id))
        turn = {group.group_id: number for number, group in enumerate(groups)}
        placements.sort(key=lambda placement: turn[placement.group_id])
        openings = tuple(opening_of(group, board.successor(group)) for group in groups)
        opened = tuple(group.instance for group in groups if group.order > newer)
        return Place(groups=openings, requests=tuple(placements), opened=opened)

    def join(self, facts: RequestFacts, board: Board, estimates: Estimates, now_s: float) -> Group:
        """The newest open group of the request's key that has room for it, else a new group at its best place, or on "unassigned" where it
        is paused."""
        tenant = facts.key.tenant
        paused = bool(board.pauses) and is_paused(board.pauses, "", tenant)
        traits = traits_of(facts, self.tenant_classes.of(tenant, now_s, paused=paused))
        group = board.newest.get(traits.key)
        if group is not None and self._has_room(group, facts.deadline_s, board, estimates):
            board.add_request(group, facts)
            return group
        self.made += 1
        group = self._alone(self.made, facts, traits)
        group.tier = tier_of(group, self.above, self.policy, now_s)
        place = None if board.is_paused(traits.key) else best_place(lines_of(board, self.table, now_s), self.table, group, now_s)
        if place is None:
            board.open_group(group, board.place_by_urgency(board.queues[UNASSIGNED], group))
        else:
            group.instance = place.line.slot.facts.name
            board.open_group(group, place.position)
        return group

    def joins(self, board: Board, estimates: Estimates) -> Callable[[GroupKey, float], str]:
        """By key and deadline, the id of the open group on an instance's queue that a request joins; "" for none."""

        def joined(key: GroupKey, deadline_s: float) -> str:
            group = board.newest.get(key)
            if group is None or group.instance not in board.slots or not self._has_room(group, deadline_s, board, estimates):
                return ""
            return group.group_id

        return joined

    def follow(self, facts: RequestFacts, seating: Seating) -> Group:
        """The group where a comparison policy seats a request, perhaps a new one."""
        alone = self._alone(self.made + 1, facts, traits_of(facts))
        group = seating.join(facts, alone)
        self.made += group is alone
        return group

    def _alone(self, number: int, facts: RequestFacts, traits: GroupTraits) -> Group:
        """A group of one request, on no queue."""
        return group_of_one(group_id_of(self.fence, number), traits, self.policy.slo_band, facts.deadline_s, facts.prompt_tokens)

    def part_of(self, group: Group) -> Group:
        """A new group of the traits of another one, without requests, on its queue."""
        self.made += 1
        return Group(
            group_id=group_id_of(self.fence, self.made),
            order=(self.fence, self.made),
            traits=group.traits,
            band=group.band,
            instance=group.instance,
            first_deadline_s=math.inf,
            next_deadline_s=math.inf,
            last_deadline_s=-math.inf,
            slo_least_s=group.slo_least_s,
            tier=group.tier,
        )

    def _has_room(self, group: Group, deadline_s: float, board: Board, estimates: Estimates) -> bool:
        slot = board.slots.get(group.instance)
        if slot is not None and not slot.serving:
            return False  # it is about to move: nothing more goes where nobody serves
        limits = estimates.limits_at(slot, group)
        if group.live >= limits.live or group.waiting >= limits.waiting:
            return False
        if self._crowded(group, slot, board, estimates):
            return False
        if math.isinf(group.traits.slo_s):
            return True  # priorities, and those that may take any time
        spread_s = max(SPREAD_MIN_S, self.policy.group_spread_fraction * group.traits.slo_s)
        return abs(deadline_s - group.first_deadline_s) <= spread_s and not self._overtakes(group, deadline_s, board)

    def _crowded(self, group: Group, slot: Slot | None, board: Board, estimates: Estimates) -> bool:
        """A step takes clearly longer on the group's instance than on another one that serves its model now."""
        model = group.traits.key.model
        if slot is None or slot.active_model != model:
            return False

        def step_s(each: Slot) -> float:
            return estimates.step_s(each, group, board.in_batch(each) + 1)

        others = [each for each in board.slots.values() if each is not slot and each.serving and each.active_model == model]
        return step_s(slot) > CROWDED * min(map(step_s, others), default=math.inf)

    def _overtakes(self, group: Group, deadline_s: float, board: Board) -> bool:
        """Whether a request that joins a group would come before others of its model and SLO class that came much earlier. A group may
        stay open for long (it is as large as what of its key arrives while it drains), and what is told to those behind it counts nobody
        who is yet to come. Costs O(1) but for finding the group on its queue."""
        queue = board.queues[group.instance]
        place = queue.index(group.group_id)
        behind = _first_alike(board, islice(queue, place + 1, place + 1 + OVERTAKEN_LOOK), group)
        if behind is None:
            return False
        first = _first_alike(board, islice(queue, min(place, OVERTAKEN_LOOK)), group) or group
        waited_s = self.policy.group_overtake_fraction * (deadline_s - first.first_deadline_s)
        return deadline_s - behind.first_deadline_s > max(self.policy.group_overtake_min_s, waited_s)


def opening_of(group: Group, before: str) -> GroupOpening:
    """How the queue opens a group, in front of another one."""
    return GroupOpening(
        group_id=group.group_id,
        instance=group.instance,
        before=before,
        first_deadline_s=group.first_deadline_s,
        meta=to_meta(group.traits, group.band),
    )


def _first_alike(board: Board, group_ids: Iterable[str], group: Group) -> Group | None:
    """The first with the model, the SLO class and the rank of a group: among those the order is that of their deadlines."""
    key = group.traits.key
    of = (key.model, key.slo_kind, key.slo_class, group.rank)
    for group_id in group_ids:
        other = board.groups[group_id]
        its = other.traits.key
        if (its.model, its.slo_kind, its.slo_class, other.rank) == of:
            return other
    return None
