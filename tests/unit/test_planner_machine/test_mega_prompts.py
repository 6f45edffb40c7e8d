"""Mega prompts: groups of their own for what takes a large share of an instance's KV."""

from __future__ import annotations

from dataclasses import replace

from qlm_core.group import MEGA
from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.machine.events import ProfilesRead

from .world import CATALOGUE, MODELS, START_S, World, hardware, profiles


async def test_mega_prompts_have_groups_of_their_own() -> None:
    """By KV (a quarter of 40,000 tokens) and by the SLO (a quarter of 4 s of prefill at 20,000 tokens a second)."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 3_600.0, prompt_tokens=9_900, count=6)
    await world.submit("alpha", 3_600.0, prompt_tokens=10_100, count=6)
    await world.submit("beta", 1.0, prompt_tokens=4_500)
    await world.submit("beta", 1.0, prompt_tokens=5_500)
    await world.submit("gamma", prompt_tokens=20_000, priority=1)
    await world.settle()
    found = sorted((group.traits.key.model, group.traits.key.cluster, group.waiting) for group in machine.board.groups.values())
    assert [each for each in found if each[0] == "beta"] == [("beta", "", 1), ("beta", MEGA, 1)]
    assert [each for each in found if each[0] == "gamma"] == [("gamma", MEGA, 1)]
    assert [each for each in found if each[:2] == ("alpha", "")] == [("alpha", "", 6)]
    mega = [waiting for model, cluster, waiting in found if (model, cluster) == ("alpha", MEGA)]
    assert sum(mega) == 6
    assert max(mega) <= 4, "one batch, not delta batches"
    assert machine.request_classes.counts(machine.board) == {"fixed": 2, "mega": len(mega) + 2}


async def test_what_is_mega_goes_by_the_profiles_as_they_are_now() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 3_600.0, prompt_tokens=9_000)
    await world.settle()
    rows = tuple(replace(row, kv_capacity_tokens=row.kv_capacity_tokens // 4) for row in profiles().hardware)
    await world.tell(ProfilesRead(catalogue=CATALOGUE, profiles=replace(profiles(version=1), hardware=rows)))
    await world.submit("alpha", 3_600.0, prompt_tokens=9_000)
    await world.settle()
    assert sorted(group.traits.key.cluster for group in machine.board.groups.values()) == ["", MEGA]


async def test_a_long_predicted_output_makes_a_mega_prompt() -> None:
    """It takes KV as a prompt does: a quarter of 40,000 tokens for both together."""
    world = World()
    await world.join("a")
    machine = await world.lead()

    def arrived(output_tokens: int) -> RequestFacts:
        return RequestFacts(
            queue_id="1-0",
            key=RequestKey("t", "r"),
            acceptance_number=1,
            accepted_s=START_S,
            model="alpha",
            slo=Slo(kind=SloKind.COMPLETION, seconds=60.0),
            prompt_tokens=2_000,
            output_tokens_max=4_096,
            predicted_output_tokens=output_tokens,
        )

    long = [machine.request_classes.mega.holds(arrived(tokens), machine.board, machine.estimates) for tokens in (0, 7_900, 8_100)]
    assert long == [False, False, True]


async def test_what_a_larger_instance_takes_easily_is_not_mega() -> None:
    """Two GPUs, one with a tenth of the other's KV: the larger one may have it."""
    world = World()
    kv_tokens = {"big": 40_000, "small": 4_000}
    rows = tuple(hardware(gpu, model, kv_tokens=tokens) for gpu, tokens in kv_tokens.items() for model in MODELS)
    world.snapshot = replace(world.snapshot, hardware=rows)
    await world.join("a", "small")
    await world.join("b", "big")
    machine = await world.lead()
    await world.submit("alpha", 3_600.0, prompt_tokens=9_000)
    await world.submit("alpha", 3_600.0, prompt_tokens=11_000)
    await world.settle()
    found = sorted((group.waiting_prompt_tokens, group.traits.key.cluster) for group in machine.board.groups.values())
    assert found == [(9_000, ""), (11_000, MEGA)]


async def test_without_an_instance_nothing_is_mega() -> None:
    world = World()
    machine = await world.lead()
    await world.submit("alpha", 3_600.0, prompt_tokens=4_000_000_000)
    await world.settle()
    [found] = machine.board.groups.values()
    assert found.traits.key.cluster == ""
    await world.join("a")
    await world.advance(1.0)
    await world.submit("alpha", 3_600.0, prompt_tokens=4_000_000_000)
    await world.settle()
    assert [group.traits.key.cluster for group in machine.board.queue_groups("a")].count(MEGA) == 1


async def test_new_profiles_may_make_a_prompt_mega() -> None:
    world = World()
    await world.join("a", "small")
    machine = await world.lead()
    await world.submit("alpha", 2.0, prompt_tokens=4_000)
    await world.settle()
    world.snapshot = profiles(version=1)
    assert [group.traits.key.cluster for group in machine.board.queue_groups("a")] == [""]
    await world.join("b", "big")
    await world.drain("a", "small")
    await world.advance(1.0)
    await world.submit("alpha", 2.0, prompt_tokens=11_000)
    await world.settle()
    assert MEGA in {group.traits.key.cluster for group in machine.board.queue_groups("b")}
