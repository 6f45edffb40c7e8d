"""Loops of load generators over any protocol, each in a process of its own (`worker`): closed, open, and streams in a window of time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Any

from benchmarks.queue.schedule import poisson_times, summary_ms
from benchmarks.queue.worker import Report, Settings, report_event

TRACED_EVERY = 4
"""One in so many requests has a sampled parent."""
LEAD_S = 0.2
"""Between the connection and the first arrival."""

Call = Callable[[int], Awaitable[bytes | None]]
"""Makes the call of a number; its answer, None for a refusal."""


def traceparent(index: int) -> str:
    """The parent of a request's trace, "" for one that is not sampled."""
    return f"00-{index + 1:032x}-{index + 1:016x}-01" if index % TRACED_EVERY == 0 else ""


def stop_collecting() -> None:
    """Without collections: a pause of the load generator is not the system's."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def closed_loop(settings: Settings, connected: Callable[[], AbstractAsyncContextManager[Call]]) -> tuple[list[bytes], Report]:
    """`in_flight` callers, each with one call after the other for `warmup_s` and then `seconds`. Returns all answers, and of the report the
    number of answers within the measured time (`accepted`), of all (`accepted_in_all`), and latencies."""
    numbers = count()
    answered: list[tuple[float, bytes]] = []
    latencies_s: list[float] = []
    begin_s = time.perf_counter() + settings["warmup_s"]
    end_s = begin_s + settings["seconds"]

    async def call_repeatedly() -> None:
        async with connected() as call:
            while (sent_s := time.perf_counter()) < end_s:
                answer = await call(next(numbers))
                done_s = time.perf_counter()
                if answer is not None:
                    answered.append((done_s, answer))
                    if sent_s >= begin_s and done_s < end_s:
                        latencies_s.append(done_s - sent_s)

    async def mark() -> None:
        for at_s, what in ((begin_s, "begin"), (end_s, "end")):
            await asyncio.sleep(at_s - time.perf_counter())
            report_event(what)

    async with asyncio.TaskGroup() as group:
        group.create_task(mark())
        for _ in range(settings["in_flight"]):
            group.create_task(call_repeatedly())
    accepted = sum(begin_s <= done_s < end_s for done_s, _ in answered)
    report: Report = {"accepted": accepted, "accepted_in_all": len(answered), "latency_ms": summary_ms(latencies_s)}
    return [answer for _, answer in answered], report


async def open_loop(settings: Settings, prepare: Callable[[int], Callable[[int], Awaitable[float | str]]]) -> Report:
    """Requests at Poisson times of `rate_per_s` over `warmup_s` and `seconds`, independent of answers. `prepare`: makes so many before the
    run; its result serves a number, and returns when its last token arrived, or the error. Reports the number of requests that were due in
    the latter and ended, and for each traced one [id, due to last token in s]; errors, and how late the client itself sent."""
    warmup_s = settings["warmup_s"]
    times_s = poisson_times(settings["seed"], settings["rate_per_s"], warmup_s + settings["seconds"])
    serve = prepare(len(times_s))
    ended_s: list[float] = []
    traced: list[tuple[str, float]] = []
    late_s: list[float] = []
    errors: Counter[str] = Counter()

    async def one(index: int, due_s: float) -> None:
        sent_s = time.perf_counter()
        last_s = await serve(index)
        if isinstance(last_s, str):
            errors[last_s] += 1
        elif times_s[index] >= warmup_s:
            ended_s.append(last_s - due_s)
            late_s.append(sent_s - due_s)
            if traceparent(index):
                traced.append((f"{settings['run_id']}-{index}", last_s - due_s))

    stop_collecting()
    start_s = time.perf_counter() + LEAD_S
    loop = asyncio.get_running_loop()
    loop.call_later(LEAD_S + warmup_s, report_event, "begin")
    async with asyncio.TaskGroup() as group:

        def send(index: int) -> None:
            group.create_task(one(index, start_s + times_s[index]))

        def send_all() -> None:
            for index, at_s in enumerate(times_s):
                time.sleep(max(0.0, start_s + at_s - time.perf_counter()))
                loop.call_soon_threadsafe(send, index)

        await asyncio.to_thread(send_all)  # a thread's clock is exact to some 0.1 ms, an event loop's to 1 ms
    report_event("end")
    return {
        "requests": sum(at_s >= warmup_s for at_s in times_s),
        "ended": len(ended_s),
        "traced": traced,
        "errors": dict(errors),
        "last_token_ms": summary_ms(ended_s),
        "sent_late_ms": summary_ms(late_s),
    }


async def window(settings: Settings, follow: Callable[[int, Callable[[], None]], Coroutine[Any, Any, None]]) -> tuple[float, float, Report]:
    """Follows `streams` at a time; `follow` calls its second argument when its stream has begun. When all have, waits `warmup_s`, then
    measures for `seconds` and breaks all off. Returns the window's begin and end, and of the report the streams that had not ended, and
    errors of the others (`broken`)."""
    begun = asyncio.Semaphore(0)
    stop_collecting()
    tasks = [asyncio.create_task(follow(index, begun.release)) for index in range(settings["streams"])]
    for _ in tasks:
        await begun.acquire()
    await asyncio.sleep(settings["warmup_s"])
    begin_s = time.perf_counter()
    report_event("begin")
    await asyncio.sleep(settings["seconds"])
    end_s = time.perf_counter()
    report_event("end")
    unended = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    broken = [repr(each) for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
    return begin_s, end_s, {"streams": len(unended), "broken": broken[:3], "seconds": end_s - begin_s}
