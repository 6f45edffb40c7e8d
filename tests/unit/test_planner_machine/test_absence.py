"""The cost of a model that is not on an instance."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_core.vocabulary.request import SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.demand import Demand
from qlm_planner.board.slot import Slot
from qlm_planner.cost.absence import SLACKS, Absences
from qlm_planner.cost.expected_absences import absences_of
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of, plan_costs
from qlm_planner.groups.cheapest_place import best_place
from qlm_planner.plan.solver_problem import draft

from .test_advice import arrival
from .test_cheapest_place import POLICY, board_of, class_table, estimates, group, slot
from .world import START_S, World

SWAP_S = 10.0
NO_RUNS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)


def demanded(per_s: float, slo_s: float, kind: SloKind = SloKind.COMPLETION, watched_s: float = 60.0) -> Demand:
    """Requests of model alpha that arrived at a rate until now."""
    demand = Demand(START_S - watched_s)
    count = round(per_s * watched_s)
    demand.record(arrival(n, START_S - watched_s * (1.0 - n / count), model="alpha", slo_s=slo_s, kind=kind) for n in range(count))
    return demand


def board_with(demand: Demand, *slots: Slot) -> Board:
    board = board_of(slots, {})
    board.expect(demand.by_model(START_S))
    return board


def cost_of(demand: Demand, *slots: Slot) -> float:
    """Taking alpha off the first instance."""
    return float(absences_of(board_with(demand, *slots), estimates(swap_s=SWAP_S), slots).leave_cost[0])


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
    slots = [slot("a", active=model) for model in ("alpha", "beta")]
    found = absences_of(board_with(demanded(2.0, 5.0), *slots), made, slots)
    assert np.flatnonzero(found.leave_cost).tolist() == [0]
    assert set(zip(*np.nonzero(found.per_s.sum(axis=2)), strict=True)) <= {(1, made.code("alpha"))}


async def test_the_machine_expects_past_arrivals() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    for _ in range(10):
        await world.submit("alpha", slo_s=5.0)
        await world.advance(1.0)
    [rate] = machine.board.expected["alpha"]
    assert rate.slo_s == 5.0
    assert rate.per_s == pytest.approx(1.0, rel=0.2)
    found = machine.changes.table.absences(machine.board, machine.board.serving)
    assert found.leave_cost[0] + found.per_s[0, machine.estimates.code("alpha")].sum() > 0.0


def test_costs_follow_what_is_expected_and_what_instances_serve() -> None:
    made: ClassTable = class_table(swap_s=SWAP_S)
    board = board_with(demanded(2.0, 5.0), slot("a"), slot("b", active="gamma"))
    alpha = made.estimates.code("alpha")
    alone = made.absences(board, board.serving)
    board.expect(demanded(4.0, 5.0).by_model(START_S))
    twice = made.absences(board, board.serving)
    assert twice.leave_cost[0] == pytest.approx(2.0 * alone.leave_cost[0], rel=0.01)
    board.slots["b"].active_model = "alpha"
    assert not made.absences(board, board.serving).leave_cost.any()
    board.slots["a"].active_model = board.slots["b"].active_model = ""
    cold_s = made.absences(board, board.serving).load_s[0, alpha]
    board.slots["a"].warm_models = ("alpha",)
    assert made.absences(board, board.serving).load_s[0, alpha] < cold_s


def test_the_solver_has_the_same_costs() -> None:
    made: ClassTable = class_table(swap_s=SWAP_S)
    board = board_with(demanded(2.0, 5.0), slot("a"), slot("b", active="gamma"))
    for each in (group(1, "beta", 200.0), group(2, "alpha", 300.0)):
        board.groups[each.group_id] = each
        board.queues["b"].append(each.group_id)
    found = draft(board, made.estimates, made, START_S)
    assert found is not None
    assert found.problem.leave_cost.tolist() == made.absences(board, board.serving).leave_cost.tolist() != [0.0, 0.0]


def test_a_group_goes_where_no_model_is_missed() -> None:
    made: ClassTable = class_table(swap_s=SWAP_S)
    board = board_with(demanded(2.0, 5.0), slot("a"), slot("b", active="gamma"))
    new = group(1, "beta", 200.0)
    found = best_place(lines_of(board, made, START_S), made, new, START_S)
    assert found is not None
    assert found.line.slot.facts.name == "b"
    board.groups[new.group_id] = new
    missed, kept = plan_costs(board, made, START_S, [{"a": [new.group_id]}, {"b": [new.group_id]}])
    assert missed.missed_cost - kept.missed_cost == pytest.approx(cost_of(demanded(2.0, 5.0), slot("a")))


def away(per_s: float, slack_s: float, *, load_s: float = 10.0, warm_s: float = 2.0) -> Absences:
    """One queue and models 0 and 1: only 1 is requested, and it is not active."""
    found = Absences.none(1, 2)
    found.per_s[0, 1, 0], found.slack_s[0, 1, 0], found.load_s[0, 1], found.warm_s[0, 1] = per_s, slack_s, load_s, warm_s
    return found


@pytest.mark.parametrize(
    ("models", "starts_s", "end_s", "away_s"),
    [([], [], 0.0, 10.0), ([0], [0.0], 5.0, 10.0), ([0], [0.0], 30.0, 32.0), ([0, 1, 0, 1], [0.0, 20.0, 25.0, 40.0], 50.0, 20.0)],
)
def test_a_model_is_away_until_its_first_run_or_the_end_of_the_order(
    models: list[int], starts_s: list[float], end_s: float, away_s: float
) -> None:
    runs = np.zeros(len(models), dtype=np.int64), np.array(models, dtype=np.int64), np.array(starts_s)
    for slack_s in (4.0, 100.0):
        assert away(3.0, slack_s).costs(*runs, np.array([end_s])).tolist() == [3.0 * max(0.0, away_s - slack_s)]


def test_models_that_nobody_knows_are_of_no_account() -> None:
    """An instance says that it serves one, requests ask for another."""
    for active, wanted in (("strange", "alpha"), ("alpha", "odd")):
        made: ClassTable = class_table(swap_s=SWAP_S)
        demand = Demand(START_S - 60.0)
        demand.record(arrival(n, START_S - n, model=wanted, slo_s=5.0) for n in range(60))
        board = board_with(demand, slot("a", active=active), slot("b", active=""))
        new = group(1, "alpha", 600.0)
        assert best_place(lines_of(board, made, START_S), made, new, START_S) is not None
        board.groups[new.group_id] = new
        assert plan_costs(board, made, START_S, [{"a": [new.group_id]}])[0].total > 0.0


def test_an_absent_model_is_missed_once() -> None:
    """By the instances that lack the model, in equal parts."""
    urgent, made = demanded(2.0, 5.0), estimates(swap_s=SWAP_S)

    def missed(*slots: Slot) -> list[float]:
        found = absences_of(board_with(urgent, *slots), made, slots)
        return [float(each) for each in found.per_s[:, made.code("alpha")].sum(axis=1)]

    alone = missed(slot("a", active="beta"))
    two = missed(slot("a", active="beta"), slot("b", active="gamma"), slot("c", active="beta", models=["beta"]))
    assert two == pytest.approx([0.5 * alone[0], 0.5 * alone[0], 0.0])


def test_slacks_of_many_kinds_are_distinguished_by_their_shares() -> None:
    """Ten keys with as many arrivals: away for so long, those that cannot wait are late, to within a part."""
    made = estimates(swap_s=SWAP_S)
    demand = Demand(START_S - 60.0)
    for tenth in range(10):
        demand.streams |= demanded(1.0, 4.0 * 2.0**tenth).streams
    on = slot("a", active="beta")
    found = absences_of(board_with(demand, on), made, [on])
    alpha = made.code("alpha")
    assert np.count_nonzero(found.per_s[0, alpha]) == SLACKS < len(demand.streams) == 10
    served = made.service_of_all(on, "alpha")
    assert served is not None
    whole_s = served.prefill_s + served.output.mean * served.step_s
    for away_s in (20.0, 50.0, 3_000.0):
        cost = found.costs(*NO_RUNS, np.array([away_s]))[0]
        lasts_s = away_s + found.warm_s[0, alpha] + whole_s
        expected = POLICY.late_weight * sum(rate.per_s * max(0.0, lasts_s - rate.slo_s) for rate in demand.by_model(START_S)["alpha"])
        assert cost == pytest.approx(expected, rel=0.15)


def test_the_requested_model_is_first_though_its_backlog_is_late() -> None:
    """Requests of alpha are late in any case; new ones are not, if it is served now."""
    made: ClassTable = class_table(swap_s=1.0)
    board = board_with(demanded(20.0, 5.0), slot("a", active="gamma"))
    late, fresh = group(1, "alpha", -30.0, 40, slo_s=5.0), group(2, "beta", 600.0, 2_000)
    for each in (fresh, late):
        board.groups[each.group_id] = each
    orders = [{"a": [late.group_id, fresh.group_id]}, {"a": [fresh.group_id, late.group_id]}]
    first, last = plan_costs(board, made, START_S, orders)
    assert first.total < last.total
    assert first.missed_cost < last.missed_cost
    board.expect({})
    assert [cost.missed_cost for cost in plan_costs(board, made, START_S, orders)] == [0.0, 0.0]


def test_a_new_group_ends_the_absence_of_its_model() -> None:
    """It comes first though it is late: for those that are yet to come. Without them it does not keep the others waiting."""
    made: ClassTable = class_table(swap_s=1.0)
    board = board_with(demanded(20.0, 5.0), slot("a", active="gamma"))
    waits = group(2, "beta", 600.0, 2_000)
    board.groups[waits.group_id] = waits
    board.queues["a"].append(waits.group_id)
    for expected, position in ((True, 0), (False, 1)):
        if not expected:
            board.expect({})
        found = best_place(lines_of(board, made, START_S), made, group(1, "alpha", -30.0, 1, slo_s=5.0), START_S)
        assert found is not None
        assert found.position == position
