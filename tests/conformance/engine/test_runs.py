"""Runs: output whole and in order, the same whenever it is made, ended once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from qlm_agent.engine import FailureKind, FinishReason, Sampling, Tier

from .subjects import DEADLINE_S, Reader, Subject, request


async def test_output_is_whole_and_in_order(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=30))
    (run,) = await reader.ends("r")
    assert len(run.token_ids) == 30 * 4 or len(run.pieces) == 30
    assert [output.finish for output in run.outputs] == [None] * (len(run.outputs) - 1) + [FinishReason.STOP]


async def test_times_go_forward(subject: Subject, reader: Reader) -> None:
    before_s = time.monotonic()
    await subject.engine.add(request(subject, "r", answer=50))
    (run,) = await reader.ends("r")
    times = [time_s for output in run.outputs for time_s in (output.first_s, output.last_s)]
    assert times == sorted(times)
    assert before_s <= run.outputs[0].started_s <= times[0]
    assert times[-1] <= time.monotonic()
    assert len({output.started_s for output in run.outputs}) == 1


async def test_first_token_comes_before_the_rest(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=200))
    await reader.until(lambda: "r" in reader.runs)
    first = reader.runs["r"].outputs[0]
    assert first.finish is None
    assert 1 <= len(first.token_ids) // 4 + len(first.pieces) < 100


async def test_greedy_output_does_not_depend_on_the_batch(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "alone", number=1))
    (alone,) = await reader.ends("alone")
    for number in range(1, 60):
        await subject.engine.add(request(subject, f"r{number}", number=number, answer=10 + number if number > 1 else 30))
    runs = await reader.ends(*(f"r{number}" for number in range(1, 60)))
    assert runs[0].token_ids == alone.token_ids
    assert len({run.token_ids for run in runs}) == 59


@pytest.mark.parametrize("resumed", [1, 7, 29])
async def test_a_run_resumes_from_prompt_and_produced_tokens(subject: Subject, reader: Reader, resumed: int) -> None:
    await subject.engine.add(request(subject, "whole"))
    (whole,) = await reader.ends("whole")
    await subject.engine.add(request(subject, "rest", produced=whole.token_ids[: 4 * resumed]))
    (rest,) = await reader.ends("rest")
    assert rest.token_ids == whole.token_ids[4 * resumed :]
    assert rest.outputs[-1].finish is FinishReason.STOP


async def test_a_run_that_had_all_its_tokens_only_ends(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "whole"))
    (whole,) = await reader.ends("whole")
    await subject.engine.add(request(subject, "again", produced=whole.token_ids))
    (again,) = await reader.ends("again")
    assert again.token_ids == b""
    assert again.outputs[-1].finish is FinishReason.STOP


async def test_output_tokens_max_cuts(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=30, output_tokens_max=12))
    await subject.engine.add(request(subject, "on", answer=5, output_tokens_max=12, sampling=Sampling(ignore_eos=True)))
    cut, on = await reader.ends("r", "on")
    assert len(cut.token_ids) == len(on.token_ids) == 12 * 4
    assert cut.outputs[-1].finish is on.outputs[-1].finish is FinishReason.LENGTH


async def test_the_context_cuts(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", prompt=subject.context_tokens - 5, answer=30))
    (run,) = await reader.ends("r")
    assert len(run.token_ids) == 5 * 4
    assert run.outputs[-1].finish is FinishReason.LENGTH


async def test_what_cannot_be_served_fails_by_itself(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "long", prompt=subject.context_tokens))
    await subject.engine.add(request(subject, "other", model=subject.models[1]))
    await subject.engine.add(request(subject, "good"))
    long, other, good = await reader.ends("long", "other", "good")
    assert long.outputs[-1].failure is not None
    assert long.outputs[-1].failure.kind is FailureKind.REFUSED
    assert other.outputs[-1].failure is not None
    assert other.outputs[-1].failure.kind is FailureKind.BROKEN
    assert good.outputs[-1].finish is FinishReason.STOP


async def test_aborted_runs_are_silent_and_free_their_kv(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "gone", number=1, answer=500))
    await subject.engine.add(request(subject, "stays", number=2, answer=100))
    await reader.until(lambda: set(reader.runs) == {"gone", "stays"})
    heard = len(reader.runs["gone"].outputs)
    await subject.engine.abort(["gone", "unknown"])
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


async def test_a_pause_stops_output_and_resume_goes_on(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "r", answer=300))
    await reader.until(lambda: "r" in reader.runs)
    await subject.engine.pause()
    await subject.engine.pause()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read_on(), timeout=0.2)  # at most what was made before the pause
    heard = len(reader.runs["r"].token_ids)
    assert heard < 300 * 4
    await subject.engine.resume()
    await subject.engine.resume()
    (run,) = await reader.ends("r")
    assert len(run.token_ids) == 300 * 4


async def test_a_pause_is_not_caught_up(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "whole", number=1, answer=1500))
    (whole,) = await reader.ends("whole")
    undisturbed_s = whole.outputs[-1].last_s - whole.outputs[0].first_s
    await subject.engine.add(request(subject, "paused", number=2, answer=1500))
    await reader.until(lambda: "paused" in reader.runs)
    await subject.engine.pause()
    await asyncio.sleep(2 * undisturbed_s)
    await subject.engine.resume()
    (paused,) = await reader.ends("paused")
    assert paused.outputs[-1].last_s - paused.outputs[0].first_s > 2.5 * undisturbed_s


async def test_stats_count_what_runs_and_what_waits(make_subject: Callable[..., Subject]) -> None:
    subject = make_subject(batch_max=4)
    await subject.engine.start()
    await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
    reader = Reader(subject.engine)
    names = [f"r{number}" for number in range(10)]
    for number, name in enumerate(names):
        await subject.engine.add(request(subject, name, number=number, answer=300))
    await reader.until(lambda: "r3" in reader.runs)
    stats = subject.engine.stats()
    assert (stats.running, stats.waiting, stats.batch_max) == (4, 6, 4)
    assert 4 * 20 <= stats.kv_used_tokens <= stats.kv_capacity_tokens
    await reader.ends(*names)
    await subject.engine.stop()


async def test_output_is_the_same_when_kv_is_short(make_subject: Callable[..., Subject]) -> None:
    wide, narrow = make_subject(), make_subject(kv_capacity_tokens=640)
    outputs: list[dict[str, bytes]] = []
    for subject in (wide, narrow):
        await subject.engine.start()
        await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
        reader = Reader(subject.engine)
        names = [f"r{number}" for number in range(12)]
        for number, name in enumerate(names):
            await subject.engine.add(request(subject, name, number=number, prompt=40, answer=100))
        runs = await reader.ends(*names)
        outputs.append({name: run.token_ids for name, run in zip(names, runs, strict=True)})
        assert subject.engine.stats().kv_used_tokens == 0
        await subject.engine.stop()
    assert narrow.engine.stats().preemptions > 0
    assert wide.engine.stats().preemptions == 0
    assert outputs[0] == outputs[1]


async def test_a_run_that_outgrows_kv_fails_and_the_others_go_on(make_subject: Callable[..., Subject]) -> None:
    subject = make_subject(kv_capacity_tokens=320)
    await subject.engine.start()
    await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
    reader = Reader(subject.engine)
    await subject.engine.add(request(subject, "prompt", number=1, prompt=400))
    await subject.engine.add(request(subject, "answer", number=2, answer=600))
    await subject.engine.add(request(subject, "good", number=3, answer=50))
    runs = await reader.ends("prompt", "answer", "good")
    for run in runs[:2]:
        assert run.outputs[-1].failure is not None
        assert run.outputs[-1].failure.kind is FailureKind.KV_CAPACITY
    assert len(runs[1].token_ids) > 200 * 4
    assert len(runs[2].token_ids) == 50 * 4
    await subject.engine.stop()


async def test_stop_and_start_are_safe_in_any_order(make_subject: Callable[..., Subject]) -> None:
    subject = make_subject()
    async with asyncio.timeout(DEADLINE_S):
        await subject.engine.stop()
        await subject.engine.start()
        await subject.engine.start()
        await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
        await subject.engine.add(request(subject, "r", answer=500))
        await subject.engine.stop()
        await subject.engine.stop()
