"""The end of a virtual queue that only grows there: `qlm_core.queue_model` one group at a time, O(1) each, in plain numbers.

For first come first served, where every request of a burst goes to the queue that would start it first. A test holds it to the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qlm_core.distribution import FAR_DEVIATIONS, Normal
from qlm_core.queue_model import DECODE, FULL_SHARE, LEFT, PERSISTENCE, PREFILL, SEATS, SEATS_SLACK, SUMS, VARIANCE
from qlm_core.run_lengths import BASE, CHUNK, LONGEST, SHARED, STEP


@dataclass(slots=True, kw_only=True)
class QueueTail:
    """`model`: of the last run ("" while nothing is loaded). `start_s`: when that run starts, from now. `ahead`: sums over it, and over
    what runs. `end_s`: when all of it has ended."""

    model: str
    ahead: list[float]
    end_s: float
    start_s: float = 0.0
    _full: deque[tuple[float, float]] = field(default_factory=deque)
    _full_seats: float = 0.0
    _full_left: float = 0.0
    _longest_s: float = 0.0
    _like: float | None = None
    _held_s: float = 0.0
    _work_s: float = 0.0
    _base_s: float = 0.0
    _least_s: float = 0.0
    _begun: bool = False

    @classmethod
    def behind(cls, model: str, left: Sequence[float], drain_s: float) -> QueueTail:
        """Of a queue with no group, behind what runs (as in `Leads`)."""
        tail = cls(model=model, ahead=list(left), end_s=drain_s)
        tail._least_s = drain_s
        if left[SEATS] > 0.0:
            tail._like = left[LEFT] / left[SEATS]
            tail._take(left[SEATS], left[LEFT])
            tail._held_s = left[DECODE] if left[SEATS] >= FULL_SHARE else 0.0
        return tail

    def copy(self) -> QueueTail:
        return replace(self, ahead=list(self.ahead), _full=self._full.copy())

    def first_start_s(self, model: str, each: Sequence[float], swap_s: float, warm_s: float) -> float:
        """When the first request of a group behind all others would start; `each`, `swap_s`, `warm_s` as in `QueueColumns`."""
        if model != self.model:
            return self._next_start_s(swap_s, warm_s)
        return self.start_s + self.ahead[PREFILL] + self._seat_wait_s(each, 0.0)

    def append(self, model: str, each: Sequence[float], ends: Sequence[float], count: float, swap_s: float, warm_s: float) -> None:
        """A group more; `ends` as in `run_lengths`."""
        if model != self.model:
            self.start_s = self._next_start_s(swap_s, warm_s)
            self.model, self.ahead = model, [0.0] * SUMS
            self._full.clear()
            self._full_seats, self._full_left, self._longest_s, self._like, self._held_s = 0.0, 0.0, 0.0, None, 0.0
            self._work_s, self._base_s, self._least_s, self._begun = 0.0, 0.0, 0.0, True
        if self._like is None:
            self._like = each[LEFT] / each[SEATS]
        if not self._begun:
            share = ends[SHARED] / each[DECODE] if each[DECODE] > 0.0 else 0.0
            self._work_s, self._begun = self.ahead[PREFILL] + self.ahead[DECODE] * share, True
        self._longest_s = max(self._longest_s, self._seat_wait_s(each, 0.0))
        others = max(0.0, count - 1.0)
        if others:
            self._longest_s = max(self._longest_s, self._seat_wait_s(each, others))
        steps = max((self.ahead[PREFILL] + others * each[PREFILL]) / ends[CHUNK], self._longest_s / ends[STEP])
        self._work_s += count * (each[PREFILL] + ends[SHARED])
        self._base_s = max(self._base_s, ends[BASE] * (steps + ends[LONGEST]))
        self.end_s = self.start_s + max(self._least_s, self._work_s + self._base_s)
        for row in range(SUMS):
            self.ahead[row] += count * each[row]
        self._take(count * each[SEATS], count * each[LEFT])

    def _next_start_s(self, swap_s: float, warm_s: float) -> float:
        return self.end_s + max(warm_s, swap_s - (self.end_s - self.start_s))

    def _seat_wait_s(self, each: Sequence[float], others: float) -> float:
        """Of a request with so many of its own group ahead."""
        if self.ahead[SEATS] + (others + 1.0) * each[SEATS] <= 1.0 + SEATS_SLACK:
            return self._longest_s
        own = others * each[SEATS]
        work = self.ahead[DECODE] + others * each[DECODE]
        in_flight_s = self._in_flight_s(each, own)
        if self._held_s > 0.0:
            stays = math.exp(-max(0.0, work - self._held_s) / (PERSISTENCE * self._held_s))
            in_flight_s = stays * self._held_s + (1.0 - stays) * in_flight_s
        work -= in_flight_s
        variance = self.ahead[VARIANCE] + others * each[VARIANCE]
        if work < FAR_DEVIATIONS * math.sqrt(variance):
            work = Normal(work, variance).floored(0.0).mean
        return max(self._longest_s, work)

    def _in_flight_s(self, each: Sequence[float], own: float) -> float:
        """What the last full batch of seats holds, of which `own` are of the group itself."""
        each_left = each[LEFT] / each[SEATS]
        if own >= 1.0:
            return each_left
        found, beyond = own * each_left + self._full_left, own + self._full_seats - 1.0
        if beyond <= 0.0:
            return found - beyond * (each_left if self._like is None else self._like)
        for share, left in self._full:  # the oldest first
            if share >= beyond:
                return found - beyond * left / share
            beyond, found = beyond - share, found - left
        return own * each_left

    def _take(self, share: float, left: float) -> None:
        if share > 0.0:
            self._full.append((share, left))
            self._full_seats += share
            self._full_left += left
        while self._full and self._full_seats - self._full[0][0] >= 1.0:
            share, left = self._full.popleft()
            self._full_seats -= share
            self._full_left -= left
