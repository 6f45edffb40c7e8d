"""The exact solver: HiGHS and GLPK against all orders where nothing is uncertain, and what it says when it has no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from drawn_problems import by_hand, certain, problems
from qlm_core.errors import ConfigError
from qlm_load.bench_planner.generator import Shape, drawn
from qlm_planner.exact import (
    ExactError,
    NoOrders,
    Settings,
    Solver,
    SolverFailed,
    SolverMissing,
    Status,
    TooLarge,
    at_means,
    at_quantile,
    backends,
    enumerated,
    printed_optimum,
    sampled,
    solve_exactly,
)
from qlm_planner.solver import Problem, Weights, solve
from slow_evaluator import cheapest, least_completions, slow_completions, valid

pytest.importorskip("pyomo", reason="the extra planner is not installed")


def small(seed: int, *, groups: int = 4, queues: int = 2, bands: int = 1) -> Problem:
    return certain(drawn(seed, Shape(groups=groups, queues=queues, models=3, tightness=1.5, bands=bands, partial=0.2)))


@pytest.mark.parametrize("solver", list(Solver))
@pytest.mark.parametrize("seed", [1, 2])
def test_the_program_is_the_cost_where_nothing_is_uncertain(solver: Solver, seed: int) -> None:
    problem = small(seed, bands=seed)
    found = solve_exactly(problem, Settings(solver=solver, time_limit_s=60.0))
    assert found.status is Status.OPTIMAL
    assert found.gap < 1e-5
    assert found.objective == pytest.approx(found.cost.total, rel=1e-5)
    assert found.cost.total == pytest.approx(cheapest(problem), rel=1e-5)
    assert valid(problem, found.orders.lists())


@pytest.mark.parametrize("seed", range(6))
def test_all_orders_are_all_orders(seed: int) -> None:
    """With everything uncertain too."""
    problem = drawn(seed, Shape(groups=5, queues=2, models=3, tightness=1.5, bands=1 + seed % 2, partial=0.3))
    found = enumerated(problem)
    assert found.cost.total == pytest.approx(cheapest(problem), rel=1e-6)
    assert valid(problem, found.orders.lists())


@pytest.mark.parametrize("seed", range(12))
def test_the_scalable_solver_hits_proven_optima(seed: int) -> None:
    problem = drawn(seed, Shape(groups=8, queues=1 + seed % 3, models=4, tightness=0.5 + 0.2 * seed))
    assert solve(problem, moves=40_000, seed=seed).cost.total == pytest.approx(enumerated(problem).cost.total, rel=1e-6)


def test_more_than_ten_groups_are_not_enumerated() -> None:
    with pytest.raises(TooLarge, match="11 groups"):
        enumerated(small(1, groups=11))


def test_the_objective_as_printed_ignores_deadlines() -> None:
    """Equation 13: the short group first, though it has all the time and the long one has none."""
    problem = by_hand(model=[0, 0], work_s=[[10.0, 30.0]], deadline_s=[1_000.0, 31.0], kind=[0], active=[0])
    assert solve_exactly(problem, Settings(printed=True)).orders.lists() == [[0, 1]]
    assert solve_exactly(problem).orders.lists() == [[1, 0]]


@given(problem=problems(groups_max=5, queues_max=2))
@settings(max_examples=40, deadline=None)
def test_the_least_sum_of_completions_is_that_of_all_orders(problem: Problem) -> None:
    """What runs may end late, give way, or be of a model that nobody asks for."""
    problem = replace(problem, band=np.zeros_like(problem.band))
    found = printed_optimum(problem)
    assert valid(problem, found.solved.orders.lists())
    assert found.objective == pytest.approx(slow_completions(problem, found.solved.orders.lists()), rel=1e-9, abs=1e-6)
    assert found.objective == pytest.approx(least_completions(problem), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_least_sum_of_completions_is_that_of_the_program(seed: int) -> None:
    problem = small(seed, groups=5)
    program = solve_exactly(problem, Settings(printed=True, time_limit_s=60.0))
    assert program.status is Status.OPTIMAL
    assert printed_optimum(problem).objective == pytest.approx(program.objective, rel=1e-5)


def test_a_sum_of_completions_has_no_bands_and_no_more_than_sixteen_groups() -> None:
    with pytest.raises(TooLarge, match="17 groups"):
        printed_optimum(small(1, groups=17))
    with pytest.raises(TooLarge, match="bands"):
        printed_optimum(small(1, bands=2))


def test_a_quantile_is_on_the_safe_side() -> None:
    """Which of two groups is late: in the mean neither, and the shorter one comes first; nine times of ten the uncertain one has to."""
    problem = by_hand(model=[0, 0], work_s=[[40.0, 50.0]], deadline_s=[95.0, 105.0], kind=[0], active=[0])
    problem = replace(
        problem,
        work_variance=np.array([[1.0, 100.0]]),
        own_variance=np.array([[0.0, 100.0]]),
        weights=Weights(completion=0.01, starvation=0.0),
    )
    problem = replace(problem, deadline_s=np.array([110.0, 95.0]))
    assert solve_exactly(problem).orders.lists() == [[0, 1]]
    assert solve_exactly(problem, None, at_quantile(problem, 0.9)).orders.lists() == [[1, 0]]


def test_samples_see_what_means_do_not() -> None:
    """Many requests that are done soon in the mean, but nobody knows: behind them the others are in time by the mean, and late nearly half
    the time."""
    problem = by_hand(model=[0, 0], work_s=[[40.0, 20.0]], deadline_s=[1_000.0, 65.0], kind=[0], active=[0])
    problem = replace(problem, count=np.array([100.0, 10.0]), work_variance=np.array([[900.0, 0.0]]))
    assert solve_exactly(problem, None, at_means(problem)).orders.lists() == [[0, 1]]
    assert solve_exactly(problem, None, sampled(problem, 20, seed=1)).orders.lists() == [[1, 0]]
    assert enumerated(problem).orders.lists() == [[1, 0]]


def test_nothing_that_can_be_served_is_an_answer() -> None:
    problem = replace(small(1), work_s=np.full((2, 4), np.inf))
    assert solve_exactly(problem).orders.lists() == [[], []]


def test_too_large_a_program_is_not_built() -> None:
    with pytest.raises(TooLarge, match="seats"):
        solve_exactly(small(1, groups=60, queues=6))


def test_a_missing_solver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "glpsol", lambda: None)
    with pytest.raises(SolverMissing, match="glpsol"):
        solve_exactly(small(1), Settings(solver=Solver.GLPK))


def test_a_failing_solver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "glpsol", lambda: "/bin/false")
    with pytest.raises((SolverFailed, SolverMissing)):
        solve_exactly(small(1), Settings(solver=Solver.GLPK))


@pytest.mark.parametrize("solver", list(Solver))
def test_a_solver_that_runs_out_of_time_answers_or_says_so(solver: Solver) -> None:
    problem = small(3, groups=12, queues=3)
    try:
        found = solve_exactly(problem, Settings(solver=solver, time_limit_s=1.0))
    except NoOrders:
        return
    assert valid(problem, found.orders.lists())
    assert found.gap > 0.0 or found.status is Status.OPTIMAL


def test_a_gap_is_a_share_of_what_was_found() -> None:
    found = [solve_exactly(small(seed, groups=6), Settings(gap=0.5)) for seed in range(1, 5)]
    assert max(each.gap for each in found) > 0.01, "not all were solved to the end"
    for each in found:
        assert each.gap == pytest.approx(max(0.0, each.objective - each.bound) / each.objective, abs=1e-6)
        assert each.gap <= 0.5 + 1e-6


def test_no_queue_has_more_groups_than_there_are_positions() -> None:
    problem = by_hand(model=[0, 0], work_s=[[10.0, 10.0], [50.0, 50.0]], deadline_s=[900.0, 900.0], kind=[0, 1], active=[0, 0])
    assert [len(order) for order in solve_exactly(problem).orders.lists()] == [2, 0]
    assert [len(order) for order in solve_exactly(problem, Settings(positions_max=1)).orders.lists()] == [1, 1]
    with pytest.raises(TooLarge, match="2 groups do not fit on 1 queues of 1 positions"):
        solve_exactly(by_hand(model=[0, 0], work_s=[[1.0, 1.0]], deadline_s=[9.0, 9.0], kind=[0], active=[0]), Settings(positions_max=1))


def test_all_its_errors_are_one_to_fall_back_on() -> None:
    assert all(issubclass(each, ExactError) for each in (NoOrders, SolverFailed, SolverMissing, TooLarge))


@pytest.mark.parametrize("wrong", [{"time_limit_s": 0.0}, {"time_limit_s": float("inf")}, {"gap": 1.0}, {"gap": -0.1}, {"solver": "cplex"}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0.3, 1.0])
def test_a_level_is_a_quantile_above_the_median(level: float) -> None:
    with pytest.raises(ConfigError, match="level"):
        at_quantile(small(1), level)
