"""Delivers output, ends and give-backs: each at most one call at a time, in order, until the server has answered.

The first output of a run is sent at once, its last with its end, any other after at most `coalesce_s`.
"""

from __future__ import annotations

from collections.abc import Iterable

from qlm_agent.decisions.effects import Complete, CompleteItem, Effect, Emit, EmitItem, GiveBack
from qlm_agent.decisions.events import Outcome
from qlm_agent.decisions.registration import ServerLink
from qlm_agent.decisions.runs import Ending, RemovalCause, ReturnCause, Run, RunPhase, RunTable

ITEMS_MAX = 500
"""Most runs in one call (`qlm_queue.values.BATCH_MAX`; the shell checks that they are equal)."""


class Delivery:
    """The part of the machine that delivers. `finished`, `given_back`: how many runs were, since the start."""

    def __init__(self, runs: RunTable, link: ServerLink, coalesce_s: float) -> None:
        self._runs = runs
        self._link = link
        self._coalesce_s = coalesce_s
        self._urgent: dict[str, None] = {}
        self._unsent: dict[str, None] = {}
        self._flush_at_s: float | None = None
        self._ending: dict[str, None] = {}
        self._returning: dict[str, None] = {}
        self._emit: tuple[int, dict[str, EmitItem]] | None = None
        self._complete: tuple[int, tuple[str, ...]] | None = None
        self._give_back: tuple[int, tuple[str, ...]] | None = None
        self.given_back = 0
        self.finished = 0

    @property
    def next_wakeup_s(self) -> float | None:
        return self._flush_at_s if self._emit is None else None

    # Events of runs ---------------------------------------------------------------------------------------------------

    def add_output(self, now_s: float, run: Run, tokens: int) -> None:
        """Counts new tokens of the engine."""
        first = run.produced == run.resumed
        self._runs.add_output(run, tokens)
        if first:
            self._urgent[run.run_id] = None
        else:
            self._wait_for_more(now_s, run.run_id)

    def send_soon(self, run: Run) -> None:
        """Sends the run's held output without delay."""
        if run.on_engine and run.unstored:
            self._urgent[run.run_id] = None

    def queue_end(self, run: Run, ending: Ending) -> None:
        """Queues the run's end for writing."""
        if run.on_engine:
            self._runs.move(run, RunPhase.ENDED)
        run.ending = ending
        self._unplan(run.run_id)
        self._ending[run.run_id] = None

    def give_back(self, run: Run, cause: ReturnCause, failure: str = "") -> None:
        """Queues a run that is off the engine for its return, with its output."""
        if run.on_engine:
            self._runs.move(run, RunPhase.RETURNING)
        run.cause = cause
        run.failure = failure
        self._unplan(run.run_id)
        self._returning[run.run_id] = None

    def forget(self, run: Run) -> None:
        self._runs.remove(run)
        self._unplan(run.run_id)
        self._ending.pop(run.run_id, None)
        self._returning.pop(run.run_id, None)

    def set_progress(self, run: Run, stored: int) -> None:
        """Sets the server's progress, after a gap."""
        run.gap = False
        self._runs.set_stored(run, min(stored, run.produced))
        if run.on_engine and run.unstored:
            self._urgent[run.run_id] = None

    # Answers ----------------------------------------------------------------------------------------------------------

    def handle_answer(self, now_s: float, call: int, outcomes: Iterable[Outcome]) -> list[tuple[Run, RemovalCause]]:
        """Takes the answer to one of its calls. Returns the runs that are no longer the agent's, and why."""
        if self._emit is not None and self._emit[0] == call:
            items, self._emit = self._emit[1], None
            return self._emit_answered(now_s, items, outcomes)
        if self._complete is not None and self._complete[0] == call:
            run_ids, self._complete = self._complete[1], None
            return self._complete_answered(run_ids, outcomes)
        if self._give_back is not None and self._give_back[0] == call:
            run_ids, self._give_back = self._give_back[1], None
            return self._give_back_answered(run_ids, outcomes)
        return []

    def handle_loss(self, now_s: float, call: int) -> None:
        """A call that may be one of its own was not answered: its content is retried."""
        if self._emit is not None and self._emit[0] == call:
            for run_id in self._emit[1]:
                run = self._runs.get(run_id)
                if run is not None and run.on_engine:
                    self._unsent[run_id] = None
                    self._flush_at_s = now_s
            self._emit = None
        elif self._complete is not None and self._complete[0] == call:
            self._complete = None
        elif self._give_back is not None and self._give_back[0] == call:
            self._give_back = None

    def _emit_answered(self, now_s: float, items: dict[str, EmitItem], outcomes: Iterable[Outcome]) -> list[tuple[Run, RemovalCause]]:
        lost: list[tuple[Run, RemovalCause]] = []
        for item, outcome in zip(items.values(), outcomes, strict=True):
            run = self._runs.get(item.run_id)
            if run is None:
                continue
            if outcome is Outcome.DONE:
                self._runs.set_stored(run, item.end)
                if run.unstored and run.on_engine and run.run_id not in self._urgent:
                    self._wait_for_more(now_s, run.run_id)
            elif outcome is Outcome.GAP:
                run.gap = True
            else:
                lost.append((run, RemovalCause.NOT_OWNED))
        return lost

    def _complete_answered(self, run_ids: tuple[str, ...], outcomes: Iterable[Outcome]) -> list[tuple[Run, RemovalCause]]:
        removed: list[tuple[Run, RemovalCause]] = []
        for run_id, outcome in zip(run_ids, outcomes, strict=True):
            run = self._runs.get(run_id)
            if run is None:
                continue
            if outcome is Outcome.GAP:
                run.gap = True
            else:
                self.finished += outcome is Outcome.DONE
                removed.append((run, RemovalCause.WRITTEN if outcome is Outcome.DONE else RemovalCause.NOT_OWNED))
        return removed

    def _give_back_answered(self, run_ids: tuple[str, ...], outcomes: Iterable[Outcome]) -> list[tuple[Run, RemovalCause]]:
        removed: list[tuple[Run, RemovalCause]] = []
        for run_id, outcome in zip(run_ids, outcomes, strict=True):
            run = self._runs.get(run_id)
            if run is not None:
                self.given_back += outcome is Outcome.DONE
                removed.append((run, RemovalCause.NOT_OWNED if outcome is Outcome.STALE else RemovalCause.GIVEN_BACK))
        return removed

    # Calls ------------------------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> list[Effect]:
        """Returns the calls to make now."""
        effects: list[Effect] = []
        if not self._link.usable(now_s):
            return effects
        # Ends first: they wait for an output call of theirs that is under way, but need none of their own.
        if self._ending and self._complete is None:
            self._decide_complete(effects)
        if self._emit is None:
            self._decide_emit(now_s, effects)
        if self._returning and self._give_back is None:
            self._decide_give_back(effects)
        return effects

    def _decide_emit(self, now_s: float, effects: list[Effect]) -> None:
        for run_id in self._returning:
            if len(self._urgent) >= ITEMS_MAX:
                break
            run = self._runs.get(run_id)
            if run is not None and run.unstored and not run.gap:
                self._urgent[run_id] = None
        due = self._flush_at_s is not None and now_s >= self._flush_at_s
        if not self._urgent and not due:
            return
        items: dict[str, EmitItem] = {}
        for waiting in (self._urgent, self._unsent) if due else (self._urgent,):
            for run_id in list(waiting):
                if len(items) == ITEMS_MAX:
                    break
                del waiting[run_id]
                run = self._runs.get(run_id)
                if run is not None and run.unstored and not run.gap:
                    items[run_id] = EmitItem(run_id, run.stored, run.produced)
        if due and not self._unsent:
            self._flush_at_s = None
        if items:
            call = self._link.next_call()
            self._emit = (call, items)
            effects.append(Emit(call=call, items=tuple(items.values())))

    def _decide_complete(self, effects: list[Effect]) -> None:
        emitting = self._emit[1] if self._emit is not None else {}
        items: list[CompleteItem] = []
        for run_id in self._ending:
            run = self._runs.get(run_id)
            if run is None or run.gap or run_id in emitting:
                continue
            assert run.ending is not None
            items.append(CompleteItem(run_id=run_id, start=run.stored, end=run.produced, ending=run.ending))
            if len(items) == ITEMS_MAX:
                break
        if items:
            call = self._link.next_call()
            self._complete = (call, tuple(item.run_id for item in items))
            effects.append(Complete(call=call, items=tuple(items)))

    def _decide_give_back(self, effects: list[Effect]) -> None:
        """One call takes runs of one cause and failure: the first ready run's."""
        emitting = self._emit[1] if self._emit is not None else {}
        ready: list[Run] = []
        for run_id in self._returning:
            run = self._runs.get(run_id)
            if run is None or run.unstored or run.gap or run_id in emitting:
                continue
            if not ready or (run.cause, run.failure) == (ready[0].cause, ready[0].failure):
                ready.append(run)
            if len(ready) == ITEMS_MAX:
                break
        if ready:
            call = self._link.next_call()
            run_ids = tuple(run.run_id for run in ready)
            self._give_back = (call, run_ids)
            effects.append(GiveBack(call=call, run_ids=run_ids, cause=ready[0].cause, failure=ready[0].failure))

    def _wait_for_more(self, now_s: float, run_id: str) -> None:
        self._unsent[run_id] = None
        if self._flush_at_s is None:
            self._flush_at_s = now_s + self._coalesce_s

    def _unplan(self, run_id: str) -> None:
        self._urgent.pop(run_id, None)
        self._unsent.pop(run_id, None)
