"""The parts about the queue's server alone: pulls from a long queue, and bytes a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import redis.asyncio as redis

from benchmarks.queue.bulk_queue import LEASE_S, BulkQueue, bulk_queue, chunks
from benchmarks.queue.filling import FilledRequest, accept_all, place_all
from benchmarks.queue.prompts import MODEL, PromptSource
from benchmarks.queue.run import Bench
from benchmarks.queue.schedule import summary_ms
from benchmarks.queue.worker import run_worker
from qlm.api.v1.request_pb2 import FINISH_REASON_LENGTH, Result, Usage
from qlm.internal.v1.events_pb2 import RequestEvent
from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES
from qlm_queue.keys import Keys
from qlm_queue.values import BATCH_MAX, Completion, Emission, Lease, Owned, PullBudget, StepStatus, TerminalRecord

QUEUE = "bench"
AGENTS = ("agent-0", "agent-1", "agent-2", "agent-3")
PROMPT_TOKENS = 100
"""A body of 300 bytes."""
OUTPUT_TOKENS = 16
PULL_REQUESTS = 100
PULL_PAUSE_S = 0.1
"""Between an agent's pulls, on average: some 4,000 requests a second in all, far more than 4 engines finish."""
CHURN = 0.9
"""Share of the requests that end, chosen at random."""
SETTLE_S = 0.5
"""Between two readings of the server's memory while it rehashes or rewrites its log."""
SETTLE_LOOKS_MAX = 60
SETTLED_BYTES = 1 << 16
"""Memory that varies with connections."""
ALL_OF_IT = PullBudget(requests_max=BATCH_MAX, kv_tokens=1 << 40, output_reserve_tokens=0)
SAMPLED = 500
"""Results read back for their length."""


@dataclass(slots=True, kw_only=True)
class Store:
    """A queue on a server of its own, with a planner's lease and registered instances."""

    queue: BulkQueue
    client: redis.Redis
    planner: Lease
    agents: dict[str, tuple[str, Lease]]


@asynccontextmanager
async def store(folder: Path) -> AsyncIterator[Store]:
    async with bulk_queue(folder, QUEUE) as queue:
        client = redis.Redis.from_url(queue.url)
        try:
            agents = {name: await queue.register(name, "bench", b"", LEASE_S) for name in AGENTS}
            yield Store(queue=queue, client=client, planner=await queue.planner_lease(), agents=agents)
        finally:
            await client.aclose()


async def measure_pulls(bench: Bench) -> None:
    """A process for each of 4 agents pulls PULL_REQUESTS some ten times a second, from a queue that holds 400,000 at the beginning."""
    count = bench.sizes.pull_queued
    async with store(bench.out / "pulls") as held:
        bench.say(f"pulls: filling a queue with {count:,} requests")
        filled = await accept_all(held.queue, _source(bench), count)
        groups = await place_all(held.queue, held.planner, AGENTS, filled)
        await _settled(held.client)
        bench.say(f"pulls: {len(AGENTS)} agents pull {PULL_REQUESTS} for {bench.sizes.pull_seconds:g} s")
        settings = {
            "url": held.queue.url,
            "queue": QUEUE,
            "requests": PULL_REQUESTS,
            "pause_s": PULL_PAUSE_S,
            "warmup_s": bench.sizes.warmup_s,
            "seconds": bench.sizes.pull_seconds,
        }
        before_s = await _server_cpu_s(held.client)
        reports = await asyncio.gather(
            *(run_worker("pulls", {**settings, "instance": name, "seed": bench.seed + number}) for number, name in enumerate(AGENTS))
        )
        used_s = await _server_cpu_s(held.client) - before_s
        overview = await held.queue.overview()
    pulled = PULL_REQUESTS * sum(report["pulls"] for report in reports)
    running = sum(each.running for each in overview.virtual_queues)
    if overview.live != count or running != pulled or any(report["short"] for report in reports):
        raise Unavailable(f"{overview.live} of {count} requests are left; short pulls: {[report['short'] for report in reports]}")
    took_s = list(chain.from_iterable(report["took_s"] for report in reports))
    summary = summary_ms(took_s)
    bench.values["pull_100_p99_ms"] = summary["p99"]
    bench.details["pulls"] = {
        "queued": count,
        "groups": groups,
        "pull_ms": summary,
        "pulled": pulled,
        "server_cpu_us_a_pull": round(used_s * 1e6 * PULL_REQUESTS / pulled, 1),
    }


