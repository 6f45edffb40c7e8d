"""Calls that share a connection: their answers, deadlines and ends. Only real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from qlm_queue.redis import pipe as redis_pipe
from qlm_queue.redis.pipe import Pipe
from qlm_queue.redis.queue import RedisQueue

from .conftest import Servers

TIMEOUT_S = 2.0
LONG_S = 20.0


@pytest.fixture
async def client(servers: Servers) -> AsyncIterator[redis.Redis]:
    """A second connection, to see and to disturb."""
    client = redis.Redis.from_url(servers.url("valkey"), protocol=2)
    yield client
    await client.delete("pipe:list", "pipe:count")
    await client.aclose()


async def started(client: redis.Redis, timeout_s: float) -> Pipe:
    pipe = Pipe(client.connection_pool.make_connection(), timeout_s)  # type: ignore[no-untyped-call]
    await pipe.start()
    return pipe


async def outcome(answer: asyncio.Future[Any]) -> Any:
    async with asyncio.timeout(LONG_S):
        try:
            return await answer
        except redis.RedisError as error:
            return type(error)


@pytest.mark.parametrize("turns", range(15))
async def test_opening_ends_when_cancelled_at_any_turn_of_the_loop(client: redis.Redis, turns: int) -> None:
    """The client's own `wait_for` loses a cancellation before Python 3.12."""
    pipe = Pipe(client.connection_pool.make_connection(), LONG_S)  # type: ignore[no-untyped-call]
    opening = asyncio.create_task(pipe.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    if opening.cancel():  # else it had ended
        await asyncio.wait([opening])
        assert opening.cancelled()
    await pipe.stop()


async def test_opening_works_in_a_task_that_was_cancelled_before(client: redis.Redis) -> None:
    async def cleanup() -> bytes:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            pipe = await started(client, LONG_S)
            answer: bytes = await pipe.ask("ECHO", "cleanup")
            await pipe.stop()
            return answer  # noqa: B012

    task = asyncio.create_task(cleanup())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == b"cleanup"


async def test_answers_reach_their_calls_in_order(client: redis.Redis) -> None:
    pipe = await started(client, LONG_S)
    answers = [pipe.ask("INCR", "pipe:count") if number % 3 else pipe.ask("NOSUCHCOMMAND", number) for number in range(300)]
    found = [await outcome(answer) for answer in answers]
    assert found == [redis.ResponseError if number % 3 == 0 else number - number // 3 for number in range(300)]
    assert pipe.idle
    await pipe.stop()


async def test_a_cancelled_call_takes_no_answer_of_another(client: redis.Redis) -> None:
    pipe = await started(client, LONG_S)
    answers = [pipe.ask("ECHO", f"{number}") for number in range(10)]
    for number in (0, 3, 9):
        answers[number].cancel()
    kept = [number for number in range(10) if number not in (0, 3, 9)]
    assert [await outcome(answers[number]) for number in kept] == [f"{number}".encode() for number in kept]
    assert await outcome(pipe.ask("ECHO", "next")) == b"next"
    assert pipe.idle
    await pipe.stop()


async def test_each_call_has_its_own_deadline_and_late_answers_are_dropped(client: redis.Redis) -> None:
    pipe = await started(client, TIMEOUT_S)
    began_s = time.monotonic()
    first = pipe.ask("BLPOP", "pipe:list", 0)
    await asyncio.sleep(TIMEOUT_S / 2)
    second = pipe.ask("ECHO", "second")
    assert await outcome(first) is redis.TimeoutError
    assert time.monotonic() - began_s >= TIMEOUT_S
    assert pipe.worn
    assert not second.done()
    await client.rpush("pipe:list", "late")
    assert await outcome(second) == b"second"
    assert pipe.idle
    assert not pipe.broken
    await pipe.stop()


async def test_a_call_by_itself_may_have_less_time_than_those_before_it(client: redis.Redis) -> None:
    pipe = await started(client, LONG_S)
    assert await outcome(pipe.ask("ECHO", "first")) == b"first"
    began_s = time.monotonic()
    assert await outcome(pipe.ask("BLPOP", "pipe:list", 0, within_s=0.1)) is redis.TimeoutError
    assert time.monotonic() - began_s < LONG_S / 2
    assert pipe.worn
    await pipe.stop()


async def test_a_read_does_not_wait_behind_a_cancelled_one(servers: Servers, client: redis.Redis) -> None:
    queue = RedisQueue(servers.url("valkey"), "cancelled-read", call_timeout_s=TIMEOUT_S)
    await queue.start()
    reading = asyncio.create_task(queue.read_events("0", LONG_S, 10))
    while not any(each["cmd"] == "xread" for each in await client.client_list()):  # it waits on the server
        pass
    reading.cancel()
    assert list(await queue.read_events("0", 0.0, 10)) == []
    await queue.stop()


async def test_calls_that_wait_end_with_the_connection(client: redis.Redis) -> None:
    pipe = await started(client, LONG_S)
    identity = await outcome(pipe.ask("CLIENT", "ID"))
    waiting = [pipe.ask("BLPOP", "pipe:list", 0), pipe.ask("ECHO", "behind")]
    while not any(int(each["id"]) == identity and each["cmd"] == "blpop" for each in await client.client_list()):  # it was sent
        pass
    await client.client_kill_filter(_id=str(identity))
    assert [await outcome(answer) for answer in waiting] == [redis.ConnectionError] * 2
    assert pipe.broken
    with pytest.raises(redis.ConnectionError):
        pipe.ask("ECHO", "after")
    await pipe.stop()
    await pipe.stop()


async def test_stopping_ends_calls_that_wait(client: redis.Redis) -> None:
    pipe = await started(client, LONG_S)
    waiting = pipe.ask("BLPOP", "pipe:list", 0)
    await pipe.stop()
    assert await outcome(waiting) is redis.ConnectionError


async def test_waiting_calls_are_bounded(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = await started(client, LONG_S)
    monkeypatch.setattr(redis_pipe, "CALLS_MAX", 3)
    answers = [pipe.ask("ECHO", "x") for _ in range(3)]
    with pytest.raises(redis.ConnectionError):
        pipe.ask("ECHO", "one too many")
    assert [await outcome(answer) for answer in answers] == [b"x"] * 3
    assert await outcome(pipe.ask("ECHO", "room again")) == b"room again"
    await pipe.stop()
