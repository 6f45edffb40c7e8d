"""A repair of a `MemoryState`: what `lua/repair.lua` does on a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from qlm.internal.v1.events_pb2 import EventKind
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestState
from qlm_queue.damage import DAMAGED_RESULT, Damage
from qlm_queue.memory.state import MemoryState, StoredGroup, StoredQueue, StoredRequest
from qlm_queue.memory.step import Step
from qlm_queue.values import RequeueCause

ROUNDS_MAX = 4
"""As on a server: what one round mends may uncover more."""
TOKEN_BYTES = 4


def repair(state: MemoryState, now_s: float, *, mend: bool) -> list[Damage]:
    """See `Queue.repair`."""
    found: list[Damage] = []
    for _ in range(ROUNDS_MAX if mend else 1):
        seen = list(_Repair(state, now_s, mend).round())
        found += seen
        if not seen:
            break
    state.damage_count += len(found) if mend else 0
    return found


class _Repair:
    """One round. Each of its parts yields what it found, and mends it before the next."""

    def __init__(self, state: MemoryState, now_s: float, mend: bool) -> None:
        self._state = state
        self._mend = mend
        self._step = Step(state, now_s)

    def round(self) -> Iterator[Damage]:
        yield from self._instances()
        yield from self._requests()
        yield from self._groups()
        yield from self._members()
        yield from self._counts()
        self._step.send()

    def _instances(self) -> Iterator[Damage]:
        state = self._state
        for name in sorted(set(state.instances) - set(state.queues)):
            yield Damage(record=name, problem="has no virtual queue", remedy="restored")
            if self._mend:
                state.queues[name] = StoredQueue(version=1)
        for name, instance in sorted(state.instances.items()):
            if instance.incarnation not in state.running and state.holder(instance.incarnation, self._step.now_s) is not None:
                yield Damage(record=name, problem="is of an unknown incarnation", remedy="restored")
                if self._mend:
                    state.running[instance.incarnation] = {}

    # Requests ---------------------------------------------------------------------------------------------------------

    def _requests(self) -> Iterator[Damage]:
        state = self._state
        every = {request.queue_id: request for request in (*state.requests.values(), *state.by_key.values(), *state.by_number.values())}
        for queue_id, request in sorted(every.items(), key=lambda item: item[1].number):
            problem = self._problem(request)
            if problem:
                yield Damage(record=queue_id, problem=problem, remedy="failed")
                if self._mend:
                    self._fail(request)
                continue
            if request.expiry_s is not None and (request.expiry_s, request.number) not in state.expiries:
                yield Damage(record=queue_id, problem="is not in the index of expiries", remedy="restored")
                if self._mend:
                    state.add_expiry(request)
            yield from self._place(request)

    def _problem(self, request: StoredRequest) -> str:
        """Why a request cannot go on, "" if it can."""
        state = self._state
        if state.by_key.get(request.key) is not request or not isinstance(request.state, RequestState):
            return "is missing"
        if state.requests.get(request.queue_id) is not request:
            return "has lost its body"
        if request.first_token_s and (not request.progress or (not request.text and len(request.progress) % TOKEN_BYTES)):
            return "has lost output that was shown"
        return ""

    def _fail(self, request: StoredRequest) -> None:
        """Ends it, whatever is left of it."""
        state = self._state
        for owned in state.running.values():
            owned.pop(request.number, None)
        group = state.groups.get(request.group_id)
        if group is not None and request.number in group.members:
            group.members.remove(request.number)
        owner = request.incarnation if request.state is RequestState.RUNNING else ""
        state.requests[request.queue_id] = state.by_key[request.key] = state.by_number[request.number] = request
        request.progress.clear()
        request.logprobs.clear()
        request.text = True
        if request.state is RequestState.RUNNING:
            state.running.setdefault(owner, {})[request.number] = request
        else:
            request.state = RequestState.ACCEPTED
        request.group_id = request.group_id if group is not None else ""
        if request.expiry_s is not None and (request.expiry_s, request.number) not in state.expiries:
            state.add_expiry(request)
        self._step.finish(request, RequestState.FAILED, DAMAGED_RESULT)

    def _place(self, request: StoredRequest) -> Iterator[Damage]:
        """Where a request stands that waits or runs, against its group and its owner."""
        state, queue_id = self._state, request.queue_id
        group = state.groups.get(request.group_id)
        match request.state:
            case RequestState.ACCEPTED if queue_id not in state.unplaced:
                yield Damage(record=queue_id, problem="waits for no planner", remedy="placed again")
                if self._mend:
                    state.unplaced[queue_id] = request
            case RequestState.PLACED if group is None:
                yield Damage(record=queue_id, problem="is of a group without a record", remedy="placed again")
                if self._mend:
                    self._step.unplace(request)
            case RequestState.PLACED if group is not None and request.number not in group.members:
                yield Damage(record=queue_id, problem="is not in its group", remedy="placed again")
                if self._mend:
                    self._step.join(group, request)
            case RequestState.RUNNING:
                if group is None and request.group_id:
                    yield Damage(record=queue_id, problem="is of a group without a record", remedy="placed again later")
                    if self._mend:
                        request.group_id = ""
                if request.number not in state.running.get(request.incarnation, {}):
                    yield Damage(record=queue_id, problem="is not among what its owner runs", remedy="placed again")
                    if self._mend:
                        owner = request.incarnation
                        state.running.setdefault(owner, {})[request.number] = request
                        self._step.return_to_place(request, 0)
                        cause = RequeueCause.LOST.value
                        self._step.event(EventKind.EVENT_KIND_REQUEUED, request, incarnation=owner, cause=cause)
            case _:
                pass

    # Groups and virtual queues ----------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[Damage]:
        state, listed = self._state, dict[str, str]()
        for name, queue in sorted(state.queues.items()):
            kept = []
            for group_id in queue.group_ids:
                if name in (UNASSIGNED, *state.instances) and group_id not in listed and self._is_open(group_id):
                    listed[group_id] = name
                    kept.append(group_id)
                else:
                    yield Damage(record=name, problem=f"has {group_id}, which does not belong there", remedy="dropped")
            if self._mend and kept != queue.group_ids:
                queue.group_ids[:] = kept
                queue.version += 1
        for name in sorted(set(state.queues) - {UNASSIGNED, *state.instances}):
            yield Damage(record=name, problem="is of no instance", remedy="dropped")
            if self._mend:
                del state.queues[name]
        for group_id, group in sorted(state.groups.items()):
            name = listed.get(group_id, "")
            if group.members and not name:
                name = group.last_instance if group.last_instance in state.queues else UNASSIGNED
                yield Damage(record=group_id, problem="is on no virtual queue", remedy=f"put on {name}")
                if self._mend:
                    state.queues[name].group_ids.append(group_id)
                    state.queues[name].version += 1
            if group.instance != name and self._mend:
                group.instance = name
            if group.last_instance not in state.queues and self._mend:
                group.last_instance = UNASSIGNED

    def _is_open(self, group_id: str) -> bool:
        group = self._state.groups.get(group_id)
        return group is not None and bool(group.members)

    def _members(self) -> Iterator[Damage]:
        state = self._state
        for group in state.groups.values():
            for number in list(group.members):
                request = state.by_number.get(number)
                waits = request is not None and request.state is RequestState.PLACED and request.group_id == group.group_id
                if not waits:
                    yield Damage(record=group.group_id, problem=f"has #{number}, which does not wait there", remedy="dropped")
                    if self._mend:
                        group.members.remove(number)
        for incarnation, owned in state.running.items():
            for number, request in list(owned.items()):
                if request.state is not RequestState.RUNNING or request.incarnation != incarnation:
                    yield Damage(record=incarnation, problem=f"has #{number}, which does not run there", remedy="dropped")
                    if self._mend:
                        del owned[number]

    # Counters ---------------------------------------------------------------------------------------------------------

    def _counts(self) -> Iterator[Damage]:
        state = self._state
        by_tenant = Counter(request.key.tenant for request in state.requests.values())
        by_class = Counter(request.slo_class for request in state.requests.values())
        if (state.live_by_tenant, state.live_by_class) != (by_tenant, by_class):
            yield Damage(record="counts", problem="do not count what is there", remedy="counted again")
            if self._mend:
                state.live_by_tenant, state.live_by_class = by_tenant, by_class
        held = [(each.key.tenant, each.slo_class, each.held_bytes) for each in state.requests.values()]
        held += [(key.tenant, each.slo_class, each.held_bytes) for key, each in state.terminals.items()]
        bytes_by_tenant, bytes_by_class = Counter[str](), Counter[str]()
        for tenant, slo_class, count in held:
            bytes_by_tenant[tenant] += count
            bytes_by_class[slo_class] += count
        found = (state.held_total, state.held_by_tenant, state.held_by_class)
        if found != (bytes_by_tenant.total(), bytes_by_tenant, bytes_by_class):
            yield Damage(record="counts", problem="do not count the bytes that are held", remedy="counted again")
            if self._mend:
                state.held_total = bytes_by_tenant.total()
                state.held_by_tenant, state.held_by_class = bytes_by_tenant, bytes_by_class
        of_group: dict[str, list[StoredRequest]] = {}
        for request in state.requests.values():
            of_group.setdefault(request.group_id, []).append(request)
        for group in list(state.groups.values()):
            requests = of_group.get(group.group_id, [])
            tokens = sum(request.prompt_tokens for request in requests if request.state is RequestState.PLACED)
            if (group.live, group.waiting_prompt_tokens) != (len(requests), tokens):
                yield Damage(record=group.group_id, problem="does not count what is there", remedy="counted again")
                if self._mend:
                    group.live, group.waiting_prompt_tokens = len(requests), tokens
            if not requests and self._mend:
                self._drop(group)

    def _drop(self, group: StoredGroup) -> None:
        del self._state.groups[group.group_id]
        for queue in self._state.queues.values():
            if group.group_id in queue.group_ids:
                queue.group_ids.remove(group.group_id)