async def measure_bytes(bench: Bench) -> None:
    """used_memory of the server, without its bounded streams, before and after: requests queued, CHURN of them ended at random, and their
    results and the index of these deleted. Bodies and Results are subtracted at their plain size; the allocator's overhead on them counts
    as ours."""
    count = bench.sizes.bytes_queued
    choice = random.Random(bench.seed)
    async with store(bench.out / "bytes") as held:
        empty = await _memory(held.client)
        bench.say(f"bytes: filling a queue with {count:,} requests")
        filled = await accept_all(held.queue, _source(bench), count)
        await place_all(held.queue, held.planner, AGENTS, filled)
        full = await _memory(held.client)
        ending = frozenset(choice.sample(range(count), round(count * CHURN)))
        bench.say(f"bytes: ending {len(ending):,} of them at random")
        await _end(held, choice, frozenset(filled[index].queue_id for index in ending))
        churned = await _memory(held.client)
        keys = Keys(QUEUE)
        ended = [filled[index].key for index in sorted(ending)]
        result_bytes = await _result_bytes(held, choice.sample(ended, min(SAMPLED, len(ended))))
        for chunk in chunks(ended, BATCH_MAX):
            await held.client.unlink(*(keys.result(key) for key in chunk))
        await held.client.unlink(keys("kept"))
        left = await _memory(held.client)
        overview = await held.queue.overview()
    living = [each for each in filled if each.index not in ending]
    if overview.live != len(living):
        raise Unavailable(f"{overview.live} requests are live, not {len(living)}")
    bench.values["redis_bytes_per_request"] = {
        "full": round((full - empty) / count - _body_bytes(filled), 1),
        "after_churn": round((left - empty) / len(living) - _body_bytes(living), 1),
        "finished": round((churned - left) / len(ending) - result_bytes, 1),
    }
    bench.details["bytes"] = {
        "queued": count,
        "ended": len(ending),
        "body_bytes": round(_body_bytes(filled), 1),
        "result_bytes": round(result_bytes, 1),
        "used_memory": {"empty": empty, "full": full, "churned": churned, "left": left},
    }


def _source(bench: Bench) -> PromptSource:
    return PromptSource(seed=bench.seed, run_id="req", prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, slo_s=3_600.0)


def _body_bytes(filled: Sequence[FilledRequest]) -> float:
    return sum(each.body_bytes for each in filled) / len(filled)


async def _end(held: Store, choice: random.Random, chosen: frozenset[str]) -> None:
    """Serves as agents do: each pulls its whole queue; the chosen requests are completed in random order, the others given back."""
    for incarnation, lease in held.agents.values():
        owned: list[Owned] = []
        while pulled := (await held.queue.pull(lease, MODEL, ALL_OF_IT)).pulled:
            owned += (Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in pulled)
        ends = [_completion(each) for each in owned if each.queue_id in chosen]
        choice.shuffle(ends)
        for batch in chunks(ends, BATCH_MAX):
            statuses = await held.queue.complete(incarnation, batch)
            if any(status is not StepStatus.DONE for status in statuses):
                raise Unavailable("the queue did not take a completion by the request's owner")
        for rest in chunks([each for each in owned if each.queue_id not in chosen], BATCH_MAX):
            await held.queue.unpull(incarnation, rest)


def _completion(owned: Owned) -> Completion:
    event = RequestEvent(model=MODEL, output_tokens=OUTPUT_TOKENS, started_s=1.0, first_token_s=2.0, finished_s=3.0)
    usage = Usage(prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
    result = Result(model=MODEL, finish_reason=FINISH_REASON_LENGTH, usage=usage)
    output = bytes(OUTPUT_TOKENS * TOKEN_BYTES)
    return Completion(
        last=Emission(queue_id=owned.queue_id, key=owned.key, attempt=owned.attempt, offset=0, progress=output, frame=b""),
        state=RequestState.COMPLETED,
        result=result.SerializeToString(),
        event=event.SerializeToString(),
    )


async def _result_bytes(held: Store, keys: Sequence[RequestKey]) -> float:
    """Mean length of the Results that are stored for some requests."""
    total = 0
    for key in keys:
        record = await held.queue.find(key)
        if not isinstance(record, TerminalRecord):
            raise Unavailable(f"{key} has no result")
        total += len(record.result)
    return total / len(keys)


async def _memory(client: redis.Redis) -> int:
    """Bytes in use by the server, without the streams, which have bounds of their own."""
    await _settled(client)
    used = int((await client.info("memory"))["used_memory"])
    keys = Keys(QUEUE)
    bounded = [keys("events"), *(keys("ctl", name) for name in AGENTS)]
    return used - sum([await client.memory_usage(key, samples=0) or 0 for key in bounded])


async def _settled(client: redis.Redis) -> None:
    """Waits until the server neither rewrites its log nor rehashes its keys: both use memory and time of their own for a while."""
    before = -SETTLED_BYTES
    for _ in range(SETTLE_LOOKS_MAX):
        persistence, memory = await client.info("persistence"), await client.info("memory")
        busy = persistence["aof_rewrite_in_progress"] or persistence.get("aof_rewrite_scheduled")
        if not busy and abs(memory["used_memory"] - before) <= SETTLED_BYTES:
            return
        before = memory["used_memory"]
        await asyncio.sleep(SETTLE_S)


async def _server_cpu_s(client: redis.Redis) -> float:
    """CPU seconds of the server so far."""
    cpu = await client.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])
