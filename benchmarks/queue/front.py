"""The parts in front of the engine: accepts, latency added to a request, and fan-out of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.queue.bare_chain import bare_chain
from benchmarks.queue.collector import Times
from benchmarks.queue.live import GPU, CpuMeter, CpuUse, LiveCluster, Shape
from benchmarks.queue.prompts import CONTEXT_TOKENS_MAX, PROFILE
from benchmarks.queue.run import Bench
from benchmarks.queue.schedule import summary_ms
from benchmarks.queue.worker import Report, Settings, run_worker
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import Unavailable
from qlm_process.queue.connection import open_queue
from qlm_process.settings import QueueSettings

IN_FLIGHT = 32
PROMPT_TOKENS = 64
FAR_SLO_S = 3_600.0
"""So far ahead that no miss is predicted: the planner places, and has no reason to reorder."""
NEAR_SLO_S = 20.0
RATES_PER_S = (200, 400)
SPANS_TIMEOUT_S = 20.0
WITH_SPANS_MIN = 0.95
"""Share of the traced requests whose engine time must be known."""
STREAMS = 200
STEPS_PER_S = 100.0
"""Decode steps of the fan-out's engine, each a token on every stream: 20,000 tokens a second offered."""
ENGINE_FAST = 4.0
"""Time scale of the engine under the latency part: steps of 2 ms, so that its own time, which is subtracted, is short and exact."""

START, END = 0, 1
Leg = tuple[tuple[str, int], tuple[str, int]]
ENGINE_LEG: Leg = (("qlm.prefill", START), ("qlm.decode", END))
LEGS: Mapping[str, Leg] = {
    "gateway accepts": (("qlm.gateway.accept", START), ("qlm.gateway.accept", END)),
    "planner places": (("qlm.gateway.accept", END), ("qlm.placement", END)),
    "agent pulls": (("qlm.placement", END), ("qlm.pull", END)),
    "engine admits": (("qlm.pull", END), ("qlm.prefill", START)),
    "engine runs": ENGINE_LEG,
    "agent hears": (("qlm.decode", END), ("qlm.complete", START)),
    "agent completes": (("qlm.complete", START), ("qlm.complete", END)),
}
"""Legs of a request, by the spans of its trace; the rest of the client's time is the way to the gateway and, after the completion, back.
Processes estimate the server's clock, to a fraction of a millisecond."""
SPANS = frozenset(name for leg in LEGS.values() for name, _ in leg)


async def measure_accepts(bench: Bench) -> None:
    """Unary Submit, beside a planner that places and an instance that serves at its real pace."""
    for durability, key in (("process", "accepts_per_s"), ("disk", "accepts_per_s_disk")):
        bench.say(f"accepts: durability {durability}, {IN_FLIGHT} in flight for {bench.sizes.accepts_s:g} s")
        shape = Shape(durability=durability)
        async with LiveCluster(bench.out / f"accepts-{durability}", shape, bench.seed, bench.collector) as live:
            report, used = await counted_accepts(bench, live, live.gateway, "accepts")
        bench.values[key] = round(report["accepted"] / bench.sizes.accepts_s, 1)
        bench.details[f"accepts_{durability}"] = {**report, **used}


async def counted_accepts(bench: Bench, live: LiveCluster, address: str, kind: str) -> tuple[Report, CpuUse]:
    """A closed loop of IN_FLIGHT accepts. One counts once answered; the queue's own acceptance counter must grow by as many, and all ids
    must differ."""
    meter, seconds = CpuMeter(live), bench.sizes.accepts_s
    settings = load_settings(bench, address, "accepts", output_tokens=256, slo_s=FAR_SLO_S, seconds=seconds, in_flight=IN_FLIGHT)
    report = await run_worker(kind, settings, meter.on_event)
    queue = open_queue(QueueSettings(name=live.state.queue, url=live.state.queue_url))
    await queue.start()
    try:
        report["counted_by_the_queue"] = (await queue.overview()).accepted_count
    finally:
        await queue.stop()
    if not report["counted_by_the_queue"] == report["accepted_in_all"] == report["ids"]:
        raise Unavailable(f"accepts at the client and in the queue differ: {report}")
    return report, meter.summary(report["accepted"])


