"""Plans that count on eviction: the batch is evicted for an urgent head (QLM section 5), at the price of its work and its lateness."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from qlm_core.operations.clearing import Head, eviction_costs, would_clear
from qlm_core.operations.preemption import Contender, Occupant, Room, Rule, Urgency, clear
from qlm_core.prediction.prediction_views import RunningView
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import PROMPT_STEP
from qlm_planner.cost.order_cost import OrderTimes
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import times_of
from qlm_planner.groups.cheapest_place import best_place
from qlm_planner.machine.effects import PlanCause
from qlm_planner.machine.events import LoadReported
from qlm_planner.policy import Policy
from qlm_queue.values import Owned, Pulled, RequeueCause

from .small_cluster import Job, SmallCluster
from .test_cheapest_place import class_table, estimates, group, lines, slot
from .world import CATALOGUE, LEASE_S, START_S, World, hardware, profiles


def running(runs: Sequence[tuple[Group, int]]) -> Slot:
    """An engine with so many requests of some groups."""
    on = slot("a", running=sum(count for _, count in runs))
    for each, count in runs:
        on.add_running(each, count)
    return on


def worked_out(groups: Sequence[Group], table: ClassTable, count: int) -> OrderTimes:
    """Behind so many that run."""
    return times_of(lines(table, (running([(CALM, count)]), groups)), table)


CALM = group(1, "alpha", 600.0, 300)
"""Others of its kind run."""

EACH_S = hardware("big", "alpha").recompute_us_per_token * (200 + round((100.0**2 + 20.0**2) / 200.0)) * 1e-6
"""An evicted request computes its KV again: the prompt and its output, at the profile's rate."""


# Cost -----------------------------------------------------------------------------------------------------------------


def test_only_a_head_that_would_be_late_does_not_wait_for_the_batch_to_end() -> None:
    made = class_table(swap_s=1.0)
    drain_s = made.estimates.engine(running([(CALM, 100)])).drain_s
    clears = worked_out([group(2, "beta", 4.6, 8), CALM], made, 100)
    assert clears.costs().redo_cost > 0.0
    assert clears.start_s[0] == pytest.approx(1.0), "only the swap"
    waits = worked_out([group(2, "beta", 60.0, 8), CALM], made, 100)
    assert waits.costs().redo_cost == 0.0
    assert waits.start_s[0] > drain_s


def test_the_work_that_is_lost_has_a_price() -> None:
    """And the time that those lose: they come back after two swaps."""
    made, policy = class_table(swap_s=1.0), Policy()
    for count in (20, 150):
        redo_cost = worked_out([group(2, "beta", 4.6, 8), CALM], made, count).costs().redo_cost
        away_s = 2.0 * hardware("big", "alpha", swap_s=1.0).swap_s(warm=True) + EACH_S
        assert redo_cost == pytest.approx(count * (policy.work_weight * EACH_S + policy.completion_weight * away_s))


def test_nothing_is_evicted_for_less_than_that_costs() -> None:
    dear = class_table(Policy(late_weight=10.0), swap_s=1.0)
    assert worked_out([group(2, "beta", 2.4, 1), CALM], dear, 150).costs().redo_cost == 0.0
    assert worked_out([group(2, "beta", 2.4, 100), CALM], dear, 150).costs().redo_cost > 0.0


def test_a_running_request_counts_once_whoever_reports_it() -> None:
    """By its groups, as any of the model, or both; those of a model that is not active count as any."""
    made, known = estimates(), profiles()
    longer = (replace(row, output_tokens_mean=4.0 * row.output_tokens_mean) if row.model == "beta" else row for row in known.workload)
    made.load(CATALOGUE, replace(known, workload=tuple(longer)))
    alpha, beta = group(1, "alpha", 600.0, 300), group(2, "beta", 600.0, 300)
    expected = made.engine(slot("a", running=100)).left_s
    for runs in ([(alpha, 100)], [(alpha, 60), (alpha, 40)], [(beta, 30), (alpha, 70)]):
        assert made.engine(running(runs)).left_s == pytest.approx(expected, rel=0.06)
    partly = running([(alpha, 40)])
    partly.running = 100
    assert made.engine(partly).left_s == pytest.approx(expected, rel=0.06)


