"""The parts of the bench: each has a cluster of its own, whose gateway is held to one core."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from benchmarks.queue.front import (
    ENGINE_FAST,
    FAR_SLO_S,
    IN_FLIGHT,
    added_loop,
    counted_accepts,
    less_engine,
    load_settings,
    stepped_shape,
    stepped_streams,
)
from benchmarks.queue.live import CpuMeter, LiveCluster, Shape
from benchmarks.queue.run import Bench
from benchmarks.queue.schedule import summary_ms
from benchmarks.queue.worker import Report, run_worker
from qlm_core.vocabulary.errors import Unavailable

GATEWAY = "gateway-0"
RATE_PER_S = 200.0
STREAMS = 64
STEPS_PER_S = 400.0
"""Decode steps of the engine under the events, each a token on every stream: 25,600 tokens a second offered."""
ENGINE_SLOW = 1e-4
"""Time scale of the engine under open streams: hours a step, so that all streams stay open."""
HELD_S = 5.0
MEMORY_TIMEOUT_S = 600.0


async def measure_accepts(bench: Bench) -> None:
    """Enqueued chats (202 once the request is durable), beside a planner that places and an instance that serves."""
    bench.say(f"accepts: {IN_FLIGHT} connections for {bench.sizes.accepts_s:g} s")
    async with LiveCluster(bench.out / "http-accepts", Shape(http=True), bench.seed, bench.collector) as live:
        hold_to_one_core(live)
        report, used = await counted_accepts(bench, live, live.http, "http_accepts")
    if report["refused"]:
        raise Unavailable(f"chats were refused: {report['refused']}")
    bench.values["http_accepts_per_s"] = round(report["accepted"] / bench.sizes.accepts_s, 1)
    bench.values["cpu_us_per_request"] = used["cpu_us_each"][GATEWAY]
    bench.details["accepts"] = {**report, **used}


async def measure_added(bench: Bench) -> None:
    """Chats of 16 tokens at Poisson times, answered as JSON. Added is the time from a call's due time to the end of its answer, minus the
    engine's time, from the start of its prefill to its last token, by the spans of its trace."""
    bench.say(f"added latency: {RATE_PER_S:g} chats/s for {bench.sizes.added_s:g} s")
    shape = Shape(time_scale=ENGINE_FAST, http=True)
    async with LiveCluster(bench.out / "http-added", shape, bench.seed, bench.collector) as live, bench.collector.following():
        hold_to_one_core(live)
        meter = CpuMeter(live)
        report = await added_loop(bench, live.http, "added", RATE_PER_S, meter.on_event, kind="http_open_loop")
        summary = summary_ms(await less_engine(bench, report))
    bench.values |= {"added_p50_ms": summary["p50"], "added_p99_ms": summary["p99"]}
    bench.details["added"] = {**report, "added_ms": summary, **meter.summary(report["requests"])}


async def measure_events(bench: Bench) -> None:
    """STREAMS streamed chats at a time. An event counts once, with any number of tokens."""
    bench.say(f"events: {STREAMS} streams for {bench.sizes.fanout_s:g} s")
    shape = replace(stepped_shape(bench, STREAMS, STEPS_PER_S), http=True)
    async with LiveCluster(bench.out / "http-events", shape, bench.seed, bench.collector) as live:
        hold_to_one_core(live)
        meter = CpuMeter(live)
        report = await stepped_streams(bench, live.http, STREAMS, STEPS_PER_S, "http_events", meter.on_event)
    used = meter.summary(report["events"])
    bench.values["sse_events_per_s"] = round(report["events"] / report["seconds"], 1)
    bench.values["cpu_us_per_chunk"] = used["cpu_us_each"][GATEWAY]
    bench.details["events"] = {**report, **used}


async def measure_memory(bench: Bench) -> None:
    """Resident memory of the gateway once it serves, and with as many open streams as the size says, none of which has an output yet. What
    could be opened is in the details: the machine's limit of files may be lower."""
    streams = bench.sizes.open_streams
    bench.say(f"memory: {streams:,} open streams")
    async with LiveCluster(bench.out / "http-memory", Shape(time_scale=ENGINE_SLOW, http=True), bench.seed, bench.collector) as live:
        hold_to_one_core(live)
        pid = _gateway_pid(live)
        await run_worker(
            "http_accepts", load_settings(bench, live.http, "warm", output_tokens=16, slo_s=FAR_SLO_S, seconds=0.5, in_flight=1)
        )
        resident = {"idle": rss_mib(pid)}
        settings = load_settings(bench, live.http, "held", output_tokens=16, slo_s=FAR_SLO_S, seconds=HELD_S, streams=streams)

        def on_event(event: str) -> None:
            if event == "end":
                resident["open"] = rss_mib(pid)

        report: Report = await run_worker("http_held", settings, on_event, timeout_s=MEMORY_TIMEOUT_S)
    bench.details["memory"] = {**report, "wanted": streams}
    if report["kept"] < 0.9 * streams:
        raise Unavailable(f"only {report['kept']} of {streams} streams stayed open: {report['refused']}")
    bench.values["rss_mib"] = dict(resident)


def hold_to_one_core(live: LiveCluster) -> None:
    """Holds all threads of the gateway, and those that they will start, to the last core that this process may use."""
    core = max(os.sched_getaffinity(0))
    for task in Path(f"/proc/{_gateway_pid(live)}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def rss_mib(pid: int) -> float:
    """Resident memory of a process. Raises OSError for one that has ended."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def _gateway_pid(live: LiveCluster) -> int:
    return live.state.of("gateway")[0].pid
