"""The closed loop of unary accepts, in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import count

import grpc.aio

from benchmarks.queue.load_client import LoadClient
from benchmarks.queue.prompts import PromptSource
from benchmarks.queue.schedule import summary_ms
from benchmarks.queue.worker import Report, Settings, report_event
from qlm.api.v1.gateway_pb2 import SubmitRequest, SubmitResponse

TRIES_MAX = 5


async def accepts(settings: Settings) -> Report:
    """`in_flight` callers, each with one Submit after the other for `warmup_s` and then `seconds`. One refused as UNAVAILABLE is sent again
    with its id, as a client does. Reports the answers within the measured time (`accepted`), all answers (`accepted_in_all`, `queue_ids`:
    how many different ones), refusals by code, and latencies."""
    source = PromptSource(
        seed=settings["seed"],
        run_id=settings["run_id"],
        prompt_tokens=settings["prompt_tokens"],
        output_tokens=settings["output_tokens"],
        slo_s=settings["slo_s"],
    )
    prompts = source.prompts()
    numbers = count()
    answers: list[tuple[float, bytes]] = []
    latencies_s: list[float] = []
    errors: Counter[str] = Counter()
    begin_s = time.perf_counter() + settings["warmup_s"]
    end_s = begin_s + settings["seconds"]

    async def call_repeatedly(client: LoadClient) -> None:
        while (sent_s := time.perf_counter()) < end_s:
            index = next(numbers)
            message = SubmitRequest(request=prompts[index % len(prompts)])
            message.request.request_id = source.request_id(index)
            answer = await submit(client, message.SerializeToString())
            done_s = time.perf_counter()
            answers.append((done_s, answer))
            if sent_s >= begin_s and done_s < end_s:
                latencies_s.append(done_s - sent_s)

    async def submit(client: LoadClient, message: bytes) -> bytes:
        for _ in range(TRIES_MAX - 1):
            try:
                return await client.submit(message)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                errors[error.code().name] += 1
        return await client.submit(message)

    async def mark() -> None:
        for at_s, what in ((begin_s, "begin"), (end_s, "end")):
            await asyncio.sleep(at_s - time.perf_counter())
            report_event(what)

    async with LoadClient(settings["address"]) as client, asyncio.TaskGroup() as group:
        group.create_task(mark())
        for _ in range(settings["in_flight"]):
            group.create_task(call_repeatedly(client))
    return {
        "accepted": sum(begin_s <= done_s < end_s for done_s, _ in answers),
        "accepted_in_all": len(answers),
        "queue_ids": len({SubmitResponse.FromString(answer).accepted.queue_id for _, answer in answers}),
        "repeated": dict(errors),
        "latency_ms": summary_ms(latencies_s),
    }
