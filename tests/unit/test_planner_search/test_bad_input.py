"""Problems and orders that make no sense are refused by name; hard ones are solved."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from drawn_problems import by_hand
from qlm_planner.search import Orders, Problem, ProblemError, Weights
from qlm_planner.search.solver import construct, evaluate, improve, solve


def two() -> Problem:
    return by_hand(model=[0, 1], work_s=[[10.0, 20.0]], deadline_s=[30.0, 40.0], kind=[0, 0], active=[0, -1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", np.array([1.0, math.nan])),
        ("count", np.array([1.0, -1.0])),
        ("count", np.array([1.0])),
        ("deadline_s", np.array([1.0, math.nan])),
        ("deadline_s", np.array([1.0, -math.inf])),
        ("spread_s", np.array([1.0, math.inf])),
        ("weight", np.array([1.0, math.inf])),
        ("work_s", np.array([[1.0, math.nan]])),
        ("work_variance", np.array([[1.0, -1.0]])),
        ("own_variance", np.array([[math.nan, 1.0]])),
        ("cold_s", np.array([[1.0, -2.0]])),
        ("model", np.array([0, 2], dtype=np.int32)),
        ("model", np.array([0, -1], dtype=np.int32)),
        ("kind", np.array([0, 1], dtype=np.int32)),
        ("active", np.array([0, 7], dtype=np.int32)),
        ("head", np.array([1, 1], dtype=np.int32)),
        ("head", np.array([2, -1], dtype=np.int32)),
        ("lead_s", np.array([0.0, math.nan])),
        ("warm", np.zeros((2, 3), dtype=np.bool_)),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field: str, value: object) -> None:
    with pytest.raises(ProblemError, match=f"^{field}: "):
        replace(two(), **{field: value})  # type: ignore[arg-type]


def test_there_must_be_a_queue() -> None:
    none = np.zeros(0)
    with pytest.raises(ProblemError, match=r"there must be 1 to"):
        replace(
            two(),
            kind=np.zeros(0, dtype=np.int32),
            active=np.zeros(0, dtype=np.int32),
            head=np.zeros(0, dtype=np.int32),
            lead_s=none,
            lead_variance=none,
            drain_lead_s=none,
            drain_lead_variance=none,
            warm=np.zeros((0, 2), dtype=np.bool_),
            clear_cost=none,
            leave_cost=none,
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_weight_that_makes_no_sense_is_named(value: float) -> None:
    with pytest.raises(ProblemError, match=r"^weights\.late: "):
        Weights(late=value)


@pytest.mark.parametrize("orders", [[[0, 0], [1]], [[0], [2]], [[0, 1]], [[0], [-1]]])
def test_orders_that_do_not_fit_are_refused(orders: list[list[int]]) -> None:
    with pytest.raises(ProblemError):
        evaluate(two(), Orders.of(orders))
    with pytest.raises(ProblemError):
        improve(two(), Orders.of(orders), moves=10, seed=1)


def test_a_group_has_no_cost_where_it_cannot_be_served() -> None:
    problem = replace(two(), work_s=np.array([[10.0, math.inf]]))
    with pytest.raises(ProblemError, match="cannot serve"):
        evaluate(problem, Orders.of([[0], [1]]))


def test_nothing_that_can_be_served() -> None:
    problem = replace(two(), work_s=np.full((1, 2), math.inf))
    for solved in (
        construct(problem),
        solve(problem, moves=100, seed=1),
        improve(problem, Orders.of([[], []]), moves=10, seed=1),
    ):
        assert solved.orders.lists() == [[], []]
        assert solved.cost.total == 0.0


def test_a_model_that_no_kind_can_load() -> None:
    problem = replace(two(), cold_s=np.array([[30.0, math.inf]]))
    assert solve(problem, moves=100, seed=1).orders.groups.tolist() == [0]


def test_no_groups() -> None:
    problem = by_hand(model=[], work_s=[[]], deadline_s=[], kind=[0], active=[-1], models=1)
    assert solve(problem, moves=100, seed=1).orders.lists() == [[]]
    assert construct(problem).cost.total == 0.0


def test_no_deadlines_at_all() -> None:
    problem = by_hand(model=[0, 1, 0], work_s=[[10.0, 1.0, 10.0]], deadline_s=[math.inf] * 3, kind=[0], active=[0])
    solved = solve(problem, moves=500, seed=1)
    assert solved.cost.late == 0.0
    assert solved.cost.swaps == 1


def test_all_are_late_long_since() -> None:
    problem = by_hand(model=[0, 1, 0], work_s=[[10.0, 1.0, 10.0]], deadline_s=[-1e6] * 3, kind=[0], active=[0])
    solved = solve(problem, moves=500, seed=1)
    assert solved.cost.late == pytest.approx(30.0)
    assert math.isfinite(solved.cost.total)