def test_the_same_model_needs_no_clearing() -> None:
    assert worked_out([group(2, "alpha", 2.0, 8), CALM], class_table(), 100).costs().redo_cost == 0.0


@pytest.mark.parametrize(("deadline_s", "swap_s", "position"), [(7.0, 2.0, 0), (60.0, 2.0, 1), (65.0, 60.0, 1)])
def test_a_late_single_request_is_put_in_front_of_a_running_head(deadline_s: float, swap_s: float, position: int) -> None:
    """One request that would be late behind the head, against two swaps, the work of the 30 evicted, and the wait of 200; but not for two
    swaps of a minute."""
    made, calm = class_table(swap_s=swap_s), group(1, "alpha", 600.0, 200)
    found = best_place(lines(made, (running([(calm, 30)]), [calm])), made, group(2, "beta", deadline_s, 1), START_S)
    assert found is not None
    assert found.position == position


def test_it_expects_what_the_agents_rule_does() -> None:
    """Where the batch is as the planner believes (alike, half done), `would_clear` says what `preemption.clear` does."""
    answers = [expects_what_the_rule_does(seed) for seed in range(200)]
    assert 25 < sum(answers) < 160, "both answers are tried"


def expects_what_the_rule_does(seed: int) -> bool:
    chance = random.Random(seed)
    swap_s = chance.choice((0.5, 2.0, 10.0))
    made = estimates(swap_s=swap_s)
    runs = [
        (group(number, "alpha", chance.choice((2.0, 6.0, 20.0, 300.0)), 100, slo_s=300.0), chance.randrange(1, 80))
        for number in range(chance.randrange(1, 4))
    ]
    on, row = running(runs), hardware("big", "alpha", swap_s=swap_s)
    drain_s, one_class = made.engine(on).drain_s, made.class_of(on, runs[0][0].traits.key, round(math.log(200.0) / PROMPT_STEP))
    assert one_class is not None
    way = eviction_costs(one_class.service, 200.0, row)
    head = Head(
        band=0,
        deadline_s=START_S + chance.choice((1.0, 3.0, 5.0, 15.0, 60.0)),
        requests=chance.randrange(1, 120),
        service_s=chance.choice((0.5, 3.0, 12.0)),
    )
    context_tokens = round(way.eviction_cost_s / (hardware("big", "alpha").recompute_us_per_token * 1e-6))
    batch = [
        Occupant(
            run_id=f"{number}-{each}",
            urgency=Urgency(0, run.first_deadline_s),
            # The last of them ends when the engine is drained.
            left_s=drain_s if number == each == 0 else way.runs_left_s,
            kv_tokens=300,
            context_tokens=context_tokens,
            offloadable=False,
        )
        for number, (run, count) in enumerate(runs)
        for each in range(count)
    ]
    contender = Contender(urgency=Urgency(0, head.deadline_s), requests=head.requests, kv_tokens=300, service_s=head.service_s)
    victims = clear(START_S, contender, batch, Room(seats=0, kv_tokens=0), row, Rule())
    runners = [RunningView(slo_class="", token_class="", count=count, deadline_s=run.first_deadline_s) for run, count in runs]
    expected = would_clear(runners, drain_s, way, head, START_S)
    assert expected == bool(victims), seed
    return expected


# Running requests by group --------------------------------------------------------------------------------------------


