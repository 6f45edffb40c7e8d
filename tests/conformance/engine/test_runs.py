"""Runs: output whole and in order, the same whenever it is made, ended once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from qlm_agent.engines.port import FailureKind, FinishReason, Sampling, Tier

from .conftest import Start
from .subjects import Can, Limits, Reader, Subject, needs, request, undisturbed


async def test_output_is_whole_and_in_order(subject: Subject, reader: Reader) -> None:
    run = await undisturbed(subject, reader, answer=30)
    assert len(run.output) == 30
    assert all(isinstance(item, str) == subject.engine.text_output for item in run.output)
    assert [output.finish for output in run.outputs] == [None] * (len(run.outputs) - 1) + [subject.finish]


async def test_times_go_forward(subject: Subject, reader: Reader) -> None:
    before_s = time.monotonic()
    run = await undisturbed(subject, reader, answer=50)
    times = [time_s for output in run.outputs for time_s in (output.first_s, output.last_s)]
    assert times == sorted(times)
    assert before_s <= run.outputs[0].started_s <= times[0]
    assert times[-1] <= time.monotonic()
    assert len({output.started_s for output in run.outputs}) == 1


async def test_first_token_arrives_before_the_rest(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=200))
    await reader.until_made(1, "r")
    assert reader.runs["r"].outputs[0].finish is None
    assert 1 <= reader.made("r") < 100


async def test_greedy_output_does_not_depend_on_the_batch(subject: Subject, reader: Reader) -> None:
    alone = await undisturbed(subject, reader)
    for number in range(1, 60):
        await subject.engine.add(request(subject, f"r{number}", number=number, answer=10 + number if number > 1 else 30))
    runs = await reader.ends(*(f"r{number}" for number in range(1, 60)))
    assert runs[0].output == alone.output
    assert [len(run.output) for run in runs[1:]] == [10 + number for number in range(2, 60)]


@pytest.mark.parametrize("resumed", [1, 7, 29])
async def test_a_run_resumes_from_prompt_and_produced_tokens(subject: Subject, reader: Reader, resumed: int) -> None:
    whole = await undisturbed(subject, reader)
    await subject.engine.add(request(subject, "rest", after=whole.output[:resumed]))
    (rest,) = await reader.ends("rest")
    assert rest.output == whole.output[resumed:]
    assert rest.outputs[-1].finish is subject.finish


async def test_a_run_that_had_all_its_tokens_only_ends(subject: Subject, reader: Reader) -> None:
    whole = await undisturbed(subject, reader)
    await subject.engine.add(request(subject, "again", after=whole.output))
    (again,) = await reader.ends("again")
    assert again.output == []
    assert again.outputs[-1].finish is subject.finish


async def test_an_aborted_run_continues_from_the_reported_output(subject: Subject, reader: Reader) -> None:
    whole = await undisturbed(subject, reader, answer=400)
    reported: list[int | str] = []
    for attempt, at_least in enumerate((1, 50, 51, 200, 400)):
        await subject.engine.add(request(subject, f"a{attempt}", answer=400, after=reported))
        await reader.until_made(max(1, at_least - len(reported)), f"a{attempt}")
        await subject.engine.abort([f"a{attempt}"])
        reported += reader.runs[f"a{attempt}"].output
        assert reported == whole.output[: len(reported)], f"after attempt {attempt}"
    assert reported == whole.output
    assert reader.runs["a4"].outputs[-1].finish is subject.finish


async def test_output_tokens_max_cuts(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=30, output_tokens_max=12))
    await subject.engine.add(request(subject, "on", answer=5, output_tokens_max=12, sampling=Sampling(ignore_eos=True)))
    cut, on = await reader.ends("r", "on")
    assert len(cut.output) == len(on.output) == 12
    assert cut.outputs[-1].finish is on.outputs[-1].finish is FinishReason.LENGTH
    await subject.engine.add(request(subject, "resumed", answer=30, output_tokens_max=12, after=cut.output[:5]))
    (resumed,) = await reader.ends("resumed")
    assert resumed.output == cut.output[5:]
    assert resumed.outputs[-1].finish is FinishReason.LENGTH


async def test_the_context_cuts(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", prompt=subject.context_tokens - 5, answer=30))
    (run,) = await reader.ends("r")
    assert len(run.output) == 5
    assert run.outputs[-1].finish is FinishReason.LENGTH


async def test_a_request_that_cannot_be_served_fails_by_itself(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "long", prompt=subject.context_tokens))
    await subject.engine.add(request(subject, "other", model="not-active"))
    await subject.engine.add(request(subject, "good"))
    long, other, good = await reader.ends("long", "other", "good")
    assert long.outputs[-1].failure is not None
    assert long.outputs[-1].failure.kind is FailureKind.REFUSED
    assert other.outputs[-1].failure is not None
    assert other.outputs[-1].failure.kind is FailureKind.AWAY
    assert good.outputs[-1].finish is subject.finish


async def test_aborted_runs_are_silent_and_free_their_kv(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "gone", number=1, answer=500))
    await subject.engine.add(request(subject, "stays", number=2, answer=100))
    await reader.until_made(1, "gone", "stays")
    await subject.engine.abort(["gone", "unknown"])
    heard = len(reader.runs["gone"].outputs)
    await reader.ends("stays")
    assert len(reader.runs["gone"].outputs) == heard
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used_tokens) == (0, 0, 0)


async def test_a_run_aborted_before_anything_was_read(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "gone"))
    await subject.engine.add(request(subject, "bad", prompt=subject.context_tokens))
    await subject.engine.abort(["gone", "bad"])
    await subject.engine.add(request(subject, "stays"))
    await reader.ends("stays")
    assert set(reader.runs) == {"stays"}


@needs(Can.LIMIT)
async def test_stats_count_running_and_waiting_requests(start: Start) -> None:
    subject = await start(Limits(batch_max=4))
    reader = Reader(subject)
    names = [f"r{number}" for number in range(10)]
    for number, name in enumerate(names):
        await subject.engine.add(request(subject, name, number=number, answer=1500))
    await reader.until_made(1, *names[:4])
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting, stats.batch_max, stats.offloaded) == (4, 6, 4, 0)
    assert 4 * 20 <= stats.kv_used_tokens <= stats.kv_capacity_tokens
    await subject.engine.abort(names)
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


@needs(Can.LIMIT)
async def test_output_is_the_same_when_kv_is_short_and_runs_are_preempted(start: Start) -> None:
    outputs: list[dict[str, list[int | str]]] = []
    preemptions: list[int] = []
    for limits in (Limits(), Limits(kv_capacity_tokens=640)):
        subject = await start(limits)
        reader = Reader(subject)
        names = [f"r{number}" for number in range(12)]
        for number, name in enumerate(names):
            await subject.engine.add(request(subject, name, number=number, prompt=40, answer=100))
        runs = await reader.ends(*names)
        outputs.append({name: run.output for name, run in zip(names, runs, strict=True)})
        preemptions.append(subject.engine.stats().preemptions)
        assert subject.engine.stats().kv_used_tokens == 0
        await subject.engine.stop()
    assert preemptions[0] == 0
    assert preemptions[1] > 0
    assert outputs[0] == outputs[1]


@needs(Can.LIMIT)
async def test_a_run_that_outgrows_kv_fails_and_the_others_continue(start: Start) -> None:
    subject = await start(Limits(kv_capacity_tokens=320))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "prompt", number=1, prompt=400))
    await subject.engine.add(request(subject, "answer", number=2, answer=600))
    await subject.engine.add(request(subject, "good", number=3, answer=50))
    runs = await reader.ends("prompt", "answer", "good")
    for run in runs[:2]:
        assert run.outputs[-1].failure is not None
        assert run.outputs[-1].failure.kind is FailureKind.KV_CAPACITY
    assert len(runs[1].output) > 200
    assert len(runs[2].output) == 50


async def test_stop_and_start_are_safe_in_any_order(make_subject: Callable[[Limits], Subject]) -> None:
    subject = make_subject(Limits())
    async with asyncio.timeout(subject.deadline_s):
        await subject.engine.stop()
        await subject.engine.start()
        await subject.engine.start()
        await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
        await subject.engine.add(request(subject, "r", answer=500))
        await subject.engine.stop()
        await subject.engine.stop()
