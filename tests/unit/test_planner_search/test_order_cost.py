"""The cost of orders on arrays: against the compiled walk of the search, and at the ends of what may come."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_problems import by_hand, problems
from qlm_planner.search import Orders, Problem
from qlm_planner.search.order_state import plan_cost, plan_of
from qlm_planner.search.packing import packed
from qlm_planner.search.solver import construct, evaluate, solve
from slow_evaluator import slow_cost


def walked(problem: Problem, orders: Orders) -> float:
    """By the search, one group at a time."""
    own = packed(problem)
    return float(plan_cost(plan_of(own, orders.first, orders.groups, problem.groups)))


@given(problem=problems(), seed=st.integers(0, 1_000), busy=st.booleans())
@settings(max_examples=60)
def test_the_walk_of_the_search_costs_the_same(problem: Problem, seed: int, busy: bool) -> None:
    """Any order, with engines that may evict."""
    chance = np.random.default_rng(seed)
    if busy:
        clear_cost = chance.choice([0.0, 50.0, 5_000.0], problem.queues)
        leave_cost = chance.choice([0.0, 3_000.0], problem.queues)
        problem = replace(
            problem,
            drain_lead_s=chance.uniform(0.0, 60.0, problem.queues),
            clear_cost=clear_cost,
            leave_cost=leave_cost,
        )
    queues = [list(chance.permutation(queue)) for queue in construct(problem).orders.lists()]
    orders = Orders.of([sorted(queue, key=lambda group: int(problem.band[group])) for queue in queues])
    total = evaluate(problem, orders).total
    assert walked(problem, orders) == pytest.approx(total, rel=1e-6, abs=1e-3)
    assert slow_cost(problem, orders) == pytest.approx(total, rel=1e-6, abs=1e-3)


def test_an_active_model_that_leaves_costs_what_it_misses() -> None:
    """Where another comes first."""
    problem = by_hand(model=[0, 1, 1, 2], work_s=[[5.0] * 4], deadline_s=[1e4] * 4, kind=[0], active=[0])
    problem = replace(problem, leave_cost=np.array([20.0]))
    for order, missed in (([0, 1, 2, 3], 0.0), ([1, 2, 0, 3], 20.0), ([3, 0, 1, 2], 20.0), ([], 0.0)):
        orders = Orders.of([order])
        assert evaluate(problem, orders).missed_cost == missed
        assert walked(problem, orders) == pytest.approx(evaluate(problem, orders).total)


@pytest.mark.parametrize(
    ("deadline_s", "clear_cost", "evicts"),
    [(50.0, 300.0, True), (1e4, 300.0, False), (15.0, 300.0, True), (15.0, 2_000.0, False), (50.0, 20_000.0, False)],
)
def test_a_batch_is_evicted_only_where_the_head_wins_more_than_that_costs(deadline_s: float, clear_cost: float, evicts: bool) -> None:
    problem = by_hand(model=[0], work_s=[[5.0]], deadline_s=[deadline_s], kind=[0], active=[1], models=2, swap_s=20.0)
    problem = replace(problem, drain_lead_s=np.array([100.0]), clear_cost=np.array([clear_cost]))
    cost = evaluate(problem, Orders.of([[0]]))
    starts_s = 20.0 if evicts else 120.0
    assert cost.redo_cost == (clear_cost if evicts else 0.0)
    assert cost.completion_s == pytest.approx(problem.count[0] * (starts_s + 2.5))
    assert walked(problem, Orders.of([[0]])) == pytest.approx(cost.total)


def test_without_deadlines_nothing_is_late() -> None:
    problem = by_hand(model=[0, 1], work_s=[[5_000.0, 5.0]], deadline_s=[math.inf, math.inf], kind=[0], active=[0])
    problem = replace(problem, slo_s=np.full(2, math.inf), work_variance=np.full((1, 2), 1e6))
    cost = evaluate(problem, Orders.of([[0, 1]]))
    assert (cost.late, cost.tardiness_s) == (0.0, 0.0)
    weights = problem.weights
    assert cost.total == pytest.approx(weights.work * cost.swap_s + weights.completion * cost.completion_s)
    assert walked(problem, Orders.of([[0, 1]])) == pytest.approx(cost.total)


@pytest.mark.parametrize(("active", "warm", "swap_s"), [(0, False, 0.0), (1, False, 30.0), (1, True, 4.0), (-1, False, 0.0)])
def test_a_swap_costs_its_time_but_for_the_first_load_of_an_engine(active: int, warm: bool, swap_s: float) -> None:
    problem = by_hand(model=[0], work_s=[[5.0]], deadline_s=[1e4], kind=[0], active=[active], models=2)
    problem = replace(problem, warm_s=np.full((1, 2), 4.0), warm=np.array([[warm, False]]))
    cost = evaluate(problem, Orders.of([[0]]))
    assert cost.swap_s == swap_s
    assert cost.swaps == (active != 0)
    assert cost.completion_s == problem.count[0] * ((30.0 if active < 0 else swap_s) + 2.5)


@pytest.mark.parametrize(("busy_s", "swap_s"), [(10.0, 20.0), (100.0, 4.0)])
def test_a_model_is_loaded_while_the_one_before_is_served(busy_s: float, swap_s: float) -> None:
    problem = by_hand(model=[0, 1], work_s=[[busy_s, 5.0]], deadline_s=[1e4, 1e4], kind=[0], active=[0])
    problem = replace(problem, warm_s=np.full((1, 2), 4.0))
    assert evaluate(problem, Orders.of([[0, 1]])).swap_s == pytest.approx(swap_s)


def test_each_request_is_late_by_its_own_place_and_deadline() -> None:
    """A group of 10 that takes 100 s and is due half way; one whose deadlines are as far apart as its ends."""
    problem = by_hand(model=[0], work_s=[[100.0]], deadline_s=[50.0], kind=[0], active=[0])
    assert evaluate(problem, Orders.of([[0]])).late == pytest.approx(5.0)
    assert evaluate(replace(problem, spread_s=np.array([100.0])), Orders.of([[0]])).late == pytest.approx(0.0)


# CP-SAT as an oracle of deterministic problems: another formulation, by another solver, in a process of its own -------


ORACLE = Path(__file__).parents[2] / "support" / "cp_sat_oracle.py"

if importlib.util.find_spec("ortools") is None:
    pytest.skip("ortools is not installed (the extra dev)", allow_module_level=True)


@pytest.mark.parametrize(("seed", "groups", "queues"), [(1, 7, 1), (2, 7, 2), (3, 8, 3)])
def test_the_cheapest_orders_cost_what_cp_sat_proves(seed: int, groups: int, queues: int) -> None:
    chance = np.random.default_rng(seed)
    models = 3
    model = chance.integers(0, models, groups).tolist()
    work_s = chance.integers(5, 60, groups).tolist()
    deadline_s = chance.integers(10, 200, groups).tolist()
    count = [int(each) * 32 for each in chance.integers(1, 5, groups)]
    active = chance.integers(-1, models, queues).tolist()
    swap_s = 25
    problem = by_hand(model=model, work_s=[work_s], deadline_s=deadline_s, kind=[0] * queues, active=active, swap_s=swap_s, models=models)
    problem = replace(problem, count=np.array(count, dtype=np.float64))
    described = {
        "model": model,
        "count": count,
        "work_s": work_s,
        "deadline_s": deadline_s,
        "swap_s": [swap_s] * models,
        "active": active,
        "work_weight": 10,
    }
    ran = subprocess.run([sys.executable, ORACLE], input=json.dumps(described), capture_output=True, text=True, timeout=100, check=True)
    assert solve(problem, moves=40_000, seed=seed).cost.total == pytest.approx(json.loads(ran.stdout)["cost"], rel=1e-6, abs=1.0)
