"""The terms of many groups at once against those of one; plans judged so against the lines of single queues."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from qlm_planner.timeline import Columns, Cost, timelines

from qlm_core.group import MEGA
from qlm_core.instance import InstanceFacts
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner import class_terms
from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import group_id_of, traits_of
from qlm_planner.items import TIERS, Group, Slot
from qlm_planner.judging import plan_cost, plan_costs
from qlm_planner.policy import Policy

from .world import CATALOGUE, MODELS, START_S, profiles


def estimates() -> Estimates:
    made = Estimates(Policy())
    made.load(CATALOGUE, profiles())
    return made


def random_board(seed: int, *, instances: int = 4, groups: int = 60, unequal: bool = False) -> Board:
    """Queues of groups in any order, on instances of two speeds that all run something. `unequal`: of tenants of several weights, some
    aged and some above their share, with requests of shorter SLOs than the first one's, and answered ones."""
    chance, tenants = random.Random(seed), random.Random(seed)
    board = Board(slo_band=0)
    for number in range(instances):
        add_slot(board, number, chance.choice(MODELS), running=5, warm=chance.choice(MODELS))
    for number in range(groups):
        kind = chance.choice((SloKind.COMPLETION, SloKind.COMPLETION, SloKind.FIRST_TOKEN, SloKind.PRIORITY))
        slo = Slo(kind=kind, priority=0) if kind is SloKind.PRIORITY else Slo(kind=kind, seconds=chance.choice((30.0, 60.0, 600.0)))
        request = RequestFacts(
            queue_id=f"{number}-0",
            key=RequestKey("t", str(number)),
            acceptance_number=number,
            accepted_s=START_S + chance.uniform(-10.0, 0.0),
            model=chance.choice(MODELS),
            slo=slo,
            prompt_tokens=chance.choice((3, 40, 700)),
            output_tokens_max=256,
        )
        name, waiting = f"i-{chance.randrange(instances)}", chance.choice((1, 7, 60, 400))
        group = add_group(board, number, request, name, waiting, waiting * request.prompt_tokens + chance.randrange(50))
        if unequal:
            key = replace(group.traits.key, tenant_class=tenants.choice(("1", "8", "1_4")))
            group.traits, group.tier = replace(group.traits, key=key), tenants.randrange(TIERS)
            group.slo_least_s = group.traits.slo_s * tenants.uniform(0.5, 1.0)
            group.answered = tenants.randrange(group.waiting + 1)
    return board


def add_slot(board: Board, number: int, model: str, *, running: int, warm: str) -> None:
    name, gpu = f"i-{number}", ("big", "small")[number % 2]
    facts = InstanceFacts(name=name, incarnation=f"{name}/1", gpu=gpu, n_gpu=1, engine="simulated", models=MODELS)
    board.slots[name] = Slot(facts=facts, active_model=model, running=running, warm_models=(warm,))
    board.queues[name], board.versions[name] = [], 0


def add_group(board: Board, number: int, request: RequestFacts, instance: str, waiting: int, prompt_tokens: int) -> Group:
    group = Group(
        group_id=group_id_of(1, number),
        order=(1, number),
        traits=traits_of(request),
        band=0,
        instance=instance,
        first_deadline_s=request.deadline_s,
        next_deadline_s=request.deadline_s,
        last_deadline_s=request.deadline_s + 0.1 * (number % 4) * min(request.slo.seconds, 1e6),
        waiting=waiting,
        live=waiting,
        waiting_prompt_tokens=prompt_tokens,
    )
    board.groups[group.group_id] = group
    board.queues[instance].append(group.group_id)
    return group


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_are_as_each_alone(seed: int) -> None:
    made, board = estimates(), random_board(seed, unequal=True)
    terms = ClassTerms(estimates=made)
    slots = [slot for _, slot in sorted(board.slots.items())]
    for number, slot in enumerate(slots):
        queue = board.queue_groups(slot.facts.name)
        expected = Columns.of([made.term(slot, group) for group in queue], slot.warm_models)
        columns = terms.columns(queue)
        found = terms.order_rows(slots, np.full(len(queue), number), columns)
        assert found == pytest.approx(expected.rows, rel=1e-9, abs=1e-12)


