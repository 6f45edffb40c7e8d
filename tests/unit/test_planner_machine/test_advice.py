"""Advice (QLM A.3, a): demand is measured, and the smallest fleet is found on which the solver's orders meet the SLOs."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board.demand import KEYS_MAX, Demand
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.overload.advice import ADDED_MAX, Advice, advise, forecast
from qlm_planner.overload.advice_question import EXPECTED_MAX, HORIZON_S, Question, question_of

from .test_cheapest_place import board_of, estimates, group, slot
from .world import START_S, World, profiles


def arrival(
    number: int, at_s: float, *, model: str = "alpha", slo_s: float = 60.0, tokens: int = 200, kind: SloKind = SloKind.COMPLETION
) -> RequestFacts:
    return RequestFacts(
        queue_id=f"{number}-0",
        key=RequestKey("t", f"r{number}"),
        acceptance_number=number,
        accepted_s=at_s,
        model=model,
        slo=Slo(kind=kind, seconds=slo_s),
        prompt_tokens=tokens,
        output_tokens_max=1000,
    )


async def build_question(
    world: World, per_s: dict[tuple[str, float], float], watched_s: float = 60.0, kind: SloKind = SloKind.COMPLETION
) -> Question:
    """The world's question, where requests arrived at these rates by (model, SLO)."""
    machine = world.machine
    assert machine is not None
    demand = Demand(world.now_s - watched_s)
    for (model, slo_s), rate in per_s.items():
        count = round(rate * watched_s)
        demand.record(arrival(n, world.now_s - watched_s * (1.0 - n / count), model=model, slo_s=slo_s, kind=kind) for n in range(count))
    return question_of(machine.board, machine.changes.table, demand, world.now_s)


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
    demand.record(arrival(n, START_S + n / 5.0, tokens=100 + n % 2 * 100) for n in range(int(5 * watched_s)))
    [rate] = demand.rates(START_S + watched_s)
    assert rate.per_s == pytest.approx(5.0, rel=0.02)
    assert rate.prompt_tokens == pytest.approx(150.0, rel=0.02)


def test_past_arrivals_fade_and_earlier_backlog_is_no_demand() -> None:
    demand = Demand(START_S)
    demand.record([arrival(1, START_S - 5.0)])
    assert demand.rates(START_S + 60.0) == []
    demand.record(arrival(n, START_S + n / 10) for n in range(600))
    [rate] = demand.rates(START_S + 900.0)
    assert rate.per_s < 0.02


def test_the_keys_that_are_counted_are_bounded() -> None:
    demand = Demand(START_S)
    demand.record(arrival(n, START_S + n, model=f"m{n}") for n in range(3 * KEYS_MAX))
    assert len(demand.streams) <= KEYS_MAX
    assert f"m{3 * KEYS_MAX - 1}" in {key.model for key in demand.streams}


def test_the_busiest_key_is_kept_when_there_are_too_many() -> None:
    demand = Demand(START_S)
    demand.record(arrival(n, START_S, model="often") for n in range(50))
    demand.record(arrival(n, START_S + n / 1000, model=f"m{n}") for n in range(3 * KEYS_MAX))
    assert "often" in {key.model for key in demand.streams}


def test_the_shortest_slo_of_a_key_counts() -> None:
    demand = Demand(START_S)
    demand.record(arrival(n, START_S, slo_s=slo_s) for n, slo_s in enumerate((60.0, 40.0, 50.0)))
    [rate] = demand.rates(START_S + 1.0)
    assert rate.slo_s == 40.0


# The question ---------------------------------------------------------------------------------------------------------


async def test_requests_are_expected_in_groups_as_the_planner_admits_to_them() -> None:
    question = await build_question(await cluster("a"), {("alpha", 40.0): 3.0, ("alpha", 900.0): 0.5})
    problem = question.problem
    assert problem is not None
    for slo_s, per_s in ((40.0, 3.0), (900.0, 0.5)):
        mine = problem.slo_s == slo_s
        assert problem.count[mine].sum() == pytest.approx(per_s * HORIZON_S, rel=0.05)
        assert problem.deadline_s[mine].min() == pytest.approx(slo_s)
        assert (problem.deadline_s + problem.spread_s)[mine].max() == pytest.approx(slo_s + HORIZON_S)
        assert problem.spread_s[mine].max() <= 0.5 * slo_s
        assert problem.work_s[0, mine].max() <= 0.25 * slo_s
    assert question.due.sum() == pytest.approx((3.0 * (HORIZON_S - 20.0) + 0.5 * HORIZON_S), rel=0.05), "not before a minute"


def test_the_horizon_of_fast_engines_is_in_their_own_seconds() -> None:
    """They run ten times as fast: 30 s of arrivals, of which those due within 6 s do not count."""
    fast, demand = slot("a"), Demand(START_S - 60.0)
    fast.facts = replace(fast.facts, time_scale=10.0)
    demand.record(arrival(n, START_S - 60.0 + n / 10.0, slo_s=4.0) for n in range(600))
    question = question_of(board_of([fast], {"a": []}), ClassTable(estimates=estimates()), demand, START_S)
    assert question.problem is not None
    assert (question.problem.deadline_s + question.problem.spread_s).max() == pytest.approx(34.0)
    assert question.due.sum() == pytest.approx(10.0 * 28.0, rel=0.05)


