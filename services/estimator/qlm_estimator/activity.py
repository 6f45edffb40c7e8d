"""What one agent incarnation is busy with, from its lifecycle events: who runs, and how much was prefilled and decoded meanwhile.

Prefills are taken to be done one after the other as requests are pulled. The totals grow with time, so what went on during a run is a
difference of two readings.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from qlm_core.profile import HardwareProfile
from qlm_estimator.events import EntryId

RUNS_MAX = 10_000
"""Runs that are followed on one incarnation, and prefills ahead of it; others are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Since the incarnation was first seen: time with anything running, and the integrals over it of decoding requests and of the prompt
    tokens that they hold."""

    busy_s: float
    sequence_s: float
    prompt_s: float


@dataclass(slots=True, kw_only=True)
class Run:
    """A request from its pull on. `prefill_due_s`: time of prefills that were outstanding when it was pulled; `prefilled_s`: when its
    own is taken to end, and decoding begins; `certain`: its model was known then; `prefill_tokens_before`,
    `prefill_squares_before`: pulled up to it, and the sum of the squares of each."""

    queue_id: str
    attempt: int
    prompt_tokens: int
    pulled_s: float
    prefill_due_s: float
    prefilled_s: float
    certain: bool
    prefill_tokens_before: int
    prefill_squares_before: int
    decode_began: Totals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What went on from the pull of a run to its end: its `seconds` of the server's clock, the prompt tokens pulled (and the
    squares of each), and the time of prefills outstanding at its end; and while it decoded, how many `sequences` did so in the mean
    and what prompts they held."""

    run: Run
    seconds: float
    sequences: float
    prompt_tokens_held: float
    prefill_tokens: int
    prefill_squares: int
    prefill_due_s: float


class Activity:
    """One incarnation, from a reading of the queue on. Times that go back count as no time."""

    def __init__(self, *, since: EntryId, running: int) -> None:
        """`running`: requests that it owned right after the event `since`; who they are is not known."""
        self._since = since
        self._unknown = running
        self._runs: dict[str, Run] = {}
        self._prefilling: deque[Run] = deque()  # in the order of their ends; a run that left stays until its end
        self._decoding = 0
        self._decoding_prompts = 0
        self._at_s = since[0] / 1000.0
        self._busy_s = self._sequence_s = self._prompt_s = 0.0
        self._prefill_tokens = 0
        self._prefill_squares = 0
        self._prefill_done_at_s = 0.0

    def covers(self, entry_id: EntryId) -> bool:
        """Whether an event is news: not yet part of the reading that this began with."""
        return entry_id > self._since

    def holds(self, queue_id: str) -> bool:
        """Whether a request runs here whose pull was seen."""
        return queue_id in self._runs

    def pull(self, at_s: float, queue_id: str, attempt: int, prompt_tokens: int, hardware: HardwareProfile | None) -> None:
        """A request was pulled. `hardware`: of the model that it is for, if that is known."""
        self._advance(at_s)
        self._forget(queue_id)
        before, squares_before = self._prefill_tokens, self._prefill_squares
        self._prefill_tokens += prompt_tokens
        self._prefill_squares += prompt_tokens * prompt_tokens
        if max(len(self._runs), len(self._prefilling)) >= RUNS_MAX:
            self._unknown += 1
            return
        due_s = self._due_s()
        prefill_s = 0.0 if hardware is None else hardware.prefill_work_s(prompt_tokens, prompt_tokens * prompt_tokens)
        self._prefill_done_at_s = self._at_s + due_s + prefill_s
        run = Run(
            queue_id=queue_id,
            attempt=attempt,
            prompt_tokens=prompt_tokens,
            pulled_s=self._at_s,
            prefill_due_s=due_s,
            prefilled_s=self._prefill_done_at_s,
            certain=hardware is not None,
            prefill_tokens_before=before,
            prefill_squares_before=squares_before,
        )
        self._runs[queue_id] = run
        self._prefilling.append(run)

    def leave(self, at_s: float, queue_id: str, ended_s: float) -> FinishedRun | None:
        """A request is no longer run here since `ended_s`, told at `at_s`; what it went through, if its pull was seen. An end that is not
        after the pull is taken to be the telling."""
        self._advance(at_s)
        run = self._forget(queue_id)
        if run is None:
            self._unknown = max(0, self._unknown - 1)
            return None
        if run.decode_began is None:  # its prefill came earlier than it was taken to
            return None
        now, then = self._totals(), run.decode_began
        busy_s = now.busy_s - then.busy_s
        if busy_s <= 0.0:
            return None
        return FinishedRun(
            run=run,
            seconds=(ended_s if ended_s > run.pulled_s else self._at_s) - run.pulled_s,
            sequences=(now.sequence_s - then.sequence_s) / busy_s,
            prompt_tokens_held=(now.prompt_s - then.prompt_s) / busy_s,
            prefill_tokens=self._prefill_tokens - run.prefill_tokens_before,
            prefill_squares=self._prefill_squares - run.prefill_squares_before,
            prefill_due_s=self._due_s(),
        )

    def _advance(self, at_s: float) -> None:
        """Goes on to a time, from the end of one prefill to the next."""
        while self._prefilling and self._prefilling[0].prefilled_s <= at_s:
            run = self._prefilling.popleft()
            self._pass(run.prefilled_s)
            if self._runs.get(run.queue_id) is run:
                run.decode_began = self._totals()
                self._decoding += 1
                self._decoding_prompts += run.prompt_tokens
        self._pass(at_s)

    def _pass(self, until_s: float) -> None:
        passed_s = until_s - self._at_s
        if passed_s <= 0.0:
            return
        self._at_s = until_s
        if self._runs or self._unknown:
            sequences = self._decoding + self._unknown
            # Those that nobody knows are taken to hold as much as the others.
            held = self._decoding_prompts * sequences / self._decoding if self._decoding else 0.0
            self._busy_s += passed_s
            self._sequence_s += passed_s * sequences
            self._prompt_s += passed_s * held

    def _forget(self, queue_id: str) -> Run | None:
        run = self._runs.pop(queue_id, None)
        if run is not None and run.decode_began is not None:
            self._decoding -= 1
            self._decoding_prompts -= run.prompt_tokens
        return run

    def _due_s(self) -> float:
        return max(0.0, self._prefill_done_at_s - self._at_s)

    def _totals(self) -> Totals:
        return Totals(busy_s=self._busy_s, sequence_s=self._sequence_s, prompt_s=self._prompt_s)
