"""What is done at intervals: reclaiming from lost incarnations, ending expired requests, forgetting instances that are gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from qlm_planner.board.board import Board
from qlm_planner.machine.effects import Expire, Forget, Reclaim
from qlm_planner.policy import BATCH_MAX, Policy


@dataclass(slots=True, kw_only=True)
class Sweeps:
    """At most one call of each kind is under way. `forgetting`: asked about since the last overview, which tells what became of it.
    `lost`: incarnations whose lease is gone -> calls made since the last overview that named them; those that own nothing any more are
    taken out."""

    policy: Policy
    next_expiry_s: float
    expiry_rounds: int = 0
    expiring: bool = False
    reclaiming: str = ""
    forgetting: str = ""
    lost: dict[str, int] = field(default_factory=dict)

    def see(self, board: Board) -> None:
        """After an overview."""
        self.forgetting = ""
        self.lost = {name: 0 for name, alive in sorted(board.incarnations.items()) if not alive}

    @property
    def taking_back(self) -> bool:
        """Requests of lost incarnations are on their way back to their groups."""
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
        """True when nothing is left to take from anyone."""
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
        """A full call means that there may be more."""
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
