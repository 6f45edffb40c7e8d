"""Engine policies by name (`agent.engine_policy`), and those that go by the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

from qlm_agent.engines.policies.feedback import FastServe, MlfqNaive
from qlm_agent.engines.policies.memory import Larry, NoPreempt
from qlm_agent.engines.policies.port import EnginePolicy, SequenceView
from qlm_agent.engines.policies.remaining import LearningToRank, Trail, TrailPlus
from qlm_agent.engines.policies.seats import FixedPriority
from qlm_agent.engines.policies.slo_batches import S3, SloOdbs
from qlm_agent.engines.policies.urgency import UrgencyFirst

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


ENGINE_POLICIES: Mapping[str, Callable[..., EnginePolicy]] = {
    "fcfs": FirstComeFirstServed,
    "edf": UrgencyFirst,
    "static": StaticBatches,
    "larry": Larry,
    "no-preempt": NoPreempt,
    "trail": Trail,
    "trail+": TrailPlus,
    "ltr": LearningToRank,
    "slo-odbs": SloOdbs,
    "s3": S3,
    "fastserve": FastServe,
    "mlfq-naive": MlfqNaive,
    "fixed-priority": FixedPriority,
}


def engine_policy(name: str, options: Mapping[str, Any]) -> EnginePolicy:
    """Makes a policy of this name, one of ENGINE_POLICIES or `module:Class`, with keyword arguments. Raises ValueError."""
    try:
        kind = ENGINE_POLICIES.get(name)
        if kind is None:
            module, colon, attribute = name.partition(":")
            if not colon:
                raise ValueError(f"is one of {', '.join(ENGINE_POLICIES)} or module:Class")
            kind = getattr(import_module(module), attribute)
        return kind(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise ValueError(f"engine policy {name}: {problem}") from problem
