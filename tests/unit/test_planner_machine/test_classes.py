"""Classes of requests: by k-means, and the mix of SLO kinds in one queue."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from qlm_core.group import MEGA, GroupKey
from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board import Board
from qlm_planner.classes import (
    CLASSES_MAX,
    FAMILIES_MAX,
    SAMPLES_MAX,
    TOKENS_MAX,
    Centre,
    Classifier,
    Family,
    Sample,
    Samples,
    centres,
    family_of,
    learn,
    sample_of,
    usual_token_class,
)
from qlm_planner.classing import Classing
from qlm_planner.policy import Policy, TokenClasses
from qlm_planner.tenants import Tenant, Tenants

from .test_insertion import estimates
from .world import LEASE_S, START_S, World

KEY = GroupKey(model="alpha", slo_kind=SloKind.COMPLETION, slo_class="64s", token_class="256")
KMEANS = Policy(lease_ttl_s=LEASE_S, token_classes=TokenClasses.KMEANS, relearn_every_s=5.0, group_overtake_min_s=60.0)
"""Groups stay open for longer than a test lasts, whoever stands behind them."""


def two_sizes(count: int = 200) -> list[Sample]:
    """Requests around 90 and around 220 tokens, which the fixed class of 256 holds both."""
    chance = random.Random(1)
    return [sample_of(chance.choice((90, 220)) * chance.uniform(0.95, 1.05), 100.0, "256") for _ in range(count)]


# Learning ---------------------------------------------------------------------------------------------------------------


def test_classes_are_where_the_requests_are() -> None:
    found = centres(two_sizes())
    assert [round(math.exp(each.log_prompt), -1) for each in found] == [90, 220]
    assert {each.token_class for each in found} == {"256"}


def test_the_same_samples_give_the_same_classes() -> None:
    chance = random.Random(2)
    samples = [sample_of(chance.lognormvariate(6, 2), chance.lognormvariate(4, 1), "1024") for _ in range(SAMPLES_MAX)]
    assert centres(samples) == centres(samples)
    assert len(centres(samples)) == CLASSES_MAX


def test_requests_that_are_alike_are_one_class() -> None:
    """Fewer distinct points than classes."""
    assert len(centres([sample_of(200, 100.0, "256")] * 500)) == 1
    assert len(centres([sample_of(200, 100.0, "256")])) == 1
    assert len(centres([sample_of(10.0**power, 1.0, "256") for power in range(3) for _ in range(50)])) == 3
    assert learn({family_of(KEY): []}) == {}


@pytest.mark.parametrize("tokens", [0.0, -5.0, math.inf, -math.inf, math.nan, 1e300])
def test_absurd_counts_are_taken_as_the_nearest_possible(tokens: float) -> None:
    sample = sample_of(tokens, tokens, "256")
    assert all(0.0 <= value <= math.log(TOKENS_MAX) for value in sample[:2])
    [*found] = centres([*two_sizes(), sample])
    assert all(math.isfinite(each.log_prompt) for each in found)


# Classifying ------------------------------------------------------------------------------------------------------------


def test_a_request_is_of_the_nearest_class() -> None:
    classifier = Classifier().renewed("1.1", {family_of(KEY): centres(two_sizes())})
    assert classifier.cluster(family_of(KEY), sample_of(100, 100.0, "256")) == ("k1.1.0", "256")
    assert classifier.cluster(family_of(KEY), sample_of(4_000, 100.0, "4096")) == ("k1.1.1", "256")
    outputs = Classifier().renewed("1.2", {family_of(KEY): centres([sample_of(100.0, tokens, "256") for tokens in [50, 1_000] * 100])})
    assert [outputs.cluster(family_of(KEY), sample_of(100, tokens, "256"))[0] for tokens in (60, 900)] == ["k1.2.0", "k1.2.1"]
    other = GroupKey(model="beta", slo_kind=SloKind.COMPLETION, slo_class="64s", token_class="256")
    assert classifier.cluster(family_of(other), sample_of(100, 100.0, "256")) == ("", "256"), "nothing is learned of it"


def test_a_class_is_estimated_as_most_of_its_requests() -> None:
    samples = [sample_of(256.0, 100.0, name) for name in ("1024", *["256"] * 2)]
    assert usual_token_class(samples) == "256"
    assert usual_token_class(samples[:2]) == "1024", "of equally frequent ones the first by name"


def test_classes_that_hardly_move_keep_their_names() -> None:
    family = family_of(KEY)

    def learned_of(*prompts: float) -> dict[Family, tuple[Centre, ...]]:
        return {family: tuple(Centre(log_prompt=math.log(tokens), log_output=0.0, token_class="256") for tokens in prompts)}

    first = Classifier().renewed("1.1", learned_of(100, 1_000))
    second = first.renewed("1.2", learned_of(90, 300, 1_100))
    third = second.renewed("1.3", learned_of(300, 310))
    assert [centre.name for centre in first.families[family]] == ["k1.1.0", "k1.1.1"]
    assert [centre.name for centre in second.families[family]] == ["k1.1.0", "k1.2.1", "k1.1.1"]
    assert [centre.name for centre in third.families[family]] == ["k1.2.1", "k1.3.1"], "no name twice"


def test_samples_are_bounded() -> None:
    samples = Samples()
    for number in range(2 * FAMILIES_MAX):
        samples.add((f"m{number}", "completion", "64s", "1"), (1.0, 1.0, "256"))
    for _ in range(2 * SAMPLES_MAX):
        samples.add(family_of(KEY), (1.0, 1.0, "256"))
    assert len(samples.by_family) == FAMILIES_MAX
    assert list(samples.enough()) == [family_of(KEY)]
    assert len(samples.enough()[family_of(KEY)]) == SAMPLES_MAX


def arrived(prompt_tokens: int, *, slo: Slo | None = None, tenant: str = "t", output_tokens: int = 0) -> RequestFacts:
    return RequestFacts(
        queue_id="1-0",
        key=RequestKey(tenant, "r"),
        acceptance_number=1,
        accepted_s=START_S,
        model="alpha",
        slo=slo or Slo(kind=SloKind.COMPLETION, seconds=60.0),
        prompt_tokens=prompt_tokens,
        output_tokens_max=4_096,
        predicted_output_tokens=output_tokens,
    )


def test_classes_are_learned_of_one_kind_and_class_of_slo_and_one_weight_at_a_time() -> None:
    """Each of them with prompts of its own length: no family has those of two."""
    tenants = Tenants(named=(Tenant(name="gold", weight=8.0), Tenant(name="greedy", share_max=0.5)))
    classing, made = Classing.of(replace(KMEANS, tenants=tenants), fence=1), estimates()
    completion, first = SloKind.COMPLETION, SloKind.FIRST_TOKEN
    sources = [
        (Slo(kind=completion, seconds=60.0), ("t", "greedy")),
        (Slo(kind=completion, seconds=600.0), ("t",)),
        (Slo(kind=first, seconds=60.0), ("t",)),
        (Slo(kind=SloKind.PRIORITY, priority=1), ("t",)),
        (Slo(kind=completion, seconds=60.0), ("gold",)),
    ]
    for number, (slo, senders) in enumerate(sources):
        for sender in senders * 60:
            classing.traits(arrived(100 + number, slo=slo, tenant=sender), Board(slo_band=0), made, START_S)
    asked = classing.learn(START_S)
    assert asked is not None
    found = sorted(
        (round(math.exp(prompt)), len(samples)) for samples in asked.samples.values() for prompt in {each[0] for each in samples}
    )
    assert found == [(100, 120), (101, 60), (102, 60), (103, 60), (104, 60)], "a limited share is no reason to be served otherwise"


def test_a_predicted_output_tells_classes_apart() -> None:
    """Finer than the fixed classes, which hold both."""
    classing, made, board = Classing.of(KMEANS, fence=1), estimates(), Board(slo_band=0)
    for output_tokens in (70, 240) * 40:
        fixed = classing.traits(arrived(200, output_tokens=output_tokens), board, made, START_S).key.token_class
        assert fixed == "256/o256"
    asked = classing.learn(START_S)
    assert asked is not None
    classing.take(asked.number, learn(asked.samples), board, made)
    few, many, also_many = (classing.traits(arrived(200, output_tokens=each), board, made, START_S).key.cluster for each in (75, 220, 260))
    assert few != many == also_many


async def waiting_by_cluster(world: World) -> Mapping[str, int]:
    overview = await world.queue.overview()
    found: dict[str, int] = {}
    for group in overview.groups.values():
        cluster = group.meta.get("cluster", "")
        found[cluster] = found.get(cluster, 0) + group.waiting
    return found


async def both_sizes(world: World, count: int) -> None:
    for _ in range(count):
        await world.submit("alpha", 3_600.0, prompt_tokens=90)
        await world.submit("alpha", 3_600.0, prompt_tokens=220)
    await world.settle()


async def test_new_requests_go_by_new_classes_and_nothing_is_lost() -> None:
    world = World(KMEANS)
    await world.join("a")
    machine = await world.lead()
    await both_sizes(world, 40)
    assert await waiting_by_cluster(world) == {"": 80}, "the first ones by fixed classes"
    await both_sizes(world, 20)
    version = machine.classing.classifier.version
    assert machine.classing.learned == 1
    assert await waiting_by_cluster(world) == {"": 80, f"k{version}.0": 20, f"k{version}.1": 20}
    overview = await world.queue.overview()
    assert {group.meta["token_class"] for group in overview.groups.values()} == {"256"}, "what estimates go by"
    assert machine.classing.counts(machine.board) == {"fixed": 1, "kmeans": 2, "mega": 0}
    # Another leader serves what it finds, and learns its own.
    again = await world.lead()
    await both_sizes(world, 40)
    assert again.board.queues["a"] == await world.group_ids("a")
    assert sum((await waiting_by_cluster(world)).values()) == 200


async def test_small_groups_are_taken_into_new_classes_and_filled_up() -> None:
    """Below `group_min`; larger ones are served as they are."""
    world = World(KMEANS)
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 3_600.0, prompt_tokens=4_000, count=4)
    await world.settle()
    [small] = machine.board.groups
    await both_sizes(world, 30)
    assert machine.classing.learned == 1
    assert machine.classing.adopted == 1
    await world.submit("alpha", 3_600.0, prompt_tokens=3_900, count=2)
    await both_sizes(world, 5)
    assert machine.board.groups[small].waiting == 6
    assert sorted(group.waiting for group in machine.board.groups.values()) == [5, 5, 6, 60]


async def test_mega_prompts_stay_apart_whatever_is_learned() -> None:
    """A small group of them is not filled up with others."""
    world = World(KMEANS)
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 3_600.0, prompt_tokens=11_000, count=2)
    await world.settle()
    [mega] = machine.board.groups
    await both_sizes(world, 30)
    assert (machine.classing.learned, machine.classing.adopted) == (1, 0)
    assert machine.board.groups[mega].traits.key.cluster == MEGA
    await both_sizes(world, 5)
    assert machine.board.groups[mega].waiting == 2


async def test_groups_outlive_a_learning_that_finds_the_same() -> None:
    world = World(KMEANS)
    await world.join("a")
    machine = await world.lead()
    await both_sizes(world, 40)
    await both_sizes(world, 10)
    before = set(machine.board.groups)
    await world.advance(6.0)
    assert machine.classing.learned == 2
    await both_sizes(world, 10)
    assert set(machine.board.groups) == before


# Kinds of SLOs ----------------------------------------------------------------------------------------------------------


async def test_a_mix_of_kinds_in_one_queue() -> None:
    """Bands first; inside the band of SLOs by deadline, whatever the deadline bounds; kinds never share a group."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", priority=1)
    await world.submit("alpha", 300.0)
    await world.submit("alpha", 100.0, kind=SloKind.FIRST_TOKEN)
    await world.submit("alpha", priority=-1)
    await world.submit("alpha", 30.0)
    await world.submit("alpha", 900.0, kind=SloKind.FIRST_TOKEN)
    await world.submit("alpha", 900.0)
    await world.settle()
    order = [(group.band, group.traits.key.slo_kind, group.traits.slo_s) for group in machine.board.queue_groups("a")]
    priority, first, whole = SloKind.PRIORITY, SloKind.FIRST_TOKEN, SloKind.COMPLETION
    assert order[:4] == [(-1, priority, math.inf), (0, whole, 30.0), (0, first, 100.0), (0, whole, 300.0)]
    assert {each[1] for each in order[4:6]} == {first, whole}
    assert order[6] == (1, priority, math.inf)
    assert await world.group_ids("a") == machine.board.queues["a"]


async def test_tiny_slos_do_not_open_a_group_each() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    for _ in range(100):
        await world.submit("alpha", 0.001, prompt_tokens=1)
        world.now_s += 0.001
        await world.settle()
    assert len(machine.board.groups) < 15


@pytest.mark.parametrize("seconds", [5e-324, 1e-9, 1e9, 1e300, math.inf])
async def test_absurd_slos_are_placed(seconds: float) -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    [key, _] = await world.submit("alpha", seconds, count=2)
    await world.submit("alpha", 60.0)
    await world.advance(2.0)
    assert await world.state(key) == "PLACED"
    assert len(machine.board.queue_groups("a")) == 2
