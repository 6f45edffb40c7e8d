"""The end of one virtual queue: when a group behind all others would start there, in O(1) for each group that is added."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.queue_tail import QueueTail
from qlm_planner.items import Slot
from qlm_planner.terms import Engine, Term


@dataclass(slots=True, kw_only=True)
class Tail:
    """The end of one virtual queue, as the model of queues has it."""

    slot: Slot
    queue: QueueTail

    @classmethod
    def of(cls, slot: Slot, engine: Engine) -> Tail:
        """Of a queue with no group."""
        return cls(slot=slot, queue=QueueTail.behind(engine.active_model, engine.left, engine.drain_s))

    def start_s(self, term: Term) -> float:
        """When the first request of a group behind all others would start, in seconds from now."""
        return self.queue.first_start_s(term.model, term.each, self._swap_s(term), term.warm_s)

    def append(self, term: Term) -> None:
        self.queue.append(term.model, term.each, term.ends, term.count, self._swap_s(term), term.warm_s)

    def with_term(self, term: Term) -> Tail:
        """A copy with a group more."""
        tail = Tail(slot=self.slot, queue=self.queue.copy())
        tail.append(term)
        return tail

    def _swap_s(self, term: Term) -> float:
        return term.warm_s if term.model in self.slot.warm_models else term.cold_s
