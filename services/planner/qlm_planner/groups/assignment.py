"""Assigns requests to groups: the online part of QLM algorithm 1, O(1) while a group is open; or as a comparison policy decides."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.pauses import is_paused
from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group, GroupTraits, group_id_of, group_of_one, to_meta, traits_of
from qlm_planner.board.slot import Slot
from qlm_planner.board.snapshot import Arrival
from qlm_planner.board.tenants import TenantClasses
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of
from qlm_planner.groups.cheapest_place import best_place, idle_place
from qlm_planner.groups.ranks import tier_of
from qlm_planner.machine.effects import GroupOpening, Place, Placement
from qlm_planner.policies.baseline import Baseline, Seating
from qlm_planner.policy import Policy

SPREAD_MIN_S = 0.1
"""Deadlines nearer than this may share a group; otherwise each request with an SLO of a millisecond opens one."""
CROWDED = 1.1
"""Ratio of step times below which two instances are equal; otherwise each request opens a group."""
OVERTAKE_GROUPS = 32
"""Groups behind an open one, and at the head of its queue, that `_overtakes` reads."""


@dataclass(slots=True, kw_only=True)
class GroupAssignment:
    """Opens the groups of one term. `fence`: of its lease. `above`: classes of tenants above their share. `baseline`: the comparison
    policy that decides instead, if any."""

    policy: Policy
    table: ClassTable
    fence: int
    tenant_classes: TenantClasses
    above: Collection[str] = ()
    baseline: Baseline | None = None
    opened: int = 0

    @classmethod
    def of(cls, policy: Policy, table: ClassTable, fence: int, baseline: Baseline | None = None) -> GroupAssignment:
        tenant_classes = TenantClasses(tenants=policy.tenants, forget_s=policy.share_window_s)
        return cls(policy=policy, table=table, fence=fence, tenant_classes=tenant_classes, baseline=baseline)

    def place(self, arrivals: Sequence[Arrival], board: Board, estimates: Estimates, now_s: float) -> Place:
        """Assigns requests to groups on the board; returns the call that does so in the queue."""
        used: dict[str, Group] = {}
        newer = (self.fence, self.opened)
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
        # From the last position to the first: a group opens in front of one that exists.
        groups = sorted(used.values(), key=lambda group: -board.queues[group.instance].index(group.group_id))
        turn = {group.group_id: number for number, group in enumerate(groups)}
        placements.sort(key=lambda placement: turn[placement.group_id])
        openings = tuple(opening_of(group, board.successor(group)) for group in groups)
        opened = tuple(group.instance for group in groups if group.order > newer)
        return Place(groups=openings, requests=tuple(placements), opened=opened)

    def join(self, facts: RequestFacts, board: Board, estimates: Estimates, now_s: float) -> Group:
        """The newest open group of the request's key with room, else a new group at its cheapest position (on "unassigned" if paused)."""
        tenant = facts.key.tenant
        paused = bool(board.pauses) and is_paused(board.pauses, "", tenant)
        traits = traits_of(facts, self.tenant_classes.of(tenant, now_s, paused=paused))
        group = board.newest.get(traits.key)
        if group is not None and self._has_room(group, facts.deadline_s, board, estimates):
            board.add_request(group, facts)
            return group
        self.opened += 1
        group = self._alone(self.opened, facts, traits)
        group.tier = tier_of(group, self.above, self.policy, now_s)
        instance, position = ("", 0) if board.is_paused(traits.key) else self._position(group, board, estimates, now_s)
        if instance:
            group.instance = instance
            board.open_group(group, position)
        else:
            board.open_group(group, board.place_by_urgency(board.queues[UNASSIGNED], group))
        return group

    def _position(self, group: Group, board: Board, estimates: Estimates, now_s: float) -> tuple[str, int]:
        """The instance of a new group and its position there; ("", 0) where no instance serves it."""
        idle = idle_place(board, estimates, group)
        if idle:
            return idle, 0
        place = best_place(lines_of(board, self.table, now_s), self.table, group, now_s)
        return ("", 0) if place is None else (place.line.slot.facts.name, place.position)

    def joins(self, board: Board, estimates: Estimates, key: GroupKey, deadline_s: float) -> str:
        """Id of the open group on an instance's queue that a request with this key and deadline joins; "" for none."""
        group = board.newest.get(key)
        if group is None or group.instance not in board.slots or not self._has_room(group, deadline_s, board, estimates):
            return ""
        return group.group_id

    def follow(self, facts: RequestFacts, seating: Seating) -> Group:
        """The group that a comparison policy chooses, perhaps a new one."""
        alone = self._alone(self.opened + 1, facts, traits_of(facts))
        group = seating.join(facts, alone)
        self.opened += group is alone
        return group

    def _alone(self, number: int, facts: RequestFacts, traits: GroupTraits) -> Group:
        """A group of one request, on no queue."""
        return group_of_one(group_id_of(self.fence, number), traits, self.policy.slo_band, facts.deadline_s, facts.prompt_tokens)

    def part_of(self, group: Group) -> Group:
        """A new, empty group with the traits and the queue of another one."""
        self.opened += 1
        return Group(
            group_id=group_id_of(self.fence, self.opened),
            order=(self.fence, self.opened),
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
            return False  # the group moves soon
        limits = estimates.limits_at(slot, group)
        if group.live >= limits.live or group.waiting >= limits.waiting:
            return False
        if self._crowded(group, slot, board, estimates):
            return False
        if math.isinf(group.traits.slo_s):
            return True  # no deadline
        spread_s = max(SPREAD_MIN_S, self.policy.group_spread_fraction * group.traits.slo_s)
        return abs(deadline_s - group.first_deadline_s) <= spread_s and not self._overtakes(group, deadline_s, board)

    def _crowded(self, group: Group, slot: Slot | None, board: Board, estimates: Estimates) -> bool:
        """Whether a step takes clearly longer on the group's instance than on another one with the same active model."""
        model = group.traits.key.model
        if slot is None or slot.active_model != model:
            return False

        def step_s(each: Slot) -> float:
            return estimates.step_s(each, group, board.in_batch(each) + 1)

        others = [each for each in board.slots.values() if each is not slot and each.serving and each.active_model == model]
        return step_s(slot) > CROWDED * min(map(step_s, others), default=math.inf)

    def _overtakes(self, group: Group, deadline_s: float, board: Board) -> bool:
        """Whether a request in this group would precede much earlier ones of its model and SLO class. A group may stay open for long, and
        predictions for the groups behind it assume no further requests. O(1) beyond finding the group on its queue."""
        queue = board.queues[group.instance]
        place = queue.index(group.group_id)
        behind = _first_alike(board, islice(queue, place + 1, place + 1 + OVERTAKE_GROUPS), group)
        if behind is None:
            return False
        first = _first_alike(board, islice(queue, min(place, OVERTAKE_GROUPS)), group) or group
        waited_s = self.policy.group_overtake_fraction * (deadline_s - first.first_deadline_s)
        return deadline_s - behind.first_deadline_s > max(self.policy.group_overtake_min_s, waited_s)


def opening_of(group: Group, before: str) -> GroupOpening:
    """The queue's call to open a group in front of another one."""
    return GroupOpening(
        group_id=group.group_id,
        instance=group.instance,
        before=before,
        first_deadline_s=group.first_deadline_s,
        meta=to_meta(group.traits, group.band),
    )


def _first_alike(board: Board, group_ids: Iterable[str], group: Group) -> Group | None:
    """The first group with a group's model, SLO class and rank: these are sorted by deadline."""
    key = group.traits.key
    of = (key.model, key.slo_kind, key.slo_class, group.rank)
    for group_id in group_ids:
        other = board.groups[group_id]
        its = other.traits.key
        if (its.model, its.slo_kind, its.slo_class, other.rank) == of:
            return other
    return None
