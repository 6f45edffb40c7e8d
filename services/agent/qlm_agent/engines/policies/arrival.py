"""Policies that go by the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from qlm_agent.engines.policies.port import EnginePolicy, SequenceView

_ARRIVAL = attrgetter("arrival")


class FirstComeFirstServed(EnginePolicy):
    """By arrival; the latest arrival is preempted (as vLLM does)."""

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(waiting, key=_ARRIVAL)]

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=_ARRIVAL, reverse=True)]


class StaticBatches(FirstComeFirstServed):
    """First come, first served in batches that nobody joins until all of it have ended (FasterTransformer; FastServe, section 6.1)."""

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return () if running else super().order(now_s, waiting, running)
