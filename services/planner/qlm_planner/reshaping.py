"""When the plan is changed, and a change under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_planner.board import Board
from qlm_planner.effects import ApplyChunk
from qlm_planner.estimates import Estimates
from qlm_planner.policy import Policy
from qlm_planner.reshape import Target, homeless, plan_cost, relocate, reorder
from qlm_planner.timeline import Cost

MISS_REQUESTS = 0.5
"""Expected late requests from which a better order is looked for."""


@dataclass(slots=True, kw_only=True)
class Reshaping:
    """`target`: the order that is being carried out, chunk by chunk. `predicted`: cost of the plan at the last overview. `serving`: the
    instances that served then, None before the first. `asks`: replans that were asked for; `working`: those that the target answers."""

    policy: Policy
    target: Target | None = None
    predicted: Cost = field(default_factory=Cost)
    serving: tuple[str, ...] | None = None
    asks: list[int] = field(default_factory=list)
    working: list[int] = field(default_factory=list)
    moved: int = 0
    attempts: int = 0
    conflicts: int = 0
    joined: bool = False
    replanned_s: float = -math.inf
    answers: dict[int, int] = field(default_factory=dict)

    def ask(self, ask: int) -> None:
        self.asks.append(ask)

    def take_answers(self) -> dict[int, int]:
        """Replans that are done -> groups named in their chunks."""
        answers, self.answers = self.answers, {}
        return answers

    def consider(self, board: Board, estimates: Estimates, now_s: float, *, in_grace: bool, taking_back: bool) -> None:
        """After an overview, which is when the board is right: decides whether to change the plan. Groups of a lost instance wait until the
        requests that ran there are back with them (`taking_back`), and nothing is taken from an instance `in_grace`."""
        self._drop_target()
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
            self.target = relocate(board, estimates, moving, now_s)
        elif self.asks or self._replan_due(board, now_s):
            self._reorder(board, estimates, now_s)

    def chunk_applied(self, chunk: ApplyChunk) -> None:
        self.attempts = 0
        self.moved += sum(len(segment.group_ids) for segment in chunk.segments)

    def conflict(self) -> bool:
        """A chunk was not applied. True if it should be tried again at once, on a new overview."""
        self.conflicts += 1
        self.attempts += 1
        self._drop_target()
        return self.attempts < self.policy.apply_attempts_max

    def reached(self) -> None:
        """The queues are as the target wants them."""
        self.target = None
        for ask in self.working:
            self.answers[ask] = self.moved
        self.working = []
        self.moved = 0

    def _drop_target(self) -> None:
        self.target = None
        self.asks = [*self.working, *self.asks]
        self.working = []

    def _replan_due(self, board: Board, now_s: float) -> bool:
        pairs = board.open_groups * len(self.serving or ())
        pause_s = self.policy.replan_every_s * max(1.0, pairs / self.policy.replan_pairs)
        if now_s < self.replanned_s + pause_s or pairs > self.policy.replan_pairs_max:
            return False
        return self.joined or self.predicted.late >= MISS_REQUESTS or _idle_beside_busy(board)

    def _reorder(self, board: Board, estimates: Estimates, now_s: float) -> None:
        self.replanned_s = now_s
        self.joined = False
        self.working, self.asks = self.asks, []
        self.target = reorder(board, estimates, now_s).target
        if self.target is None:
            self.reached()


def _idle_beside_busy(board: Board) -> bool:
    """Somebody has nothing to do while groups wait behind another head."""
    serving = [(name, slot) for name, slot in board.slots.items() if slot.serving]
    idle = any(slot.running == 0 and not board.queues[name] for name, slot in serving)
    return idle and any(len(board.queues[name]) > 1 for name, _ in serving)
