"""Load over HTTP, in processes of their own (`benchmarks.queue.worker`): closed and open loops of chats, and streams."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from itertools import count

from benchmarks.gateway.chats import ChatCalls, chats_of
from benchmarks.gateway.http_client import HttpConnection
from benchmarks.queue.schedule import poisson_times, summary_ms
from benchmarks.queue.stream_worker import LEAD_S, TRACED_EVERY
from benchmarks.queue.worker import Report, Settings, report_event

OPENING = 32
"""Streams that are opened at a time."""


async def accepts(settings: Settings) -> Report:
    """`in_flight` connections, each with one enqueued chat after the other for `warmup_s` and then `seconds`. Reports the 202 answers
    within the measured time (`accepted`), all of them (`accepted_in_all`, `ids`: how many differ), other statuses, and latencies."""
    return await _closed_loop(settings, chats_of(settings, headers="x-qlm-mode: enqueue\r\n"), 202)


async def answers(settings: Settings) -> Report:
    """As `accepts`, with chats that are waited for: `accepted` are answers."""
    return await _closed_loop(settings, chats_of(settings), 200)


async def _closed_loop(settings: Settings, chats: ChatCalls, wanted: int) -> Report:
    numbers = count()
    answered: list[tuple[float, bytes]] = []
    latencies_s: list[float] = []
    refused: Counter[int] = Counter()
    begin_s = time.perf_counter() + settings["warmup_s"]
    end_s = begin_s + settings["seconds"]

    async def call_repeatedly() -> None:
        async with HttpConnection(settings["address"]) as connection:
            while (sent_s := time.perf_counter()) < end_s:
                status, body = await connection.call(chats.call(next(numbers)))
                if status != wanted:
                    refused[status] += 1
                    continue
                done_s = time.perf_counter()
                answered.append((done_s, body))
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
    return {
        "accepted": sum(begin_s <= done_s < end_s for done_s, _ in answered),
        "accepted_in_all": len(answered),
        "ids": len({json.loads(body)["id"] for _, body in answered}),
        "refused": dict(refused),
        "latency_ms": summary_ms(latencies_s),
    }


async def open_loop(settings: Settings) -> Report:
    """Chats at Poisson times of `rate_per_s` over `warmup_s` and `seconds`, independent of answers, each on a free connection or a new one.
    Of those that were due in the latter and ended it reports the number, and of each traced one [id, due to the end of its answer in s];
    other statuses, and how late the client itself sent."""
    chats = chats_of(settings)
    warmup_s = settings["warmup_s"]
    times_s = poisson_times(settings["seed"], settings["rate_per_s"], warmup_s + settings["seconds"])
    free: list[HttpConnection] = []
    ended_s: list[float] = []
    traced: list[tuple[str, float]] = []
    late_s: list[float] = []
    errors: Counter[int] = Counter()

    async def serve(index: int, due_s: float) -> None:
        connection = free.pop() if free else await HttpConnection(settings["address"]).__aenter__()
        sent_s = time.perf_counter()
        trace = f"traceparent: 00-{index + 1:032x}-{index + 1:016x}-01\r\n" if index % TRACED_EVERY == 0 else ""
        status, _ = await connection.call(chats.call(index, trace))
        took_s = time.perf_counter() - due_s
        free.append(connection)
        if status != 200:
            errors[status] += 1
        elif times_s[index] >= warmup_s:
            ended_s.append(took_s)
            late_s.append(sent_s - due_s)
            if trace:
                traced.append((chats.request_id(index), took_s))

    _quiet()
    start_s = time.perf_counter() + LEAD_S
    loop = asyncio.get_running_loop()
    loop.call_later(LEAD_S + warmup_s, report_event, "begin")
    async with asyncio.TaskGroup() as group:

        def send(index: int) -> None:
            group.create_task(serve(index, start_s + times_s[index]))

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
        "connections": len(free),
        "answer_ms": summary_ms(ended_s),
        "sent_late_ms": summary_ms(late_s),
    }


async def events(settings: Settings) -> Report:
    """`streams` long answers at a time. When all have begun, waits `warmup_s`, then counts events for `seconds` and breaks all off."""
    chats = chats_of(settings, stream=True)
    seen = 0
    begun = asyncio.Semaphore(0)

    async def follow(index: int) -> None:
        nonlocal seen
        own = 0
        async with HttpConnection(settings["address"]) as connection:
            async for number in connection.events(chats.call(index)):
                if not own and number:
                    begun.release()
                own += number
                seen += number

    _quiet()
    tasks = [asyncio.create_task(follow(index)) for index in range(settings["streams"])]
    for _ in tasks:
        await begun.acquire()
    await asyncio.sleep(settings["warmup_s"])
    begin_s, before = time.perf_counter(), seen
    report_event("begin")
    await asyncio.sleep(settings["seconds"])
    end_s, after = time.perf_counter(), seen
    report_event("end")
    unended = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    broken = [repr(each) for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
    return {"streams": len(unended), "broken": broken[:3], "seconds": end_s - begin_s, "events": after - before}


async def held(settings: Settings) -> Report:
    """Opens `streams` streams, OPENING at a time, and holds those whose answer has begun: says "begin" when all are there, "end" after
    `seconds`, and reports how many were open at both. One that cannot be opened is counted in `refused`."""
    chats = chats_of(settings, stream=True)
    opening = asyncio.Semaphore(OPENING)
    settled = asyncio.Semaphore(0)
    refused: Counter[str] = Counter()
    open_now = 0

    async def follow(index: int) -> None:
        nonlocal open_now
        await opening.acquire()
        begun = False
        try:
            async with HttpConnection(settings["address"]) as connection:
                async for _ in connection.events(chats.call(index)):
                    if not begun:
                        begun = True
                        open_now += 1
                        opening.release()
                        settled.release()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            refused[f"{type(error).__name__}: {error}"] += 1
        finally:
            if begun:
                open_now -= 1
            else:
                opening.release()
                settled.release()

    _quiet()
    tasks = [asyncio.create_task(follow(index)) for index in range(settings["streams"])]
    for _ in tasks:
        await settled.acquire()
    opened = open_now
    report_event("begin")
    await asyncio.sleep(settings["seconds"])
    kept = open_now
    report_event("end")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"opened": opened, "kept": kept, "refused": dict(refused.most_common(3))}


def _quiet() -> None:
    """Without collections: a pause of the load generator is not the gateway's."""
    gc.collect()
    gc.freeze()
    gc.disable()