async def test_the_groups_that_are_expected_are_bounded() -> None:
    world = await cluster("a")
    question = await build_question(world, {("alpha", float(2**n)): 1000.0 for n in range(1, 12)}, watched_s=10.0)
    assert question.problem is not None
    assert EXPECTED_MAX / 2 < question.problem.groups <= EXPECTED_MAX + 12
    assert len(pickle.dumps(question)) < 1 << 23


async def test_a_question_has_the_plan_and_its_unplaced_groups() -> None:
    world = await cluster("a", "b")
    await world.submit("alpha", slo_s=600.0, count=150)
    await world.submit("unheard-of", slo_s=600.0, count=3)
    await world.advance(1.0)
    question = await build_question(world, {})
    machine = world.machine
    assert machine is not None
    assert question.problem is not None
    placed = [[question.waiting[at].group_id for at in queue] for queue in question.orders.lists()]
    assert placed[: question.size] == [machine.board.queues[name] for name in ("a", "b")]
    assert [miss.model for miss in question.waiting[sum(map(len, placed)) :]] == ["unheard-of"]
    assert (question.unserved, question.problem.groups) == (3, len(question.waiting))


async def test_a_gpu_for_a_model_that_nobody_serves_is_tried_however_many_there_are_for_others() -> None:
    """The last one by name, of more GPUs than are tried."""
    gpus = tuple(f"g{number}" for number in range(12))
    known = profiles(gpus=(*gpus, "z"))
    world = World(snapshot=replace(known, hardware=tuple(row for row in known.hardware if (row.model == "beta") == (row.gpu == "z"))))
    for gpu in gpus[:4]:
        await world.join(f"on-{gpu}", gpu, models=("alpha",))
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=20)
    await world.submit("beta", slo_s=600.0)
    await world.advance(1.0)
    advice = advise(await build_question(world, {}))
    assert [(option.gpu, option.models) for option in advice.options] == [("z", ("beta",))]
    assert advice.line.startswith("add 1 more z")


async def test_an_instance_has_the_models_that_it_can_serve_and_none_that_drains_is_of_the_fleet() -> None:
    world = World()
    await world.join("a", models=("alpha", "unheard-of"))
    await world.join("b", draining=True)
    await world.lead()
    await world.advance(1.0)
    question = await build_question(world, {("alpha", 600.0): 1.0})
    assert [(each.name, each.models) for each in question.members[: question.size]] == [("a", ("alpha",))]
    assert question.idle == 1


async def test_a_gpu_is_tried_with_the_models_that_it_can_hold() -> None:
    """The only GPU that profiles know, and the one instance with it does not have the model."""
    world = World(snapshot=profiles(gpus=("big",)))
    await world.join("a", models=("alpha",))
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=200)
    await world.submit("beta", slo_s=600.0)
    await world.advance(1.0)
    question = await build_question(world, {})
    assert question.unserved == 1
    [option] = advise(question).options
    assert (option.gpu, option.models, option.instances, option.enough) == ("big", ("alpha", "beta"), 1, True)
    await world.join("b", models=("beta", "gamma"))
    await world.advance(1.0)
    question = await build_question(world, {})
    assert question.unserved == 0
    assert {each.models for each in question.members[question.size :]} == {("alpha",), ("beta", "gamma")}, "none has to be added for these"


# Advice ---------------------------------------------------------------------------------------------------------------


async def test_a_load_of_several_instances_asks_for_about_as_many() -> None:
    """One "big" serves about 45 such requests a second, one "small" half as many."""
    question = await build_question(await cluster("a"), {("alpha", 30.0): 150.0})
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


async def test_attainment_grows_with_instances_and_falls_with_load() -> None:
    world = await cluster("a", "b", "c", "d")
    low, high = await build_question(world, {("alpha", 30.0): 30.0}), await build_question(world, {("alpha", 30.0): 120.0})
    by_size = [forecast(high, range(count)).attainment for count in range(5)]
    assert by_size == sorted(by_size)
    assert by_size[0] == 0.0
    assert by_size[1] < 0.9 < by_size[4]
    assert forecast(low, range(1)).attainment > by_size[1]


async def test_idle_instances_could_go_and_no_more_than_that() -> None:
    advice = advise(await build_question(await cluster("a", "b", "c", "d", "e"), {("alpha", 30.0): 60.0}))
    assert not advice.options
    assert 2 <= len(advice.spare) <= 3
    assert "could go" in advice.line
    fewest = advise(await build_question(await cluster(), {("alpha", 30.0): 60.0})).options[0].instances
    assert abs(fewest - (5 - len(advice.spare))) <= 1, "an instance that is added has to load the model"


