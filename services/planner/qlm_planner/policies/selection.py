"""Selects the policy that a setting names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from qlm_planner.policies.balancers import Chance, LeastLoaded, PowerOfTwo, RoundRobin
from qlm_planner.policies.baseline import Baseline
from qlm_planner.policies.batched import Batched
from qlm_planner.policies.deadlines import Edf
from qlm_planner.policies.fcfs import Fcfs
from qlm_planner.policies.server_reports import LeastKv, ServerAware
from qlm_planner.policies.shepherd import Shepherd
from qlm_planner.policy import Order, Policy

BASELINES: Mapping[Order, Callable[[int], Baseline]] = {
    Order.FCFS: lambda seed: Fcfs(),
    Order.EDF: lambda seed: Edf(),
    Order.ROUND_ROBIN: lambda seed: RoundRobin(),
    Order.RANDOM: Chance,
    Order.POWER_OF_TWO: PowerOfTwo,
    Order.LEAST_LOADED: lambda seed: LeastLoaded(),
    Order.LEAST_KV: lambda seed: LeastKv(),
    Order.SAL: lambda seed: ServerAware(),
    Order.BATCHED: lambda seed: Batched(),
    Order.SHEPHERD: lambda seed: Shepherd(),
}


def order_of(name: str) -> str:
    """Checks the name of an order: an `Order`, or "module:Class" of the user's own. Raises ValueError for any other."""
    if ":" in name:
        _class_of(name)
        return name
    if name not in set(Order):
        raise ValueError(f"may be {', '.join(Order)}, or module:Class of a `qlm_planner.policies.baseline.Baseline`")
    return Order(name)


def baseline_of(policy: Policy) -> Baseline | None:
    """A new comparison policy with its own state; None for QLM's order."""
    if policy.order == Order.SLO:
        return None
    return _class_of(policy.order)() if ":" in policy.order else BASELINES[Order(policy.order)](policy.seed)


def _class_of(name: str) -> type[Baseline]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Baseline)):
        raise ValueError(f"{name}: not a subclass of `qlm_planner.policies.baseline.Baseline`")
    return found
