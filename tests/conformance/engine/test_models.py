"""Models: three tiers, one active, host memory with a budget."""

from __future__ import annotations

import asyncio

import pytest

from qlm_agent.engines.port import EngineBusy, ModelLoadFailed, Tier

from .conftest import Start
from .subjects import Can, Limits, Reader, Subject, needs, request, undisturbed

pytestmark = needs(Can.SWAP)


async def test_tiers_follow_loads(subject: Subject) -> None:
    first, second = subject.models[:2]
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.ACTIVE, Tier.COLD)
    assert await subject.engine.load_model(second, Tier.WARM) > 0.0
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.ACTIVE, Tier.WARM)
    await subject.engine.load_model(second, Tier.ACTIVE)
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.WARM, Tier.ACTIVE)
    stats = subject.engine.stats()
    assert (stats.active_model, stats.warm_models) == (second, (first,))
    await subject.engine.load_model(first, Tier.COLD)
    assert subject.engine.tier(first) is Tier.COLD


async def test_times_to_serve_order_as_tiers_do(subject: Subject) -> None:
    first, second = subject.models[:2]
    active_s = await subject.engine.load_model(first, Tier.ACTIVE)
    cold_s = await subject.engine.load_model(second, Tier.ACTIVE)
    warm_s = await subject.engine.load_model(first, Tier.ACTIVE)
    await subject.engine.load_model(second, Tier.COLD)
    cold_again_s = await subject.engine.load_model(second, Tier.ACTIVE)
    assert active_s < warm_s / 2
    assert warm_s < min(cold_s, cold_again_s) / 2


async def test_each_model_answers_for_itself(subject: Subject, reader: Reader) -> None:
    first, second = subject.models[:2]
    a = await undisturbed(subject, reader, "a")
    await subject.engine.load_model(second, Tier.ACTIVE)
    b = await undisturbed(subject, reader, "b", model=second)
    await subject.engine.load_model(first, Tier.ACTIVE)
    c = await undisturbed(subject, reader, "c")
    assert a.output == c.output != b.output


@needs(Can.LIMIT)
async def test_each_model_answers_for_itself_where_one_takes_the_others_place(start: Start) -> None:
    """Prompts are alike, and long enough to be found in a prefix cache; that holds KV of the other model's weights."""
    answers = []
    for host_models in (4.0, 1.5):
        subject = await start(Limits(host_models=host_models))
        reader = Reader(subject)
        for model in subject.models[:2]:
            await subject.engine.load_model(model, Tier.ACTIVE)
            await subject.engine.add(request(subject, model, model=model, prompt=200))
            await reader.ends(model)
        answers.append([run.output for run in await reader.ends(*subject.models[:2])])
    beside, in_place = answers
    assert in_place == beside


@needs(Can.STAGE)
async def test_warming_proceeds_beside_the_running_batch(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=1000))
    warming = asyncio.create_task(subject.engine.load_model(subject.models[1], Tier.WARM))
    await reader.until(lambda: "r" in reader.runs and len(reader.runs["r"].outputs) > 2)
    assert not warming.done()
    await reader.ends("r")
    await warming


async def test_unknown_models_are_refused(subject: Subject) -> None:
    with pytest.raises(ModelLoadFailed):
        await subject.engine.load_model("unknown", Tier.ACTIVE)
    assert subject.engine.tier("unknown") is Tier.COLD
    assert subject.engine.tier(subject.models[0]) is Tier.ACTIVE


async def test_repeated_loads_change_nothing(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=100))
    await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
    await reader.ends("r")


@needs(Can.LIMIT)
async def test_a_model_that_host_memory_does_not_hold_is_cold(start: Start) -> None:
    subject = await start(Limits(host_models=1.5))
    first, second = subject.models[:2]
    await subject.engine.load_model(second, Tier.ACTIVE)
    assert subject.engine.tier(first) is Tier.COLD
    await subject.engine.load_model(first, Tier.WARM)
    assert subject.engine.tier(first) is Tier.WARM


@needs(Can.LIMIT)
async def test_a_model_that_host_memory_can_never_hold_is_served_but_not_warmed(start: Start) -> None:
    subject = await start(Limits(host_models=0.5))
    first, second = subject.models[:2]
    with pytest.raises(ModelLoadFailed):
        await subject.engine.load_model(second, Tier.WARM)
    await subject.engine.load_model(second, Tier.ACTIVE)
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.COLD, Tier.ACTIVE)


async def test_a_busy_refusal_leaves_runs_and_tiers_as_they_are(subject: Subject, reader: Reader) -> None:
    first, second = subject.models[:2]
    whole = await undisturbed(subject, reader, answer=300)
    await subject.engine.load_model(second, Tier.WARM)
    await subject.engine.add(request(subject, "r", answer=300))
    for model, tier in ((second, Tier.ACTIVE), (first, Tier.COLD), (first, Tier.WARM)):
        with pytest.raises(EngineBusy):
            await subject.engine.load_model(model, tier)
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.ACTIVE, Tier.WARM)
    (run,) = await reader.ends("r")
    assert run.output == whole.output
