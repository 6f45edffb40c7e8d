"""The exact solver: HiGHS and GLPK against all orders where nothing is uncertain, and what it says when it has no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.planner.enumeration import enumerated
from benchmarks.planner.generator import Shape, drawn
from benchmarks.planner.printed import printed_optimum
from hypothesis import given, settings

from drawn_problems import by_hand, certain, problems
from problem_scenarios import at_quantile, sampled
from qlm_core.vocabulary.errors import ConfigError
from qlm_planner.exact.solver import (
    NoOrders,
    Scenario,
    Settings,
    Solver,
    SolverFailed,
    SolverMissing,
    Status,
    TooLarge,
    at_means,
    solve_exactly,
)
from qlm_planner.machine.effects import Solve, Stage
from qlm_planner.machine.events import Solved
from qlm_planner.search import Problem, Weights
from qlm_planner.search.solver import evaluate, solve
from qlm_planner.shell.solver_requests import Choice, answer
from slow_evaluator import cheapest, cheapest_together, least_completions, slow_completions, valid

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


@pytest.mark.parametrize("seed", range(3))
def test_all_orders_are_all_orders(seed: int) -> None:
    """With everything uncertain too."""
    problem = drawn(seed, Shape(groups=5, queues=2, models=3, tightness=1.5, bands=1 + seed % 2, partial=0.3))
    found = enumerated(problem)
    assert found.cost.total == pytest.approx(cheapest(problem), rel=1e-6)
    assert valid(problem, found.orders.lists())


@pytest.mark.parametrize("seed", range(0, 12, 3))
def test_the_scalable_solver_comes_near_proven_optima(seed: int) -> None:
    """It misses them by 0.012% at most."""
    problem = drawn(seed, Shape(groups=8, queues=1 + seed % 3, models=4, tightness=0.5 + 0.2 * seed))
    assert solve(problem, moves=40_000, seed=seed).cost.total == pytest.approx(enumerated(problem).cost.total, rel=2e-4)


def test_more_than_ten_groups_are_not_enumerated() -> None:
    with pytest.raises(ValueError, match="11 groups"):
        enumerated(small(1, groups=11))


def test_the_objective_as_printed_ignores_deadlines() -> None:
    """Equation 13: the short group first, though it has all the time and the long one has none."""
    problem = by_hand(model=[0, 0], work_s=[[10.0, 30.0]], deadline_s=[1_000.0, 31.0], kind=[0], active=[0])
    assert printed_optimum(problem).solved.orders.lists() == [[0, 1]]
    assert solve_exactly(problem).orders.lists() == [[1, 0]]


@given(problem=problems(groups_max=5, queues_max=2))
@settings(max_examples=20)
def test_the_least_sum_of_completions_is_that_of_all_orders(problem: Problem) -> None:
    """A batch may end late, be evicted, or be of a model that nobody requests."""
    problem = replace(problem, band=np.zeros_like(problem.band))
    found = printed_optimum(problem)
    assert valid(problem, found.solved.orders.lists())
    assert found.objective == pytest.approx(slow_completions(problem, found.solved.orders.lists()), rel=1e-9, abs=1e-6)
    assert found.objective == pytest.approx(least_completions(problem), rel=1e-9, abs=1e-6)


def test_a_sum_of_completions_has_no_bands_and_no_more_than_sixteen_groups() -> None:
    with pytest.raises(ValueError, match="17 groups"):
        printed_optimum(small(1, groups=17))
    with pytest.raises(ValueError, match="bands"):
        printed_optimum(small(1, bands=2))


def test_a_quantile_is_on_the_safe_side() -> None:
    """Which of two groups is late: in the mean neither, and the shorter one comes first; nine times of ten the uncertain one has to."""
    problem = by_hand(model=[0, 0], work_s=[[40.0, 50.0]], deadline_s=[95.0, 105.0], kind=[0], active=[0])
    problem = replace(
        problem,
        work_variance=np.array([[1.0, 100.0]]),
        own_variance=np.array([[0.0, 100.0]]),
        weights=Weights(completion=0.01),
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


def test_a_model_that_is_missed_stays_where_another_instance_is_as_good() -> None:
    problem = by_hand(model=[1, 0], work_s=[[10.0, 10.0]], deadline_s=[1_000.0] * 2, kind=[0, 0], active=[0, 2], models=3)
    problem = replace(problem, leave_cost=np.array([5_000.0, 0.0]))
    assert solve_exactly(problem).orders.lists() == enumerated(problem).orders.lists() == [[1], [0]]


def uncertain(seed: int) -> Problem:
    """Four groups, of which only the duration is uncertain, and no batch is evicted."""
    problem = small(seed)
    clear_cost = np.full(problem.queues, np.inf)
    return replace(problem, work_variance=(0.3 * problem.work_s) ** 2, own_variance=(0.2 * problem.own_s) ** 2, clear_cost=clear_cost)


def in_scenario(problem: Problem, scenario: Scenario, weights: Weights | None = None) -> Problem:
    """All comes out as in the scenario."""
    return replace(certain(problem), work_s=scenario.work_s, own_s=scenario.own_s, weights=weights or problem.weights)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_best_orders_for_samples_are_those_of_the_least_mean_cost(seed: int) -> None:
    """Over all orders, each sample by itself."""
    problem = uncertain(seed)
    samples = sampled(problem, 3, seed=seed)
    found = solve_exactly(problem, Settings(time_limit_s=60.0), samples)
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(cheapest_together([in_scenario(problem, each) for each in samples]) / 3, rel=1e-5)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_best_orders_at_a_quantile_count_late_by_it_and_all_else_in_the_mean(seed: int) -> None:
    problem = uncertain(seed)
    problem = replace(problem, leave_cost=0.0 * problem.leave_cost)
    mean, high = at_quantile(problem, 0.9)
    late_only = Weights(late=problem.weights.late, tardiness=0.0, work=0.0, completion=0.0)
    expected = cheapest_together(
        [in_scenario(problem, mean, replace(problem.weights, late=0.0)), in_scenario(problem, high, late_only)],
    )
    found = solve_exactly(problem, Settings(time_limit_s=60.0), (mean, high))
    assert found.objective == pytest.approx(expected, rel=1e-5)


def two_kinds() -> Problem:
    """Three groups, all of whose times are uncertain."""
    problem = by_hand(model=[0, 0, 1], work_s=[[40.0, 60.0, 80.0], [20.0, 30.0, 40.0]], deadline_s=[99.0] * 3, kind=[0, 1], active=[0, 0])
    own_s = np.array([[5.0, 6.0, 7.0], [4.0, 5.0, 6.0]])
    return replace(problem, own_s=own_s, work_variance=(0.3 * problem.work_s) ** 2, own_variance=(0.2 * own_s) ** 2)


def test_quantiles_and_samples_are_those_of_the_times() -> None:
    """Against normal times drawn by numpy."""
    problem = two_kinds()
    draws = np.random.default_rng(7).standard_normal((20_000, 1, 1))
    _, high = at_quantile(problem, 0.9)
    samples = sampled(problem, 100, seed=3)
    for times in ("work", "own"):
        mean, deviation = getattr(problem, f"{times}_s"), np.sqrt(getattr(problem, f"{times}_variance"))
        below = (mean + deviation * draws <= getattr(high, f"{times}_s")).mean(axis=0)
        assert below == pytest.approx(0.9, abs=0.01)
        drawn = np.stack([getattr(each, f"{times}_s") for each in samples])
        assert drawn.mean() == pytest.approx(mean.mean(), rel=0.1)
        assert drawn.std(axis=0) == pytest.approx(deviation, rel=0.3)


def test_samples_are_those_of_their_seed() -> None:
    problem = two_kinds()
    one, again, other = (sampled(problem, 5, seed=seed) for seed in (1, 1, 2))
    assert all((left.work_s == right.work_s).all() and (left.own_s == right.own_s).all() for left, right in zip(one, again, strict=True))
    assert not any((left.work_s == right.work_s).any() for left, right in zip(one, other, strict=True))


def test_an_unservable_group_takes_for_ever_in_every_sample() -> None:
    """Planners say so of all its times."""
    problem = two_kinds()
    never = np.array([[False, True, False], [False, False, True]])
    work_s, work_variance, own_s, own_variance = (
        np.where(never, np.inf, each) for each in (problem.work_s, problem.work_variance, problem.own_s, problem.own_variance)
    )
    problem = replace(problem, work_s=work_s, work_variance=work_variance, own_s=own_s, own_variance=own_variance)
    for sample in sampled(problem, 20, seed=1):
        assert (np.isinf(sample.work_s) == never).all()
        assert (np.isinf(sample.own_s) == never).all()


def test_nothing_that_can_be_served_is_an_answer() -> None:
    problem = replace(small(1), work_s=np.full((2, 4), np.inf))
    assert solve_exactly(problem).orders.lists() == [[], []]


def test_too_large_a_program_is_not_built() -> None:
    with pytest.raises(TooLarge, match="seats"):
        solve_exactly(small(1, groups=60, queues=6))


def test_a_missing_solver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlm_planner.exact.backends.glpsol", lambda: None)
    with pytest.raises(SolverMissing, match="glpsol"):
        solve_exactly(small(1), Settings(solver=Solver.GLPK))


def test_a_failing_solver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlm_planner.exact.backends.glpsol", lambda: "/bin/false")
    with pytest.raises((SolverFailed, SolverMissing)):
        solve_exactly(small(1), Settings(solver=Solver.GLPK))


@pytest.mark.parametrize("solver", list(Solver))
def test_a_solver_that_runs_out_of_time_answers_or_says_so(solver: Solver) -> None:
    problem = small(3, groups=12, queues=3)
    try:
        found = solve_exactly(problem, Settings(solver=solver, time_limit_s=0.3))
    except NoOrders:
        return
    assert valid(problem, found.orders.lists())
    assert found.gap > 0.0 or found.status is Status.OPTIMAL


def test_a_gap_is_a_share_of_what_was_found() -> None:
    found = [solve_exactly(small(seed, groups=5), Settings(gap=0.5)) for seed in range(1, 5)]
    assert max(each.gap for each in found) > 0.01, "not all were solved to the end"
    for each in found:
        assert each.gap == pytest.approx(max(0.0, each.objective - each.bound) / each.objective, abs=1e-6)
        assert each.gap <= 0.5 + 1e-6


def test_a_bound_is_never_above_the_optimum() -> None:
    """GLPK reports none where it stops at its gap."""
    ratios = []
    for seed in range(1, 7):
        problem = small(seed, groups=5)
        found = solve_exactly(problem, Settings(solver=Solver.GLPK, gap=0.5))
        assert found.bound <= cheapest(problem) * (1.0 + 1e-6)
        ratios.append(found.objective / cheapest(problem))
    assert max(ratios) > 1.01, "not all were solved to the end"


@pytest.mark.parametrize("solver", list(Solver))
def test_orders_unproven_in_time_are_not_called_proven(solver: Solver) -> None:
    """A market split: how to halve the sums of several rows at once is found in no time to within a little, and proven in days."""
    import pyomo.environ as pyo  # late: it takes a second

    from qlm_planner.exact.backends import BACKENDS

    model, chance = pyo.ConcreteModel(), np.random.default_rng(1)
    model.x = pyo.Var(range(50), domain=pyo.Binary)
    model.off = pyo.Var(range(6), bounds=(0.0, None))
    model.rules = pyo.ConstraintList()
    for row in range(6):
        shares = chance.integers(1, 100, 50).tolist()
        half = sum(shares) // 2
        split = sum(share * model.x[number] for number, share in enumerate(shares))
        model.rules.add(split - half <= model.off[row])
        model.rules.add(half - split <= model.off[row])
    model.cost = pyo.Objective(expr=sum(model.off[row] for row in range(6)), sense=pyo.minimize)
    found = BACKENDS[solver](model, 1.0, 1e-6)
    assert found.status is Status.FEASIBLE
    assert found.bound < found.objective


@pytest.mark.parametrize("wrong", [{"time_limit_s": 0.0}, {"time_limit_s": float("inf")}, {"gap": 1.0}, {"gap": -0.1}, {"solver": "cplex"}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0.3, 1.0])
def test_a_level_is_a_quantile_above_the_median(level: float) -> None:
    with pytest.raises(ConfigError, match="level"):
        at_quantile(small(1), level)


# Jobs of the solver ------------------------------------------------------------------------------------------------------


def polished(problem: Problem, *, moves: int = 0) -> Solve:
    return Solve(job=1, stage=Stage.REPLAN, problem=problem, orders=None, moves=moves, seed=1)


def answered(job: Solve, choice: Choice) -> Solved:
    found = answer(job, choice)
    assert isinstance(found, Solved), found
    return found


@pytest.mark.parametrize("choice", [Choice.EXACT_HIGHS, Choice.EXACT_GLPK])
def test_exact_orders_are_taken_where_they_are_cheaper(choice: Choice) -> None:
    """Than those of a search without a move."""
    problem = small(5)
    first, exact = answered(polished(problem), Choice.HEURISTIC), answered(polished(problem), choice)
    assert exact.rule == f"{choice}: optimal"
    cost = evaluate(problem, exact.orders).total
    assert cost == pytest.approx(cheapest(problem), rel=1e-5)
    assert cost < 0.99 * evaluate(problem, first.orders).total


def test_exact_orders_of_the_means_are_left_where_uncertainty_makes_them_dearer() -> None:
    problem = by_hand(model=[0, 0], work_s=[[40.0, 20.0]], deadline_s=[1_000.0, 65.0], kind=[0], active=[0])
    problem = replace(problem, count=np.array([100.0, 10.0]), work_variance=np.array([[900.0, 0.0]]))
    assert solve_exactly(problem).orders.lists() == [[0, 1]]
    found = answered(polished(problem, moves=500), Choice.EXACT_HIGHS)
    assert found.orders.lists() == [[1, 0]]
    assert found.rule.endswith(f"; {Choice.EXACT_HIGHS}: optimal")


def test_the_chosen_solver_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlm_planner.exact.backends.glpsol", lambda: None)
    assert "glpsol" in answered(polished(small(5)), Choice.EXACT_GLPK).rule
    assert "glpsol" not in answered(polished(small(5)), Choice.EXACT_HIGHS).rule


def test_more_groups_than_can_be_proven_are_not_tried() -> None:
    for groups, tried in ((10, True), (11, False)):
        found = answered(polished(small(1, groups=groups, queues=1), moves=500), Choice.EXACT_HIGHS)
        assert (str(Choice.EXACT_HIGHS) in found.rule) is tried
