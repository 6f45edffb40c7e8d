"""Which policy a setting names."""

from __future__ import annotations

from qlm_planner.policies.balancers import Chance, LeastLoaded, PowerOfTwo, RoundRobin
from qlm_planner.policies.baseline import Baseline
from qlm_planner.policies.batched import Batched
from qlm_planner.policies.deadlines import Edf
from qlm_planner.policies.fcfs import Fcfs
from qlm_planner.policies.shepherd import Shepherd
from qlm_planner.policy import Order, Policy


def baseline_of(policy: Policy) -> Baseline | None:
    """A new comparison policy, which keeps its own state; None for QLM's own order."""
    match policy.order:
        case Order.SLO:
            return None
        case Order.FCFS:
            return Fcfs()
        case Order.EDF:
            return Edf()
        case Order.ROUND_ROBIN:
            return RoundRobin()
        case Order.RANDOM:
            return Chance(policy.seed)
        case Order.POWER_OF_TWO:
            return PowerOfTwo(policy.seed)
        case Order.LEAST_LOADED:
            return LeastLoaded()
        case Order.BATCHED:
            return Batched()
        case Order.SHEPHERD:
            return Shepherd()