async def test_running_requests_are_known_by_group() -> None:
    """From events at once, and from an overview after a rebuild."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 60.0, count=10)
    await world.submit("alpha", 600.0, count=10)
    await world.settle()
    pulled = await world.pull("a", "alpha", 13)
    await world.settle()
    lived = {name: (kept.count, kept.traits) for name, kept in machine.board.slots["a"].runners.items()}
    assert sorted(count for count, _ in lived.values()) == [3, 10]
    rebuilt = await world.lead()
    assert {name: (kept.count, kept.traits) for name, kept in rebuilt.board.slots["a"].runners.items()} == lived
    await world.complete("a", pulled[:12])
    await world.settle()
    assert [kept.count for kept in rebuilt.board.slots["a"].runners.values()] == [1]
    await world.complete("a", pulled[12:])
    await world.advance(1.0)
    assert rebuilt.board.slots["a"].runners == {}


async def evict_for(world: World, name: str, pulled: Sequence[Pulled], model: str) -> None:
    """The agent evicts its batch for a model, and reports the model swap at once."""
    await world.deliver(LoadReported(incarnation=world.agents[name][0], active_model=model))
    owned = [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in pulled]
    await world.queue.requeue(world.agents[name][0], owned, RequeueCause.EVICTED, b"")
    await world.settle()


async def test_evicted_requests_stand_behind_all_of_the_heads_model() -> None:
    """The queue puts them right behind the head; between two groups of the head's model theirs would be loaded in between (A-B-A-B)."""
    world = World(snapshot=profiles(swap_s=20.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 3600.0, count=50)
    await world.settle()
    pulled = await world.pull("a", "alpha", 50)
    await world.submit("beta", 20.0, count=10)
    await world.settle()
    await world.submit("beta", 100.0, count=10)
    await world.settle()
    assert (await world.queues())["a"] == ["beta", "beta"]
    await evict_for(world, "a", pulled, "beta")
    assert machine.board.slots["a"].active_model == "beta"
    assert machine.board.queues["a"] == await world.group_ids("a")
    await world.advance(0.2)
    assert (await world.queues())["a"] == ["beta", "beta", "alpha"]
    assert [applied.cause for applied in world.applied] == [PlanCause.EVICTED]


async def test_nothing_is_put_in_front_of_the_head_while_the_engine_clears() -> None:
    """A new group of the former model takes no place in front of the head that it was just evicted for."""
    world = World(snapshot=profiles(swap_s=5.0))
    await world.join("a")
    await world.lead()
    await world.submit("alpha", 600.0, count=50)
    await world.settle()
    pulled = await world.pull("a", "alpha", 50)
    await world.submit("beta", 10.0, count=10)
    await world.settle()
    await evict_for(world, "a", pulled, "beta")
    await world.submit("alpha", 300.0, count=5)
    await world.settle()
    assert (await world.queues())["a"][0] == "beta"


# Outcome --------------------------------------------------------------------------------------------------------------


def mixed(seed: int, *, seconds: float = 100.0) -> list[Job]:
    """Interactive requests one by one, batches at once, of three models."""
    chance = random.Random(seed)
    models = ("alpha", "beta", "gamma")
    jobs: list[Job] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(1.5)) < seconds:
        jobs.append(Job(at_s, chance.choice(models), 15.0))
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(0.15)) < seconds:
        model, slo_s = chance.choice(models), chance.choice((60.0, 600.0))
        jobs += [Job(at_s + chance.random(), model, slo_s) for _ in range(chance.randrange(10, 60))]
    return jobs


async def test_interactive_requests_gain_and_batches_do_not_lose() -> None:
    """In two overloads: the gain of one depends on when its batches arrive."""
    gained = 0.0
    for seed in (2, 4):
        drain, evict = [SmallCluster(Policy(lease_ttl_s=LEASE_S), engines=("a", "b"), evicting=evicting) for evicting in (False, True)]
        jobs = mixed(seed)
        for cluster in (drain, evict):
            cluster.world.snapshot = profiles(output_tokens=180.0, swap_s=3.0)
            await cluster.serve(jobs)
            assert sum(cluster.served.count.values()) == len(jobs)
        gained += evict.served.attained(15.0) - drain.served.attained(15.0)
        assert evict.served.attained(60.0) >= drain.served.attained(60.0) - 0.02
        assert evict.served.attained(600.0) == 1.0
    assert gained / 2 > 0.05


async def test_two_models_do_not_take_turns_pushing_each_other_out() -> None:
    """A-B-A-C: three models with requests alike, each of which would like to be first: they are evicted only for more urgent ones, so
    there are few evictions, and far fewer swaps than changes of model in the order of arrival."""
    models = ("alpha", "beta", "alpha", "gamma")
    jobs = [Job(0.4 * number, models[number % 4], 30.0) for number in range(150)]
    cluster = SmallCluster(Policy(lease_ttl_s=LEASE_S))
    cluster.world.snapshot = profiles(output_tokens=180.0, swap_s=3.0)
    served = await cluster.serve(jobs)
    assert served.count[30.0] == 150
    assert served.swaps <= 15, served
    assert served.evictions <= 50, served
