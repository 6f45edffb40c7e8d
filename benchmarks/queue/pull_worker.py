"""One agent's pulls, in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np

from benchmarks.queue.bulk_queue import FULL_BOUNDS, LEASE_S
from benchmarks.queue.prompts import MODEL
from benchmarks.queue.worker import Report, Settings, report_event
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import PullBudget

PAUSES = 1_000


async def pulls(settings: Settings) -> Report:
    """Registers as `instance`, and for `seconds` pulls `requests` and pauses for `pause_s` on average, exponentially by `seed`. Reports the
    seconds that each pull took at the caller, decoded, after `warmup_s`."""
    queue = RedisQueue(settings["url"], settings["queue"], bounds=FULL_BOUNDS)
    await queue.start()
    try:
        _, lease = await queue.register(settings["instance"], "bench", b"", LEASE_S)
        budget = PullBudget(requests_max=settings["requests"], kv_tokens=1 << 40, output_reserve_tokens=0)
        took_s: list[float] = []
        count = short = 0
        pauses_s = np.random.Generator(np.random.PCG64([settings["seed"], 0x70756C])).exponential(settings["pause_s"], PAUSES).tolist()
        gc.collect()
        gc.freeze()
        begin_s = time.perf_counter() + settings["warmup_s"]
        end_s = begin_s + settings["seconds"]
        report_event("begin")
        while (began_s := time.perf_counter()) < end_s:
            result = await queue.pull(lease, MODEL, budget)
            done_s = time.perf_counter()
            count += 1
            if began_s >= begin_s:
                took_s.append(done_s - began_s)
            short += len(result.pulled) != settings["requests"]
            await asyncio.sleep(pauses_s[count % PAUSES])
        report_event("end")
    finally:
        await queue.stop()
    return {"took_s": took_s, "pulls": count, "short": short}