@pytest.mark.parametrize(("count", "more"), [(100, 0), (30_000, 3)])
async def test_a_backlog_needs_instances_though_nothing_arrives(count: int, more: int) -> None:
    """30,000 take 660 s of one instance, and are due in 200 s."""
    world = await cluster("a")
    await world.submit("alpha", slo_s=200.0, count=count)
    await world.settle()
    advice = advise(await build_question(world, {}))
    assert sum(option.instances for option in advice.options if option.gpu == "big") == more


async def test_a_burst_that_is_over_is_served_until_its_deadline() -> None:
    """2,000 requests in ten seconds, then next to none: one instance needs 45 s for them."""
    world = await cluster("a")
    await world.submit("alpha", slo_s=120.0, count=2000)
    await world.settle()
    assert advise(await build_question(world, {("alpha", 120.0): 1.0})).line == "the instances are enough"


async def test_first_tokens_are_there_long_before_the_outputs() -> None:
    """Outputs take longer than the SLO."""
    world = World(snapshot=profiles(output_tokens=10_000.0))
    await world.join("a")
    await world.lead()
    await world.advance(1.0)
    first = advise(await build_question(world, {("alpha", 90.0): 0.01}, kind=SloKind.FIRST_TOKEN))
    assert not first.options
    assert first.attainment == pytest.approx(1.0)
    assert not any(option.enough for option in advise(await build_question(world, {("alpha", 90.0): 0.01})).options)


async def test_no_instance_at_all_is_advised_from_what_profiles_know() -> None:
    world = World()
    await world.lead()
    await world.submit("alpha", slo_s=300.0, count=50)
    await world.submit("unheard-of", slo_s=600.0)
    await world.settle()
    question = await build_question(world, {("alpha", 300.0): 5.0})
    assert question.unserved == 51
    assert question.needs_advice
    advice = advise(question)
    assert advice.options[0].models == ("alpha",)
    assert advice.options[0].instances == 1


async def test_a_model_without_a_profile_is_said_to_be_served_by_nobody() -> None:
    world = World()
    await world.lead()
    await world.submit("unheard-of", slo_s=300.0, count=3)
    await world.settle()
    advice = advise(await build_question(world, {}))
    assert not advice.options
    assert "no known GPU serves" in advice.line


async def test_an_slo_that_no_fleet_meets_is_reported() -> None:
    """Outputs take longer than the SLO on every GPU."""
    advice = advise(await build_question(await cluster("a"), {("alpha", 0.5): 5.0, ("beta", 0.5): 5.0}))
    assert all(not option.enough and option.instances <= ADDED_MAX for option in advice.options)
    assert advice.attainment < 0.5


async def test_requests_without_a_deadline_are_never_late() -> None:
    world = await cluster("a")
    await world.submit("alpha", priority=3, count=5000)
    await world.settle()
    advice = advise(await build_question(world, {}))
    assert (advice.late, advice.misses, advice.options) == (0.0, (), ())


async def test_the_plan_names_late_requests_and_by_how_much() -> None:
    world = await cluster("a")
    await world.submit("alpha", slo_s=20.0, count=3000)
    await world.submit("beta", slo_s=3600.0, count=100)
    await world.settle()
    advice = advise(await build_question(world, {}))
    assert {miss.model for miss in advice.misses} == {"alpha"}
    assert advice.late == pytest.approx(sum(miss.late for miss in advice.misses), rel=0.2)
    assert advice.late == pytest.approx(3000 - (20 - 10 - 3) * 45, rel=0.1), "it loads for 10 s, and an output takes 3 s"
    assert max(miss.over_s for miss in advice.misses) == pytest.approx(10 + 3 + 3000 / 45 - 20, rel=0.1)
    assert all(miss.late <= miss.waiting for miss in advice.misses)
    assert [miss.late for miss in advice.misses] == sorted((miss.late for miss in advice.misses), reverse=True), "the worst first"


def test_each_request_of_a_group_is_due_by_its_own_deadline() -> None:
    """A group that ends as it is due is hardly late; of what is due from 56 s on to 64 s, half is due a minute later or after."""
    each = group(1, "alpha", 5.0, 400)
    board, terms = board_of([slot("a")], {"a": [each]}), ClassTable(estimates=estimates())

    def answer() -> tuple[Question, Advice]:
        question = question_of(board, terms, Demand(START_S), START_S)
        return question, advise(question)

    [miss] = answer()[1].misses
    assert miss.late > 200.0
    each.last_deadline_s += 8.0
    assert answer()[1].late < 10.0
    each.next_deadline_s, each.last_deadline_s = START_S + 56.0, START_S + 64.0
    assert answer()[0].due.tolist() == [pytest.approx(200.0)]


async def test_advice_is_the_same_again() -> None:
    world = await cluster("a", "b")
    await world.submit("alpha", slo_s=100.0, count=3000)
    await world.submit("beta", slo_s=50.0, count=1000)
    await world.settle()
    rates = {("alpha", 30.0): 30.0, ("beta", 90.0): 20.0}
    assert advise(await build_question(world, rates)) == advise(await build_question(world, rates))
