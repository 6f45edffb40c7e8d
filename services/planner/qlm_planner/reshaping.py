"""When the plan is changed, and a change under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_planner.board import Board
from qlm_planner.effects import ApplyChunk, PlanApplied, PlanCause
from qlm_planner.estimates import Estimates
from qlm_planner.policy import Order, Policy
from qlm_planner.reshape import Target, homeless, plan_cost, relocate, reorder, settle
from qlm_planner.timeline import Cost

MISS_REQUESTS = 0.5
"""Expected late requests from which a better order is looked for."""


@dataclass(slots=True, kw_only=True)
class Change:
    """A change of the plan under way, and what came of it so far (`PlanApplied`)."""

    cause: PlanCause
    target: Target
    began_s: float
    late_before: float
    plan_version: int = 0
    chunks: int = 0
    named: int = 0
    moved: int = 0
    sources: set[str] = field(default_factory=set)
    destinations: set[str] = field(default_factory=set)

    def applied(self, chunk: ApplyChunk, board: Board) -> None:
        """`board`: as it was before the chunk."""
        self.plan_version = chunk.plan_version
        self.chunks += 1
        for segment in chunk.segments:
            self.named += len(segment.group_ids)
            for group_id in segment.group_ids:
                group = board.groups.get(group_id)
                if group is not None and group.open and group.instance != segment.instance:
                    self.moved += 1
                    self.sources.add(group.instance)
                    self.destinations.add(segment.instance)

    def report(self, *, whole: bool) -> PlanApplied:
        return PlanApplied(
            cause=self.cause,
            whole=whole,
            began_s=self.began_s,
            plan_version=self.plan_version,
            chunks=self.chunks,
            groups_named=self.named,
            groups_moved=self.moved,
            sources=tuple(sorted(self.sources)),
            destinations=tuple(sorted(self.destinations)),
            late_before=self.late_before,
        )


@dataclass(slots=True, kw_only=True)
class Reshaping:
    """`change`: what is being carried out, chunk by chunk. `predicted`: cost of the plan at the last overview. `serving`: the
    instances that served then, None before the first. `asks`: replans that were asked for; `working`: those that the change answers.
    `done`: changes that ended, to be told."""

    policy: Policy
    change: Change | None = None
    predicted: Cost = field(default_factory=Cost)
    serving: tuple[str, ...] | None = None
    asks: list[int] = field(default_factory=list)
    working: list[int] = field(default_factory=list)
    named: int = 0
    attempts: int = 0
    conflicts: int = 0
    joined: bool = False
    replanned_s: float = -math.inf
    answers: dict[int, int] = field(default_factory=dict)
    done: list[PlanApplied] = field(default_factory=list)

    @property
    def target(self) -> Target | None:
        """The queues as they are to become, None where nothing is to be changed."""
        return None if self.change is None else self.change.target

    def ask(self, ask: int) -> None:
        self.asks.append(ask)

    def take_answers(self) -> dict[int, int]:
        """Replans that are done -> groups named in their chunks."""
        answers, self.answers = self.answers, {}
        return answers

    def take_done(self) -> list[PlanApplied]:
        """Changes of the plan that came to their end."""
        done, self.done = self.done, []
        return done

    def consider(
        self, board: Board, estimates: Estimates, now_s: float, *, in_grace: bool, taking_back: bool, backlog: bool = False
    ) -> None:
        """After an overview, which is when the board is right: decides whether to change the plan. Groups of a lost instance wait until the
        requests that ran there are back with them (`taking_back`), and nothing is taken from an instance `in_grace`. While a `backlog` is
        being placed, the order of what is there by then is only changed where it is asked for."""
        self._drop_target()
        reopened = board.take_reopened()
        self.predicted = plan_cost(board, estimates, now_s)
        serving = tuple(slot.facts.incarnation for _, slot in sorted(board.slots.items()) if slot.serving)
        if self.serving is None:
            # A new leader first goes on with the plan that it finds.
            self.replanned_s = now_s
        else:
            self.joined = self.joined or not set(serving) <= set(self.serving)
        self.serving = serving
        if self.attempts >= self.policy.apply_attempts_max:
            # Others change the queues faster than we read them: the next regular overview tries again.
            self.attempts = 0
            return
        moving = homeless(board, estimates, lost_too=not in_grace and not taking_back)[: self.policy.relocate_max]
        if moving:
            self._begin(PlanCause.RELOCATE, relocate(board, estimates, moving, now_s), now_s)
        elif self.policy.order is Order.FCFS:
            self._answer_unchanged()
        elif reopened and (settled := settle(board, estimates, reopened, now_s)) is not None:
            self._begin(PlanCause.EVICTED, settled, now_s)
        else:
            cause = PlanCause.ASKED if self.asks else None if backlog else self._replan_due(board, now_s)
            if cause is not None:
                self._reorder(cause, board, estimates, now_s)

    def chunk_applied(self, chunk: ApplyChunk, board: Board) -> None:
        """`board`: as it was before the chunk."""
        self.attempts = 0
        self.named += sum(len(segment.group_ids) for segment in chunk.segments)
        if self.change is not None:
            self.change.applied(chunk, board)

    def conflict(self) -> bool:
        """A chunk was not applied. True if it should be tried again at once, on a new overview."""
        self.conflicts += 1
        self.attempts += 1
        self._drop_target()
        return self.attempts < self.policy.apply_attempts_max

    def reached(self) -> None:
        """The queues are as the target wants them."""
        self._end(whole=True)
        for ask in self.working:
            self.answers[ask] = self.named
        self.working = []
        self.named = 0

    def _begin(self, cause: PlanCause, target: Target, now_s: float) -> None:
        self.change = Change(cause=cause, target=target, began_s=now_s, late_before=self.predicted.late)

    def _end(self, *, whole: bool) -> None:
        change, self.change = self.change, None
        if change is not None and change.chunks:
            self.done.append(change.report(whole=whole))

    def _answer_unchanged(self) -> None:
        """Nothing is ordered anew: what was asked for is done."""
        self.working, self.asks = [*self.working, *self.asks], []
        self.reached()

    def _drop_target(self) -> None:
        self._end(whole=False)
        self.asks = [*self.working, *self.asks]
        self.working = []

    def _replan_due(self, board: Board, now_s: float) -> PlanCause | None:
        pairs = board.open_groups * len(self.serving or ())
        pause_s = self.policy.replan_every_s * max(1.0, pairs / self.policy.replan_pairs)
        if now_s < self.replanned_s + pause_s or pairs > self.policy.replan_pairs_max:
            return None
        if self.joined:
            return PlanCause.JOINED
        if self.predicted.late >= MISS_REQUESTS:
            return PlanCause.MISS
        return PlanCause.IDLE if _idle_beside_busy(board) else None

    def _reorder(self, cause: PlanCause, board: Board, estimates: Estimates, now_s: float) -> None:
        self.replanned_s = now_s
        self.joined = False
        self.working, self.asks = self.asks, []
        target = reorder(board, estimates, now_s)
        if target is None:
            self.reached()
        else:
            self._begin(cause, target, now_s)


def _idle_beside_busy(board: Board) -> bool:
    """Somebody has nothing to do while groups wait behind another head."""
    serving = [(name, slot) for name, slot in board.slots.items() if slot.serving]
    idle = any(slot.running == 0 and not board.queues[name] for name, slot in serving)
    return idle and any(len(board.queues[name]) > 1 for name, _ in serving)
