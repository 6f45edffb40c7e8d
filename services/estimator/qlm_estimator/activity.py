"""What one agent incarnation is busy with, from its lifecycle events: who runs, and how much was prefilled and decoded meanwhile.

Prefills are taken to be done one after the other as requests are pulled. The totals grow with the steps of the engine, so what went on
during a run is a difference of two readings. A step takes as long as the profile says of what decodes then, and of a chunk of a prefill
that rides along: while a batch fills, seconds pass and few steps are made, and means over a run's seconds would be of another time than its
tokens were made in. Every decoding request gets a token in each step, so what each has made is a difference of two readings of one clock
that counts steps. It runs at the pace that the runs of the model that ended lately had: their tokens over the steps of the profile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from qlm_core.instance import PREFILL_CHUNK_TOKENS
from qlm_core.profile import HardwareProfile
from qlm_estimator.events import EntryId

RUNS_MAX = 10_000
"""Runs that are followed on one incarnation, and prefills ahead of it; others are only counted."""

PACE_MEMORY = 32.0
"""Runs that ended after which an old one weighs 1 / e in the pace of steps."""
PACE_WITHIN_S = 10.0
"""A run that decoded for longer tells of that time no more than one that took so long: it is a mean over what was long ago."""
PACE_MAX = 16.0
"""A run that made so many times more tokens than there were steps by the profile tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Since the incarnation was first seen: steps by the profile with anything running (seconds, where there is none), and the sums over
    them of decoding requests and of the tokens that they hold, prompts and outputs."""

    steps: float
    sequences: float
    context_tokens: float


@dataclass(slots=True)
class Pace:
    """Steps of one model over those by its profile, from runs that ended; 1 before any ended."""

    tokens: float = 0.0
    steps: float = 0.0

    def add(self, tokens: float, steps: float, seconds: float) -> None:
        """A run that made so many tokens after its first, in so many steps by the profile and seconds > 0."""
        if tokens > PACE_MAX * steps:
            return
        kept, weight = 1.0 - 1.0 / PACE_MEMORY, min(1.0, PACE_WITHIN_S / seconds)
        self.tokens = kept * self.tokens + weight * tokens
        self.steps = kept * self.steps + weight * steps

    @property
    def factor(self) -> float:
        return self.tokens / self.steps if self.steps > 0.0 else 1.0


@dataclass(slots=True, kw_only=True)
class Run:
    """A request from its pull on. `prefill_due_s`: time of prefills that were outstanding when it was pulled; `prefilled_s`: when its
    own is taken to end, and decoding begins, at the step `began_step`; `profile`: of its model, "" where that was not known; `certain`: it
    was; `prefill_tokens_before`, `prefill_squares_before`: pulled up to it, and the sum of the squares of each."""

    queue_id: str
    attempt: int
    prompt_tokens: int
    pulled_s: float
    prefill_due_s: float
    prefilled_s: float
    certain: bool
    prefill_tokens_before: int
    prefill_squares_before: int
    profile: str = ""
    decode_began: Totals | None = None
    began_step: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What went on from the pull of a run to its end: its `seconds` of the server's clock, the prompt tokens pulled (and the
    squares of each), and the time of prefills outstanding at its end; and while it decoded, how many `sequences` did so in the mean
    and the `context_tokens` that all of them held."""

    run: Run
    seconds: float
    sequences: float
    context_tokens: float
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
        self._decoding_began = 0.0  # sum of the steps that those who decode began at
        self._step = 0.0
        self._hardware: HardwareProfile | None = None  # of the model that was pulled last
        self._paces: dict[str, Pace] = {}
        self._at_s = since[0] / 1000.0
        self._steps = self._sequence_steps = self._context_steps = 0.0
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
        if hardware is not None:
            self._hardware = hardware
            self._paces.setdefault(hardware.model, Pace())
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
            profile="" if hardware is None else hardware.model,
        )
        self._runs[queue_id] = run
        self._prefilling.append(run)

    def leave(self, at_s: float, queue_id: str, ended_s: float, output_tokens: int = 0) -> FinishedRun | None:
        """A request is no longer run here since `ended_s`, told at `at_s`; what it went through, if its pull was seen. An end that is not
        after the pull is taken to be the telling. `output_tokens`: that it made here, 0 where nobody knows."""
        self._advance(at_s)
        run = self._forget(queue_id)
        if run is None:
            self._unknown = max(0, self._unknown - 1)
            return None
        if run.decode_began is None:  # its prefill came earlier than it was taken to
            return None
        now, then = self._totals(), run.decode_began
        steps = now.steps - then.steps
        if steps <= 0.0:
            return None
        ended_s = ended_s if ended_s > run.pulled_s else self._at_s
        if output_tokens > 1 and run.profile and ended_s > run.prefilled_s:
            self._paces[run.profile].add(output_tokens - 1.0, steps, ended_s - run.prefilled_s)
        return FinishedRun(
            run=run,
            seconds=ended_s - run.pulled_s,
            sequences=(now.sequences - then.sequences) / steps,
            context_tokens=(now.context_tokens - then.context_tokens) / steps,
            prefill_tokens=self._prefill_tokens - run.prefill_tokens_before,
            prefill_squares=self._prefill_squares - run.prefill_squares_before,
            prefill_due_s=self._due_s(),
        )

    def _advance(self, at_s: float) -> None:
        """Goes on to a time, from the end of one prefill to the next."""
        while self._prefilling and self._prefilling[0].prefilled_s <= at_s:
            run = self._prefilling.popleft()
            self._pass(run.prefilled_s, prefilling=True)
            if self._runs.get(run.queue_id) is run:
                run.decode_began, run.began_step = self._totals(), self._step
                self._decoding += 1
                self._decoding_began += self._step
                self._decoding_prompts += run.prompt_tokens
        self._pass(at_s, prefilling=bool(self._prefilling))

    def _pass(self, until_s: float, *, prefilling: bool) -> None:
        passed_s = until_s - self._at_s
        if passed_s <= 0.0:
            return
        self._at_s = until_s
        if self._runs or self._unknown:
            sequences = self._decoding + self._unknown
            hardware = self._hardware
            steps, made = passed_s, 0.0
            if hardware is not None:
                steps = passed_s / self._step_s(hardware, sequences, self._held(sequences, self._step), prefilling=prefilling)
                made = steps * self._paces[hardware.model].factor
            self._steps += steps
            self._sequence_steps += steps * sequences
            self._context_steps += steps * self._held(sequences, self._step + made / 2.0)
            self._step += made

    def _held(self, sequences: int, step: float) -> float:
        """Tokens that all hold at a step. Those that nobody knows are taken to hold as much as the others."""
        own = self._decoding_prompts + self._decoding * step - self._decoding_began
        return own * sequences / self._decoding if self._decoding else 0.0

    def _step_s(self, hardware: HardwareProfile, sequences: int, held: float, *, prefilling: bool) -> float:
        chunk_s = hardware.prefill_work_s(PREFILL_CHUNK_TOKENS) if prefilling else 0.0
        return hardware.decode_step_s(float(sequences), held) + chunk_s

    def _forget(self, queue_id: str) -> Run | None:
        run = self._runs.pop(queue_id, None)
        if run is not None and run.decode_began is not None:
            self._decoding -= 1
            self._decoding_prompts -= run.prompt_tokens
            self._decoding_began = self._decoding_began - run.began_step if self._decoding else 0.0
        return run

    def _due_s(self) -> float:
        return max(0.0, self._prefill_done_at_s - self._at_s)

    def _totals(self) -> Totals:
        return Totals(steps=self._steps, sequences=self._sequence_steps, context_tokens=self._context_steps)
