"""The client's own account of a run: requests sent, accepted and ended, tokens received, independent of the servers.

Every token is checked against the model's expected answer (`Workload.expected_output`). If that is unknown (a real model), the streamed
tokens are checked against the Result that is read again at the end from another gateway. A run is *clean* if nothing is lost, doubled or
wrong:

- lost: accepted, and never ended; or ended COMPLETED without all its tokens (of a real model, all that its Result counts); or missing at
  the second reading. A request whose stream broke off for good is not lost if its Result, read at the end, holds its whole answer (it
  counts as a broken stream);
- doubled: a token delivered twice; or a request that ended twice with different results (seen when its Result is read again at the end,
  from another gateway), or that was accepted as two different requests;
- wrong: a token that is not the expected one, or a gap in the offsets.

Times are given by the caller (`now_s`: seconds of one monotonic clock) and reported in trace seconds: real seconds * time scale. Latency
counts from a request's due time in the trace, not from its sending, so that a slow client cannot hide waiting; `wait` is from the client's
receipt of the acceptance to its first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qlm.values import RequestState, Result
from qlm_load.workload.workload import Workload, WorkloadRequest

PROBLEMS_MAX = 100
"""Most problems that are kept as text; all are counted."""


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """The client's record of one request. Times in seconds of the caller's clock, None for events to come. `answer_tokens`: length of its
    answer; of a real model the limit, until it ended."""

    request: WorkloadRequest
    due_s: float
    answer_tokens: int
    sent_s: float | None = None
    accepted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    queue_id: str = ""
    tokens: int = 0
    state: RequestState | None = None
    attempts: int = 0
    resumed: bool = False
    error: str = ""
    doubled: bool = False
    wrong: bool = False
    vanished: bool = False
    stream_broken: bool = False

    @property
    def completed(self) -> bool:
        return self.state is RequestState.COMPLETED

    @property
    def lost(self) -> bool:
        """Accepted, and not ended with its whole answer."""
        if self.accepted_s is None:
            return False
        return self.state is None or self.vanished or (self.completed and self.tokens < self.answer_tokens)

    @property
    def whole(self) -> bool:
        """Completed with exactly the answer of an undisturbed run, each token once."""
        return self.completed and self.tokens == self.answer_tokens and not (self.wrong or self.doubled or self.vanished)

    @property
    def recovered(self) -> bool:
        """Completed although a process that served it died: run again by an agent, or resumed at another gateway."""
        return self.completed and (self.attempts > 1 or self.resumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """One SLO class. `attained`: completed within the SLO; latencies in trace seconds, of the completed ones."""

    name: str
    slo_s: float
    requests: int
    attained: int
    latency_p50_s: float
    latency_p99_s: float

    @property
    def attainment(self) -> float:
        return self.attained / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole run. Waits in trace seconds (acceptance to first token); `requests_per_s`, `tokens_per_s` and `run_s` in real time."""

    sent: int
    accepted: int
    refused: int
    completed: int
    failed: int
    lost: int
    doubled: int
    wrong: int
    recovered: int
    attempts_repeated: int
    streams_resumed: int
    streams_broken: int
    verified: int
    tokens: int
    classes: tuple[ClassReport, ...]
    wait_p50_s: float
    wait_p99_s: float
    late_sends: int
    run_s: float
    requests_per_s: float
    tokens_per_s: float
    problems: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        return self.lost == 0 and self.doubled == 0 and self.wrong == 0


