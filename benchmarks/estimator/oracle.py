"""An estimator that knows each class's current mean: it learns a request's length at its arrival, not at its end.

What is left of its error is what no learner of classes can know: how the requests of one class differ, and how the class changes while a
request waits.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.estimator.follower import Follower
from benchmarks.estimator.workloads import SLO, Arrival
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.workload_profile import WorkloadProfile
from qlm_core.vocabulary.group import GroupKey, slo_class
from qlm_estimator.lengths.classes import LengthLearner

MEMORY_REQUESTS = 100.0
"""Arrivals of a class that its current mean is taken over: of outputs that vary as much as they are long, 10% of it is chance."""
ROWS_MAX = 4096
PUBLISHED_EVERY = 32
"""Arrivals between two publications."""


class Oracle(Follower):
    """As `Follower`, with the lengths of classes as they are now."""

    _rows: LengthLearner | None = None
    _workload: tuple[WorkloadProfile, ...] = ()

    @property
    def snapshot(self) -> ProfileSnapshot:
        return replace(super().snapshot, workload=self._workload)

    def arrive(self, request: Arrival) -> GroupKey:
        key = super().arrive(request)
        if self._rows is None:
            self._rows = LengthLearner(memory=MEMORY_REQUESTS, rows_max=ROWS_MAX)
        classes = self._rows.classes(request.model, slo_class(SLO), key.token_class)
        self._rows.finish(classes, request.prompt_tokens, request.output_tokens)
        if request.number % PUBLISHED_EVERY == 0:
            self._workload = self._rows.profiles()
        return key
