"""The scalable solver: its costs, against a slow reference; its orders, against all orders; what holds for every problem."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from benchmarks.planner.generator import Shape, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_problems import by_hand, problems
from qlm_planner.search import Orders, Problem, Solution
from qlm_planner.search.annealing import PLACE_BITS, anneal
from qlm_planner.search.group_cost import probability_and_excess
from qlm_planner.search.packing import packed
from qlm_planner.search.random_numbers import chance_of
from qlm_planner.search.solver import construct, evaluate, group_lateness, improve, solve
from slow_evaluator import cheapest, slow_cost, valid

FEW = settings(max_examples=60)
SOME = settings(max_examples=25)


def holds(problem: Problem, solved: Solution) -> None:
    """Each group that can be served exactly once, where it can be; bands never fall; the cost is that of the orders."""
    placed = solved.orders.groups.tolist()
    able = {
        group
        for group in range(problem.groups)
        if any(valid(problem, [[group] if other == queue else [] for other in range(problem.queues)]) for queue in range(problem.queues))
    }
    assert len(placed) == len(set(placed))
    assert set(placed) == able
    assert valid(problem, solved.orders.lists())
    assert solved.cost.total == pytest.approx(slow_cost(problem, solved.orders), rel=1e-6, abs=1e-3)


@given(z=st.floats(-8, 8))
@FEW
def test_the_table_is_the_normal_distribution(z: float) -> None:
    normal = NormalDist()
    probability, excess = probability_and_excess(z)
    assert probability == pytest.approx(normal.cdf(z), abs=1e-7)
    assert excess == pytest.approx(normal.pdf(z) + z * normal.cdf(z), abs=1e-7)


@given(problem=problems(), seed=st.integers(0, 100))
@FEW
def test_all_ways_to_orders_keep_what_holds_for_every_problem(problem: Problem, seed: int) -> None:
    built, solved = construct(problem), solve(problem, moves=400, seed=seed)
    better = improve(problem, built.orders, moves=200, seed=seed)
    for each in (built, solved, better):
        holds(problem, each)
    assert solved.cost.total <= built.cost.total
    assert better.cost.total <= built.cost.total


@given(problem=problems())
@FEW
def test_late_requests_are_those_of_the_groups(problem: Problem) -> None:
    """Groups that nobody serves are late for ever."""
    orders = construct(problem).orders
    share, over_s = group_lateness(problem, orders).T
    placed = np.zeros(problem.groups, dtype=np.bool_)
    placed[orders.groups] = True
    assert ((share == 1.0) & (over_s == math.inf))[~placed].all()
    late = problem.count * problem.weight * share
    assert late[placed].sum() == pytest.approx(evaluate(problem, orders).late, rel=1e-6, abs=1e-6)


def test_how_late_the_latest_of_a_group_is() -> None:
    """Groups of 10 s one behind the other: the second ends at 20 s, and was due at 15 s; or 5 s to 25 s, when its first is the latest."""
    problem = by_hand(model=[0, 0], work_s=[[10.0, 10.0]], deadline_s=[30.0, 15.0], kind=[0], active=[0])
    orders = Orders.of([[0, 1]])
    assert group_lateness(problem, orders)[:, 1].tolist() == [-20.0, 5.0]
    spread = replace(problem, deadline_s=np.array([30.0, 5.0]), spread_s=np.array([0.0, 20.0]))
    assert group_lateness(spread, orders)[:, 1].tolist() == [-20.0, 5.0]


@given(problem=problems(), seed=st.integers(0, 100))
@SOME
def test_a_seed_gives_the_same_orders(problem: Problem, seed: int) -> None:
    one, other = (solve(problem, moves=400, seed=seed) for _ in range(2))
    assert one.orders.lists() == other.orders.lists()
    assert one.cost == other.cost


@given(problem=problems(), seed=st.integers(0, 100), hot=st.sampled_from([0.0, 1e3, 1e4]))
@SOME
def test_kept_costs_of_rejected_moves_change_nothing(problem: Problem, seed: int, hot: float) -> None:
    """None are kept where queues have room for very many groups."""
    orders, arrays = construct(problem).orders, packed(problem)
    room = problem.groups + 1
    found = [anneal(arrays, orders.first, orders.groups, each, 2_000, hot, chance_of(seed)) for each in (room, 1 << PLACE_BITS)]
    (first, groups, cost), (other_first, other_groups, other_cost) = found
    assert (first.tolist(), groups.tolist(), cost) == (other_first.tolist(), other_groups.tolist(), other_cost)


@given(problem=problems(groups_max=5, queues_max=2))
@SOME
def test_small_problems_are_solved_to_a_thousandth_of_the_optimum(problem: Problem) -> None:
    assert solve(problem, moves=8_000, seed=1).cost.total == pytest.approx(cheapest(problem), rel=1e-3)


@given(problem=problems(noisy=False), seed=st.integers(0, 100))
@FEW
def test_an_insertion_leaves_nobody_out_and_costs_no_more_than_the_best_place(problem: Problem, seed: int) -> None:
    full = construct(problem)
    group = seed % problem.groups
    without = Orders.of([[each for each in queue if each != group] for queue in full.orders.lists()])
    found = improve(problem, without, moves=0, seed=seed)
    holds(problem, found)
    best = math.inf
    for queue in range(problem.queues):
        for place in range(len(without.lists()[queue]) + 1):
            lists = without.lists()
            lists[queue].insert(place, group)
            if valid(problem, lists):
                best = min(best, slow_cost(problem, Orders.of(lists)))
    if math.isfinite(best):
        assert found.cost.total == pytest.approx(best, rel=1e-6, abs=1e-3)
    assert improve(problem, without, moves=200, seed=seed).cost.total <= found.cost.total


@given(problem=problems(), seed=st.integers(0, 100))
@SOME
def test_broken_orders_are_mended(problem: Problem, seed: int) -> None:
    """Orders from before: bands mixed, groups where they cannot be served any more, groups that are on no queue yet."""
    chance = np.random.default_rng(seed)
    turn = chance.permutation(problem.groups)[: problem.groups - seed % 2]
    where = chance.integers(0, problem.queues, len(turn))
    mixed = Orders.of([turn[where == queue].tolist() for queue in range(problem.queues)])
    holds(problem, improve(problem, mixed, moves=100, seed=seed))


def test_the_parts_of_the_cost_add_up() -> None:
    problem = drawn(3, Shape(groups=40, queues=4, models=6, tightness=1.5))
    orders = construct(problem).orders
    cost, weights = evaluate(problem, orders), problem.weights
    parts = weights.late * cost.late + weights.tardiness * cost.tardiness_s + weights.work * cost.swap_s
    parts += weights.completion * cost.completion_s + cost.redo_cost + cost.missed_cost
    assert cost.total == pytest.approx(parts)


def test_a_late_request_of_a_heavy_tenant_counts_as_much_as_its_weight() -> None:
    """Two groups, one of which is late: the one that weighs less."""
    problem = by_hand(model=[0, 0], work_s=[[100.0, 100.0]], deadline_s=[101.0, 100.5], kind=[0], active=[0])
    heavy = replace(problem, weight=np.array([5.0, 1.0]))
    light = replace(problem, weight=np.array([1.0, 5.0]))
    assert solve(heavy, moves=500, seed=1).orders.lists() == [[0, 1]]
    assert solve(light, moves=500, seed=1).orders.lists() == [[1, 0]]


def test_tail_models_are_coupled_with_a_frequent_one() -> None:
    """QLM section 8.1: a model that is requested now and then shares an instance with a frequent one; nobody else swaps."""
    frequent, tail = 24, 6
    model = [number % 2 for number in range(frequent)] + [2] * tail
    problem = by_hand(
        model=model,
        work_s=[[20.0] * (frequent + tail)],
        deadline_s=[2_000.0] * (frequent + tail),
        kind=[0] * 4,
        active=[0, 1, 0, 1],
        swap_s=60.0,
    )
    solved = solve(problem, moves=20_000, seed=1)
    with_tail = [queue for queue in solved.orders.lists() if any(model[group] == 2 for group in queue)]
    assert len(with_tail) == 1
    assert solved.cost.swaps == 1
    assert any(model[group] != 2 for group in with_tail[0])


def test_a_head_is_displaced_only_for_a_gain() -> None:
    """A request of another model that would be late behind it."""
    problem = by_hand(model=[0, 1], work_s=[[50.0, 5.0]], deadline_s=[1e4, 60.0], kind=[0], active=[0], swap_s=20.0, count=1.0)
    served = replace(problem, head=np.array([0], dtype=np.int32))
    assert solve(served, moves=500, seed=1).orders.lists() == [[1, 0]]
    careful = replace(served, leave_cost=np.array([2_000.0]))
    assert solve(careful, moves=500, seed=1).orders.lists() == [[0, 1]]


def test_ten_thousand_groups_in_one_queue() -> None:
    """400,000 requests that one instance has to serve."""
    problem = drawn(1, Shape(groups=10_000, queues=1, models=8, requests=(39, 41)))
    assert problem.count.sum() >= 390_000
    built = construct(problem)
    assert sorted(built.orders.groups.tolist()) == list(range(10_000))
    assert improve(problem, built.orders, moves=200, seed=1).cost.total <= built.cost.total