def test_a_group_that_cannot_be_served_weighs_nothing() -> None:
    made, board = estimates(), random_board(1)
    slot = board.slots["i-0"]
    slot.facts = InstanceFacts(name="i-0", incarnation="i-0/1", gpu="big", n_gpu=1, engine="simulated", models=("alpha",))
    queue = board.queue_groups("i-0")
    assert any(group.traits.key.model != "alpha" for group in queue)
    terms = ClassTerms(estimates=made)
    expected = Columns.of([made.term(slot, group) for group in queue], slot.warm_models)
    assert terms.order_rows([slot], np.zeros(len(queue), dtype=np.int64), terms.columns(queue)) == pytest.approx(expected.rows)


def test_other_profiles_give_other_terms() -> None:
    made, board = estimates(), random_board(2)
    terms = ClassTerms(estimates=made)
    before = plan_cost(board, terms, START_S)
    made.load(CATALOGUE, profiles(output_tokens=200.0))
    assert plan_cost(board, terms, START_S).completion_s > 1.3 * before.completion_s


def test_what_is_kept_is_of_the_newest_profiles_and_of_the_group_as_it_is() -> None:
    """Held against estimates that never knew anything else."""
    made, board = estimates(), random_board(2)
    slot, queue = board.slots["i-0"], board.queue_groups("i-0")
    assert all(made.kept_term(slot, group) == made.term(slot, group) for group in queue)
    made.engine(slot)
    newest = profiles(output_tokens=200.0, swap_s=30.0, version=1)
    learned = tuple(replace(row, instance="i-0", slowdown=1.5, samples=50) for row in newest.hardware if row.gpu == "big")
    newest = replace(newest, hardware=(*newest.hardware, *learned))
    before = [made.kept_term(slot, group) for group in queue]
    fresh = Estimates(Policy())
    for each in (made, fresh):
        each.load(CATALOGUE, newest)
    after = [made.kept_term(slot, group) for group in queue]
    assert after == [fresh.term(slot, group) for group in queue]
    assert all(new.work_s > 2.0 * old.work_s and new.cold_s > old.cold_s for old, new in zip(before, after, strict=True))
    assert made.engine(slot) == fresh.engine(slot)
    assert made.hardware(slot.facts, "alpha") == learned[0]
    group = queue[0]
    for change in (
        {"next_deadline_s": START_S + 5.0},
        {"last_deadline_s": START_S + 9.0},
        {"waiting": 3},
        {"waiting_prompt_tokens": 9},
        {"tier": 0},
        {"band": 1},
    ):
        for name, value in change.items():
            setattr(group, name, value)
        assert made.kept_term(slot, group) == fresh.term(slot, group)


def test_profiles_tell_once_of_an_instance_that_runs_otherwise() -> None:
    """Each drift is a reason to look for another plan, but no reason at each snapshot that still shows it, nor the first that is read."""
    usual = profiles()

    def drifting(since_s: float) -> ProfileSnapshot:
        return replace(usual, hardware=(*usual.hardware, replace(usual.hardware[0], instance="i-0", drifting_since_s=since_s)))

    made = Estimates(Policy())
    told = [
        made.load(CATALOGUE, each) for each in (drifting(5.0), drifting(5.0), usual, drifting(7.0), drifting(7.0), drifting(9.0), usual)
    ]
    assert told == [False, False, False, True, False, True, False]


def test_plans_judged_together_cost_what_each_does_alone() -> None:
    made, board = estimates(), random_board(6)
    terms = ClassTerms(estimates=made)
    backwards = {name: queue[::-1] for name, queue in board.queues.items()}
    in_one = {"i-1": [group_id for queue in board.queues.values() for group_id in queue]}
    plans = [board.queues, backwards, in_one, {}]
    together = plan_costs(board, terms, START_S, plans)
    for found, plan in zip(together, plans, strict=True):
        (alone,) = plan_costs(board, terms, START_S, [plan])
        assert astuple(found) == pytest.approx(astuple(alone), rel=1e-9)
    assert len({cost.completion_s for cost in together}) == 4
    assert together[3] == Cost()


