"""How near the solver's linear cost is to the one model of queues (`qlm_core.queue_model`, by `qlm_planner.timeline`).

On random boards, queues in random orders. Measured over 80 of them of 2 instances and 24 groups: expected late requests differ by 0.9% of
all requests in the mean and 3.5% at p95, tardiness by 5% and 10%. The bounds here are about twice that.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from qlm_planner.class_terms import ClassTerms
from qlm_planner.judging import plan_costs
from qlm_planner.problems import draft
from qlm_planner.solver import evaluate
from qlm_planner.solver.problem import Orders

from .test_class_terms import estimates, random_board
from .world import START_S

SEEDS, ORDERS = 8, 4


@pytest.mark.parametrize(("instances", "groups"), [(2, 24), (4, 60)])
def test_the_linear_cost_is_near_the_model_of_queues(instances: int, groups: int) -> None:
    late: list[float] = []
    tardiness: list[tuple[float, float]] = []
    for seed in range(SEEDS):
        board, made = random_board(seed, instances=instances, groups=groups), estimates()
        terms = ClassTerms(estimates=made)
        found = draft(board, made, terms, START_S)
        assert found is not None
        chance = random.Random(seed)
        for _ in range(ORDERS):
            queues = found.orders.lists()
            for queue in queues:
                rest = queue[1:]
                chance.shuffle(rest)
                queue[1:] = rest
            orders = Orders.of(queues)
            [judged] = plan_costs(board, terms, START_S, [found.lists(orders)])
            linear = evaluate(found.problem, orders)
            late.append(abs(linear.late - judged.late) / float(found.problem.count.sum()))
            tardiness.append((linear.tardiness_s, judged.tardiness_s))
    assert np.mean(late) <= 0.02
    assert max(late) <= 0.10
    told, expected = np.sum(tardiness, axis=0)
    assert told == pytest.approx(expected, rel=0.10)
