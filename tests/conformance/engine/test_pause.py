"""Pausing: the buffer of an agent is full, so nothing is made until it resumes."""

from __future__ import annotations

import asyncio

from .subjects import Can, Reader, Subject, needs, request, undisturbed


async def test_a_pause_stops_output_and_resume_continues_it(subject: Subject, reader: Reader) -> None:
    whole = await undisturbed(subject, reader, answer=300)
    await subject.engine.add(request(subject, "r", answer=300))
    await reader.until_made(1, "r")
    await subject.engine.pause()
    await subject.engine.pause()
    await reader.for_s(0.1)  # at most what was made before the pause
    heard = reader.made("r")
    await reader.for_s(0.2)
    assert reader.made("r") == heard < 300
    await subject.engine.resume()
    await subject.engine.resume()
    (run,) = await reader.ends("r")
    assert run.output == whole.output


@needs(Can.HALT)
async def test_a_pause_is_not_caught_up(subject: Subject, reader: Reader) -> None:
    whole = await undisturbed(subject, reader, answer=1500)
    undisturbed_s = whole.outputs[-1].last_s - whole.outputs[0].first_s
    await subject.engine.add(request(subject, "paused", number=2, answer=1500))
    await reader.until_made(1, "paused")
    await subject.engine.pause()
    await asyncio.sleep(2 * undisturbed_s)
    await subject.engine.resume()
    (paused,) = await reader.ends("paused")
    assert paused.outputs[-1].last_s - paused.outputs[0].first_s > 2.5 * undisturbed_s


async def test_runs_added_and_aborted_in_a_pause(subject: Subject, reader: Reader) -> None:
    await subject.engine.pause()
    await subject.engine.add(request(subject, "gone"))
    await subject.engine.add(request(subject, "stays"))
    await subject.engine.abort(["gone"])
    await reader.for_s(0.1)
    assert reader.runs == {}
    await subject.engine.resume()
    await reader.ends("stays")
    assert set(reader.runs) == {"stays"}


@needs(Can.OFFLOAD)
async def test_kv_moves_in_a_pause(subject: Subject, reader: Reader) -> None:
    whole = await undisturbed(subject, reader, answer=300)
    await subject.engine.add(request(subject, "r", answer=300))
    await reader.until_made(1, "r")
    await subject.engine.pause()
    assert list(await subject.engine.offload(["r"])) == ["r"]
    await subject.engine.resume()
    await reader.for_s(0.1)
    heard = reader.made("r")
    await subject.engine.pause()
    assert list(await subject.engine.restore(["r"])) == ["r"]
    await reader.for_s(0.1)
    assert reader.made("r") == heard
    await subject.engine.resume()
    (run,) = await reader.ends("r")
    assert run.output == whole.output
