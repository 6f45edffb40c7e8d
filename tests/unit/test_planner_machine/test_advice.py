"""Advice (QLM A.3, a): demand is measured, the load is played forward, and the smallest fleet that is enough is found."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.advice.advising import ADDED_MAX, advise
from qlm_planner.advice.demand import KEYS_MAX, Demand
from qlm_planner.advice.forecast import forecast
from qlm_planner.advice.late_share import late_share, late_shares
from qlm_planner.advice.question import CLASSES_MAX, Question, question_of
from qlm_planner.class_terms import ClassTerms
from qlm_planner.insertion import lines_of
from qlm_planner.plan_view import plan_view

from .test_insertion import estimates, group
from .test_policy_choices import board_of, slot
from .world import LEASE_S, START_S, World, profiles


def arrival(number: int, at_s: float, *, model: str = "alpha", slo_s: float = 60.0, tokens: int = 200) -> RequestFacts:
    return RequestFacts(
        queue_id=f"{number}-0",
        key=RequestKey("t", f"r{number}"),
        acceptance_number=number,
        accepted_s=at_s,
        model=model,
        slo=Slo(kind=SloKind.COMPLETION, seconds=slo_s),
        prompt_tokens=tokens,
        output_tokens_max=1000,
    )


async def asked(world: World, per_s: dict[tuple[str, float], float], watched_s: float = 60.0) -> Question:
    """The world's question, where requests came at these rates by (model, SLO)."""
    machine = world.machine
    assert machine is not None
    demand = Demand(world.now_s - watched_s)
    for (model, slo_s), rate in per_s.items():
        count = round(rate * watched_s)
        demand.saw(arrival(n, world.now_s - watched_s * (1.0 - n / count), model=model, slo_s=slo_s) for n in range(count))
    return question_of(machine.board, machine.reshaping.terms, demand, world.now_s)


async def cluster(*names: str, gpu: str = "big") -> World:
    world = World()
    for name in names:
        await world.join(name, gpu)
    await world.lead()
    await world.advance(1.0)
    return world


# Demand ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watched_s", [20.0, 120.0, 600.0])
def test_a_steady_rate_is_measured_however_long_it_was_watched(watched_s: float) -> None:
    demand = Demand(START_S)
    demand.saw(arrival(n, START_S + n / 5.0, tokens=100 + n % 2 * 100) for n in range(int(5 * watched_s)))
    [rate] = demand.rates(START_S + watched_s)
    assert rate.per_s == pytest.approx(5.0, rel=0.02)
    assert rate.prompt_tokens == pytest.approx(150.0, rel=0.02)


def test_what_came_no_more_fades_and_what_waited_before_is_no_demand() -> None:
    demand = Demand(START_S)
    demand.saw([arrival(1, START_S - 5.0)])
    assert demand.rates(START_S + 60.0) == []
    demand.saw(arrival(n, START_S + n / 10) for n in range(600))
    [rate] = demand.rates(START_S + 900.0)
    assert rate.per_s < 0.02


def test_the_keys_that_are_counted_are_bounded() -> None:
    demand = Demand(START_S)
    demand.saw(arrival(n, START_S + n, model=f"m{n}") for n in range(3 * KEYS_MAX))
    assert len(demand.streams) <= KEYS_MAX
    assert f"m{3 * KEYS_MAX - 1}" in {key.model for key in demand.streams}


def test_what_comes_most_is_kept_when_there_are_too_many_keys() -> None:
    demand = Demand(START_S)
    demand.saw(arrival(n, START_S, model="often") for n in range(50))
    demand.saw(arrival(n, START_S + n / 1000, model=f"m{n}") for n in range(3 * KEYS_MAX))
    assert "often" in {key.model for key in demand.streams}


def test_the_shortest_slo_of_a_key_counts() -> None:
    demand = Demand(START_S)
    demand.saw(arrival(n, START_S, slo_s=slo_s) for n, slo_s in enumerate((60.0, 40.0, 50.0)))
    [rate] = demand.rates(START_S + 1.0)
    assert rate.slo_s == 40.0


# The question ---------------------------------------------------------------------------------------------------------


