"""Choices of comparison policies, on boards made by hand: a request of 200 tokens takes 0.023 s of "big", a swap 10 s or (warm) 2 s."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of
from qlm_planner.policies.balancers import LeastLoaded
from qlm_planner.policies.baseline import Baseline
from qlm_planner.policies.deadlines import Edf, by_deadline
from qlm_planner.policies.fcfs import Fcfs
from qlm_planner.policies.queue_work import Work, Works
from qlm_planner.policies.shepherd import Shepherd

from .test_cheapest_place import board_of, class_table, group, slot
from .world import MODELS, START_S


def home(policy: Baseline, board: Board, new: Group) -> str:
    made = class_table()
    line, _ = policy.home(lines_of(board, made, START_S), made, new, board, START_S)
    return line.slot.facts.name


# EDF, FCFS and the shortest queue -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "warm", "goes"), [(300, "", "a"), (600, "", "b"), (300, "alpha", "b"), (60, "alpha", "a")])
def test_edf_ends_a_group_first_with_the_swap_that_its_place_needs(ahead: int, warm: str, goes: str) -> None:
    board = board_of([slot("a"), slot("b", active="beta", warm=[warm])], {"a": [group(1, "alpha", 100.0, ahead)]})
    assert home(Edf(), board, group(2, "alpha", 200.0)) == goes


def test_edf_counts_the_groups_own_work_and_what_runs() -> None:
    slow_and_free = board_of([slot("a"), slot("b", gpu="small")], {"a": [group(1, "alpha", 100.0, 200)]})
    assert home(Edf(), slow_and_free, group(2, "alpha", 200.0, 600)) == "a", "5 + 15 s are less than 28 s"
    assert home(Edf(), slow_and_free, group(2, "alpha", 200.0, 20)) == "b", "2 s are less than 5 s"
    busy = board_of([slot("a", running=100), slot("b")], {})
    assert home(Edf(), busy, group(2, "alpha", 200.0)) == "b"


@pytest.mark.parametrize("running", [0, 10])
def test_a_head_that_runs_stays_when_edf_orders_all_anew(running: int) -> None:
    """Only a higher band comes before it."""
    head, *rest = [group(1, "alpha", 500.0), group(2, "beta", 30.0), group(3, "alpha", 100.0)]
    board = board_of([slot("a", running=running)], {"a": [head, *rest]})
    order = list(by_deadline(board, Works(table=class_table()))["a"])
    assert order == (["alpha-1", "beta-2", "alpha-3"] if running else ["beta-2", "alpha-3", "alpha-1"])
    board = board_of([slot("a", running=running)], {"a": [head, *rest, group(4, "gamma", 50.0, priority=-1)]})
    assert by_deadline(board, Works(table=class_table()))["a"][:2] == ["gamma-4", "alpha-1" if running else "beta-2"]


def test_edf_orders_anew_only_for_an_instance_without_work() -> None:
    queues = {"a": [group(1, "alpha", 30.0), group(2, "alpha", 60.0), group(3, "alpha", 90.0)], "b": [group(4, "beta", 30.0)]}
    full = board_of([slot("a"), slot("b", active="beta")], queues)
    assert Edf().reorder(full, class_table(), START_S) is None
    one_more = board_of([slot("a"), slot("b", active="beta"), slot("c")], queues)
    orders = Edf().reorder(one_more, class_table(), START_S)
    assert orders is not None
    assert orders["c"]
    busy = board_of([slot("a"), slot("b", active="beta"), slot("c", running=5)], queues)
    assert Edf().reorder(busy, class_table(), START_S) is None, "it has what runs there"


def test_fcfs_moves_a_group_to_where_there_is_least_to_do() -> None:
    board = board_of([slot("a"), slot("b")], {"a": [group(1, "alpha", 100.0, 900)], "b": [group(2, "alpha", 100.0, 600)]})
    assert home(Fcfs(), board, group(3, "alpha", 200.0)) == "b"
    assert home(Fcfs(), board, group(3, "beta", 200.0)) == "b"
    board = board_of([slot("a"), slot("b", active="beta")], {"a": [group(1, "alpha", 100.0, 20)], "b": []})
    assert home(Fcfs(), board, group(3, "alpha", 200.0)) == "a", "the other one would load the model"


def test_the_least_loaded_counts_what_runs_and_what_waits() -> None:
    board = board_of([slot("a", running=20), slot("b")], {"a": [group(1, "alpha", 100.0, 5)], "b": [group(2, "alpha", 100.0, 15)]})
    assert home(LeastLoaded(), board, group(3, "alpha", 200.0)) == "b"
    board.slots["a"].running = 5
    assert home(LeastLoaded(), board, group(3, "alpha", 200.0)) == "a"


# SHEPHERD -------------------------------------------------------------------------------------------------------------


def work_of(table: ClassTable, on: Slot, batch: Group) -> Work:
    return Works(table=table).on([on], [batch])[0][0]


def span_s(table: ClassTable, on: Slot, batch: Group) -> float:
    """A batch by itself: SHEPHERD's times are certain, and know no swaps."""
    work = work_of(table, on, batch)
    return work.work_s + work.own_s


