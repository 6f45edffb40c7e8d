"""What it costs to take its model off an instance."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_core.request import SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.demand import Demand
from qlm_planner.board.slot import Slot
from qlm_planner.cost.leave_cost import leave_costs
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of, plan_costs
from qlm_planner.groups.cheapest_place import best_place
from qlm_planner.plan.solver_problem import draft

from .test_advice import arrival
from .test_cheapest_place import POLICY, board_of, class_table, estimates, group, slot
from .world import START_S, World

SWAP_S = 10.0


def demanded(per_s: float, slo_s: float, kind: SloKind = SloKind.COMPLETION, watched_s: float = 60.0) -> Demand:
    """Requests of model alpha that came at a rate until now."""
    demand = Demand(START_S - watched_s)
    count = round(per_s * watched_s)
    demand.saw(arrival(n, START_S - watched_s * (1.0 - n / count), model="alpha", slo_s=slo_s, kind=kind) for n in range(count))
    return demand


def board_with(demand: Demand, *slots: Slot) -> Board:
    board = board_of(slots, {})
    board.expect(demand.by_model(START_S))
    return board


def cost_of(demand: Demand, *slots: Slot) -> float:
    """Of alpha on the first instance."""
    made = estimates(swap_s=SWAP_S)
    return float(leave_costs(board_with(demand, *slots), made, slots)[0, made.code("alpha")])


def test_requests_are_late_that_come_while_the_model_is_away_and_cannot_wait_so_long() -> None:
    served = estimates(swap_s=SWAP_S).service_of_all(slot("a"), "alpha")
    hardware = estimates(swap_s=SWAP_S).hardware(slot("a").facts, "alpha")
    assert served is not None
    assert hardware is not None
    whole_s = served.prefill_s + served.output.mean * served.step_s
    away_s = 2.0 * hardware.swap_s(warm=True) + whole_s
    [rate] = demanded(2.0, 5.0).by_model(START_S)["alpha"]
    for slo_s, kind, own_s in ((5.0, SloKind.FIRST_TOKEN, served.prefill_s), (5.0, SloKind.COMPLETION, whole_s)):
        expected = POLICY.late_weight * rate.per_s * (away_s + own_s - slo_s)
        assert cost_of(demanded(2.0, slo_s, kind), slot("a")) == pytest.approx(expected)
    assert cost_of(demanded(2.0, away_s + whole_s), slot("a")) == 0.0, "all can wait"


def test_nothing_is_missed_where_others_carry_the_model() -> None:
    urgent = demanded(2.0, 5.0)
    alone = cost_of(urgent, slot("a"))
    assert cost_of(urgent, slot("a"), slot("b", active="beta")) == alone > 0.0
    assert cost_of(urgent, slot("a"), slot("b")) == 0.0
    served = estimates().service_of_all(slot("b"), "alpha")
    assert served is not None
    flood = 2.0 / served.work.mean
    assert cost_of(demanded(flood, 5.0), slot("a"), slot("b")) == pytest.approx(0.5 * cost_of(demanded(flood, 5.0), slot("a")), rel=0.01)


def test_a_model_that_nobody_asks_for_is_not_missed() -> None:
    made = estimates(swap_s=SWAP_S)
    [costs] = leave_costs(board_with(demanded(2.0, 5.0), slot("a")), made, [slot("a")])
    assert np.flatnonzero(costs).tolist() == [made.code("alpha")]


async def test_the_machine_expects_what_came() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    for _ in range(10):
        await world.submit("alpha", slo_s=5.0)
        await world.advance(1.0)
    [rate] = machine.board.expected["alpha"]
    assert rate.slo_s == 5.0
    assert rate.per_s == pytest.approx(1.0, rel=0.2)
    costs = machine.changes.table.leave_costs(machine.board, machine.board.serving)
    assert costs[0, machine.estimates.code("alpha")] > 0.0


def test_costs_follow_what_is_expected_and_what_instances_serve() -> None:
    made: ClassTable = class_table(swap_s=SWAP_S)
    board = board_with(demanded(2.0, 5.0), slot("a"), slot("b", active="gamma"))
    alpha = made.estimates.code("alpha")
    alone = made.leave_costs(board, board.serving)[0, alpha]
    board.expect(demanded(4.0, 5.0).by_model(START_S))
    assert made.leave_costs(board, board.serving)[0, alpha] == pytest.approx(2.0 * alone, rel=0.01)
    board.slots["b"].active_model = "alpha"
    assert made.leave_costs(board, board.serving)[0, alpha] == 0.0


def test_the_solver_has_the_same_costs() -> None:
    made: ClassTable = class_table(swap_s=SWAP_S)
    board = board_with(demanded(2.0, 5.0), slot("a"), slot("b", active="gamma"))
    for each in (group(1, "beta", 200.0), group(2, "alpha", 300.0)):
        board.groups[each.group_id] = each
        board.queues["b"].append(each.group_id)
    found = draft(board, made.estimates, made, START_S)
    assert found is not None
    costs = made.leave_costs(board, board.serving)[:, made.estimates.code("alpha")]
    assert found.problem.leave_cost.max(axis=1).tolist() == costs.tolist() != [0.0, 0.0]
    assert found.problem.leave_active_cost.tolist() == [costs[0], 0.0]


def test_a_group_goes_where_no_model_is_missed() -> None:
    made: ClassTable = class_table(swap_s=SWAP_S)
    board = board_with(demanded(2.0, 5.0), slot("a"), slot("b", active="gamma"))
    new = group(1, "beta", 200.0)
    found = best_place(lines_of(board, made, START_S), made, new, START_S)
    assert found is not None
    assert found.line.slot.facts.name == "b"
    board.groups[new.group_id] = new
    missed, kept = plan_costs(board, made, START_S, [{"a": [new.group_id]}, {"b": [new.group_id]}])
    assert missed.leave_cost - kept.leave_cost == pytest.approx(cost_of(demanded(2.0, 5.0), slot("a")))