async def test_a_question_has_the_figures_of_the_profiles() -> None:
    """`world.hardware` at twice the speed: steps of 20/2 and 0.1/2 ms, prefills of 5/2 + 0.1/2 ms a token, loads of 10 s and 2 s."""
    question = await asked(await cluster("a"), {("alpha", 600.0): 3.0})
    kind = next(kind for kind in question.kinds if kind.gpu == "big")
    [served] = kind.served
    assert served is not None
    assert (served.base_s, served.sequence_s) == pytest.approx((0.010, 0.00005))
    assert served.first_s == pytest.approx(0.0125, rel=0.1), "prompts of about 200 tokens"
    assert (served.tokens, served.tokens_deviation) == pytest.approx((100.0, 20.0), rel=0.01)
    assert (served.cold_s, served.warm_s) == pytest.approx((10.0, 2.0))
    [load] = question.classes
    assert (load.model, load.slo_s, load.backlog) == ("alpha", 600.0, ())
    assert load.per_s == pytest.approx(3.0, rel=0.05)


async def test_a_question_has_what_waits_and_what_runs() -> None:
    world = await cluster("a")
    await world.submit("alpha", slo_s=600.0, count=150)
    await world.advance(1.0)
    assert len(await world.pull("a", "alpha", 50)) == 50
    await world.settle()
    question = await asked(world, {})
    [load] = question.classes
    assert load.backlog[0] == pytest.approx((100.0, 599.0))
    [member] = question.fleet
    served = question.kinds[member.kind].served[0]
    assert served is not None
    assert member.active_model == "alpha"
    assert member.busy == pytest.approx(50 / served.seats, rel=0.1)
    assert 0.5 * served.stay_s(50.0) < member.left_s < 2.0 * served.stay_s(50.0)


async def test_of_many_classes_the_least_count_with_others_of_their_model() -> None:
    world = World()
    await world.lead()
    await world.submit("alpha", slo_s=3000.0, count=7)
    await world.settle()
    rates = {("alpha", float(2**n)): 60.0 - n for n in range(30)} | {("beta", float(2**n)): 60.0 - n for n in range(30)}
    question = await asked(world, rates, watched_s=10.0)
    assert len(question.classes) == CLASSES_MAX
    for model in ("alpha", "beta"):
        of_model = sum(load.per_s for load in question.classes if load.model == model)
        assert of_model == pytest.approx(sum(60.0 - n for n in range(30)), rel=0.05)
    assert sum(count for load in question.classes for count, _ in load.backlog) == 7.0


async def test_a_gpu_for_a_model_that_nobody_serves_is_tried_however_many_there_are_for_others() -> None:
    """The last one by name; an instance of each of four kinds is there."""
    gpus = ("g1", "g2", "g3", "g4", "g5", "g6")
    known = profiles(gpus=(*gpus, "z"))
    world = World(snapshot=replace(known, hardware=tuple(row for row in known.hardware if (row.model == "beta") == (row.gpu == "z"))))
    for gpu in gpus[:4]:
        await world.join(f"on-{gpu}", gpu, models=("alpha",))
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=20)
    await world.submit("beta", slo_s=600.0)
    await world.advance(1.0)
    advice = advise(await asked(world, {}))
    assert [(option.gpu, option.models) for option in advice.options] == [("z", ("beta",))]
    assert advice.line.startswith("add 1 more z")


async def test_a_kind_has_the_models_that_it_can_serve() -> None:
    world = World()
    await world.join("a", models=("alpha", "unheard-of"))
    await world.lead()
    await world.advance(1.0)
    assert (await asked(world, {("alpha", 600.0): 1.0})).kinds[0].models == ("alpha",)


async def test_an_instance_that_drains_is_none_of_the_fleet() -> None:
    world = await cluster("a", "b")
    await world.drain("b")
    await world.advance(1.0)
    question = await asked(world, {("alpha", 600.0): 1.0})
    assert [member.name for member in question.fleet] == ["a"]
    assert question.idle == 1


async def test_a_gpu_is_tried_with_the_models_that_it_can_hold() -> None:
    world = World()
    await world.lead()
    await world.submit("alpha", slo_s=600.0)
    await world.submit("unheard-of", slo_s=600.0)
    await world.settle()
    assert {kind.models for kind in (await asked(world, {})).kinds} == {("alpha",)}


