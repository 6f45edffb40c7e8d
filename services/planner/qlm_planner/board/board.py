"""The board: groups, virtual queues and instances with counts per group; it holds nothing per request.

Placements of the planner change it at once, lifecycle events as they are read; an overview replaces all counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.instance import UNASSIGNED, instance_of
from qlm_core.vocabulary.pauses import Pause, is_paused
from qlm_core.vocabulary.request import RequestFacts, SloKind
from qlm_planner.board.demand import Rate
from qlm_planner.board.group import USUAL, Group, band_of, from_meta, order_of
from qlm_planner.board.slot import Slot
from qlm_planner.board.snapshot import GroupRow, Snapshot
from qlm_planner.board.tenants import limited_tenant
from qlm_planner.machine.effects import Place
from qlm_planner.machine.events import Change, ChangeKind, LoadReported

BATCH_GROUPS_MAX = 64
"""Groups at the front of a queue that `in_batch` counts."""
Target = dict[str, list[str]]
"""Instance -> group ids in the wanted order."""


@dataclass(slots=True, kw_only=True)
class Board:
    """`newest`: the newest open group of each key. `reopened`: evicted groups, in place behind the head. `expected`: arrival rates of each
    model; `expectations`: number of updates of it. `pauses`: of models and tenants."""

    slo_band: int
    groups: dict[str, Group] = field(default_factory=dict)
    queues: dict[str, list[str]] = field(default_factory=lambda: {UNASSIGNED: []})
    versions: dict[str, int] = field(default_factory=lambda: {UNASSIGNED: 0})
    slots: dict[str, Slot] = field(default_factory=dict)
    incarnations: dict[str, bool] = field(default_factory=dict)
    newest: dict[GroupKey, Group] = field(default_factory=dict)
    reopened: list[str] = field(default_factory=list)
    expected: Mapping[str, Sequence[Rate]] = field(default_factory=dict)
    expectations: int = 0
    plan_version: int = 0
    pauses: tuple[Pause, ...] = ()

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def open_groups(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    @property
    def serving(self) -> list[Slot]:
        """Instances that accept groups, by name."""
        return [slot for _, slot in sorted(self.slots.items()) if slot.serving]

    def is_paused(self, key: GroupKey) -> bool:
        """Whether an operator has paused the groups of a key. Requests of a paused tenant have groups of their own (`TenantClasses`)."""
        return bool(self.pauses) and is_paused(self.pauses, key.model, limited_tenant(key.tenant_class))

    def order(self) -> Target:
        """A copy of the queues."""
        return {name: list(queue) for name, queue in self.queues.items()}

    def queue_groups(self, instance: str) -> list[Group]:
        """The open groups of a virtual queue, first served first."""
        return [self.groups[group_id] for group_id in self.queues.get(instance, ())]

    def in_batch(self, slot: Slot) -> int:
        """Requests that run on an instance or wait for its active model in the first BATCH_GROUPS_MAX groups of its queue."""
        count = slot.running
        for group_id in self.queues.get(slot.facts.name, ())[:BATCH_GROUPS_MAX]:
            group = self.groups[group_id]
            if group.traits.key.model != slot.active_model:
                break
            count += group.waiting
        return count

    def expect(self, rates: Mapping[str, Sequence[Rate]]) -> None:
        self.expected = rates
        self.expectations += 1

    def successor(self, group: Group) -> str:
        """The group behind an open one on its queue, "" behind the last."""
        queue = self.queues[group.instance]
        position = queue.index(group.group_id) + 1
        return queue[position] if position < len(queue) else ""

    def place_by_urgency(self, queue: Sequence[str], group: Group) -> int:
        """The position in front of the first less urgent group."""
        return next((at for at, other in enumerate(queue) if self.groups[other].urgency > group.urgency), len(queue))

    def take_reopened(self) -> list[str]:
        """Removes and returns the groups evicted since the last call."""
        reopened, self.reopened = self.reopened, []
        return reopened

    # Changing ---------------------------------------------------------------------------------------------------------

    def open_group(self, group: Group, position: int) -> None:
        """Puts a new or drained group on its queue."""
        assert group.group_id not in self.queues[group.instance]
        self.groups[group.group_id] = group
        self.queues[group.instance].insert(position, group.group_id)
        self.mark_newest(group)

    def mark_newest(self, group: Group) -> None:
        """Lets requests of an open group's key join it, unless a newer one is open."""
        key = group.traits.key
        held = self.newest.get(key)
        if held is None or held.order <= group.order:
            self.newest[key] = group

    def count_opening(self, instance: str) -> None:
        """Raises the version of a virtual queue on which the queue opened a group. A wrong version costs a conflict."""
        if instance in self.versions:
            self.versions[instance] += 1

    def add_request(self, group: Group, facts: RequestFacts) -> None:
        group.waiting += 1
        group.live += 1
        group.waiting_prompt_tokens += facts.prompt_tokens
        group.slo_least_s = min(group.slo_least_s, facts.slo.seconds)
        group.first_deadline_s = min(group.first_deadline_s, facts.deadline_s)
        group.next_deadline_s = min(group.next_deadline_s, facts.deadline_s)
        group.last_deadline_s = max(group.last_deadline_s, facts.deadline_s)

    def regroup(self, source: Group, into: Group, count: int, prompt_tokens: int) -> None:
        """Moves waiting requests to another group of the queue, or to a new one, opened right behind the source."""
        queue = self.queues[source.instance]
        if into.group_id not in queue:
            place = queue.index(source.group_id) + 1 if source.group_id in queue else len(queue)
            self.groups[into.group_id] = into
            queue.insert(place, into.group_id)
        into.waiting += count
        into.live += count
        into.waiting_prompt_tokens += prompt_tokens
        gone = min(count, source.waiting)
        answered = max(0, source.answered - (source.waiting - gone))
        if answered:  # answered requests stand in front, and the last requests move
            into.answered += answered
            into.set_next_deadline(into.next_deadline_s)
        source.live -= gone
        if gone:
            source.waiting -= gone - 1
            self._leave(source, prompt_tokens)
        if source.live <= 0:
            self.groups.pop(source.group_id, None)
        self.mark_newest(into)

    def apply_placement(self, call: Place, done: Sequence[bool]) -> None:
        """Applies the answer to a placement: whether each request is in its group."""
        assert len(done) == len(call.requests), "one answer for each request"
        for name in call.opened:
            self.count_opening(name)
        for placement, is_in in zip(call.requests, done, strict=True):
            if not is_in:
                self.drop_request(placement.group_id, placement.arrival.facts.prompt_tokens)

    def drop_request(self, group_id: str, prompt_tokens: int) -> None:
        """Removes an added request that is placed elsewhere or has ended."""
        group = self.groups.get(group_id)
        if group is not None:
            self._leave(group, prompt_tokens)
            self._end(group)

    def apply_change(self, change: Change) -> None:
        """Applies a lifecycle event. Events of unknown groups are ignored: the next overview corrects the counts."""
        group = self.groups.get(change.group_id)
        if group is None:
            return
        slot = self._owner(change.incarnation)
        match change.kind:
            case ChangeKind.PULLED:
                if group.answered:
                    group.answered -= 1
                else:
                    group.next_deadline_s += group.spread_s / max(1, group.waiting - 1)
                self._leave(group, change.prompt_tokens)
                if slot is not None:
                    slot.running += 1
                    slot.pulled_tokens += change.prompt_tokens
                    slot.active_model = slot.active_model or group.traits.key.model
                    slot.add_running(group, 1)
            case ChangeKind.RETURNED:
                self._return(group, change)
                if slot is not None:
                    slot.end_running(group.group_id)
            case ChangeKind.ENDED_RUNNING:
                if slot is not None:
                    slot.end_running(group.group_id)
                self._end(group)
            case ChangeKind.ENDED_WAITING:
                group.answered -= min(group.answered, int(change.answered))
                self._leave(group, change.prompt_tokens)
                self._end(group)

    def apply_report(self, load: LoadReported) -> bool:
        """Applies an agent's report of its engine. False for an unknown incarnation."""
        slot = self._owner(load.incarnation)
        if slot is None:
            return False
        slot.active_model = load.active_model
        slot.warm_models = load.warm_models
        slot.report_batch(load.batch)
        slot.load, slot.pulled_tokens = load.engine, 0
        return True

    def load(self, snapshot: Snapshot, now_s: float) -> None:
        """Replaces all counts by an overview. Agents' later reports (the active model) stay."""
        self.plan_version = max(self.plan_version, snapshot.plan_version)
        self.load_slots(snapshot, now_s)
        self.incarnations = dict(snapshot.incarnations)
        old, self.groups = self.groups, {}
        for group_id, row in snapshot.groups.items():
            self.groups[group_id] = self.group_of_row(row, old.get(group_id))
        self.queues = {name: [] for name in (UNASSIGNED, *self.slots)}
        self.versions = dict.fromkeys(self.queues, 0)
        for queue in snapshot.queues:
            if queue.instance in self.queues:
                self.queues[queue.instance] = [group_id for group_id in queue.group_ids if group_id in self.groups]
                self.versions[queue.instance] = queue.version
        runners = self.slots_by_group()
        for group in self.groups.values():
            self.settle_runners(group, runners.pop(group.group_id, ()))
        for group_id, slots in runners.items():
            for slot in slots:
                del slot.runners[group_id]
        self.newest = {}
        for group in self.groups.values():
            if group.open:
                self.mark_newest(group)

    def group_of_row(self, row: GroupRow, old: Group | None) -> Group:
        """A group from an overview, with the traits and the tier of the `old` one."""
        traits = from_meta(row.meta) if old is None else old.traits
        return Group(
            group_id=row.group_id,
            order=order_of(row.group_id),
            traits=traits,
            band=band_of(traits, self.slo_band),
            instance=row.instance or row.last_instance or UNASSIGNED,
            first_deadline_s=row.first_deadline_s,
            next_deadline_s=row.next_deadline_s,
            last_deadline_s=row.last_deadline_s,
            waiting=row.waiting if row.instance else 0,
            live=row.live,
            waiting_prompt_tokens=row.waiting_prompt_tokens,
            slo_least_s=row.slo_least_s,
            tier=USUAL if old is None else old.tier,
        )

    def load_slots(self, snapshot: Snapshot, now_s: float) -> None:
        """Replaces the instances and the pauses by those of an overview."""
        self.pauses = snapshot.pauses
        old, self.slots = self.slots, {}
        for row in snapshot.instances:
            known = old.get(row.facts.name)
            same = known is not None and known.facts.incarnation == row.facts.incarnation
            facts = row.facts.lasting  # the key of cached service times
            active, warm = row.facts.active_model, row.facts.warm_models
            slot = known if known is not None and same else Slot(facts=facts, active_model=active, warm_models=warm)
            slot.facts = facts
            slot.loading_since_s, slot.runs = row.facts.loading_since_s, row.runs
            slot.alive = row.alive
            if row.alive:
                slot.lost_s = None
            elif slot.lost_s is None:
                slot.lost_s = now_s
            self.slots[row.facts.name] = slot
        for queue in snapshot.queues:
            if queue.instance in self.slots:
                self.slots[queue.instance].running = queue.running

    def move(self, queues: Mapping[str, list[str]], homes: Mapping[str, str]) -> None:
        """Replaces whole queues. `homes`: named groups -> their queues."""
        self.queues.update(queues)
        for group_id, instance in homes.items():
            self.groups[group_id].instance = instance

    def _owner(self, incarnation: str) -> Slot | None:
        slot = self.slots.get(instance_of(incarnation))
        return slot if slot is not None and slot.facts.incarnation == incarnation else None

    def slots_by_group(self) -> dict[str, list[Slot]]:
        """The instances that run requests of each group, by lifecycle events."""
        found: dict[str, list[Slot]] = {}
        for slot in self.slots.values():
            for group_id in slot.runners:
                found.setdefault(group_id, []).append(slot)
        return found

    def settle_runners(self, group: Group, slots: Sequence[Slot]) -> None:
        """Sets the runners of a group on its `slots_by_group`. An overview counts the running requests, earlier events name their
        instances: where the two disagree, the instance of the group's queue runs all."""
        running = group.live - group.waiting
        if sum(slot.runners[group.group_id].count for slot in slots) == running:
            return
        for slot in slots:
            del slot.runners[group.group_id]
        home = self.slots.get(group.instance)
        if home is not None and running > 0:
            home.add_running(group, running)

    def _leave(self, group: Group, prompt_tokens: int) -> None:
        """Removes a waiting request; the last one closes the group. Answered requests stand in front, and leave last unless pulled."""
        if not group.open:
            return
        group.waiting -= 1
        group.answered = min(group.answered, group.waiting)
        group.waiting_prompt_tokens = max(0, group.waiting_prompt_tokens - prompt_tokens)
        if group.waiting == 0:
            queue = self.queues[group.instance]
            if group.group_id in queue:
                queue.remove(group.group_id)
            self._replace_newest(group)

    def _replace_newest(self, group: Group) -> None:
        """Lets requests of a drained group's key join its next newest group. O(groups) if the drained one was the newest."""
        key = group.traits.key
        if self.newest.get(key) is not group:
            return
        others = (each for each in self.groups.values() if each.open and each.traits.key == key and each is not group)
        newest = max(others, key=lambda each: each.order, default=None)
        if newest is None:
            del self.newest[key]
        else:
            self.newest[key] = newest

    def _return(self, group: Group, change: Change) -> None:
        """Adds a waiting request. A drained group reopens at the head, or behind it if evicted, as in the queue."""
        if change.answered and group.traits.key.slo_kind is SloKind.FIRST_TOKEN:
            group.next_deadline_s = group.next_deadline_s if group.open else math.inf
            group.answered += 1
        else:
            group.next_deadline_s = group.first_deadline_s  # until the next overview
        group.waiting += 1
        group.waiting_prompt_tokens += change.prompt_tokens
        if group.instance not in self.queues:
            group.instance = UNASSIGNED
        queue = self.queues[group.instance]
        if group.group_id not in queue:
            self.open_group(group, min(int(change.evicted), len(queue)))
            self.count_opening(group.instance)
            if change.evicted:
                self.reopened.append(group.group_id)

    def _end(self, group: Group) -> None:
        group.live = max(0, group.live - 1)
        if group.live == 0 and not group.open:
            self.groups.pop(group.group_id, None)
