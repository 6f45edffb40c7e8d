"""Engine policies by name (`agent.engine_policy`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from qlm_agent.engines.policies.arrival import FirstComeFirstServed, StaticBatches
from qlm_agent.engines.policies.feedback import FastServe, MlfqNaive
from qlm_agent.engines.policies.memory import Larry, NoPreempt
from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.policies.remaining import LearningToRank, Trail, TrailPlus
from qlm_agent.engines.policies.seats import FixedPriority
from qlm_agent.engines.policies.slo_batches import S3, SloOdbs
from qlm_agent.engines.policies.urgency import UrgencyFirst

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
