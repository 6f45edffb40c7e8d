"""Follows the work of one agent incarnation by its lifecycle events: running requests, prefilled and decoded tokens.

Prefills are taken to be done one after the other as requests are pulled. The totals grow with the steps of the engine, so the work
during a run is a difference of two readings. A step takes as long as the profile says of what decodes then, and of a chunk of a prefill
that rides along: while a batch fills, seconds pass and few steps are made, and means over a run's seconds would be of another time than its
tokens were made in. Every decoding request gets a token in each step, so what each has made is a difference of two readings of one clock
that counts steps.

An engine with lookahead holds requests that wait for a seat and for KV; their prefills begin as others leave. The policy chooses
who waits, so a run that was assumed to wait has the batch of its whole stay beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace

from qlm_core.profiles.hardware_profile import HardwareProfile, prefill_shares
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS
from qlm_core.vocabulary.stream import EntryId

RUNS_MAX = 10_000
"""Runs that are followed on one incarnation, and prefills ahead of it; others are only counted."""

PULLS_MAX = 4_096
"""Pulls whose times are kept; a run that saw more of them is taken to have seen the last."""


@dataclass(slots=True)
class Totals:
    """Since the incarnation was first seen: steps by the profile with anything running (seconds, where there is none), and the sums over
    them of decoding requests and of the tokens that they hold, prompts and outputs. `pulled`, `prefilled`: tokens to compute of prompts
    that were pulled, and that are taken to be done; `pulled_squares`, `prefilled_squares`: the sum of the squares of each prompt, less
    those of its cached part."""

    steps: float = 0.0
    sequences: float = 0.0
    context_tokens: float = 0.0
    pulled: float = 0.0
    pulled_squares: float = 0.0
    prefilled: float = 0.0
    prefilled_squares: float = 0.0


@dataclass(slots=True, kw_only=True)
class Run:
    """A request from its pull on. `prefill_tokens`, `prefill_squares`: its part of `Totals`; `prefill_left_tokens`: of them; without any it
    decodes, since `decode_began`; `certain`: its model was known; `at_pull`: with its own prompt."""

    queue_id: str
    attempt: int
    prompt_tokens: int
    pulled_s: float
    prefill_tokens: float
    prefill_squares: float
    prefill_left_tokens: float
    certain: bool
    at_pull: Totals
    decode_began: Totals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Work beside a run while it decoded, from its first token to its end: `seconds` of the server's clock, 0 where its first token was
    not reported or it was paused; how many `sequences` decoded in a step on average and the `context_tokens` that all of them held; and the
    `prefill_tokens` of others that rode along with its steps, with the sum of the squares of their prompts as far as these were done.
    Prefills go in the order of pulls, a chunk in each step, so they are of those pulled behind it."""

    run: Run
    seconds: float
    sequences: float
    context_tokens: float
    prefill_tokens: float
    prefill_squares: float


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
        self._hardware: HardwareProfile | None = None  # of the model that was pulled last
        self._seats = 0  # of an engine with lookahead
        self._at_s = since[0] / 1000.0
        self._now = Totals()
        self._pulls_s: list[float] = []
        self._pulls_before: list[float] = []  # prompt tokens pulled before each

    def covers(self, entry_id: EntryId) -> bool:
        """Whether an event is news: not yet part of the reading that this began with."""
        return entry_id > self._since

    def holds(self, queue_id: str) -> bool:
        """Whether a request runs here whose pull was seen."""
        return queue_id in self._runs

    def made(self, queue_id: str) -> float:
        """Tokens that a request is taken to have made by the last event; 0 for one that runs not here, or has its prefill before it."""
        run = self._runs.get(queue_id)
        return 0.0 if run is None or run.decode_began is None else self._now.steps - run.decode_began.steps

    def pull(
        self,
        at_s: float,
        queue_id: str,
        attempt: int,
        prompt_tokens: int,
        hardware: HardwareProfile | None,
        seats: int = 0,
        uncached_share: float = 1.0,
    ) -> None:
        """A request was pulled. `hardware`: of the model that it is for, if that is known. `seats`: of an engine with lookahead; 0 for one
        that runs all that it has. `uncached_share`: of its prompt, what is expected to be computed."""
        self._advance(at_s)
        self._seats = seats
        self._forget(queue_id)
        self._pulls_s.append(self._at_s)
        self._pulls_before.append(self._now.pulled)
        if len(self._pulls_s) > PULLS_MAX:
            del self._pulls_s[: PULLS_MAX // 2], self._pulls_before[: PULLS_MAX // 2]
        linear, squared = prefill_shares(uncached_share)
        tokens, squares = prompt_tokens * linear, prompt_tokens * prompt_tokens * squared
        self._now.pulled += tokens
        self._now.pulled_squares += squares
        if max(len(self._runs), len(self._prefilling)) >= RUNS_MAX:
            self._unknown += 1
            return
        self._hardware = hardware or self._hardware
        run = Run(
            queue_id=queue_id,
            attempt=attempt,
            prompt_tokens=prompt_tokens,
            pulled_s=self._at_s,
            prefill_tokens=tokens,
            prefill_squares=squares,
            prefill_left_tokens=tokens if hardware is not None else 0.0,
            certain=hardware is not None,
            at_pull=replace(self._now),
        )
        self._runs[queue_id] = run
        self._prefilling.append(run)

    def leave(
        self, at_s: float, queue_id: str, ended_s: float, output_tokens: int = 0, first_token_s: float = 0.0, paused_s: float = 0.0
    ) -> FinishedRun | None:
        """A request ran here until `ended_s`, reported at `at_s`; its work, if its pull was seen. An end that is not
        after the pull is taken to be at `at_s`. `output_tokens`: that it made here, `first_token_s`: when the first was made; 0 where
        nobody knows. `paused_s`: in which it had no seat since then: its time says nothing of the steps."""
        self._advance(at_s)
        run = self._runs.get(queue_id)
        if run is not None and first_token_s > 0.0 and not self._seats:  # its prompt is done, and all before it
            while run.decode_began is None and self._prefilling:
                self._begin_decoding()
        self._forget(queue_id)
        if run is None:
            self._unknown = max(0, self._unknown - 1)
            return None
        then = run.decode_began or (run.at_pull if self._seats else None)
        if then is None:  # its prefill was earlier than assumed
            return None
        now = self._now
        steps = now.steps - then.steps
        if steps <= 0.0:
            return None
        ended_s = ended_s if ended_s > run.pulled_s else self._at_s
        seconds = ended_s - first_token_s if run.pulled_s <= first_token_s < ended_s and paused_s == 0.0 else 0.0
        behind = now.pulled - run.at_pull.pulled
        squares = now.pulled_squares - run.at_pull.pulled_squares
        if self._seats:
            behind, squares = now.prefilled - then.prefilled, now.prefilled_squares - then.prefilled_squares
            done = behind * max(0, output_tokens - 1) / steps
        else:
            done = self._done_behind(run, output_tokens - 1, first_token_s, seconds) if seconds > 0.0 else 0.0
        return FinishedRun(
            run=run,
            seconds=seconds,
            sequences=(now.sequences - then.sequences) / steps,
            context_tokens=(now.context_tokens - then.context_tokens) / steps,
            prefill_tokens=done,
            prefill_squares=done * squares / max(1, behind),
        )

    def _advance(self, at_s: float) -> None:
        """Goes on to a time, from the end of one prefill to the next."""
        while self._prefilling and self._has_room(self._prefilling[0]):
            first = self._prefilling[0]
            token_s = self._prefill_token_s(first)
            left_s = first.prefill_left_tokens * token_s
            if self._at_s + left_s > at_s:
                if at_s > self._at_s:
                    first.prefill_left_tokens -= (at_s - self._at_s) / token_s
                break
            self._pass(self._at_s + left_s, prefilling=True)
            self._begin_decoding()
        self._pass(at_s, prefilling=bool(self._prefilling) and self._has_room(self._prefilling[0]))

    def _has_room(self, run: Run) -> bool:
        """Whether the engine computes a prompt now, or has begun to."""
        sequences = self._sequences
        if not self._seats or not sequences or self._hardware is None or run.prefill_left_tokens < run.prefill_tokens:
            return True
        held = self._held(sequences, self._now.steps) + run.prompt_tokens
        return sequences < self._seats and held <= self._hardware.kv_capacity_tokens

    @property
    def _sequences(self) -> int:
        """Those who decode."""
        sequences = self._decoding + self._unknown
        return min(sequences, self._seats) if self._seats else sequences

    def _begin_decoding(self) -> None:
        run = self._prefilling.popleft()
        run.prefill_left_tokens = 0.0
        self._now.prefilled += run.prefill_tokens
        self._now.prefilled_squares += run.prefill_squares
        if self._runs.get(run.queue_id) is run:
            run.decode_began = replace(self._now)
            self._decoding += 1
            self._decoding_began += self._now.steps
            self._decoding_prompts += run.prompt_tokens

    def _pass(self, until_s: float, *, prefilling: bool) -> None:
        passed_s = until_s - self._at_s
        if passed_s <= 0.0:
            return
        self._at_s = until_s
        if self._runs or self._unknown:
            now = self._now
            sequences = self._sequences
            steps = passed_s
            if self._hardware is not None:
                chunk_s = self._hardware.prefill_work_s(PREFILL_CHUNK_TOKENS) if prefilling else 0.0
                steps /= self._hardware.decode_step_s(float(sequences), self._held(sequences, now.steps)) + chunk_s
            now.sequences += steps * sequences
            now.context_tokens += steps * self._held(sequences, now.steps + steps / 2.0)
            now.steps += steps

    def _held(self, sequences: int, step: float) -> float:
        """Tokens that all hold at a step. Those that nobody knows are taken to hold as much as the others."""
        own = self._decoding_prompts + self._decoding * step - self._decoding_began
        return own * sequences / self._decoding if self._decoding else 0.0

    def _forget(self, queue_id: str) -> None:
        run = self._runs.pop(queue_id, None)
        if run is not None and run.decode_began is not None:
            self._decoding -= 1
            self._decoding_prompts -= run.prompt_tokens
            self._decoding_began = self._decoding_began - run.decode_began.steps if self._decoding else 0.0

    def _prefill_token_s(self, run: Run) -> float:
        """Seconds per token of a prefill whose chunks ride along with the present decode steps."""
        hardware = self._hardware
        if hardware is None or not run.prefill_tokens:
            return 0.0
        sequences = self._sequences
        beside_s = hardware.decode_step_s(float(sequences), self._held(sequences, self._now.steps)) if sequences else 0.0
        return hardware.prefill_work_s(run.prefill_tokens, run.prefill_squares) / run.prefill_tokens + beside_s / PREFILL_CHUNK_TOKENS

    def _done_behind(self, run: Run, steps: int, first_token_s: float, seconds: float) -> float:
        """Prompt tokens pulled behind a run that were prefilled in its steps, evenly over its seconds: at most a chunk in
        each step. Others had half of the chunk that ended its own prefill, where there were any."""
        if steps < 1:
            return 0.0
        step_s = seconds / steps
        up_to = run.at_pull.pulled
        first = bisect_left(self._pulls_before, up_to)
        since = bisect_left(self._pulls_s, first_token_s - step_s, first)
        before = self._pulls_before[since] if since < len(self._pulls_s) else self._now.pulled
        shared = min(0.5 * PREFILL_CHUNK_TOKENS, before - up_to)
        done = min(self._now.pulled - up_to - shared, float(steps * PREFILL_CHUNK_TOKENS))
        for at in range(bisect_left(self._pulls_s, first_token_s, first), len(self._pulls_s)):
            left = steps - (self._pulls_s[at] - first_token_s) / step_s
            done = min(done, self._pulls_before[at] - up_to - shared + max(0.0, left) * PREFILL_CHUNK_TOKENS)
        return max(0.0, done)
