"""The policy of deadlines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlm_agent.engines.policies.port import EnginePolicy, Sequences, SequenceView


class UrgencyFirst(EnginePolicy):
    """By priority band, then by deadline.

    A running run is preempted at once for a waiting run of a lower band. Inside a band, three conditions hold: the waiting run would be
    late by waiting (its deadline is less than `lead_s` away, the assumed time from its start to its end), can still be in time, and the
    running run has time to wait for it and start again (twice `lead_s`). No run is preempted more than `preemptions_max` times for others;
    a shortage of KV is apart from that, and the least urgent lose it.
    """

    def __init__(self, *, lead_s: float = 10.0, preemptions_max: int = 3) -> None:
        self._lead_s = lead_s
        self._preemptions_max = preemptions_max
        self._turns_s = np.empty(0)  # when waiting runs become urgent

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        deadline_s = waiting.column("deadline_s")
        self._turns_s = deadline_s - self._lead_s
        return waiting.names(np.lexsort((waiting.column("arrival"), deadline_s, waiting.column("priority"))))

    def preempt(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
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
        later_s = self._turns_s[(now_s < self._turns_s) & np.isfinite(self._turns_s)]
        return float(later_s.min()) if len(later_s) else None
