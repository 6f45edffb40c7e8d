"""Nobody waits more than 3 x its SLO while others of its band are served in time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_planner.board.board import Board
from qlm_planner.board.group import AGED, BEHIND, TIERS, USUAL, Group
from qlm_planner.config import PlannerSettings
from qlm_planner.groups.ranks import MARGIN_SLOS, in_rank, set_tiers, tier_of
from qlm_planner.policy import Policy

from .small_cluster import REQUEST_S, SEATS, STEP_S, SWAP_S, Job, Served, SmallCluster
from .test_cheapest_place import group
from .world import LEASE_S, START_S, World

POLICY = Policy(lease_ttl_s=LEASE_S, wait_max_s=0.0)

GREEDY = "1/greedy"

groups = st.tuples(
    st.sampled_from(["alpha", "beta"]),
    st.floats(-500.0, 500.0),
    st.sampled_from([5.0, 60.0, 1e9, math.inf]),
    st.sampled_from(["1", GREEDY]),
    st.integers(-1, 1),
)


def board_of(made: list[tuple[str, float, float, str, int]]) -> Board:
    board = Board(slo_band=0)
    board.queues["a"] = []
    for number, (model, deadline_s, slo_s, tenant_class, band) in enumerate(made):
        each = group(number, model, deadline_s, slo_s=slo_s)
        key = each.traits.key
        object.__setattr__(
            each.traits, "key", type(key)(**{name: getattr(key, name) for name in key.__slots__} | {"tenant_class": tenant_class})
        )
        each.band = band
        board.open_group(each, len(board.queues["a"]))
    return board


@given(st.lists(groups, max_size=12), st.sampled_from([frozenset[str](), frozenset({GREEDY})]))
@settings(max_examples=100)
def test_aged_groups_are_first_and_groups_above_their_share_last(
    made: list[tuple[str, float, float, str, int]], above: frozenset[str]
) -> None:
    board = board_of(made)
    before = list(board.queues["a"])
    set_tiers(board, above, POLICY, START_S)
    order = [board.groups[each] for each in (in_rank(board, board.queues) or board.queues)["a"]]
    assert sorted(each.group_id for each in order) == sorted(before)
    assert [each.band for each in order] == sorted(each.band for each in order), "bands stay"
    for at, each in enumerate(order):
        waited_slos = 1.0 + (START_S - each.first_deadline_s) / each.traits.slo_s if math.isfinite(each.traits.slo_s) else 0.0
        if waited_slos >= POLICY.wait_max_slos and each.tier != BEHIND:
            assert all(ahead.tier == AGED for ahead in order[:at] if ahead.band == each.band)
        if each.traits.key.tenant_class not in above:
            assert all(ahead.tier != BEHIND for ahead in order[:at] if ahead.band == each.band)
    for tier in range(TIERS):
        for band in (-1, 0, 1):
            alike = [each.group_id for each in order if (each.band, each.tier) == (band, tier)]
            assert alike == [each for each in before if each in alike], "nobody overtakes within a rank"


@pytest.mark.parametrize(("slo_s", "waited_s", "tier"), [(60.0, 134.0, USUAL), (60.0, 136.0, AGED), (math.inf, 1e9, USUAL)])
def test_when_a_group_has_waited_too_long(slo_s: float, waited_s: float, tier: int) -> None:
    """3 - 0.75 SLOs after its first request arrived; but not while its tenant has more than its share."""
    assert MARGIN_SLOS == 0.75
    each: Group = group(1, "alpha", slo_s - waited_s, slo_s=slo_s)
    assert tier_of(each, (), POLICY, START_S) == tier
    assert tier_of(each, (each.traits.key.tenant_class,), POLICY, START_S) == BEHIND
    longer = replace(POLICY, wait_max_s=max(0.0, waited_s) + 0.75 * min(slo_s, 1e6) + 1.0)
    assert tier_of(each, (), longer, START_S) == USUAL


@pytest.mark.parametrize("value", [1.9, 0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_makes_no_sense_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="wait_max_slos"):
        Policy(wait_max_slos=value)
    with pytest.raises(ValueError, match="wait_max_slos"):
        PlannerSettings.model_validate({"wait_max_slos": value})


def adversarial(load: float, urgent_s: float, patient_s: float, seconds: float) -> list[Job]:
    """An endless stream of urgent requests of one model, at a share of what the engine can do, and a patient one of another model: for this
    a swap there and back makes many urgent ones late, so that by cost alone it never comes."""
    rate = load * SEATS / REQUEST_S
    stream = [Job(arrival_s=number / rate, model="alpha", slo_s=urgent_s) for number in range(int(seconds * rate))]
    return [*stream, Job(arrival_s=1.0, model="beta", slo_s=patient_s)]


def served(jobs: list[Job], policy: Policy) -> Served:
    return asyncio.run(SmallCluster(policy).serve(jobs))


def test_nobody_starves_behind_an_endless_urgent_stream_and_without_the_bound_they_would() -> None:
    jobs = adversarial(0.97, 6.0, 16.0, 60.0)
    unbounded = served(jobs, Policy(lease_ttl_s=LEASE_S, wait_max_slos=1e6, wait_max_s=0.0))
    bounded = served(jobs, POLICY)
    assert unbounded.longest_wait_s[16.0] > 3.0 * 16.0 + STEP_S
    assert bounded.longest_wait_s[16.0] <= 3.0 * 16.0
    assert bounded.attained(6.0) > 0.1, "others are served in time"
    assert bounded.swaps <= unbounded.swaps + 2
    assert SWAP_S < MARGIN_SLOS * 16.0, "what the margin is for"


async def test_the_shortest_slo_of_a_group_bounds_its_wait() -> None:
    """17 s and 32 s are of one class: the bound of the short one comes before a group of the long one alone is moved up. A later leader
    knows that too."""
    world = World(POLICY)
    await world.join("a")
    await world.lead()
    await world.advance(2.0 * LEASE_S)
    for slo_s in (32.0, 17.0):
        await world.submit("alpha", slo_s)
        await world.settle()
    assert world.machine is not None
    [only] = world.machine.board.groups.values()
    assert (only.waiting, only.tier) == (2, USUAL)
    await world.advance((POLICY.wait_max_slos - MARGIN_SLOS) * 17.0 - 1.0)
    assert [each.tier for each in world.machine.board.groups.values()] == [USUAL]
    await world.advance(2.0)
    assert [each.tier for each in world.machine.board.groups.values()] == [AGED]
    await world.lead()
    await world.advance(1.0)
    assert [each.tier for each in world.machine.board.groups.values()] == [AGED]
