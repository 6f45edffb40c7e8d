"""Restores offloaded runs (QLM section 5, GPU-CPU state swapping).

They compete by urgency with the virtual queue: a run is restored before anything less urgent is pulled; if its model is not active, it
competes with the head for the next model. After `offloaded_max_s` it counts as more urgent than any head, so no run waits in host memory
for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qlm_agent.decisions.batch_size import BatchSize
from qlm_agent.decisions.delivery import Delivery
from qlm_agent.decisions.effects import AbortRuns, Effect, RestoreRuns
from qlm_agent.decisions.events import RunsRestored
from qlm_agent.decisions.runs import Operations, ReturnCause, Run, RunPhase, RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_core.operations.preemption import Urgency

RETRY_S = 0.25
REFUSALS_MAX = 8
"""Failed restores after which a run returns to the queue with its output."""

FIRST_OF_ALL = Urgency(-1_000_000, -math.inf)


class RestoreControl:
    """See the module."""

    def __init__(
        self, settings: MachineSettings, runs: RunTable, delivery: Delivery, operations: Operations, batch_size: BatchSize
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._delivery = delivery
        self._operations = operations
        self._batch_size = batch_size
        self._retry_at_s: float | None = None

    @property
    def next_wakeup_s(self) -> float | None:
        """Time of the next try, or of the next run that has waited too long."""
        if not self._runs.offloaded():
            return None
        times_s = [run.offloaded_s + self._settings.offloaded_max_s for run in self._runs.offloaded()]
        return min(times_s if self._retry_at_s is None else [*times_s, self._retry_at_s])

    def urgency(self, now_s: float, run: Run) -> Urgency:
        return FIRST_OF_ALL if now_s >= run.offloaded_s + self._settings.offloaded_max_s else run.urgency

    def first(self, now_s: float, head: Urgency | None) -> Run | None:
        """The most urgent offloaded run, if the head (None: the queue is empty) is not more urgent."""
        if not self._runs.offloaded():
            return None
        run = min(self._runs.offloaded(), key=lambda run: (self.urgency(now_s, run), run.queue_id))
        return run if head is None or self.urgency(now_s, run) <= head else None

    def handle_restore(self, now_s: float, event: RunsRestored) -> list[Effect]:
        """A run that could not be restored keeps waiting, and returns to the queue in the end."""
        done = frozenset(event.done)
        given_up: list[Run] = []
        for run_id in event.requested:
            run = self._runs.get(run_id)
            if run is None or run.phase is not RunPhase.RESTORING:
                continue
            if run_id in done:
                self._runs.move(run, RunPhase.RUNNING)
                run.refusals = 0
                self._operations.kv_restores += 1
                continue
            self._runs.move(run, RunPhase.OFFLOADED)
            run.refusals += 1
            self._retry_at_s = now_s + RETRY_S
            if run.refusals >= REFUSALS_MAX:
                given_up.append(run)
        return self._give_up(given_up, "its KV could not be brought back from host memory")

    def give_up_model(self, model: str) -> list[Effect]:
        """A model could not be made active: its runs return to the queue, for another instance."""
        return self._give_up([run for run in self._runs.offloaded() if run.model == model], f"model {model} could not be made active again")

    def _give_up(self, runs: Sequence[Run], why: str) -> list[Effect]:
        """Gives runs back; an attempt that cannot be continued faithfully fails with this reason."""
        for run in runs:
            self._delivery.give_back(run, ReturnCause.EVICTED if run.resumable else ReturnCause.FAILED, "" if run.resumable else why)
            self._operations.evictions += run.resumable
        return [AbortRuns(run_ids=tuple(run.run_id for run in runs))] if runs else []

    def decide(self, now_s: float, head: Urgency | None, active_model: str, kv_capacity_tokens: int) -> list[Effect]:
        """Restores runs of the active model, the most urgent first, while there is room and no more urgent head."""
        if not self._runs.offloaded() or (self._retry_at_s is not None and now_s < self._retry_at_s):
            return []
        self._retry_at_s = None
        seats, kv_tokens = self._runs.room(self._batch_size.limit, kv_capacity_tokens)
        alone = self._runs.running == 0 and seats > 0 and (kv_tokens > 0 or not self._runs.others_kv_tokens)
        chosen: list[Run] = []
        for run in sorted(self._runs.offloaded(), key=lambda run: (self.urgency(now_s, run), run.queue_id)):
            if run.model != active_model:
                continue
            fits = seats >= 1 and kv_tokens >= run.kv_reserved
            if not (fits or (alone and not chosen)) or (head is not None and self.urgency(now_s, run) > head):
                break
            chosen.append(run)
            seats -= 1
            kv_tokens -= run.kv_reserved
        for run in chosen:
            self._runs.move(run, RunPhase.RESTORING)
        return [RestoreRuns(run_ids=tuple(run.run_id for run in chosen))] if chosen else []
