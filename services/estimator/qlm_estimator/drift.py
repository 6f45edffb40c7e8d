"""Notices that an instance runs otherwise than it did: a two-sided CUSUM over its runs (Page, Biometrika 1954). Pure.

A run tells how far its duration was from what was learned by then, as the logarithm of measured over predicted. Runs share steps with each
other and the profile fits some loads better than others, so their errors are alike for tens of runs and wander by some 20% without any
change of the engine. `SLACK` is what is put down to that, and `ERROR_MAX` keeps one absurd run from being an alarm: a change by a factor of
2 is noticed after 20 to 30 runs that saw all of it, one by 1.5 after 55, and one below 1.28 is left to ordinary learning. Where so many
end in a second or two they shared their steps, with one long prefill among them, and a change lasts longer than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SLACK = 0.25
"""Of the logarithm of measured over predicted: an error of less than this counts against a drift."""

ERROR_MAX = 0.7
"""Most that one run counts."""

THRESHOLD = 8.0
"""Sum of errors beyond the slack that is a drift."""

LASTS_S = 10.0
"""Seconds of the instance's clock that it takes until it is a drift, at least."""

WARM_UP_RUNS = 50.0
"""Runs behind what was learned before it can be drifted from; until then errors are those of the prior."""

SETTLED_RUNS = 200
"""Runs without another alarm after which the instance no longer counts as drifting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The level changed. `since_s`: when its runs began to differ, and `slowdown` was believed; `runs`: how many there were since;
    `measured_s` and `predicted_s`: what they took, and what the pair's row says of them."""

    since_s: float
    slowdown: float
    runs: int
    measured_s: float
    predicted_s: float


@dataclass(slots=True)
class _Side:
    """Sum of the errors in one direction beyond the slack, and the runs since it was zero."""

    total: float = 0.0
    since_s: float = 0.0
    slowdown: float = 1.0
    runs: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, at_s: float, slowdown: float, error: float, measured_s: float, predicted_s: float, time_scale: float) -> bool:
        """Whether the level has changed in this direction."""
        if self.total <= 0.0:
            self.since_s, self.slowdown, self.runs, self.measured_s, self.predicted_s = at_s, slowdown, 0, 0.0, 0.0
        self.total = max(0.0, self.total + error - SLACK)
        self.runs += 1
        self.measured_s += measured_s
        self.predicted_s += predicted_s
        return self.total > THRESHOLD and time_scale * (at_s - self.since_s) >= LASTS_S


@dataclass(slots=True)
class DriftDetector:
    """One instance and model. `drifting_since_s`: from when it has run otherwise, 0 where it does not or has settled since."""

    drifting_since_s: float = 0.0
    _slower: _Side = field(default_factory=_Side)
    _faster: _Side = field(default_factory=_Side)
    _settled_in: int = 0

    @classmethod
    def restored(cls, drifting_since_s: float) -> DriftDetector:
        """As a published row tells it; one that drifts has yet to settle."""
        return cls(drifting_since_s, _settled_in=SETTLED_RUNS if drifting_since_s else 0)

    def add(
        self, at_s: float, slowdown: float, learned_runs: float, measured_s: float, predicted_s: float, time_scale: float = 1.0
    ) -> Shift | None:
        """A run that ended at `at_s`, took `measured_s` > 0, and `predicted_s` > 0 by the pair's row, when `slowdown` > 0 was believed from
        `learned_runs` runs; `time_scale`: how many times as fast the instance's clock is as that of `at_s`. Gives the shift that it made
        certain, and begins anew."""
        if self._settled_in:
            self._settled_in -= 1
            if not self._settled_in:
                self.drifting_since_s = 0.0
        if learned_runs < WARM_UP_RUNS:
            return None
        error = math.log(measured_s / (predicted_s * slowdown))
        error = min(ERROR_MAX, max(-ERROR_MAX, error))
        # Both look at each run.
        slower = self._slower.add(at_s, slowdown, error, measured_s, predicted_s, time_scale)
        faster = self._faster.add(at_s, slowdown, -error, measured_s, predicted_s, time_scale)
        if not (slower or faster):
            return None
        side = self._slower if slower else self._faster
        self._slower, self._faster = _Side(), _Side()
        self._settled_in = SETTLED_RUNS
        if not self.drifting_since_s:
            self.drifting_since_s = side.since_s
        return Shift(since_s=side.since_s, slowdown=side.slowdown, runs=side.runs, measured_s=side.measured_s, predicted_s=side.predicted_s)
