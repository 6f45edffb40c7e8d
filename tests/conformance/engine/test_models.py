"""Models: three tiers, one active, host memory with a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from qlm_agent.engine import EngineBusy, FinishReason, ModelLoadFailed, Tier

from .subjects import Reader, Subject, request


async def test_tiers_follow_loads(subject: Subject) -> None:
    first, second = subject.models
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.ACTIVE, Tier.COLD)
    assert await subject.engine.load_model(second, Tier.WARM) > 0.0
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.ACTIVE, Tier.WARM)
    await subject.engine.load_model(second, Tier.ACTIVE)
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.WARM, Tier.ACTIVE)
    stats = subject.engine.stats()
    assert (stats.active_model, stats.warm_models) == (second, (first,))
    await subject.engine.load_model(first, Tier.COLD)
    assert subject.engine.tier(first) is Tier.COLD


async def test_a_warm_model_is_active_sooner_than_a_cold_one(subject: Subject) -> None:
    first, second = subject.models
    cold_s = await subject.engine.load_model(second, Tier.ACTIVE)
    warm_s = await subject.engine.load_model(first, Tier.ACTIVE)
    assert warm_s < cold_s / 2


async def test_each_model_answers_for_itself(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "a"))
    await reader.ends("a")
    await subject.engine.load_model(subject.models[1], Tier.ACTIVE)
    await subject.engine.add(request(subject, "b", model=subject.models[1]))
    await reader.ends("b")
    await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
    await subject.engine.add(request(subject, "c"))
    await reader.ends("c")
    assert reader.runs["a"].token_ids == reader.runs["c"].token_ids != reader.runs["b"].token_ids


async def test_a_busy_model_is_not_replaced(subject: Subject, reader: Reader) -> None:
    first, second = subject.models
    await subject.engine.add(request(subject, "r", answer=500))
    await reader.until(lambda: "r" in reader.runs)
    for model, tier in ((second, Tier.ACTIVE), (first, Tier.COLD), (first, Tier.WARM)):
        with pytest.raises(EngineBusy):
            await subject.engine.load_model(model, tier)
    assert subject.engine.tier(first) is Tier.ACTIVE
    (run,) = await reader.ends("r")
    assert run.outputs[-1].finish is FinishReason.STOP
    await subject.engine.load_model(second, Tier.ACTIVE)


async def test_warming_goes_on_beside_the_running_batch(subject: Subject, reader: Reader) -> None:
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


async def test_what_host_memory_does_not_hold_is_cold(make_subject: Callable[..., Subject]) -> None:
    subject = make_subject(host_memory_gb=20.0)  # one model
    await subject.engine.start()
    first, second = subject.models
    await subject.engine.load_model(first, Tier.ACTIVE)
    await subject.engine.load_model(second, Tier.ACTIVE)
    assert subject.engine.tier(first) is Tier.COLD
    await subject.engine.load_model(first, Tier.WARM)
    assert subject.engine.tier(first) is Tier.WARM
    await subject.engine.stop()


async def test_a_model_that_host_memory_can_never_hold_is_served_but_not_warmed(make_subject: Callable[..., Subject]) -> None:
    subject = make_subject(host_memory_gb=1.0)
    await subject.engine.start()
    first, second = subject.models
    await subject.engine.load_model(first, Tier.ACTIVE)
    with pytest.raises(ModelLoadFailed):
        await subject.engine.load_model(second, Tier.WARM)
    await subject.engine.load_model(second, Tier.ACTIVE)
    assert (subject.engine.tier(first), subject.engine.tier(second)) == (Tier.COLD, Tier.ACTIVE)
    await subject.engine.stop()
