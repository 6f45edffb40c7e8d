"""Tenants: weights in the objective, limits of the share of served work, and however many names there are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import SloKind
from qlm_planner.board.group import BEHIND, USUAL, Group, GroupTraits, from_meta, to_meta
from qlm_planner.board.slot import Running, Slot
from qlm_planner.board.tenant_shares import INTERVAL_MAX_S, TenantShares
from qlm_planner.board.tenants import (
    LIMITED_MAX,
    WEIGHT_EXPONENT_MAX,
    Tenant,
    TenantClasses,
    Tenants,
    limited_tenant,
    weight_class,
    weight_of,
)
from qlm_planner.config import PlannerConfig, PlannerSettings
from qlm_planner.cost.virtual_queues import times_of
from qlm_planner.groups.cheapest_place import best_place
from qlm_planner.policy import Policy
from qlm_planner.search import Costs

from .small_cluster import REQUEST_S, SEATS, Job, SmallCluster
from .test_cheapest_place import class_table, group, lines, slot
from .world import LEASE_S, MODELS, START_S, World

GOLD = Tenant(name="gold", weight=8.0)
GREEDY = Tenant(name="greedy", share_max=0.25)


def slot_of(**running: int) -> Slot:
    """An instance that runs so many requests of each class of tenants."""
    slot = Slot(facts=InstanceFacts(name="a", incarnation="a/1", gpu="big", n_gpu=1, engine="simulated", models=MODELS))
    for number, (name, count) in enumerate(running.items()):
        key = GroupKey(model="alpha", slo_kind=SloKind.COMPLETION, slo_class="64s", token_class="256", tenant_class=name.replace("__", "/"))
        traits = GroupTraits(key=key, slo_s=60.0, priority=0)
        slot.runners[f"g1-{number}"] = Running(traits=traits, count=count)
        slot.running += count
    return slot


# Settings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_is_finite_and_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Tenant(name="a", weight=weight)
    with pytest.raises(ValidationError):
        PlannerSettings.model_validate({"tenants": [{"name": "a", "weight": weight}]})
    with pytest.raises(ValidationError):
        PlannerSettings.model_validate({"tenant_weight": weight})


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, math.nan, math.inf])
def test_a_share_is_above_zero_and_at_most_one(share: float) -> None:
    with pytest.raises(ValueError, match="share_max"):
        Tenant(name="a", share_max=share)
    with pytest.raises(ValidationError):
        PlannerSettings.model_validate({"tenants": [{"name": "a", "share_max": share}]})


def test_names_are_there_and_come_once() -> None:
    for named in ((GOLD, GOLD), (Tenant(),)):
        with pytest.raises(ValueError, match="name"):
            Tenants(named=named)
    with pytest.raises(ValidationError, match="once"):
        PlannerSettings.model_validate({"tenants": [{"name": "a"}, {"name": "a"}]})


def test_settings_become_policy() -> None:
    model = {"name": "m", "profile": "p"}
    tenants = [{"name": "gold", "weight": 8}, {"name": "greedy", "share_max": 0.25}]
    made = PlannerConfig.model_validate({"models": [model], "planner": {"tenants": tenants, "tenant_weight": 2}}).policy().tenants
    assert made.of("gold") == GOLD
    assert made.of("greedy") == GREEDY
    assert made.of("anybody") == Tenant(weight=2.0)


# Classes ----------------------------------------------------------------------------------------------------------------


def test_weights_make_few_classes() -> None:
    weights = [10.0**exponent for exponent in range(-300, 300, 5)]
    classes = {weight_class(weight) for weight in weights}
    assert len(classes) <= 2 * WEIGHT_EXPONENT_MAX + 1
    for name in classes:
        assert weight_class(weight_of(name)) == name
    assert weight_of(weight_class(8.0)) == 8.0
    assert weight_of(weight_class(0.3)) == 0.25


@pytest.mark.parametrize("name", ["", "x", "-1", "nan", "inf", "0", "1_0", "1_x", "/a", "٣", "9" * 400])
def test_a_class_of_another_version_weighs_one(name: str) -> None:
    assert weight_of(name) == 1.0


def test_only_limited_tenants_have_classes_of_their_own() -> None:
    classes = TenantClasses(tenants=Tenants(named=(GOLD, GREEDY)), forget_s=60.0)
    assert classes.of("anybody", 0.0) == "1"
    assert classes.of("gold", 0.0) == "8"
    assert classes.of("greedy", 0.0) == "1/greedy"
    assert limited_tenant("1/a/b") == "a/b", "a tenant's name may hold anything"


def test_a_hundred_thousand_tenants_take_bounded_memory() -> None:
    """Also where each unknown one is limited: so many have classes of their own at a time, the others share one."""
    classes = TenantClasses(tenants=Tenants(others=Tenant(share_max=0.5)), forget_s=60.0)
    made = {classes.of(f"t{number}", 0.0) for number in range(100_000)}
    assert len(made) == LIMITED_MAX + 1
    assert len(classes.seen_s) == LIMITED_MAX
    assert classes.of("t3", 1.0) == "1/t3", "who has a place keeps it"
    assert classes.of("later", 59.0) == "1"
    assert classes.of("later", 60.5) == "1/later", "places of those that sent nothing are free again"
    assert set(classes.seen_s) == {"t3", "later"}


def test_the_class_survives_a_restart() -> None:
    key = GroupKey(model="alpha", slo_kind=SloKind.COMPLETION, slo_class="64s", token_class="256", tenant_class="8/a/b")
    traits = GroupTraits(key=key, slo_s=60.0, priority=0)
    assert from_meta(to_meta(traits, 0)) == traits


# Shares -----------------------------------------------------------------------------------------------------------------------


def test_shares_are_of_gpu_time_in_the_window() -> None:
    shares = TenantShares(tenants=Tenants(named=(GREEDY,)), window_s=60.0)
    slots = [slot_of(**{"1__greedy": 30, "1": 10}), slot_of(**{"1": 5}), slot_of()]
    for second in range(10):
        shares.update(slots, START_S + second)
    assert shares.in_use() == {"1/greedy": pytest.approx(0.375)}
    assert shares.above == {"1/greedy"}
    for second in range(10, 200):
        shares.update(slots[1:], START_S + second)
    assert shares.in_use() == {}
    assert shares.above == frozenset()


def test_a_tenant_does_not_go_back_and_forth_at_its_limit() -> None:
    shares = TenantShares(tenants=Tenants(named=(GREEDY,)), window_s=60.0)
    turns, was = 0, False
    for second in range(120):
        shares.update([slot_of(**{"1__greedy": 25 + second % 2, "1": 75 - second % 2})], START_S + second)
        turns += was != bool(shares.above)
        was = bool(shares.above)
    assert turns <= 2


def test_a_long_pause_between_two_looks_is_not_taken_as_served() -> None:
    shares = TenantShares(tenants=Tenants(named=(GREEDY,)), window_s=1e6)
    shares.update([slot_of(**{"1__greedy": 1})], START_S)
    shares.update([slot_of(**{"1__greedy": 1})], START_S + 1e5)
    shares.update([slot_of(**{"1": 1})], START_S + 1e5 - 50.0)
    assert sum(part.all_s for part in shares._parts) == INTERVAL_MAX_S


async def test_a_tenant_above_its_share_waits_behind_and_returns() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, tenants=Tenants(named=(GREEDY,)), share_window_s=6.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 100.0, count=40, tenant="greedy")
    await world.settle()
    pulled = await world.pull("a", "alpha", 20)
    await world.advance(2.0)
    assert machine.tenant_shares.above == {"1/greedy"}
    [greedy] = machine.board.queue_groups("a")
    assert greedy.tier == BEHIND
    # Nobody else waits: it is served all the same (above), and later deadlines come first now.
    await world.submit("alpha", 500.0, count=5, tenant="modest")
    await world.advance(1.0)
    tenants = [group.traits.key.tenant_class for group in machine.board.queue_groups("a")]
    assert tenants == ["1", "1/greedy"]
    assert await world.group_ids("a") == machine.board.queues["a"]
    # A new group of it goes behind at once.
    await world.submit("beta", 100.0, tenant="greedy")
    await world.settle()
    assert [group.tier for group in machine.board.queue_groups("a")] == [USUAL, BEHIND, BEHIND]
    # Its running requests have ended, and others ran meanwhile.
    await world.complete("a", pulled)
    await world.pull("a", "alpha", 5)
    await world.advance(8.0)
    assert machine.tenant_shares.above == frozenset()
    assert {group.tier for group in machine.board.queue_groups("a")} == {USUAL}


async def test_a_share_is_no_matter_of_bands() -> None:
    """A tenant above its share stays before lower bands."""
    world = World(Policy(lease_ttl_s=LEASE_S, tenants=Tenants(named=(GREEDY,))))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", priority=1, count=10, tenant="greedy")
    await world.settle()
    await world.pull("a", "alpha", 5)
    await world.advance(2.0)
    assert machine.tenant_shares.above == {"1/greedy"}
    await world.submit("alpha", priority=2, tenant="modest")
    await world.submit("alpha", priority=1, tenant="modest")
    await world.advance(1.0)
    found = [(group.band, group.traits.key.tenant_class) for group in machine.board.queue_groups("a")]
    assert found == [(1, "1"), (1, "1/greedy"), (2, "1")]


async def test_the_modest_are_served_first_and_no_engine_waits_for_it() -> None:
    """One tenant sends 24 s of work at once, another a request now and then, with the same SLO."""
    flood = [Job(arrival_s=0.0, model="alpha", slo_s=60.0, tenant="greedy")] * 300
    modest = [Job(arrival_s=2.0 + number, model="alpha", slo_s=60.0, tenant="modest") for number in range(20)]
    free, limited = [
        await SmallCluster(Policy(lease_ttl_s=LEASE_S, tenants=Tenants(named=named))).serve([*flood, *modest]) for named in ((), (GREEDY,))
    ]
    assert max(limited.waits_s["modest"]) < 0.3 * max(free.waits_s["modest"]), "who is below its share does not wait behind the flood"
    assert limited.ended_s <= free.ended_s + 2 * REQUEST_S, "no seat stays empty for it"
    assert len(limited.waits_s["greedy"]) == 300


async def test_a_tenant_at_ten_times_its_share_costs_the_others_at_most_five_points() -> None:
    """Ten tenants may have a tenth of the engine each. Nine send four fifths of that; the tenth sends ten times its own, as urgently."""
    slo_s, per_s, seconds = 12.0, SEATS / REQUEST_S, 30

    def sent(tenant: str, rate_per_s: float) -> list[Job]:
        times_s = [number / rate_per_s for number in range(int(seconds * rate_per_s))]
        return [Job(arrival_s=at_s, model="alpha", slo_s=slo_s, tenant=tenant) for at_s in times_s]

    others = [job for number in range(9) for job in sent(f"other-{number}", 0.08 * per_s)]
    attained = {}
    for name, share_max, jobs in (
        ("alone", 0.1, others),
        ("beside it", 0.1, [*others, *sent("greedy", per_s)]),
        ("without limits", 1.0, [*others, *sent("greedy", per_s)]),
    ):
        policy = Policy(lease_ttl_s=LEASE_S, tenants=Tenants(others=Tenant(share_max=share_max)))
        served = await SmallCluster(policy).serve(jobs)
        waits_s = [wait_s for tenant, each in served.waits_s.items() if tenant != "greedy" for wait_s in each]
        assert len(waits_s) == len(others)
        attained[name] = sum(wait_s + REQUEST_S <= slo_s for wait_s in waits_s) / len(waits_s)
    assert attained["alone"] - attained["beside it"] <= 0.05, attained
    assert attained["without limits"] < attained["beside it"] - 0.05, "the load is one that limits are needed for"


async def test_impossible_slos_are_no_way_around_a_limit() -> None:
    """Requests that have waited too long as soon as they have come."""
    flood = [Job(arrival_s=number / 10, model="alpha", slo_s=0.5, tenant="greedy") for number in range(500)]
    modest = [Job(arrival_s=5.0 + number, model="alpha", slo_s=20.0, tenant="modest") for number in range(20)]
    policy = Policy(lease_ttl_s=LEASE_S, tenants=Tenants(named=(GREEDY,)))
    served = await SmallCluster(policy).serve([*[flood[0]] * 300, *flood, *modest])
    assert served.attained(20.0) == 1.0
    assert len(served.waits_s["greedy"]) == 800


# Weights ----------------------------------------------------------------------------------------------------------------


def weighty(number: int, model: str, deadline_s: float, tenant_class: str) -> Group:
    made = group(number, model, deadline_s, slo_s=20.0)
    made.traits = replace(made.traits, key=replace(made.traits.key, tenant_class=tenant_class))
    return made


def test_weights_multiply_all_that_a_request_costs() -> None:
    weights = Policy().weights
    costs: list[Costs] = []
    for name in ("1", "8", "1_4"):
        made = class_table()
        costs.append(times_of(lines(made, (slot("a", running=20), [weighty(1, "alpha", 0.1, name)])), made).costs())
    plain, heavy, light = costs
    assert plain.late == pytest.approx(50.0, rel=0.01)
    for cost, weight in ((heavy, 8.0), (light, 0.25)):
        assert cost.late == pytest.approx(weight * plain.late)
        assert cost.tardiness_s == pytest.approx(weight * plain.tardiness_s)
        assert cost.completion_s == pytest.approx(weight * plain.completion_s)
        parts = weights.late * cost.late + weights.tardiness * cost.tardiness_s + weights.completion * cost.completion_s
        assert cost.total == pytest.approx(parts)


def test_the_weight_decides_who_is_late() -> None:
    """Two groups that cannot both be in time, behind a head of a third model."""
    head = group(1, "alpha", 600.0)
    rival = weighty(2, "beta", 16.0, "1")
    for tenant_class, expected in (("16", 1), ("1", 2)):
        made = class_table()
        place = best_place(lines(made, (slot("a", running=20), [head, rival])), made, weighty(3, "gamma", 20.0, tenant_class), START_S)
        assert place is not None
        assert place.position == expected, tenant_class
