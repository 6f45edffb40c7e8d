"""Load over HTTP, in processes of their own (`benchmarks.queue.worker`): closed and open loops of chats, and streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from benchmarks.gateway.chats import ChatCalls, chats_of
from benchmarks.gateway.http_client import HttpConnection
from benchmarks.queue.load_loops import Call, closed_loop, stop_collecting, traceparent, window
from benchmarks.queue.load_loops import open_loop as any_open_loop
from benchmarks.queue.worker import Report, Settings, report_event

OPENING = 32
"""Streams that are opened at a time."""


async def accepts(settings: Settings) -> Report:
    """A closed loop of enqueued chats; 202 answers are accepts. Reports also how many of their `ids` differ, and other statuses."""
    return await _closed_loop(settings, chats_of(settings, headers="x-qlm-mode: enqueue\r\n"), 202)


async def answers(settings: Settings) -> Report:
    """As `accepts`, with chats that are waited for: `accepted` are answers."""
    return await _closed_loop(settings, chats_of(settings), 200)


async def _closed_loop(settings: Settings, chats: ChatCalls, wanted: int) -> Report:
    refused: Counter[int] = Counter()

    @asynccontextmanager
    async def connected() -> AsyncIterator[Call]:
        async with HttpConnection(settings["address"]) as connection:

            async def call(index: int) -> bytes | None:
                status, body = await connection.call(chats.call(index))
                if status == wanted:
                    return body
                refused[status] += 1
                return None

            yield call

    answered, report = await closed_loop(settings, connected)
    return {**report, "ids": len({json.loads(body)["id"] for body in answered}), "refused": dict(refused)}


async def open_loop(settings: Settings) -> Report:
    """An open loop of chats, each on a free connection or a new one."""
    free: list[HttpConnection] = []

    def prepare(count: int) -> Callable[[int], Awaitable[float | str]]:
        chats = chats_of(settings)

        async def serve(index: int) -> float | str:
            connection = free.pop() if free else await HttpConnection(settings["address"]).__aenter__()
            parent = traceparent(index)
            status, _ = await connection.call(chats.call(index, f"traceparent: {parent}\r\n" if parent else ""))
            ended_s = time.perf_counter()
            free.append(connection)
            return ended_s if status == 200 else str(status)

        return serve

    report = await any_open_loop(settings, prepare)
    return {**report, "connections": len(free)}


async def events(settings: Settings) -> Report:
    """Long answers in a window, whose `events` are counted."""
    chats = chats_of(settings, stream=True)
    seen: list[tuple[float, int]] = []

    async def follow(index: int, begun: Callable[[], None]) -> None:
        own = 0
        async with HttpConnection(settings["address"]) as connection:
            async for number in connection.events(chats.call(index)):
                if not own and number:
                    begun()
                own += number
                seen.append((time.perf_counter(), number))

    begin_s, end_s, report = await window(settings, follow)
    return {**report, "events": sum(number for at_s, number in seen if begin_s <= at_s < end_s)}


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

    stop_collecting()
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