def test_the_first_run_of_a_queue_shares_its_batch_with_what_runs_already() -> None:
    """If it is of the model that is active; so many in a batch, by hand: a run is all groups of a model in a row."""
    made, board = estimates(), Board(slo_band=0)
    queues = [
        ("alpha", 50, [("alpha", 7, 117.0), ("alpha", 60, 117.0), ("beta", 40, 40.0), ("alpha", 1, 1.0)]),
        ("beta", 30, [("gamma", 10, 14.0), ("gamma", 4, 14.0), ("beta", 9, 9.0)]),
    ]
    beside: list[float] = []
    for number, (active, running, groups) in enumerate(queues):
        add_slot(board, number, active, running=running, warm=active)
        for model, waiting, shared in groups:
            at = len(beside)
            request = RequestFacts(
                queue_id=str(at),
                key=RequestKey("t", str(at)),
                acceptance_number=at,
                accepted_s=START_S,
                model=model,
                slo=Slo(kind=SloKind.COMPLETION, seconds=60.0),
                prompt_tokens=40,
                output_tokens_max=256,
            )
            add_group(board, at, request, f"i-{number}", waiting, 40 * waiting)
            beside.append(shared)
    terms = ClassTerms(estimates=made)
    slots = [slot for _, slot in sorted(board.slots.items())]
    on = np.array([0, 0, 0, 0, 1, 1, 1])
    rows = terms.order_rows(slots, on, terms.columns(list(board.groups.values())), np.array(beside))
    lines = [(made.engine(slot), Columns(rows[:, on == number])) for number, slot in enumerate(slots)]
    expected = sum((timeline.cost for timeline in timelines(lines, START_S)), Cost())
    found = plan_cost(board, terms, START_S)
    assert (found.late, found.tardiness_s, found.completion_s) == pytest.approx(
        (expected.late, expected.tardiness_s, expected.completion_s), rel=1e-9
    )


def test_who_shares_a_batch_is_served_slower() -> None:
    """Two groups of a model in a row are one run, and take longer than each alone."""
    made, board = estimates(), random_board(3)
    terms = ClassTerms(estimates=made)
    columns = terms.columns(board.queue_groups("i-0"))
    slots, on = [board.slots["i-0"]], np.zeros(len(columns.count), dtype=np.int64)
    alone, beside = terms.order_rows(slots, on, columns), terms.order_rows(slots, on, columns, columns.count + 100.0)
    assert (beside >= alone - 1e-12).all()
    assert (beside > alone).any()


def rows_of(terms: ClassTerms, board: Board, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    queue = board.queue_groups(name)
    return terms.order_rows([board.slots[name]], np.zeros(len(queue), dtype=np.int64), terms.columns(queue))


def test_a_group_of_another_cluster_keeps_its_terms_and_takes_no_more_memory() -> None:
    """Profiles know no clusters."""
    made, board = estimates(), random_board(4)
    terms = ClassTerms(estimates=made)
    before, keys = rows_of(terms, board, "i-0"), len(terms._keys)
    for each in board.queue_groups("i-0"):
        each.traits = replace(each.traits, key=replace(each.traits.key, cluster=MEGA))
    terms._traits.clear()  # as groups of their own would have it
    assert (rows_of(terms, board, "i-0") == before).all()
    assert len(terms._keys) == keys


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants come and go: their names are forgotten, and what is there has its terms all the same."""
    monkeypatch.setattr(class_terms, "KEYS_MAX", 30)
    made, board = estimates(), random_board(5)
    terms = ClassTerms(estimates=made)
    before = rows_of(terms, board, "i-0")
    for number in range(40):
        for each in board.queue_groups("i-0"):
            each.traits = replace(each.traits, key=replace(each.traits.key, tenant_class=f"1/{number}"))
        terms._traits.clear()  # as groups of their own would have it
        board.queues["i-0"].reverse()
        before = before[:, ::-1]
        assert (rows_of(terms, board, "i-0") == before).all()
        assert len(terms._keys) <= 30 + len(board.queue_groups("i-0"))
