"""Multi-level feedback queues: FastServe (Wu et al., arXiv 2305.05920v3), section 4.1, algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlm_agent.engines.policies.port import EngineView, Flags, Numbers, Positions, Sequences, SequenceView
from qlm_agent.engines.policies.seats import LeastKeyFirst

_QUEUE = 2.0**40
"""Keys of one queue: moves between queues since the model became active."""

_TINY_S = 1e-9
"""Rounding of sums of step times."""

ROWS_LEAST = 256

_LEAST_QUANTUM_S = 1e-3
"""Where the engine has measured no step."""


class FastServe(LeastKeyFirst):
    """Skip-join multi-level feedback queue.

    Queue k of `queues` has a quantum of 2^k times `quantum_s`, default the least step time: one run, one token of context. A run joins the
    first queue whose quantum holds its prefill, the last if none does. Having used up its quantum, it moves `demotion` queues down; having
    waited for `promote_s`, to the first. A prefill is not interrupted: a run that is promoted before it prefills it in one turn all the
    same. Among those of a queue the first to enter is first. Ten queues hold 1,023 times the least step: an answer of so many tokens.
    """

    skips = True

    def __init__(
        self, *, quantum_s: float = 0.0, queues: int = 10, promote_s: float = 0.3, demotion: int = 1, kv: str = "proactive"
    ) -> None:
        if not (quantum_s >= 0.0 and 1 <= queues <= 60 and promote_s > 0.0 and demotion >= 1):
            raise ValueError("quantum_s >= 0, queues 1 to 60, promote_s > 0 and demotion >= 1 needed")
        super().__init__(kv=kv)
        self._quantum_s, self._promote_s, self._demotion = quantum_s, promote_s, demotion
        self._quanta_s: Numbers = np.zeros(queues)
        self._wakeup_s: float | None = None
        self._moves = 0
        self._counts: Positions = np.zeros(queues, np.intp)  # runs of each queue
        self._count = 0  # rows taken; the state of a run is in the row of its note
        self._level: Positions = np.zeros(0, np.intp)
        self._key, self._served_s, self._since_s = np.zeros((3, 0))
        self._shown = (self._level, self._level)

    def reset(self, engine: EngineView) -> None:
        super().reset(engine)
        self._quanta_s[0] = 0.0
        self._count = 0

    def keys(self, now_s: float, waiting: Sequences, running: Sequences) -> tuple[Numbers, Numbers]:
        self._set_quanta()
        if self._count + len(waiting) + len(running) > len(self._level):
            self._compact(waiting, running)
        self._shown = waits, runs = self._rows(waiting), self._rows(running)
        served_s = running.column("served_s")
        spent = served_s - self._served_s[runs] >= self._quanta_s[self._level[runs]] - _TINY_S
        self._move(runs[spent], np.minimum(self._level[runs[spent]] + self._demotion, len(self._quanta_s) - 1), served_s[spent])
        since_s = self._since_s[waits]
        left = np.flatnonzero(np.isinf(since_s))
        since_s[left] = waiting.numbers("waiting_since_s", left)
        starved = now_s - since_s >= self._promote_s - _TINY_S
        self._since_s[waits] = np.where(starved, now_s, since_s)
        lower = np.flatnonzero(starved & (self._level[waits] > 0))
        self._move(waits[lower], np.zeros(len(lower), np.intp), waiting.numbers("served_s", lower))
        return self._key[waits], self._key[runs]

    def decided(self, now_s: float, waiting: Sequences, running: Sequences, starts: Positions, stays: Flags) -> None:
        waits, runs = self._shown
        seated = np.concatenate((waits[starts], runs[stays]))
        served_s = np.concatenate((waiting.numbers("served_s", starts), running.column("served_s")[stays]))
        left = np.delete(waits, starts)
        self._since_s[seated] = np.inf
        self._wakeup_s = None
        if len(left) or not stays.all():
            ends_s = now_s + self._quanta_s[self._level[seated]] - (served_s - self._served_s[seated])
            starves_s = self._since_s[left] + self._promote_s if len(left) else np.array([now_s + self._promote_s])
            self._wakeup_s = float(np.concatenate((ends_s, starves_s)).min())
        self._counts = np.bincount(self._level[np.concatenate((waits, runs))], minlength=len(self._quanta_s))

    def victims(self, now_s: float, running: Sequences) -> Sequence[str]:
        """By estimated next scheduled time (section 4.2), the latest first."""
        rows = self._rows(running)
        begins_s = np.concatenate(([0.0], np.cumsum(self._quanta_s)[:-1]))  # service before a queue
        ahead_s = np.cumsum(self._counts) * begins_s - np.cumsum(
            self._counts * begins_s
        )  # work of higher queues, until they are in this one
        next_s = np.minimum(self._since_s[rows] + self._promote_s - now_s, ahead_s[self._level[rows]] / self.engine.seats)
        return running.names(np.lexsort((-self._key[rows], -next_s)))

    def next_wakeup_s(self, now_s: float) -> float | None:
        return self._wakeup_s

    def _set_quanta(self) -> None:
        if not self._quanta_s[0]:
            least_s = self._quantum_s or self.engine.expected_step_s(1, 1, ())
            self._quanta_s[:] = max(least_s, _LEAST_QUANTUM_S) * 2.0 ** np.arange(len(self._quanta_s))

    def _rows(self, runs: Sequences) -> Positions:
        rows = runs.column("note").astype(np.intp)
        for position in np.flatnonzero(rows < 0).tolist():
            run = runs[position]
            rows[position] = run.note if run.note >= 0 else self._join(run)
        return rows

    def _join(self, run: SequenceView) -> int:
        row = run.note = self._count
        self._count += 1
        prefill_s = self.engine.expected_step_s(0, 0, ((0, run.prompt_tokens),)) if self.skips else 0.0
        level = min(int(np.searchsorted(self._quanta_s, prefill_s - _TINY_S)), len(self._quanta_s) - 1)
        self._move(np.array([row]), np.array([level]), np.array([run.served_s]))
        self._since_s[row] = run.waiting_since_s
        return row

    def _move(self, rows: Positions, levels: Positions, served_s: Numbers) -> None:
        """Appends runs to queues, in the order of their keys. `served_s`: of the runs."""
        ranks = np.argsort(np.argsort(self._key[rows]))
        self._key[rows] = levels * _QUEUE + self._moves + ranks
        self._moves += len(rows)
        self._level[rows] = levels
        self._served_s[rows] = served_s

    def _compact(self, waiting: Sequences, running: Sequences) -> None:
        """Makes room for new rows; those of ended runs are dropped."""
        shown = [run for run in (*running, *waiting) if run.note >= 0]
        rows = np.array([run.note for run in shown], np.intp)
        more = np.zeros(len(waiting) + len(running) + ROWS_LEAST + len(shown))
        columns = (self._key, self._served_s, self._since_s)
        self._key, self._served_s, self._since_s = (np.concatenate((column[rows], more)) for column in columns)
        self._level = np.concatenate((self._level[rows], more.astype(np.intp)))
        self._count = len(shown)
        for row, run in enumerate(shown):
            run.note = row


class MlfqNaive(FastServe):
    """Every run joins the first queue (the strawman of FastServe, section 4.1)."""

    skips = False
