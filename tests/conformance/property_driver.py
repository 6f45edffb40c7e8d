"""One queue under a property test: each call is checked from outside, by what the state was before and is after it.

Nothing here knows how the queue works: the rules are those of port.py (who may change what), and the invariants of the design.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from qlm_core.vocabulary.errors import LeaseLost, QlmError
from qlm_core.vocabulary.instance import UNASSIGNED, instance_of
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.values import (
    PLANNER_ROLE,
    AppliedChunk,
    Completion,
    GroupPlacement,
    Lease,
    PlanChunk,
    PullResult,
    StepStatus,
    WaitingRequest,
)
from queue_dump import QueueDump, RequestDump

from .invariants import check_frames, check_histories, check_invariants, check_output
from .mirror import Mirror
from .subjects import MemorySubject, RedisSubject, Subject

Answer = TypeVar("Answer")
ROUNDING_S = 0.0011  # a queue id states the acceptance in whole milliseconds
IDEMPOTENT = frozenset(
    {"accept", "cancel", "place", "regroup", "apply_plan", "emit", "complete", "unpull", "requeue", "attach", "reclaim", "shed"}
)
"""Calls whose repeat, at once, changes nothing more (`reclaim` may forget the incarnation)."""


def answer_of(key: RequestKey) -> tuple[int, ...]:
    """The output that every run of a request makes."""
    number = int(key.request_id[1:])
    return tuple(100 * number + index for index in range(2 + number % 5))


def top_of(key: RequestKey) -> int | None:
    """How many logprobs of likeliest tokens a request has; None: none at all."""
    return (None, 0, 2)[int(key.request_id[1:]) % 3]


class Driver:
    """Runs calls on a queue, mirrored on the twin where `twin` is given, and checks every one."""

    def __init__(self, make_subject: Callable[[], Subject], twin: MemorySubject | None) -> None:
        self._loop = asyncio.new_event_loop()
        self.subject = make_subject()
        self.mirror = None if twin is None else Mirror(self.subject, twin)
        self.answers: dict[str, tuple[int, ...]] = {}
        self.rebound: set[str] = set()
        self.run(self.subject.queue.start())
        self.state: QueueDump = self.run(self.subject.dump())

    def run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        if isinstance(self.subject, RedisSubject):
            self.run(self.subject.stop())
        self.run(self._loop.shutdown_asyncgens())
        self._loop.close()

    def hook(self, name: str, *args: Any) -> None:
        """Lets time pass: a lease, an expiry or a window ends."""
        self.run(getattr(self.mirror or self.subject, name)(*args))
        self.state = self.run(self.subject.dump())

    def call(self, operation: str, *args: Any, twice: bool = False) -> Any:
        """The answer, or the error as a value. `twice`: the answer is lost, and the caller repeats the call."""
        outcome = self._checked(operation, args)
        if not twice:
            return outcome
        before = self.state
        again = self._checked(operation, args)
        if operation in IDEMPOTENT:
            assert before == self.state or operation == "reclaim", f"the repeat of {operation}{args} changed something"
        return again

    def _checked(self, operation: str, args: Sequence[Any]) -> Any:
        before = self.state
        try:
            if self.mirror is not None:
                outcome = self.run(self.mirror(operation, *args))
            else:
                outcome = self.run(getattr(self.subject.queue, operation)(*args))
        except QlmError as error:
            outcome = error
        dump = None if self.mirror is None else self.mirror.last_dump
        self.state = after = dump or self.run(self.subject.dump())
        for request in after.requests:
            self.answers.setdefault(request.queue_id, answer_of(request.key))
        self._check_effect(operation, args, outcome, before)
        check_invariants(after)
        check_histories(before, after)
        check_output(after, self.answers)
        known = {r.queue_id for r in after.requests} | {r.queue_id for r in after.terminals}
        check_frames(after, {queue_id: self.answers[queue_id] for queue_id in known - self.rebound})
        return outcome

    # Permitted effects, by the state before the call ----------------------------------------------------------------------

    def _check_effect(self, operation: str, args: Sequence[Any], outcome: Any, before: QueueDump) -> None:
        refused = isinstance(outcome, QlmError) or (isinstance(outcome, AppliedChunk) and not outcome.applied)
        if operation in ("emit", "complete", "unpull", "requeue", "place", "regroup"):
            refused = refused or all(status in (StepStatus.STALE, StepStatus.GAP) for status in outcome)
        if refused or operation.startswith(("find", "waiting", "overview", "owned", "read_unplaced", "requests_ahead")):
            assert self.state == before, f"{operation}{args} was refused or only reads, and changed something: {outcome}"
        match operation:
            case "emit" | "complete" | "unpull" | "requeue":
                self._check_ownership(operation, args[0], args[1], outcome, before)
            case "pull":
                self._check_pull(args[0], outcome, before)
            case "place" | "regroup" | "apply_plan" | "reclaim" | "shed" | "forget_instance":
                holds = before.leases.get(PLANNER_ROLE, ("", ""))[0] == args[0].token
                assert holds == (not isinstance(outcome, LeaseLost)), f"{operation} with a lease that {'holds' if holds else 'is lost'}"
                if isinstance(outcome, AppliedChunk):
                    _check_chunk(args[1], outcome, before)
                if operation == "regroup" and holds:
                    _check_regrouped(args[1], args[2], args[3], outcome, before, self.state)
            case "cancel":
                self._check_cancel(args[0], outcome, before)
            case _:
                pass

    def _check_ownership(self, operation: str, incarnation: str, items: Sequence[Any], statuses: Any, before: QueueDump) -> None:
        live = {request.queue_id: request for request in before.requests}
        ended = {record.queue_id: record for record in before.terminals}
        for item, status in zip(items, statuses, strict=True):
            named = item.last if isinstance(item, Completion) else item
            owner = live.get(named.queue_id)
            owns = owner is not None and (owner.incarnation, owner.attempt) == (incarnation, named.attempt)
            record = ended.get(named.queue_id)
            repeats = operation == "complete" and record is not None and record.attempt == named.attempt and record.state is item.state
            assert owns or status is StepStatus.STALE or (repeats and status is StepStatus.DONE), f"{operation} by {incarnation}: {status}"
            assert not owns or status is not StepStatus.STALE or len(items) > 1, f"{operation} by the owner {incarnation} is stale"

    def _check_pull(self, lease: Lease, outcome: Any, before: QueueDump) -> None:
        registered = {record.name: record.incarnation for record in before.instances}
        holds = before.leases.get(lease.role, ("", ""))[0] == lease.token and registered.get(instance_of(lease.role)) == lease.role
        assert holds == (not isinstance(outcome, LeaseLost)), f"pull with a lease that {'holds' if holds else 'is lost'}"
        if not isinstance(outcome, PullResult):
            return
        live: dict[str, RequestDump] = {request.queue_id: request for request in before.requests}
        members = {group.group_id: group.members for group in before.groups}
        queue = next(queue for queue in before.virtual_queues if queue.instance == instance_of(lease.role))
        gone = {record.queue_id for record in self.state.terminals if record.state is RequestState.EXPIRED}
        # Paused requests leave the queue: those of a tenant are ACCEPTED again, groups of a model are on no instance.
        gone |= {request.queue_id for request in self.state.requests if request.state is RequestState.ACCEPTED}
        aside = {group_id for each in self.state.virtual_queues if each.instance == UNASSIGNED for group_id in each.group_ids}
        order = [each for group_id in queue.group_ids if group_id not in aside for each in members[group_id] if each not in gone]
        pulled = [request.queue_id for request in outcome.pulled]
        assert pulled == order[: len(pulled)], "pull took requests out of the order of the virtual queue"
        for request in outcome.pulled:
            was = live[request.queue_id]
            assert (request.attempt, request.progress) == (was.attempt + 1, was.progress)
        self._check_head(instance_of(lease.role), outcome)

    def _check_head(self, instance: str, outcome: PullResult) -> None:
        """`pull` reports the virtual queue as it is after it."""
        groups = {group.group_id: group for group in self.state.groups}
        queue = next(queue for queue in self.state.virtual_queues if queue.instance == instance)
        models = [groups[group_id].meta["model"] for group_id in queue.group_ids]
        behind = [(groups[group_id].meta["model"], len(groups[group_id].members)) for group_id in queue.group_ids[1:]]
        assert [(group.model, group.waiting) for group in outcome.behind] == behind[: len(outcome.behind)]
        assert (outcome.head is None) == (not models), "pull reported a head that there is not, or none where there is one"
        if outcome.head is None:
            return
        head, group = outcome.head, groups[queue.group_ids[0]]
        assert (head.group_id, head.model, head.meta) == (group.group_id, models[0], group.meta)
        assert (head.waiting, head.waiting_prompt_tokens) == (len(group.members), group.waiting_prompt_tokens)
        accepted_s = int(group.members[0].partition("-")[0]) / 1000
        deadline_s = max(group.first_deadline_s, accepted_s + group.slo_least_s)
        assert head.first_deadline_s == pytest.approx(deadline_s, rel=0, abs=ROUNDING_S), "the deadline of the head is not its first one's"

    def _check_cancel(self, key: RequestKey, outcome: Any, before: QueueDump) -> None:
        was_live = any(request.key == key for request in before.requests)
        ended = {record.key: record.state for record in self.state.terminals}
        if was_live:
            assert outcome is RequestState.CANCELLED is ended.get(key)
        else:
            assert isinstance(outcome, QlmError) or outcome is ended[key]


def _check_regrouped(
    source: str, into: GroupPlacement, items: Sequence[WaitingRequest], statuses: Any, before: QueueDump, after: QueueDump
) -> None:
    """Only requests that waited in one of the two groups wait in the other now; nothing else moved."""
    was = {request.queue_id: request for request in before.requests}
    now = {request.queue_id: request for request in after.requests}
    assert list(was) == list(now), "regroup ends nothing"
    taken = {item.queue_id for item, status in zip(items, statuses, strict=True) if status is StepStatus.DONE}
    for queue_id, request in was.items():
        expected = request
        if queue_id in taken:
            assert request.state is RequestState.PLACED
            assert request.group_id in (source, into.group_id)
            expected = replace(request, group_id=into.group_id)
        assert now[queue_id] == expected


def _check_chunk(chunk: PlanChunk, outcome: AppliedChunk, before: QueueDump) -> None:
    versions = {queue.instance: queue.version for queue in before.virtual_queues}
    knows = all(versions.get(name, 0) == version for name, version in chunk.versions.items())
    current = knows and chunk.plan_version >= before.plan_version
    assert current or not outcome.applied, "a chunk was applied that knows an old version"
    names_all = set(versions) <= set(chunk.versions) and {segment.instance for segment in chunk.segments} <= set(versions)
    assert outcome.applied or not (current and names_all), "a chunk was refused that knows everything"