async def test_a_gpu_that_is_there_is_tried_with_a_model_that_none_has() -> None:
    """The only GPU that profiles know, and the one instance with it does not have the model."""
    world = World(snapshot=profiles(gpus=("big",)))
    await world.join("a", models=("alpha",))
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=200)
    await world.submit("beta", slo_s=600.0)
    await world.advance(1.0)
    question = await asked(world, {})
    assert question.unserved == 1
    [option] = advise(question).options
    assert (option.gpu, option.models, option.instances, option.enough) == ("big", ("alpha", "beta"), 1, True)
    await world.join("b", models=("beta", "gamma"))
    await world.advance(1.0)
    question = await asked(world, {})
    assert question.unserved == 0
    assert {kind.models for kind in question.kinds} == {("alpha",), ("beta", "gamma")}, "all are had by those that are there"


# Forecasts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin_s", "end_s", "deviation_s", "due_s", "share"),
    [
        (0, 10, 0, 5, 0.5),
        (0, 10, 0, 20, 0),
        (5, 5, 0, 4, 1),
        (5, 5, 0, 6, 0),
        (0, 10, 1e-4, 2.5, 0.75),
        (3, 3, 1, 3, 0.5),
        (0, 1, 1, math.inf, 0),
    ],
)
def test_the_share_that_is_late(begin_s: float, end_s: float, deviation_s: float, due_s: float, share: float) -> None:
    assert late_share(begin_s, end_s, deviation_s, due_s) == pytest.approx(share, abs=1e-3)
    [of_many] = late_shares(*(np.array([float(each)]) for each in (begin_s, end_s, deviation_s, due_s)))
    assert of_many == pytest.approx(share, abs=1e-3)


def test_many_shares_are_as_each_alone() -> None:
    chance = np.random.default_rng(1)
    begin_s = chance.uniform(0.0, 100.0, 300)
    end_s, deviation_s = begin_s + chance.choice([0.0, 1e-3, 5.0, 80.0], 300), chance.choice([0.0, 0.01, 3.0, 40.0], 300)
    due_s = chance.choice([-5.0, 20.0, 60.0, 110.0, 1e4], 300)
    alone = [late_share(*each) for each in zip(begin_s, end_s, deviation_s, due_s, strict=True)]
    assert late_shares(begin_s, end_s, deviation_s, due_s) == pytest.approx(alone, abs=1e-6)


async def test_attainment_grows_with_instances_and_falls_with_load() -> None:
    world = await cluster("a", "b", "c", "d")
    low, high = await asked(world, {("alpha", 30.0): 30.0}), await asked(world, {("alpha", 30.0): 120.0})
    by_size = [forecast(high, high.fleet[:count]).attainment for count in range(5)]
    assert by_size == sorted(by_size)
    assert by_size[0] == 0.0
    assert by_size[1] < 0.9 < by_size[4]
    assert forecast(low, low.fleet[:1]).attainment > by_size[1]


# Advice ---------------------------------------------------------------------------------------------------------------


async def test_a_load_of_several_instances_asks_for_about_as_many() -> None:
    """One "big" serves about 45 such requests a second, one "small" half as many."""
    world = await cluster("a")
    question = await asked(world, {("alpha", 30.0): 150.0})
    advice = advise(question)
    assert [option.gpu for option in advice.options] == ["big", "small"]
    big, small = advice.options
    assert big.enough
    assert small.enough
    assert 2 <= big.instances <= 5
    assert small.instances >= 1.5 * big.instances
    assert big.attainment >= 0.99 > advice.attainment
    assert advice.model == "alpha"
    assert advice.line.startswith(f"add {big.instances} more big")


async def test_idle_instances_could_go_and_no_more_than_that() -> None:
    world = await cluster("a", "b", "c", "d", "e")
    advice = advise(await asked(world, {("alpha", 30.0): 60.0}))
    assert not advice.options
    assert 2 <= len(advice.spare) <= 3
    assert "could go" in advice.line
    left = replace(await asked(world, {("alpha", 30.0): 60.0}), fleet=())
    assert advise(left).options[0].instances >= 5 - len(advice.spare) - 1


async def test_no_instance_at_all_is_advised_from_what_profiles_know() -> None:
    world = World()
    await world.lead()
    await world.submit("alpha", slo_s=300.0, count=50)
    await world.settle()
    question = await asked(world, {("alpha", 300.0): 5.0})
    assert question.unserved == 50
    assert question.worth_asking
    advice = advise(question)
    assert advice.options
    assert advice.options[0].instances == 1