class Ledger:
    """Takes the client's observations, in any order between requests; `index`: of the workload's request."""

    def __init__(self, workload: Workload, time_scale: float, start_s: float, late_after_s: float = 0.25) -> None:
        """`time_scale`: trace seconds in a real second. A request sent `late_after_s` real seconds after it was due counts as sent late."""
        self._workload = workload
        self._time_scale = time_scale
        self._start_s = start_s
        self._late_after_s = late_after_s
        self._expected: dict[int, Sequence[int]] = {}
        self._streamed: dict[int, list[int]] = {}
        self._verified = 0
        self._problem_count = 0
        self._problems: list[str] = []
        self.entries = [
            LedgerEntry(request=each, due_s=start_s + each.arrival_s / time_scale, answer_tokens=each.output_tokens)
            for each in workload.requests
        ]
        self.texts: dict[int, str] = {}
        """Answers of real models by index, from their Results at the end of the run."""
        self.ended = 0
        """Requests that ended or were given up."""
        self.late = 0
        """Requests that ended COMPLETED, after their SLO."""

    def sent(self, index: int, now_s: float) -> None:
        self.entries[index].sent_s = now_s

    def accepted(self, index: int, now_s: float, queue_id: str) -> None:
        entry = self.entries[index]
        if entry.accepted_s is None:
            entry.accepted_s, entry.queue_id = now_s, queue_id
        elif entry.queue_id != queue_id:
            self._double(entry, f"accepted as {entry.queue_id} and as {queue_id}")

    def resumed(self, index: int) -> None:
        """Its stream broke off after the acceptance and was resumed at another gateway."""
        self.entries[index].resumed = True

    def tokens(self, index: int, now_s: float, offset: int, token_ids: Sequence[int]) -> None:
        """Output tokens from `offset` on, as delivered."""
        entry = self.entries[index]
        if not token_ids:
            return
        expected = self._expected_of(index) if entry.state is None else ()
        if entry.state is not None:
            self._double(entry, f"{len(token_ids)} tokens after its end")
        if offset < entry.tokens:
            self._double(entry, f"token {offset} again, {entry.tokens} were delivered")
        elif offset > entry.tokens:
            self._wrong(entry, f"token {offset} after token {entry.tokens - 1}: a gap")
        if expected is None and offset == entry.tokens:
            self._streamed.setdefault(index, []).extend(token_ids)
        for position, token in enumerate(token_ids, start=offset):
            if entry.state is None and expected is not None and (position >= len(expected) or expected[position] != token):
                self._wrong(entry, f"token {position} is {token}, not {expected[position] if position < len(expected) else 'the end'}")
                break
        entry.tokens = max(entry.tokens, offset + len(token_ids))
        entry.last_token_s = now_s
        if entry.first_token_s is None:
            entry.first_token_s = now_s

    def end(self, index: int, now_s: float, result: Result) -> None:
        """The Result at the end of its stream."""
        entry = self.entries[index]
        if entry.state is not None:
            self._double(entry, f"ended twice, {entry.state} and {result.state}")
            return
        if not self._workload.answers_known:
            entry.answer_tokens = result.output_tokens
        self._expected.pop(index, None)
        self.ended += 1
        entry.ended_s, entry.state, entry.attempts = now_s, result.state, result.attempts
        entry.error = result.error_reason
        if entry.queue_id and result.queue_id != entry.queue_id:
            self._double(entry, f"accepted as {entry.queue_id}, ended as {result.queue_id}")
        self.late += entry.completed and self._latency_s(entry) > entry.request.slo_s
        if entry.completed and entry.tokens != entry.answer_tokens:
            self._problem(entry, f"completed with {entry.tokens} of {entry.answer_tokens} tokens")

    def give_up(self, index: int, reason: str) -> None:
        """The client got no end of it: not accepted (refused), or accepted and lost."""
        entry = self.entries[index]
        entry.error = reason
        self._expected.pop(index, None)
        self.ended += 1
        self._problem(entry, reason)

    def read_again(self, index: int, result: Result | None) -> None:
        """Its Result, read again at the end of the run: the same end, with all streamed tokens. None: there is none."""
        entry = self.entries[index]
        if result is None:
            entry.vanished = True
            self._problem(entry, "has no result at the end of the run")
            return
        self._verified += 1
        if entry.state is None:
            self._end_unstreamed(index, entry, result)
            return
        if not self._workload.answers_known:
            self.texts[index] = result.text
        expected = self._answer_of(entry, self._streamed.pop(index, ()))
        end, again = (entry.state, entry.queue_id, entry.attempts), (result.state, result.queue_id, result.attempts)
        if end != again:
            self._double(entry, f"ended as {end}, its result says {again}")
        elif entry.completed and list(result.token_ids) != list(expected):
            self._double(entry, f"its result holds other tokens ({len(result.token_ids)}) than were streamed")

    def _end_unstreamed(self, index: int, entry: LedgerEntry, result: Result) -> None:
        entry.stream_broken = True
        entry.state, entry.attempts, entry.error = result.state, result.attempts, result.error_reason
        if entry.completed:
            streamed, entry.tokens = entry.tokens, len(result.token_ids)
            if not self._workload.answers_known:
                entry.answer_tokens = result.output_tokens
                self.texts[index] = result.text
            if list(result.token_ids) != list(self._answer_of(entry, [*self._streamed.pop(index, ()), *result.token_ids[streamed:]])):
                self._wrong(entry, "its result holds other tokens than the expected ones")

    def attained(self, entry: LedgerEntry) -> bool:
        """Completed, its last token within the SLO."""
        return entry.completed and entry.last_token_s is not None and self._latency_s(entry) <= entry.request.slo_s

    def report(self, now_s: float) -> Report:
        """The account as of now: an accepted request without an end is lost."""
        entries = self.entries
        last_s = max((e.ended_s for e in entries if e.ended_s is not None), default=now_s)
        run_s = max(last_s - self._start_s, 1e-9)
        waits = [(e.first_token_s - e.accepted_s) * self._time_scale for e in entries if e.first_token_s and e.accepted_s]
        completed = sum(e.completed for e in entries)
        tokens = sum(e.tokens for e in entries)
        return Report(
            sent=sum(e.sent_s is not None for e in entries),
            accepted=sum(e.accepted_s is not None for e in entries),
            refused=sum(e.sent_s is not None and e.accepted_s is None for e in entries),
            completed=completed,
            failed=sum(e.state is not None and not e.completed for e in entries),
            lost=sum(e.lost for e in entries),
            doubled=sum(e.doubled for e in entries),
            wrong=sum(e.wrong for e in entries),
            recovered=sum(e.recovered for e in entries),
            attempts_repeated=sum(e.completed and e.attempts > 1 for e in entries),
            streams_resumed=sum(e.completed and e.resumed for e in entries),
            streams_broken=sum(e.stream_broken for e in entries),
            verified=self._verified,
            tokens=tokens,
            classes=self._class_reports(),
            wait_p50_s=quantile(waits, 0.5),
            wait_p99_s=quantile(waits, 0.99),
            late_sends=sum(e.sent_s is not None and e.sent_s - e.due_s > self._late_after_s for e in entries),
            run_s=run_s,
            requests_per_s=completed / run_s,
            tokens_per_s=tokens / run_s,
            problems=(*self._problems, *([f"and {self._problem_count - PROBLEMS_MAX} more"] if self._problem_count > PROBLEMS_MAX else [])),
        )

    def _class_reports(self) -> tuple[ClassReport, ...]:
        slo_s = {entry.request.slo_class: entry.request.slo_s for entry in self.entries}
        latencies: dict[str, list[float]] = {name: [] for name in slo_s}
        for entry in self.entries:
            if entry.completed and entry.last_token_s is not None:
                latencies[entry.request.slo_class].append(self._latency_s(entry))
        counts = Counter(entry.request.slo_class for entry in self.entries if entry.sent_s is not None)
        return tuple(
            ClassReport(
                name=name,
                slo_s=slo_s[name],
                requests=counts[name],
                attained=sum(latency <= slo_s[name] for latency in latencies[name]),
                latency_p50_s=quantile(latencies[name], 0.5),
                latency_p99_s=quantile(latencies[name], 0.99),
            )
            for name in sorted(slo_s, key=lambda name: slo_s[name])
        )

    def _expected_of(self, index: int) -> Sequence[int] | None:
        """None if unknown."""
        if not self._workload.answers_known:
            return None
        if index not in self._expected:
            self._expected[index] = self._workload.expected_output(self.entries[index].request)
        return self._expected[index]

    def _answer_of(self, entry: LedgerEntry, streamed: Sequence[int]) -> Sequence[int]:
        """Its required answer; the streamed one if that is unknown."""
        return self._workload.expected_output(entry.request) if self._workload.answers_known else streamed

    def _latency_s(self, entry: LedgerEntry) -> float:
        """Trace seconds from due to the last token."""
        return ((entry.last_token_s or entry.due_s) - entry.due_s) * self._time_scale

    def _double(self, entry: LedgerEntry, what: str) -> None:
        entry.doubled = True
        self._problem(entry, what)

    def _wrong(self, entry: LedgerEntry, what: str) -> None:
        entry.wrong = True
        self._problem(entry, what)

    def _problem(self, entry: LedgerEntry, what: str) -> None:
        self._problem_count += 1
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(f"{entry.request.request_id}: {what}")


def quantile(values: Sequence[float], level: float) -> float:
    """Linear interpolation between order statistics; 0 without values."""
    return float(np.quantile(values, level)) if values else 0.0