async def measure_added(bench: Bench) -> None:
    """Generate at Poisson times, 16-token answers. Added is the time from a request's due time to its last token at the client, minus the
    engine's time, from the start of its prefill to its last token, by the spans of its trace. CPU is that of all processes. The same
    requests then go through the bare chain, which has no engine: the ratio is the price of policy and records."""
    live_ms: dict[str, dict[str, float | int | None]] = {"p50": {}, "p99": {}}
    cpu: dict[str, float | int | None] = {}
    shape = Shape(time_scale=ENGINE_FAST)
    async with LiveCluster(bench.out / "added", shape, bench.seed, bench.collector) as live, bench.collector.following():
        await _warm_up(bench, live, "added-warmup")
        for rate_per_s in RATES_PER_S:
            bench.say(f"added latency: {rate_per_s} requests/s for {bench.sizes.added_s:g} s")
            meter = CpuMeter(live)
            report = await added_loop(bench, live.gateway, f"added-{rate_per_s}", rate_per_s, meter.on_event)
            added_s = await less_engine(bench, report)
            summary = summary_ms(added_s)
            used = meter.summary(report["requests"])
            cpu[f"at_{rate_per_s}"] = round(sum(used["cpu_us_each"].values()) / 1e3, 2)
            for name, ms in live_ms.items():
                ms[f"at_{rate_per_s}"] = summary[name]
            bench.details[f"added_{rate_per_s}"] = {**report, "added_ms": summary, **used}
    bench.values |= {"added_p50_ms": live_ms["p50"], "added_p99_ms": live_ms["p99"], "cpu_ms_per_request": cpu}
    bare_ms: dict[str, dict[str, float]] = {"p50": {}, "p99": {}}
    async with bare_chain(bench.out / "bare") as address:
        for rate_per_s in RATES_PER_S:
            bench.say(f"bare chain: {rate_per_s} requests/s for {bench.sizes.added_s:g} s")
            summary = (await added_loop(bench, address, f"bare-{rate_per_s}", rate_per_s))["last_token_ms"]
            for name, each in bare_ms.items():
                each[f"at_{rate_per_s}"] = summary[name]
    for name, ms in live_ms.items():
        bench.values[f"bare_{name}_ms"] = dict(bare_ms[name])
        bench.values[f"added_{name}_ratio"] = {at: round((ms[at] or 0.0) / each_ms, 2) for at, each_ms in bare_ms[name].items()}


async def added_loop(
    bench: Bench,
    address: str,
    run_id: str,
    rate_per_s: float,
    on_event: Callable[[str], None] = lambda event: None,
    kind: str = "open_loop",
) -> Report:
    """Requests of 16 tokens at Poisson times. Raises Unavailable unless all end."""
    seconds = bench.sizes.added_s
    settings = load_settings(bench, address, run_id, output_tokens=16, slo_s=NEAR_SLO_S, seconds=seconds, rate_per_s=rate_per_s)
    report = await run_worker(kind, settings, on_event)
    if report["errors"] or report["ended"] < report["requests"]:
        raise Unavailable(f"only {report['ended']} of {report['requests']} requests ended: {report['errors']}")
    return report


async def less_engine(bench: Bench, report: Report) -> list[float]:
    """Seconds added to each traced request. Moves those from the report to sums of their legs."""
    ended: dict[str, float] = dict(report.pop("traced"))
    times = await bench.collector.times(ended, SPANS, SPANS_TIMEOUT_S)
    if len(times) < WITH_SPANS_MIN * len(ended):
        raise Unavailable(f"the spans of only {len(times)} of {len(ended)} requests arrived")
    engine_s = {each: leg_s(spans, ENGINE_LEG) for each, spans in times.items()}
    report["with_spans"] = len(times)
    report["engine_ms"] = summary_ms(list(engine_s.values()))
    report["legs_ms"] = {name: summary_ms([leg_s(spans, leg) for spans in times.values()]) for name, leg in LEGS.items()}
    return [ended[each] - own_s for each, own_s in engine_s.items()]


