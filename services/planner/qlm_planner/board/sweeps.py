"""Periodic calls: reclaim from lost incarnations, end expired requests, forget lost instances."""

from __future__ import annotations

from dataclasses import dataclass, field

from qlm_planner.board.board import Board
from qlm_planner.machine.effects import Expire, Forget, Reclaim
from qlm_planner.policy import BATCH_MAX, Policy


@dataclass(slots=True, kw_only=True)
class Sweeps:
    """At most one call of each kind is under way. `forgetting`: the instance of a call since the last overview. `lost`: incarnations
    without a lease that may own requests -> reclaim calls since the last overview."""

    policy: Policy
    next_expiry_s: float
    expiry_rounds: int = 0
    expiring: bool = False
    reclaiming: str = ""
    forgetting: str = ""
    lost: dict[str, int] = field(default_factory=dict)

    def start_round(self, board: Board) -> None:
        """Takes the lost incarnations from a new overview."""
        self.forgetting = ""
        self.lost = {name: 0 for name, alive in sorted(board.incarnations.items()) if not alive}

    @property
    def reclaim_pending(self) -> bool:
        """Whether requests of lost incarnations still return to their groups."""
        return bool(self.reclaiming) or any(rounds < self.policy.reclaim_rounds_max for rounds in self.lost.values())

    def reclaim(self) -> Reclaim | None:
        if self.reclaiming:
            return None
        name = next((name for name, rounds in self.lost.items() if rounds < self.policy.reclaim_rounds_max), "")
        if not name:
            return None
        self.reclaiming = name
        self.lost[name] += 1
        return Reclaim(incarnation=name)

    def reclaimed(self, incarnation: str, count: int) -> bool:
        """True when no lost incarnation owns requests."""
        self.reclaiming = ""
        if count == 0:
            self.lost.pop(incarnation, None)
        return not self.lost

    def expire(self, now_s: float) -> Expire | None:
        if self.expiring or now_s < self.next_expiry_s:
            return None
        self.expiring = True
        return Expire()

    def swept(self, count: int, now_s: float) -> None:
        """Schedules the next sweep; after a full call, at once."""
        self.expiring = False
        self.expiry_rounds += 1
        if count < BATCH_MAX or self.expiry_rounds >= self.policy.expire_rounds_max:
            self.expiry_rounds = 0
            self.next_expiry_s = now_s + self.policy.expire_every_s

    def forget(self, board: Board, now_s: float) -> Forget | None:
        if self.forgetting:
            return None
        for name, slot in sorted(board.slots.items()):
            gone = slot.lost_s is not None and now_s - slot.lost_s >= self.policy.forget_after_s
            if gone and not board.queues[name] and slot.facts.incarnation not in board.incarnations:
                self.forgetting = name
                return Forget(instance=name)
        return None
