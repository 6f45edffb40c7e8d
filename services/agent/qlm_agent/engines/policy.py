"""The policy port inside an engine: the order of service, and the victims when KV is short. Pure; the simulated engine calls it at each
step, and engines with their own scheduler use it as a plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """A policy's view of a run. `arrival`: order of arrival, from the request (vLLM) or the engine's count. `deadline_s`: engine's clock.
    `preemptions`: how often it lost its seat or KV in this engine."""

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
        """All waiting runs, the first to be admitted first. Called again when the waiting runs changed or a run ended, or at
        `next_wakeup_s`."""

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        """Running runs to preempt for the first of `waiting`, in order. Called right after `order`, with the waiting runs in that order,
        from the first one without a seat or KV; the engine takes as many as that one needs, or none if all of them do not suffice, and
        calls again for the next one without room."""

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        """All running runs, the first to lose its KV first. Called when the next step does not fit in KV; the engine takes as many as it
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

    A running run is preempted at once for a waiting run of a lower band. Inside a band, three conditions hold: the waiting run would be
    late by waiting (its deadline is less than `lead_s` away, the assumed time from its start to its end), can still be in time, and the
    running run has time to wait for it and start again (twice `lead_s`). No run is preempted more than `preemptions_max` times for others;
    a shortage of KV is apart from that, and the least urgent lose it.
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
