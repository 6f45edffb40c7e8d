"""The rows of many groups at once, against the service of each; plans judged together and alone."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import numpy as np
import pytest

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.group import TIERS, Group, group_id_of, traits_of
from qlm_planner.board.slot import Slot
from qlm_planner.board.tenants import weight_of
from qlm_planner.cost.estimates import PROMPT_STEP, Estimates
from qlm_planner.cost.order_cost import (
    BAND,
    COUNT,
    DEADLINE,
    FAR_S,
    MODEL,
    OWN,
    OWN_VARIANCE,
    REQUESTS,
    SLO,
    SPREAD,
    SWAP,
    WARM,
    WORK,
    WORK_VARIANCE,
    Floats,
)
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import plan_cost, plan_costs
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


def rows_of(table: ClassTable, board: Board, name: str, crowd: float = 0.0) -> Floats:
    queue = board.queue_groups(name)
    return table.rows([board.slots[name]], np.zeros(len(queue), dtype=np.int64), table.columns(queue), crowd, START_S)


def row_of(made: Estimates, slot: Slot, group: Group) -> dict[int, float]:
    """By the service of its class, and what the group adds."""
    key, mean_tokens = group.traits.key, group.waiting_prompt_tokens / group.waiting
    known = made.class_of(slot, key, round(math.log(max(1.0, mean_tokens)) / PROMPT_STEP))
    assert known is not None
    served, prefill_s = known.service, known.hardware.prefill_work_s(mean_tokens, mean_tokens**2 + known.prompt_variance)
    batch = min(served.batch, group.waiting)
    pace_s = served.step_base_s + batch * (served.sequence_s + served.prefill_work_s / served.output.mean)
    decode_s = 0.0 if key.slo_kind is SloKind.FIRST_TOKEN else served.output.mean * pace_s
    return {
        WORK: group.waiting * (prefill_s + served.output.mean * served.token_s),
        WORK_VARIANCE: group.waiting * served.output.variance * served.token_s**2,
        OWN: known.hardware.prefill_s(0.0) + prefill_s + decode_s,
        REQUESTS: group.waiting * weight_of(key.tenant_class) * group.due_share,
        DEADLINE: min(group.next_deadline_s - START_S, FAR_S),
        SPREAD: group.spread_s,
        SWAP: known.hardware.swap_s(warm=key.model in slot.warm_models),
        WARM: known.hardware.swap_s(warm=True),
        MODEL: made.code(key.model),
        BAND: group.rank,
        COUNT: group.waiting,
        SLO: min(group.slo_least_s, FAR_S),
    }


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_are_as_each_alone(seed: int) -> None:
    made, board = estimates(), random_board(seed, unequal=True)
    table = ClassTable(estimates=made)
    for name, slot in board.slots.items():
        rows = rows_of(table, board, name)
        for number, group in enumerate(board.queue_groups(name)):
            expected = row_of(made, slot, group)
            assert rows[list(expected), number] == pytest.approx(list(expected.values()), rel=1e-9, abs=1e-12)


def test_a_group_that_cannot_be_served_weighs_nothing() -> None:
    board = random_board(1)
    board.slots["i-0"].facts = replace(board.slots["i-0"].facts, models=("alpha",))
    stranger = np.array([group.traits.key.model != "alpha" for group in board.queue_groups("i-0")])
    rows = rows_of(ClassTable(estimates=estimates()), board, "i-0")
    assert stranger.any()
    assert not rows[[WORK, OWN, REQUESTS, SWAP]][:, stranger].any()
    assert (rows[DEADLINE, stranger] == FAR_S).all()
    assert (rows[WORK, ~stranger] > 0.0).all()


def test_other_profiles_give_other_terms() -> None:
    made, board = estimates(), random_board(2)
    table = ClassTable(estimates=made)
    before = plan_cost(board, table, START_S)
    made.load(CATALOGUE, profiles(output_tokens=200.0))
    assert plan_cost(board, table, START_S).completion_s > 1.3 * before.completion_s


def test_kept_rows_are_of_the_newest_profiles_and_of_the_group_as_it_is() -> None:
    """Held against a table that never knew anything else."""
    made, board = estimates(), random_board(2)
    slot, queue, table = board.slots["i-0"], board.queue_groups("i-0"), ClassTable(estimates=made)
    made.engine(slot)
    before = rows_of(table, board, "i-0")
    newest = profiles(output_tokens=200.0, swap_s=30.0, version=1)
    learned = tuple(replace(row, instance="i-0", slowdown=1.5, samples=50) for row in newest.hardware if row.gpu == "big")
    newest = replace(newest, hardware=(*newest.hardware, *learned))
    fresh = Estimates(Policy())
    for each in (made, fresh):
        each.load(CATALOGUE, newest)

    def found() -> Floats:
        rows = rows_of(table, board, "i-0")
        other = rows_of(ClassTable(estimates=fresh), board, "i-0")
        assert np.delete(rows, MODEL, axis=0) == pytest.approx(np.delete(other, MODEL, axis=0))
        return rows

    after = found()
    assert (after[WORK] > 2.0 * before[WORK]).all()
    assert (after[SWAP] > before[SWAP]).all()
    assert made.engine(slot) == replace(fresh.engine(slot), model_code=made.code(slot.active_model))
    assert made.hardware(slot.facts, "alpha") == learned[0]
    for change in (
        {"next_deadline_s": START_S + 5.0},
        {"last_deadline_s": START_S + 9.0},
        {"waiting": 3},
        {"waiting_prompt_tokens": 9},
        {"tier": 0},
        {"band": 1},
    ):
        for name, value in change.items():
            setattr(queue[0], name, value)
        found()


def test_profiles_report_an_instance_that_runs_otherwise_once() -> None:
    """Each change is a reason to look for another plan, but no reason at each snapshot that still shows it, nor the first that is read."""
    usual = profiles()

    def slowed(slowdown: float) -> ProfileSnapshot:
        return replace(usual, hardware=(*usual.hardware, replace(usual.hardware[0], instance="i-0", slowdown=slowdown)))

    made = Estimates(Policy())
    changed = [made.load(CATALOGUE, slowed(slowdown)) for slowdown in (2.0, 2.0, 2.2, 2.6, 2.6, 1.0)]
    assert changed == [False, False, False, True, False, True]


def test_plans_judged_together_cost_what_each_does_alone() -> None:
    made, board = estimates(), random_board(6)
    table = ClassTable(estimates=made)
    backwards = {name: queue[::-1] for name, queue in board.queues.items()}
    in_one = {"i-1": [group_id for queue in board.queues.values() for group_id in queue]}
    plans = [board.queues, backwards, in_one, {}]
    together = plan_costs(board, table, START_S, plans)
    for found, plan in zip(together, plans, strict=True):
        (alone,) = plan_costs(board, table, START_S, [plan])
        assert astuple(found) == pytest.approx(astuple(alone), rel=1e-9)
    assert len({cost.completion_s for cost in together}) == 4
    assert (together[3].completion_s, together[3].total) == (0.0, 0.0)


def test_sharing_a_batch_makes_the_end_less_certain() -> None:
    """A step of a larger batch is longer, and each request takes as many of them as its output has tokens."""
    board, table = random_board(3), ClassTable(estimates=estimates())
    alone, beside = rows_of(table, board, "i-0"), rows_of(table, board, "i-0", crowd=1_000.0)
    assert (beside >= alone).all()
    assert (beside[OWN_VARIANCE] > alone[OWN_VARIANCE]).any()
    assert (beside[WORK] == alone[WORK]).all()


# Batches that agents report ---------------------------------------------------------------------------------------------


def test_each_model_has_the_batch_that_was_reported_last_while_it_was_active() -> None:
    slot = random_board(3).slots["i-0"]
    slot.active_model = "alpha"
    slot.report_batch(0)
    assert slot.batches == {}, "nothing is known"
    for batch in (124, 100):
        slot.report_batch(batch)
        assert slot.batch("alpha") == batch
    slot.active_model = "beta"
    assert slot.batch("beta") == slot.facts.batch_max, "models are apart"
    slot.report_batch(16)
    assert (slot.batch("alpha"), slot.batch("beta")) == (100, 16)
    slot.report_batch(10 * slot.facts.batch_max)
    assert slot.batch("beta") == slot.facts.batch_max
    slot.active_model = ""
    slot.report_batch(3)
    assert sorted(slot.batches) == ["alpha", "beta"]


def test_the_figures_of_a_class_are_of_the_batch_that_is_reported() -> None:
    board, table = random_board(3), ClassTable(estimates=estimates())
    slot = board.slots["i-0"]
    active = np.array([group.traits.key.model == slot.active_model for group in board.queue_groups("i-0")])
    before = rows_of(table, board, "i-0")
    slot.report_batch(8)
    after = rows_of(table, board, "i-0")
    assert (after[WORK] > before[WORK]).tolist() == active.tolist()
    slot.report_batch(slot.facts.batch_max)
    assert (rows_of(table, board, "i-0") == before).all()
