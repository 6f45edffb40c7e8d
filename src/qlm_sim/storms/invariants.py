"""The design's invariants, checked at the server after every command, independently of the twin's own bookkeeping.

1. An accepted request reaches exactly one terminal state. 2. A request is in at most one group, or owned by at most one incarnation; an
open group is on exactly one virtual queue. 3. A call with an old attempt, incarnation or lease changes nothing. 4. Output only grows, and
is that of an undisturbed run. (`SimClient` checks the clients' tokens.) 5. Queues, streams and attempts keep their bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qlm.api.v1.request_pb2 import Request, Result
from qlm_core.vocabulary.errors import LeaseLost, QlmError
from qlm_core.vocabulary.instance import instance_of
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES, answer_length, answer_tokens, prompt_digest
from qlm_queue.memory.state import MemoryState, StoredRequest
from qlm_queue.values import PLANNER_ROLE, RequeueCause
from qlm_sim.world.network import Command
from qlm_sim.world.server import READ_ONLY

ITEM_CALLS = frozenset({"emit", "complete", "unpull", "requeue"})
"""Calls of an incarnation about requests that it claims to own."""

PLANNER_CALLS = frozenset({"place", "regroup", "apply_plan", "reclaim", "shed", "forget_instance"})
LEASE_CALLS = frozenset({*PLANNER_CALLS, "pull", "describe", "deregister", "publish_profiles", "publish_waits", "renew_lease"})
"""Calls whose first argument is a lease."""

MOVING_CALLS = frozenset({*PLANNER_CALLS, "accept", "pull", "unpull", "requeue", "complete", "cancel", "expire", "register"})
"""Calls after which requests and groups may have moved."""

FAILURES = frozenset({"ATTEMPTS_EXHAUSTED", "KV_CAPACITY_EXCEEDED", "SHED"})
"""Reasons for which a request may FAIL in a simulation, where every request is servable; SHED only with that fallback."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class _Lease:
    token: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """A request as it was before a command."""

    state: RequestState
    incarnation: str
    attempt: int
    failed_attempts: int
    produced: int