async def test_a_model_without_a_profile_is_said_to_be_served_by_nobody() -> None:
    world = World()
    await world.lead()
    await world.submit("unheard-of", slo_s=300.0, count=3)
    await world.settle()
    advice = advise(await asked(world, {}))
    assert not advice.options
    assert "no known GPU serves" in advice.line


async def test_an_slo_that_no_fleet_meets_is_told_so() -> None:
    """Outputs take longer than the SLO on every GPU."""
    world = await cluster("a")
    advice = advise(await asked(world, {("alpha", 0.5): 5.0, ("beta", 0.5): 5.0}))
    assert all(not option.enough and option.instances <= ADDED_MAX for option in advice.options)
    assert advice.attainment < 0.5


async def test_requests_without_a_deadline_are_never_late() -> None:
    world = await cluster("a")
    await world.submit("alpha", priority=3, count=5000)
    await world.settle()
    question = await asked(world, {})
    assert question.late == 0.0
    assert advise(question).options == ()


async def test_the_plan_names_who_will_be_late_and_by_how_much() -> None:
    world = await cluster("a")
    await world.submit("alpha", slo_s=20.0, count=3000)
    await world.submit("beta", slo_s=3600.0, count=100)
    await world.advance(LEASE_S)
    question = await asked(world, {})
    assert question.worth_asking
    assert {miss.model for miss in question.misses} == {"alpha"}
    assert question.late == pytest.approx(sum(miss.late for miss in question.misses), rel=0.2)
    assert max(miss.over_s for miss in question.misses) > 20.0
    assert all(miss.late <= miss.waiting for miss in question.misses)


async def test_expected_misses_are_those_of_a_draw() -> None:
    """Of every group, requests that end evenly from the first to the last, each as uncertain as the group's end; and their ends are those
    of the plan that others see."""
    world = await cluster("a")
    await world.submit("alpha", slo_s=20.0, count=600)
    await world.submit("alpha", slo_s=120.0, count=1000, prompt_tokens=2000)
    await world.settle()
    machine = world.machine
    assert machine is not None
    question = await asked(world, {})
    told = {miss.group_id: miss for miss in question.misses}
    chance = np.random.default_rng(1)
    [line] = lines_of(machine.board, machine.estimates)
    times = line.timeline(world.now_s)
    [_, seen] = sorted(plan_view(machine.board, machine.estimates, world.now_s).queues, key=lambda queue: len(queue.groups))
    partly = 0
    for place, (term, outlook) in enumerate(zip(line.terms, seen.groups, strict=True)):
        first_s, last_s = times.start_s[place] + term.own_s, times.end_s[place]
        ends_s = chance.uniform(first_s, last_s, 100_000) + chance.normal(0.0, math.sqrt(times.end_variance[place]), 100_000)
        late = term.count * float((world.now_s + ends_s > term.deadline_s).mean())
        miss = told.get(term.group_id)
        assert (miss.late if miss else 0.0) == pytest.approx(late, rel=0.02, abs=0.6)
        if miss is not None:
            assert miss.over_s == pytest.approx(max(0.0, outlook.completion_p50_s - outlook.first_deadline_s))
            partly += 0.1 < miss.late / miss.waiting < 0.9
    assert partly >= 2
    assert [miss.late for miss in question.misses] == sorted((miss.late for miss in question.misses), reverse=True), "the worst first"
    assert question.late == pytest.approx(sum(miss.late for miss in question.misses), rel=0.1)


async def test_a_cluster_that_is_enough_is_not_asked_about() -> None:
    world = await cluster("a")
    await world.submit("alpha", slo_s=600.0, count=100)
    await world.settle()
    assert not (await asked(world, {("alpha", 600.0): 1.0})).worth_asking


def test_each_request_of_a_group_is_due_by_its_own_deadline() -> None:
    """What waits is due in parts, from the first deadline to the last; a group that ends as it is due is no miss."""
    each = group(1, "alpha", 5.0, 400)
    board, terms = board_of([slot("a")], {"a": [each]}), ClassTerms(estimates=estimates())
    [miss] = question_of(board, terms, Demand(START_S), START_S).misses
    assert miss.late > 200.0
    each.last_deadline_s += 8.0
    asked = question_of(board, terms, Demand(START_S), START_S)
    assert not asked.misses
    assert [load.backlog for load in asked.classes] == [((100.0, 6.0), (100.0, 8.0), (100.0, 10.0), (100.0, 12.0))]