def leg_s(spans: Times, leg: Leg) -> float:
    """Seconds from one end of a span to one of another."""
    (first, first_end), (last, last_end) = leg
    return spans[last][last_end] - spans[first][first_end]


async def measure_fanout(bench: Bench) -> None:
    """STREAMS answers at a time, slightly above the target rate. A message counts once, with any number of tokens."""
    bench.say(f"fan-out: {STREAMS} streams for {bench.sizes.fanout_s:g} s")
    shape = stepped_shape(bench, STREAMS, STEPS_PER_S)
    async with LiveCluster(bench.out / "fanout", shape, bench.seed, bench.collector) as live:
        await _warm_up(bench, live, "fanout-warmup")
        meter = CpuMeter(live)
        report = await stepped_streams(bench, live.gateway, STREAMS, STEPS_PER_S, "fanout", meter.on_event)
    report["tokens_per_message"] = round(report["tokens"] / max(1, report["messages"]), 3)
    bench.values["fanout_tokens_per_s"] = round(report["messages"] / report["seconds"], 1)
    bench.values["itl_p99_ms"] = report["itl_ms"]["p99"]
    bench.details["fanout"] = {**report, **meter.summary(report["messages"])}


def stepped_shape(bench: Bench, streams: int, steps_per_s: float) -> Shape:
    """A cluster whose one agent makes so many steps a second with `streams` answers (mean over the run), and holds no output back."""
    (profile,) = (row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model, row.instance) == (GPU, 1, PROFILE, ""))
    seconds = bench.sizes.fanout_s + bench.sizes.warmup_s
    step_s = profile.decode_step_s(streams, streams * (PROMPT_TOKENS + steps_per_s * seconds / 2))
    return Shape(
        time_scale=step_s * steps_per_s,
        agent={"coalesce_s": 0.0, "batch_max": streams},
        simulated={"tell_every_s": 0.001},
    )


async def stepped_streams(
    bench: Bench, address: str, streams: int, steps_per_s: float, kind: str, on_event: Callable[[str], None]
) -> Report:
    """Streams on such a cluster that last longer than the run. Raises Unavailable unless all do."""
    seconds = bench.sizes.fanout_s
    tokens = min(round(steps_per_s * (seconds + bench.sizes.warmup_s + 10.0)), CONTEXT_TOKENS_MAX - 2 * PROMPT_TOKENS)
    settings = load_settings(bench, address, kind, output_tokens=tokens, slo_s=FAR_SLO_S, seconds=seconds, streams=streams)
    report = await run_worker(kind, settings, on_event)
    if report["broken"] or report["streams"] < streams:
        raise Unavailable(f"streams broke off or ended before the time: {report}")
    return {**report, "offered_per_s": streams * steps_per_s}


async def _warm_up(bench: Bench, live: LiveCluster, run_id: str) -> None:
    """Sends a few requests, to load the model and exercise every path once."""
    seconds = bench.sizes.warmup_s
    settings = load_settings(bench, live.gateway, run_id, output_tokens=16, slo_s=NEAR_SLO_S, seconds=seconds, rate_per_s=50.0)
    await run_worker("open_loop", {**settings, "warmup_s": 0.0})


def load_settings(bench: Bench, address: str, run_id: str, *, output_tokens: int, slo_s: float, seconds: float, **more: float) -> Settings:
    """Settings of a load generator; `more`: those of its loop."""
    return {
        "address": address,
        "seed": bench.seed,
        "run_id": run_id,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": output_tokens,
        "slo_s": slo_s,
        "warmup_s": bench.sizes.warmup_s,
        "seconds": seconds,
        **more,
    }
