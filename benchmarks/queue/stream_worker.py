"""Streams, in a process of their own: an open loop of short ones, and many long ones at a time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import grpc.aio

from benchmarks.queue.load_client import TOKENS, LoadClient
from benchmarks.queue.prompts import PromptSource
from benchmarks.queue.schedule import poisson_times, summary_ms
from benchmarks.queue.worker import Report, Settings, report_event
from qlm.api.v1.gateway_pb2 import GenerateRequest, StreamResponse

TRACED_EVERY = 4
"""One in so many requests has a sampled parent."""
LEAD_S = 0.2
"""Between the connection and the first arrival."""


def _source(settings: Settings) -> PromptSource:
    return PromptSource(
        seed=settings["seed"],
        run_id=settings["run_id"],
        prompt_tokens=settings["prompt_tokens"],
        output_tokens=settings["output_tokens"],
        slo_s=settings["slo_s"],
    )


def _messages(source: PromptSource, count: int) -> list[bytes]:
    """Made before the run, which then only sends."""
    prompts = source.prompts()
    messages: list[bytes] = []
    for index in range(count):
        message = GenerateRequest(request=prompts[index % len(prompts)])
        message.request.request_id = source.request_id(index)
        if index % TRACED_EVERY == 0:
            message.request.trace.traceparent = f"00-{index + 1:032x}-{index + 1:016x}-01"
        messages.append(message.SerializeToString())
    return messages


async def open_loop(settings: Settings) -> Report:
    """Generate at Poisson times of `rate_per_s` over `warmup_s` and `seconds`, independent of answers. Of the requests that were due
    in the latter and ended it reports the number, and of each traced one [id, due to last token in s]; errors by code, and how late the
    client itself sent."""
    source = _source(settings)
    warmup_s = settings["warmup_s"]
    times_s = poisson_times(settings["seed"], settings["rate_per_s"], warmup_s + settings["seconds"])
    messages = _messages(source, len(times_s))
    ended_s: list[float] = []
    traced: list[tuple[str, float]] = []
    first_s: list[float] = []
    late_s: list[float] = []
    errors: Counter[str] = Counter()

    async def serve(client: LoadClient, index: int, due_s: float) -> None:
        sent_s = time.perf_counter()
        first_token_s = last_token_s = 0.0
        try:
            async for message in client.generate(messages[index]):
                if message[0] == TOKENS:
                    last_token_s = time.perf_counter()
                    first_token_s = first_token_s or last_token_s
        except grpc.aio.AioRpcError as error:
            errors[error.code().name] += 1
            return
        if times_s[index] >= warmup_s and last_token_s:
            ended_s.append(last_token_s - due_s)
            if index % TRACED_EVERY == 0:
                traced.append((source.request_id(index), ended_s[-1]))
            first_s.append(first_token_s - due_s)
            late_s.append(sent_s - due_s)

    async with LoadClient(settings["address"]) as client:
        gc.collect()
        gc.freeze()
        gc.disable()  # a pause of the load generator is not the system's
        start_s = time.perf_counter() + LEAD_S
        loop = asyncio.get_running_loop()
        loop.call_later(LEAD_S + warmup_s, report_event, "begin")
        async with asyncio.TaskGroup() as group:

            def send(index: int) -> None:
                group.create_task(serve(client, index, start_s + times_s[index]))

            def send_all() -> None:
                for index, at_s in enumerate(times_s):
                    time.sleep(max(0.0, start_s + at_s - time.perf_counter()))
                    loop.call_soon_threadsafe(send, index)

            # A thread's clock is exact to some 0.1 ms, an event loop's to 1 ms.
            await asyncio.to_thread(send_all)
        report_event("end")
    return {
        "requests": sum(at_s >= warmup_s for at_s in times_s),
        "requests_in_all": len(times_s),
        "ended": len(ended_s),
        "traced": traced,
        "errors": dict(errors),
        "first_token_ms": summary_ms(first_s),
        "last_token_ms": summary_ms(ended_s),
        "sent_late_ms": summary_ms(late_s),
    }


async def fanout(settings: Settings) -> Report:
    """`streams` long answers at a time. When all have begun, waits `warmup_s`, then measures for `seconds` and breaks all off. Reports
    messages and tokens received in that window, and the gaps between the messages of a stream that end in it."""
    messages = _messages(_source(settings), settings["streams"])
    received: list[list[tuple[float, bytes]]] = [[] for _ in messages]
    begun = asyncio.Semaphore(0)

    async def follow(client: LoadClient, index: int) -> None:
        mine = received[index]
        async for message in client.generate(messages[index]):
            mine.append((time.perf_counter(), message))
            if len(mine) == 2:  # after the acceptance, the first tokens
                begun.release()

    async with LoadClient(settings["address"]) as client:
        gc.collect()
        gc.freeze()
        gc.disable()
        tasks = [asyncio.create_task(follow(client, index)) for index in range(len(messages))]
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
        results = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [repr(result) for result in results if isinstance(result, Exception)]
    streams = [[(at_s, _token_count(message)) for at_s, message in mine if message[0] == TOKENS] for mine in received]
    return {
        "streams": len(unended),
        "broken": broken[:3],
        "seconds": end_s - begin_s,
        "messages": sum(begin_s <= at_s < end_s for stream in streams for at_s, _ in stream),
        "tokens": sum(tokens for stream in streams for at_s, tokens in stream if begin_s <= at_s < end_s),
        "itl_ms": summary_ms(gaps_s(streams, begin_s, end_s)),
    }


def _token_count(message: bytes) -> int:
    return len(StreamResponse.FromString(message).tokens.token_ids)


def gaps_s(streams: Sequence[Sequence[tuple[float, int]]], begin_s: float, end_s: float) -> list[float]:
    return [later - earlier for stream in streams for (earlier, _), (later, _) in pairwise(stream) if begin_s <= later < end_s]