class Oracle:
    """Watches the server. `accepted`, `ended`: by queue id."""

    def __init__(self, state: MemoryState, catalogue: dict[str, ModelSpec], now_s: Any) -> None:
        self.accepted: dict[str, RequestKey] = {}
        self.ended: dict[str, RequestState] = {}
        self.stale_calls = 0
        self._state = state
        self._catalogue = catalogue
        self._now_s = now_s
        self._answers: dict[str, bytes] = {}
        self._expiries: dict[str, float] = {}
        self._cancelled: set[RequestKey] = set()  # membership tests only
        self._last_end: object = None
        self._leases: dict[str, _Lease] = {}
        self._registered: dict[str, str] = {}
        self._before: list[_Seen | None] = []
        self._stale: object = None  # the state before a call that must change nothing
        self._closed: dict[str, None] = {}
        self._standing: dict[str, tuple[str, _Seen | None]] = {}

    # Before -----------------------------------------------------------------------------------------------------------

    def before(self, process: str, command: Command) -> None:
        """Remembers state that the command may not change, or only in one way."""
        self._stale = None
        if command.name in ITEM_CALLS:
            self._before = [self._seen(_named(item)) for item in command.args[1]]
        elif command.name in LEASE_CALLS and not self._holds(command):
            self.stale_calls += 1
            self._stale = fingerprint(self._state)
        if command.name == "regroup":
            self._standing = {queue_id: (each.group_id, self._seen(each)) for queue_id, each in self._state.requests.items()}
        if command.name in ("requeue", "unpull", "reclaim"):
            self._closed = {group_id: None for group_id, group in self._state.groups.items() if not group.instance}

    def _seen(self, named: Any) -> _Seen | None:
        request = self._state.live(named.key, named.queue_id)
        if request is None:
            return None
        return _Seen(request.state, request.incarnation, request.attempt, request.failed_attempts, len(request.progress))

    def _holds(self, command: Command) -> bool:
        """Whether the caller's lease is valid, by the answers to acquisitions and renewals."""
        lease = command.args[0]
        role = PLANNER_ROLE if command.name in PLANNER_CALLS else lease.role
        held = self._leases.get(role)
        if held is None or held.token != lease.token or held.expires_s <= self._now_s():
            return False
        return command.name not in ("pull", "describe") or self._registered.get(instance_of(lease.role)) == lease.role

    # After ------------------------------------------------------------------------------------------------------------

    def after(self, process: str, command: Command, value: object, error: QlmError | None) -> None:
        """Raises Violation."""
        if self._stale is not None:
            self._check(isinstance(error, LeaseLost), f"{command.name} of {process} with an old lease is not refused")
            self._check(fingerprint(self._state) == self._stale, f"{command.name} of {process} with an old lease changed something")
            return
        if error is not None:
            return
        match command.name:
            case "accept":
                self._accepted(command.args[0].key)
            case "acquire_lease" if value is not None:
                role, _, ttl_s, _ = command.args
                self._took(role, value, ttl_s)
            case "register":
                registered: Any = value
                self._registered[command.args[0]] = registered[0]
                self._took(registered[0], registered[1], command.args[3])
            case "renew_lease":
                lease, ttl_s = command.args
                self._took(lease.role, lease, ttl_s)
            case "release_lease" | "deregister":
                lease = command.args[0]
                if lease.role in self._leases and self._leases[lease.role].token == lease.token:
                    del self._leases[lease.role]
            case "cancel":
                self._cancelled.add(command.args[0])
            case "emit" | "complete" | "unpull" | "requeue":
                self._items(command)
            case "pull":
                self._pulled(value)
            case "regroup":
                self._regrouped(command)
        if command.name in ("requeue", "unpull", "reclaim"):
            self._reopened(command)
        if command.name not in READ_ONLY:
            self._ends()
        if command.name in MOVING_CALLS:
            check_places(self._state)
            self._bounds()

    def _took(self, role: str, lease: Any, ttl_s: float) -> None:
        self._leases[role] = _Lease(lease.token, self._now_s() + ttl_s)

    def _accepted(self, key: RequestKey) -> None:
        request = self._state.by_key.get(key)
        if request is None or request.queue_id in self.accepted:
            return
        self._check(request.number == len(self.accepted) + 1, "acceptance numbers have a hole")
        self.accepted[request.queue_id] = key
        body = Request.FromString(request.body)
        ids = list(body.tokens.ids)
        spec = self._catalogue[body.model]
        length = min(answer_length(ids), body.admission.output_tokens_max)
        self._answers[request.queue_id] = answer_tokens(prompt_digest(spec.name, ids), 0, length, spec.vocabulary_size)
        if request.expiry_s is not None:
            self._expiries[request.queue_id] = request.expiry_s

    def _items(self, command: Command) -> None:
        """Invariants 3 and 4."""
        incarnation: str = command.args[0]
        items = [(_named(item), seen) for item, seen in zip(command.args[1], self._before, strict=True)]
        owned = {named.queue_id for named, seen in items if _owns(seen, incarnation, named)}  # membership tests only
        for named, seen in items:
            now = self._seen(named)
            if named.queue_id not in owned:
                what = f"{command.name} of {incarnation} for attempt {named.attempt} of {named.queue_id}"
                self._check(now == seen, f"{what} changed it though it is {seen}")
            elif now is not None and command.name in ("emit", "complete"):
                assert seen is not None
                progress = self._state.by_key[named.key].progress
                self._check(now.produced >= seen.produced, f"output of {named.queue_id} was taken back")
                grown = self._answers[named.queue_id][seen.produced : now.produced]
                self._check(bytes(progress[seen.produced :]) == grown, f"output of {named.queue_id} is not its answer's")

    def _pulled(self, value: Any) -> None:
        """First accepted, first pulled, inside of a group."""
        last: dict[str, int] = {}
        for pulled in value.pulled:
            number = pulled.acceptance_number
            self._check(last.get(pulled.group_id, 0) < number, f"{pulled.group_id} is not pulled in the order of acceptance")
            last[pulled.group_id] = number
            self._check(not pulled.progress or self._answers[pulled.queue_id].startswith(pulled.progress), "progress is not the answer's")
        for group_id, number in last.items():
            group = self._state.groups.get(group_id)
            waiting = () if group is None else group.members
            self._check(not waiting or waiting[0] > number, f"{group_id}: {number} was pulled before {waiting[:1]}")

    def _regrouped(self, command: Command) -> None:
        """Only named requests that waited in the source group may be in the other one now, unchanged."""
        _, source, into, wanted = command.args
        named = {each.queue_id for each in wanted}  # membership tests only
        self._check(list(self._standing) == list(self._state.requests), "regroup ended a request, or made one")
        for queue_id, (group_id, seen) in self._standing.items():
            request = self._state.requests[queue_id]
            moved = queue_id in named and group_id == source and seen is not None and seen.state is RequestState.PLACED
            self._check(request.group_id == group_id or (moved and request.group_id == into.group_id), f"regroup took {queue_id} elsewhere")
            self._check(self._seen(request) == seen, f"regroup changed {queue_id}")

    def _reopened(self, command: Command) -> None:
        """A group that is reopened for its returned requests is at the head of a queue; behind the head if they were evicted."""
        opened = [group_id for group_id in self._closed if group_id in self._state.groups and self._state.groups[group_id].instance]
        match command.name:
            case "requeue":
                evicted = command.args[2] is RequeueCause.EVICTED
            case "unpull":
                evicted = command.args[2]
            case _:
                evicted = False
        for group_id in opened:
            queue = self._state.queues[self._state.groups[group_id].instance]
            self._check(queue.group_ids.index(group_id) < len(opened) + evicted, f"{group_id} lost its place")

    def _ends(self) -> None:
        """Invariant 1. New ends are the last ones that are kept."""
        new: list[tuple[RequestKey, Any]] = []
        for key, stored in reversed(self._state.terminals.items()):
            if stored is self._last_end:
                break
            new.append((key, stored))
        if not new:
            return
        self._last_end = new[0][1]
        for key, stored in reversed(new):
            self._end(key, stored.record)

    def _end(self, key: RequestKey, record: Any) -> None:
        queue_id = record.queue_id
        self._check(queue_id in self.accepted, f"{key} ended and was never accepted")
        self._check(queue_id not in self.ended, f"{key} ended twice")
        self.ended[queue_id] = record.state
        result = Result.FromString(record.result)
        output = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in result.output_token_ids)
        expected = self._answers[queue_id]
        self._check(expected.startswith(output), f"the result of {key} is not its answer")
        match record.state:
            case RequestState.COMPLETED:
                self._check(output == expected, f"{key} COMPLETED with a part of its answer")
            case RequestState.FAILED:
                self._check(result.error.reason in FAILURES, f"{key} FAILED: {result.error.reason} {result.error.message}")
            case RequestState.CANCELLED:
                self._check(key in self._cancelled, f"{key} was not cancelled by anyone")
            case RequestState.EXPIRED:
                self._check(self._expiries.get(queue_id, float("inf")) <= self._now_s(), f"{key} EXPIRED before its time")

    def _bounds(self) -> None:
        """Invariant 5."""
        state, bounds = self._state, self._state.bounds
        self._check(len(state.requests) <= bounds.queue_max, "more live requests than the queue holds")
        for stream in state.frames.values():
            self._check(len(stream.payloads()) <= bounds.frames_max, "more frames than are kept")

    @staticmethod
    def _check(holds: bool, message: str) -> None:
        if not holds:
            raise Violation(message)


