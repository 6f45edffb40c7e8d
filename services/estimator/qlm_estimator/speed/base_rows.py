"""The rows that learning starts from: of a pair of GPUs and model, before any instance of it was measured.

Three kinds, the first that there is: a row that was measured (`qlm profile`) and imported, one that QLM ships, one that follows from facts.
What an instance does is believed to be `slowdown` times that, with a normal prior of mean 1 and a variance by the kind. Runs of T predicted
seconds say it with a variance of `RUN_VARIANCE_S / T`, so the posterior mean is (measured + prior_s) / (predicted + prior_s), where prior_s
= RUN_VARIANCE_S / variance: the seconds of predicted run time that the prior weighs as much as (the conjugate update of a normal mean,
weights by precision).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import ORIGIN_FACTS, ORIGIN_MEASURED, ORIGIN_SHIPPED, HardwareKey, HardwareProfile
from qlm_core.vocabulary.model import ModelFacts
from qlm_estimator.newest_rows import put_newest

RUN_VARIANCE_S = 0.6
"""Variance of the ratio of measured to predicted over one second of run time. Large, since the runs of a batch share their steps: 5 s of
one run are known to 35%, 100 runs of 5 s to 3.5%."""

DEVIATION: Mapping[str, float] = {ORIGIN_SHIPPED: 0.1, ORIGIN_MEASURED: 0.09, ORIGIN_FACTS: 0.2}
"""Relative standard deviation of an instance's true duration about its pair's row. Instances of one kind differ by about 9%; a shipped row
has an error of its own; one from facts is off by 7 to 15% of a shipped one (see hardware_prior.py), which is off itself."""

ROWS_MAX = 1024
"""Imported rows, and rows from facts, that are kept; the oldest go first."""


def prior_s(row: HardwareProfile) -> float:
    """Seconds of predicted run time that a pair's row weighs as much as: 60 shipped, 74 measured, 15 from facts."""
    return RUN_VARIANCE_S / DEVIATION[row.origin] ** 2


class BaseRows:
    """The rows of pairs. Those from facts are made at the first request."""

    def __init__(self, *, shipped: tuple[HardwareProfile, ...], facts: Mapping[str, ModelFacts | None] | None = None) -> None:
        """`facts`: of models by the name of their profile, where they are not those that QLM knows."""
        self._shipped = {row.key: row for row in shipped if row.origin != ORIGIN_FACTS}
        self._measured: dict[HardwareKey, HardwareProfile] = {}
        self._from_facts: dict[HardwareKey, HardwareProfile] = {}
        self._facts = facts or {}

    def of(self, gpu: str, n_gpu: int, profile_name: str) -> HardwareProfile | None:
        """The row of a pair; None where not even facts are known."""
        key = (gpu, n_gpu, profile_name)
        row = self._measured.get(key) or self._shipped.get(key) or self._from_facts.get(key)
        if row is None:
            row = hardware_prior(gpu, n_gpu, profile_name, self._facts.get(profile_name))
            if row is not None:
                put_newest(self._from_facts, row.key, row, ROWS_MAX)
        return row

    def take(self, rows: Iterable[HardwareProfile]) -> None:
        """Takes the measured rows among these in place of what was there for their pairs."""
        for row in rows:
            if not row.instance and row.origin == ORIGIN_MEASURED:
                self._from_facts.pop(row.key, None)
                put_newest(self._measured, row.key, row, ROWS_MAX)

    def rows(self) -> tuple[HardwareProfile, ...]:
        """All of them, those from facts as far as requested."""
        return tuple({**self._shipped, **self._measured, **self._from_facts}.values())
