"""The policy port inside an engine: who is served first, who gives up its KV. Pure; the simulated engine asks it at each step, and
engines with their own scheduler get it as a plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """A run as a policy sees it. `arrival`: in the order they came, as the request says (vLLM) or by the engine's count. `deadline_s`:
    engine's clock. `preemptions`: how often it gave up its place or its KV in this engine."""

    run_id: str
    arrival: int
    deadline_s: float
    priority: int
    prompt_tokens: int
    produced_tokens: int
    preemptions: int = 0


class EnginePolicy(Protocol):
    """Times are seconds of the engine's clock. Answers name runs that were shown, each at most once."""

    def order(self, now_s: float, waiting: Sequence[SequenceView]) -> Sequence[str]:
        """All waiting runs, who is to be admitted first first. Asked again when the waiting runs changed or a run ended, or at
        `next_wakeup_s`."""

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        """Running runs that give up their place for the first of `waiting`, who gives up first first. Asked right after `order`, with the
        waiting runs in that order, from the first on that finds no seat or no KV; the engine takes as many as that one needs, or none
        where all of them do not make room, and asks again for the next that finds none."""

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        """All running runs, who gives up its KV first first. Asked when the next step does not fit in KV; the engine takes as many as it
        needs, and recomputes them later."""

    def next_wakeup_s(self, now_s: float) -> float | None:
        """When the order changes by itself, None for never."""


class FirstComeFirstServed:
    """The default: by arrival; the latest arrival is preempted (as vLLM does)."""

    def order(self, now_s: float, waiting: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(waiting, key=lambda run: run.arrival)]

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return ()

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=lambda run: -run.arrival)]

    def next_wakeup_s(self, now_s: float) -> float | None:
        return None


class UrgencyFirst:
    """By priority band, then by deadline.

    A running run gives up its place for a waiting one of a lower band at once. Inside a band it does so only for one that would be late
    by waiting (its deadline is less than `lead_s` away: what a run is taken to need from its start to its end) and can still be in time,
    and only where it has so much time itself that it can wait for that one and then start again (twice `lead_s`). Nobody is preempted
    more than `preemptions_max` times for others; KV that is short is another matter, and the least urgent give it up.
    """

    def __init__(self, *, lead_s: float = 10.0, preemptions_max: int = 3) -> None:
        self._lead_s = lead_s
        self._preemptions_max = preemptions_max
        self._turns_s: list[float] = []  # when waiting runs become urgent

    def order(self, now_s: float, waiting: Sequence[SequenceView]) -> Sequence[str]:
        self._turns_s = [run.deadline_s - self._lead_s for run in waiting]
        return [run.run_id for run in sorted(waiting, key=lambda run: (run.priority, run.deadline_s, run.arrival))]

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        first = waiting[0]
        urgent = 0.0 <= first.deadline_s - now_s <= self._lead_s
        give_way = [
            run
            for run in running
            if run.preemptions < self._preemptions_max
            and (run.priority > first.priority or (run.priority == first.priority and urgent and run.deadline_s - now_s > 2 * self._lead_s))
        ]
        return self.victims(now_s, give_way)

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=lambda run: (-run.priority, -run.deadline_s, run.produced_tokens, -run.arrival))]

    def next_wakeup_s(self, now_s: float) -> float | None:
        return min((turn_s for turn_s in self._turns_s if now_s < turn_s < inf), default=None)
