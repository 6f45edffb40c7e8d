"""Which policy a setting names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qlm_planner.policies.balancers import Chance, LeastLoaded, PowerOfTwo, RoundRobin
from qlm_planner.policies.baseline import Baseline
from qlm_planner.policies.batched import Batched
from qlm_planner.policies.deadlines import Edf
from qlm_planner.policies.fcfs import Fcfs
from qlm_planner.policies.shepherd import Shepherd
from qlm_planner.policy import Order, Policy

BASELINES: Mapping[Order, Callable[[int], Baseline]] = {
    Order.FCFS: lambda seed: Fcfs(),
    Order.EDF: lambda seed: Edf(),
    Order.ROUND_ROBIN: lambda seed: RoundRobin(),
    Order.RANDOM: Chance,
    Order.POWER_OF_TWO: PowerOfTwo,
    Order.LEAST_LOADED: lambda seed: LeastLoaded(),
    Order.BATCHED: lambda seed: Batched(),
    Order.SHEPHERD: lambda seed: Shepherd(),
}


def baseline_of(policy: Policy) -> Baseline | None:
    """A new comparison policy, which keeps its own state; None for QLM's own order."""
    return None if policy.order is Order.SLO else BASELINES[policy.order](policy.seed)