def most_in_time(table: ClassTable, slots: Sequence[Slot], leads_s: Sequence[float], batches: Sequence[Group]) -> int:
    """By trying every batch on every queue and on none, in the order of deadlines."""
    best = 0
    by_due = sorted(batches, key=lambda batch: batch.first_deadline_s)
    for places in itertools.product(range(len(slots) + 1), repeat=len(by_due)):
        free_s, count = list(leads_s), 0
        for batch, at in zip(by_due, places, strict=True):
            if at < len(slots):
                free_s[at] += span_s(table, slots[at], batch)
                if START_S + free_s[at] > batch.first_deadline_s:
                    break
                count += batch.waiting
        else:
            best = max(best, count)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_shepherd_ends_as_many_requests_in_time_as_any_choice_of_batches(seed: int) -> None:
    chance, made = random.Random(seed), class_table()
    slots = [slot("a", running=30), slot("b", gpu="small", active="beta")]
    head = group(99, "beta", 20.0, 40)
    batches = [group(n, chance.choice(MODELS), chance.uniform(3.0, 18.0), chance.choice((10, 40, 150))) for n in range(6)]
    orders = Shepherd().reorder(board_of(slots, {"a": [head, *batches]}), made, START_S)
    assert orders is not None
    assert orders["a"][0] == head.group_id, "it runs"
    ahead = work_of(made, slots[0], head)
    leads_s = [made.estimates.engine(slots[0]).left_s + ahead.swap_s + ahead.work_s, 0.0]
    by_id = {batch.group_id: batch for batch in batches}
    in_time = 0
    for on, lead_s in zip(slots, leads_s, strict=True):
        now_s = START_S + lead_s
        for group_id in orders[on.facts.name]:
            if group_id in by_id:
                now_s += span_s(made, on, by_id[group_id])
                in_time += by_id[group_id].waiting * (now_s <= by_id[group_id].first_deadline_s)
    best = most_in_time(made, slots, leads_s, batches)
    assert in_time == best
    assert 0 < best < sum(batch.waiting for batch in batches), "a choice"


def test_shepherd_would_rather_end_many_requests_than_many_batches() -> None:
    """Within 7 s one of 150 (6.4 s), or two of 10 (1.4 s each)."""
    small, other, large = group(1, "alpha", 7.0, 10), group(2, "alpha", 7.0, 10), group(3, "alpha", 7.0, 150)
    orders = Shepherd().reorder(board_of([slot("a")], {"a": [small, other, large]}), class_table(), START_S)
    assert orders is not None
    assert orders["a"][0] == large.group_id


def test_batches_that_shepherd_lets_go_stand_behind_by_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only some of it was in the program; and bands come first in any case."""
    monkeypatch.setattr("qlm_planner.policies.shepherd.BATCHES_MAX", 3)
    hopeless = [group(n, "alpha", 0.1 * n, 50) for n in range(1, 7)]
    later = group(9, "alpha", 10.0, 50, priority=1)
    orders = Shepherd().reorder(board_of([slot("a")], {"a": [*hopeless, later]}), class_table(), START_S)
    assert orders is not None
    assert orders["a"] == [*(batch.group_id for batch in hopeless), later.group_id]
    monkeypatch.setattr("qlm_planner.policies.shepherd.BATCHES_MAX", 7)
    assert Shepherd().reorder(board_of([slot("a")], {"a": [*hopeless, later]}), class_table(), START_S) == orders


def test_a_program_that_was_not_solved_to_its_end_is_not_followed() -> None:
    """Even where it has found something by then."""
    chance, made = random.Random(0), class_table()
    batches = [group(n, chance.choice(MODELS), chance.uniform(3.0, 20.0), chance.randrange(10, 150)) for n in range(24)]
    board = board_of([slot("a"), slot("b", active="beta")], {"a": batches})
    hurried = Shepherd(nodes_max=5, time_limit_s=60.0)
    assert hurried.reorder(board, made, START_S) == by_deadline(board, Works(table=made))
    assert hurried.fallbacks == 1


def test_work_that_is_kept_is_of_the_group_and_the_batch_as_they_are() -> None:
    on, waits, made = slot("a"), group(1, "alpha", 60.0, 400), class_table()
    works = Works(table=made)

    def kept() -> Work:
        [work] = works.stand(on, [waits]).works
        assert work == work_of(made, on, waits)
        return work

    first = kept()
    waits.waiting //= 2
    fewer = kept()
    on.report_batch(16)
    assert kept().work_s > fewer.work_s
    assert first.work_s > fewer.work_s