def _owns(seen: _Seen | None, incarnation: str, named: Any) -> bool:
    return seen is not None and (seen.state, seen.incarnation, seen.attempt) == (RequestState.RUNNING, incarnation, named.attempt)


def _named(item: Any) -> Any:
    """The request's name in an item: a completion's is in its last emission."""
    return getattr(item, "last", item)


def check_places(state: MemoryState) -> None:
    """Invariant 2. Raises Violation."""
    on_queue: dict[str, str] = {}
    for name, queue in state.queues.items():
        for group_id in queue.group_ids:
            if group_id in on_queue:
                raise Violation(f"group {group_id} is on the queues of {on_queue[group_id]} and {name}")
            on_queue[group_id] = name
    places = len(state.unplaced)
    for group_id, group in state.groups.items():
        if bool(group.members) != (group_id in on_queue) or (group.members and on_queue[group_id] != group.instance):
            raise Violation(f"group {group_id} of {group.instance!r} with {len(group.members)} waiting is on {on_queue.get(group_id)!r}")
        _check_members(state, group_id, group.members)
        places += len(group.members)
    for incarnation, owned in state.running.items():
        for request in owned.values():
            _check_request(state, request, RequestState.RUNNING, incarnation)
        places += len(owned)
    for request in state.unplaced.values():
        _check_request(state, request, RequestState.ACCEPTED, "")
    if places != len(state.requests):
        raise Violation(f"{len(state.requests)} live requests are at {places} places")


def _check_members(state: MemoryState, group_id: str, members: Sequence[int]) -> None:
    before = 0
    for number in members:
        if number <= before:
            raise Violation(f"group {group_id} is not in the order of acceptance")
        before = number
        request = state.by_number[number]
        _check_request(state, request, RequestState.PLACED, "")
        if request.group_id != group_id:
            raise Violation(f"{request.key} waits in {group_id} and belongs to {request.group_id}")


def _check_request(state: MemoryState, request: StoredRequest, expected: RequestState, incarnation: str) -> None:
    if request.state is not expected or request.incarnation != incarnation or state.requests.get(request.queue_id) is not request:
        raise Violation(f"{request.key} is {request.state.name} of {request.incarnation!r} where {expected.name} of {incarnation!r} belong")


def fingerprint(state: MemoryState) -> object:
    """All state that a refused call could have changed."""
    return (
        [
            (request.queue_id, request.state, request.incarnation, request.attempt, len(request.progress), request.group_id)
            for request in state.requests.values()
        ],
        [(name, queue.version, tuple(queue.group_ids)) for name, queue in state.queues.items()],
        [(name, group.instance, tuple(group.members)) for name, group in state.groups.items()],
        [(name, record.incarnation, record.body) for name, record in state.instances.items()],
        {name: tuple(owned) for name, owned in state.running.items()},
        (state.plan_version, len(state.terminals), state.profiles),
    )
