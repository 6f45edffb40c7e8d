"""The board as a problem of the solver, and its orders back on a board that changed meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
import pytest

from qlm_planner.board.slot import Slot
from qlm_planner.cost import virtual_queues
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import REQUESTS, WORK, Floats, Integers
from qlm_planner.cost.service_times import ROWS, ClassTable, GroupColumns
from qlm_planner.cost.virtual_queues import plan_costs
from qlm_planner.plan.solver_problem import Draft, draft, reconciled
from qlm_planner.search import Orders, ProblemError
from qlm_planner.search.solver import evaluate

from .test_service_times import estimates, random_board, row_of
from .world import START_S


@pytest.mark.parametrize("seed", range(3))
def test_the_board_as_a_problem(seed: int) -> None:
    board, made = random_board(seed, unequal=True), estimates()
    terms = ClassTable(estimates=made)
    found = draft(board, made, terms, START_S)
    assert found is not None
    assert found.lists(found.orders) == {name: queue for name, queue in board.queues.items() if name in board.slots}
    problem = found.problem
    assert problem.cold_s.shape[0] == 2, "two kinds of four instances"
    assert [int(kind) for kind in problem.kind] == [0, 1, 0, 1]
    for number, group_id in enumerate(found.groups):
        group = board.groups[group_id]
        expected = row_of(made, board.slots["i-0"], group)
        assert problem.work_s[0, number] == pytest.approx(expected[WORK])
        assert problem.deadline_s[number] == pytest.approx(group.next_deadline_s - START_S)
        assert problem.deadline_s[number] + problem.spread_s[number] == pytest.approx(group.last_deadline_s - START_S)
        assert problem.weight[number] * problem.count[number] == pytest.approx(expected[REQUESTS])
        assert problem.band[number] == group.rank
    assert len(set(problem.band)) == 3
    assert problem.spread_s.any()


def test_an_unservable_group_has_no_finite_work() -> None:
    board, made = random_board(1), estimates()
    for name in ("i-0", "i-2"):
        slot = board.slots[name]
        slot.facts = replace(slot.facts, models=("alpha",))
    found = draft(board, made, ClassTable(estimates=made), START_S)
    assert found is not None
    model = np.array([board.groups[group_id].traits.key.model for group_id in found.groups])
    assert np.isinf(found.problem.work_s[0, model != "alpha"]).all()
    assert np.isfinite(found.problem.work_s[1]).all()


def test_terms_that_are_no_numbers_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    board, made = random_board(1), estimates()
    terms = ClassTable(estimates=made)
    shared = terms._shared
    monkeypatch.setattr(ClassTable, "_shared", lambda self, slot, key, size: shared(slot, key, size) * np.r_[np.nan, np.ones(ROWS - 1)])
    with pytest.raises(ProblemError, match="no number"):
        draft(board, made, terms, START_S)


@pytest.mark.parametrize("seed", range(4))
def test_an_order_costs_the_same_as_a_plan_and_as_the_answer_to_a_problem(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where batches are the mean one: the search knows no others."""

    def mean(slots: Sequence[Slot], known: Estimates, queue: Integers, groups: GroupColumns) -> Floats:
        return np.full((len(slots), known.codes), virtual_queues.mean_crowd(slots, groups.count))

    monkeypatch.setattr(virtual_queues, "crowds_of", mean)
    board, made = random_board(seed, unequal=True), estimates()
    terms, chance = ClassTable(estimates=made), random.Random(seed)
    found = draft(board, made, terms, START_S)
    assert found is not None
    for _ in range(4):
        lists = [chance.sample(queue, len(queue)) for queue in found.orders.lists()]
        for queue in lists:
            queue.sort(key=lambda number: int(found.problem.band[number]))
        orders = Orders.of(lists)
        [cost] = plan_costs(board, terms, START_S, [found.lists(orders)])
        assert astuple(evaluate(found.problem, orders)) == pytest.approx(astuple(cost), rel=1e-9)


# Reconciling ----------------------------------------------------------------------------------------------------------


def reversed_orders(found: Draft) -> Orders:
    """All groups but the heads the other way round."""
    return Orders.of([[*queue[:1], *reversed(queue[1:])] for queue in found.orders.lists()])


def test_ended_groups_are_left_out_and_new_ones_are_kept() -> None:
    board, made = random_board(4), estimates()
    found = draft(board, made, ClassTable(estimates=made), START_S)
    assert found is not None
    gone, new = board.queues["i-0"][2], replace(board.groups[board.queues["i-1"][3]], group_id="g1-900")
    board.groups[gone].waiting = 0
    board.queues["i-0"].remove(gone)
    board.groups["g1-900"] = new
    board.queues["i-1"].insert(2, "g1-900")
    target = reconciled(board, found, reversed_orders(found))
    assert sorted(group_id for queue in target.values() for group_id in queue) == sorted(
        group_id for queue in board.queues.values() for group_id in queue
    )
    at = target["i-1"].index("g1-900")
    assert target["i-1"][at - 1] == board.queues["i-1"][1], "behind who is before it"


def test_an_instance_that_is_gone_keeps_what_it_had() -> None:
    board, made = random_board(4), estimates()
    found = draft(board, made, ClassTable(estimates=made), START_S)
    assert found is not None
    lists = found.orders.lists()
    orders = Orders.of([[], [*lists[1], *lists[0]], *lists[2:]])
    board.slots["i-0"].alive = False
    target = reconciled(board, found, orders)
    assert target["i-0"] == board.queues["i-0"]
    assert not set(target["i-1"]) & set(target["i-0"])


def test_an_instance_that_lost_a_model_meanwhile_is_given_nothing() -> None:
    board, made = random_board(4), estimates()
    found = draft(board, made, ClassTable(estimates=made), START_S)
    assert found is not None
    lists = found.orders.lists()
    board.slots["i-0"].facts = replace(board.slots["i-0"].facts, models=("alpha",))
    target = reconciled(board, found, Orders.of([[*lists[0], *lists[1]], [], *lists[2:]]))
    assert {name: target[name] for name in ("i-0", "i-1")} == {name: board.queues[name] for name in ("i-0", "i-1")}


def test_a_head_that_moved_up_meanwhile_stays_there() -> None:
    board, made = random_board(4), estimates()
    found = draft(board, made, ClassTable(estimates=made), START_S)
    assert found is not None
    first, second = board.queues["i-0"][:2]
    board.groups[first].waiting = 0
    board.queues["i-0"].remove(first)
    assert reconciled(board, found, reversed_orders(found))["i-0"][0] == second
