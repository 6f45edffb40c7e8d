"""Policies by the predicted length of the answer: TRAIL, TRAIL+ and LTR, as Kossmann et al. (2024, sections 2.2 and 6) compare them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qlm_agent.engines.policies.port import MEDIAN, EnginePolicy, Sequences, SequenceView

Floats = NDArray[np.float64]
UNKNOWN_TOKENS = 1e9
"""Length of a run without a prediction: it follows those with one, by arrival."""
GROWTH = 0.5
"""Share of its tokens that a run beyond all predicted quantiles has left: a heavy tail grows with what was made."""


class Trail(EnginePolicy):
    """TRAIL (Shahout et al., 2024): shortest predicted remaining processing time with limited preemption. Waiting runs are admitted by
    remaining tokens, the fewest first. A running run is preempted for one with fewer remaining tokens, while it has made less than the
    share `c` of its predicted length. Without an age limit nobody protects long runs: they may starve (Kossmann et al., section 6).

    TRAIL predicts anew at each step from layer activations; here the predicted quantiles and the tokens made so far say what is left."""

    def __init__(self, *, c: float = 0.8) -> None:
        """`c`: 0.8 is that of TRAIL's authors, 0 preempts nobody. Raises ValueError outside 0 to 1."""
        if not 0.0 <= c <= 1.0:
            raise ValueError(f"c is from 0 to 1, got {c}")
        self._c = c

    def remaining(self, runs: Sequences) -> Floats:
        """Expected tokens of each run until its end."""
        return remaining_tokens(runs.quantiles(), runs.column("produced_tokens"))

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        return waiting.names(np.lexsort((waiting.column("arrival"), self.remaining(waiting))))

    def preempt(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        if not self._c:
            return ()
        produced, left = running.column("produced_tokens"), self.remaining(running)
        first = float(self.remaining(Sequences([waiting[0]]))[0])
        young = produced < self._c * (produced + left)
        return running.names(_longest_first(running, left, young & (left > first)))

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        runs = running if isinstance(running, Sequences) else Sequences(running)
        return runs.names(_longest_first(runs, self.remaining(runs), np.ones(len(runs), np.bool_)))


class TrailPlus(Trail):
    """TRAIL+ (section 6): TRAIL with the true lengths, the most that its predictor can become; with predictions where the engine does not
    know them. The authors find c = 0 the best."""

    oracle = True

    def __init__(self, *, c: float = 0.0) -> None:
        super().__init__(c=c)

    def remaining(self, runs: Sequences) -> Floats:
        """Tokens of each run until its end."""
        true = runs.column("true_tokens")
        return true - runs.column("produced_tokens") if true.all() else super().remaining(runs)


class LearningToRank(Trail):
    """LTR (Fu et al., 2024): waiting runs by the rank of their length, predicted once at their arrival. Ranks say which is shorter, not by
    how much, so no run is preempted for another."""

    def __init__(self) -> None:
        super().__init__(c=0.0)

    def remaining(self, runs: Sequences) -> Floats:
        """Predicted length of each run, whatever it has made."""
        return np.nan_to_num(runs.quantiles()[:, MEDIAN], nan=UNKNOWN_TOKENS)


def remaining_tokens(quantiles: Floats, produced: Floats) -> Floats:
    """Tokens left of each run, at least one: up to the first predicted quantile [runs, levels] that it has not passed, from the median on;
    beyond the last one GROWTH of its tokens."""
    ahead = quantiles[:, MEDIAN:]
    longest = np.where(ahead > produced[:, None], ahead, np.inf).min(axis=1)
    left = np.where(np.isfinite(longest), longest - produced, np.maximum(1.0, GROWTH * produced))
    return np.where(np.isnan(quantiles[:, MEDIAN]), UNKNOWN_TOKENS, left)


def _longest_first(runs: Sequences, left: Floats, among: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Positions of the runs with the most tokens left first, then the latest arrival."""
    order = np.lexsort((-runs.column("arrival"), -left))
    return order[among[order]]
