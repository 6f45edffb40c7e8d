"""The policy port inside an engine: who is served first, who gives up its KV. Pure; the simulated engine asks it at each step, and
engines with their own scheduler get it as a plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """A run as a policy sees it. `arrival`: the engine's count of runs, in the order they came. `deadline_s`: engine's clock."""

    run_id: str
    arrival: int
    deadline_s: float
    priority: int
    prompt_tokens: int
    produced_tokens: int


class EnginePolicy(Protocol):
    """Times are seconds of the engine's clock. Answers name runs that were shown, each at most once."""

    def order(self, now_s: float, waiting: Sequence[SequenceView]) -> Sequence[str]:
        """All waiting runs, who is to be admitted first first. Asked again when the waiting runs changed, or at `next_wakeup_s`."""

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        """Running runs that give up their place before this step though there is KV. Asked when `order` is."""

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
