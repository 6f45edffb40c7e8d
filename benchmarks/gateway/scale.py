"""Throughput of clusters of several gateways, agents and queues, on all cores of the machine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.gateway.figures import FIGURES
from benchmarks.queue.front import FAR_SLO_S, IN_FLIGHT, NEAR_SLO_S, load_settings
from benchmarks.queue.live import CpuMeter, LiveCluster, Shape
from benchmarks.queue.run import Bench
from benchmarks.queue.worker import Report, run_worker
from qlm_core.vocabulary.errors import Unavailable

OUTPUT_TOKENS = 64
"""Length of an awaited answer; one that is only accepted has four times as much."""


async def measure_scale(bench: Bench) -> None:
    """Closed loops of IN_FLIGHT connections from a process of its own for each gateway (accepts), each agent (answered chats, through one
    gateway; engines at their real pace) or each queue (accepts; each queue has a cluster of its own, all on one server)."""
    for figure in FIGURES:
        if figure.part == "scale":
            what = figure.key.rpartition("_")[2]
            found = {point: await _measure(bench, what, int(point)) for point in figure.points[: bench.sizes.scale_points]}
            bench.values[figure.key] = dict(found)


async def _measure(bench: Bench, what: str, number: int) -> float:
    bench.say(f"scale: {number} {what}")
    async with _clusters(bench, what, number) as clusters:
        meters = [CpuMeter(live) for live in clusters]
        addresses = [address for live in clusters for address in live.http_addresses]
        reports = await asyncio.gather(
            *(_load(bench, what, index, addresses[index % len(addresses)], meters if index == 0 else ()) for index in range(number))
        )
    done = sum(report["accepted"] for report in reports)
    refused = [report["refused"] for report in reports if report["refused"]]
    if refused or not done:
        raise Unavailable(f"{number} {what}: {done} were served, {refused} refused")
    used: dict[str, defaultdict[str, float]] = {"cores": defaultdict(float), "cpu_us_each": defaultdict(float)}
    for meter in meters:
        summary = meter.summary(done)
        for key, by_service in used.items():
            for name, value in summary[key].items():
                by_service[name.rpartition("-")[0] or name] += value
    bench.details[f"scale_{what}_{number}"] = {
        **{key: {name: round(value, 2) for name, value in by_service.items()} for key, by_service in used.items()},
        "load_cores": round(sum(report["client_cpu_s"] for report in reports) / (bench.sizes.scale_s + bench.sizes.warmup_s), 2),
        "p99_ms": max(report["latency_ms"]["p99"] for report in reports),
    }
    return round(float(done) / bench.sizes.scale_s, 1)


async def _load(bench: Bench, what: str, index: int, address: str, meters: Sequence[CpuMeter]) -> Report:
    def on_event(event: str) -> None:
        for meter in meters:
            meter.on_event(event)

    kind, tokens, slo_s = ("http_answers", 1, NEAR_SLO_S) if what == "agents" else ("http_accepts", 4, FAR_SLO_S)
    settings = load_settings(
        bench,
        address,
        f"scale-{what}-{index}",
        output_tokens=tokens * OUTPUT_TOKENS,
        slo_s=slo_s,
        seconds=bench.sizes.scale_s,
        in_flight=IN_FLIGHT,
    )
    return await run_worker(kind, settings, on_event)


@asynccontextmanager
async def _clusters(bench: Bench, what: str, number: int) -> AsyncIterator[Sequence[LiveCluster]]:
    """One, or `number` with a queue each on the first one's server."""
    async with AsyncExitStack() as stack:
        clusters: list[LiveCluster] = []
        for index in range(number if what == "queues" else 1):
            queue = {"name": f"bench-{index}", **({"url": clusters[0].state.queue_url} if clusters else {})}
            shape = Shape(gateways=number if what == "gateways" else 1, agents=number if what == "agents" else 1, http=True, queue=queue)
            folder = bench.out / f"scale-{what}-{number}-{index}"
            clusters.append(await stack.enter_async_context(LiveCluster(folder, shape, bench.seed, bench.collector)))
        yield clusters
