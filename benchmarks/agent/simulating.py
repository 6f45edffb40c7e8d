"""The simulator, given a row measured in serving, against real vLLM: the same requests on a cluster and in virtual time.

One agent with SEATS seats; 300 requests of two SLO classes for each of three seeds, more than the row's capacity, so that the order of the
queue decides which are in time. Each seed has a row of its own, measured just before on such a cluster under a load of another seed and
other sizes, since machines change their speed from minute to minute; and a cluster of its own, whose estimator has learned only the row.
Both sides report the times of acceptance, first token and end from the queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.agent.measured_cluster import (
    FILE,
    MODEL,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SEATS,
    WARM_UP_S,
    WARM_UP_TOKENS,
    MeasuredAgent,
    TimedRequest,
    measured_agent,
    replayed,
    serving,
)
from benchmarks.agent.model_config import INSTANCE, run_quietly, vocabulary_of
from benchmarks.agent.own_agent import NotServed
from benchmarks.agent.parts import Plan
from benchmarks.figures import Values
from benchmarks.parts import Measured
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_load.replay.ledger import quantile
from qlm_sim import SimRequest, simulate
from qlm_sim.from_config import describe

SEEDS = 3
REQUESTS = 300
OVERLOAD = 2.0
"""Arrival rate over the profile's capacity."""
URGENT_SHARE = 0.3
URGENT_SLO = 10.0
"""SLO of urgent requests, in times of a request on a full batch."""
LATER_SLO_SHARE = 0.6
"""SLO of the others, as a share of the time in which all are served: not all of them can be in time."""
AFTER_WARM_UP_S = 10.0
"""Virtual seconds from the end of the model's load to the first request."""
LIMIT_S = 3_600.0
STEP_NOISE = 0.05
POLL_EVERY_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Seconds from acceptance."""

    wait_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFigures:
    """One side's figures of a workload."""

    attainment: float
    wait_p50_s: float
    wait_p99_s: float


def measure(plan: Plan) -> Measured:
    with TemporaryDirectory(prefix="qlm-bench-cluster-") as scratch:
        compared = run_quietly(_compared(plan, Path(scratch)))
    gaps = [100.0 * abs(simulated.attainment - real.attainment) for _, real, simulated in compared]
    p50 = [relative_error(simulated.wait_p50_s, real.wait_p50_s) for _, real, simulated in compared]
    p99 = [relative_error(simulated.wait_p99_s, real.wait_p99_s) for _, real, simulated in compared]
    values: Values = {"sim_attainment_gap": fmean(gaps), "sim_wait_p50_err": fmean(p50), "sim_wait_p99_err": fmean(p99)}
    details: dict[str, object] = {
        "figures": "mean error of each figure over the seeds",
        "requests": plan.some(REQUESTS),
        "seeds": [{"real": asdict(real), "simulated": asdict(simulated)} for _, real, simulated in compared],
        "gaps_points": gaps,
        "p50_errors": p50,
        "p99_errors": p99,
        "rows": [measured.calibration for measured, _, _ in compared],
        "seats": SEATS,
        "overload": OVERLOAD,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return Measured(values=values, details=details)


def relative_error(found: float, true: float) -> float:
    return abs(found - true) / max(1e-9, true)


async def _compared(plan: Plan, folder: Path) -> list[tuple[MeasuredAgent, SideFigures, SideFigures]]:
    """For each seed: its row, the real side and the simulated one."""
    return [await _of_seed(replace(plan, seed=plan.seed + number), folder / str(number)) for number in range(SEEDS)]


async def _of_seed(plan: Plan, folder: Path) -> tuple[MeasuredAgent, SideFigures, SideFigures]:
    measured = await measured_agent(plan, folder / "calibration")
    vocabulary = vocabulary_of(plan.model)
    timed = workload(plan.some(REQUESTS), plan.seed, measured.request_s)
    async with serving(measured, folder, vocabulary) as (client, _):
        times = [timing for _, timing in await replayed(client, timed, vocabulary)]
    real = side(
        timed, [RequestTimes(wait_s=each.first_token_s - each.accepted_s, latency_s=each.finished_s - each.accepted_s) for each in times]
    )
    simulated = side(timed, await asyncio.to_thread(in_virtual_time, timed, folder / FILE, measured.profiles, plan.seed))
    plan.say(f"simulator, seed {plan.seed}: real {_text(real)}; simulated {_text(simulated)}")
    return measured, real, simulated


def workload(count: int, seed: int, request_s: float) -> list[TimedRequest]:
    """Poisson arrivals, OVERLOAD times the rate of service at `request_s`."""
    dice = random.Random(seed)
    urgent_s, later_s = URGENT_SLO * request_s * SEATS, LATER_SLO_SHARE * count * request_s
    at_s, timed = 0.0, []
    for _ in range(count):
        slo_s = urgent_s if dice.random() < URGENT_SHARE else max(later_s, 2 * urgent_s)
        timed.append(TimedRequest(at_s=at_s, output_tokens=dice.randint(*OUTPUT_TOKENS), slo_s=slo_s))
        at_s += dice.expovariate(OVERLOAD / request_s)
    return timed


def side(timed: Sequence[TimedRequest], times: Sequence[RequestTimes]) -> SideFigures:
    waits = [each.wait_s for each in times]
    in_time = sum(each.latency_s <= request.slo_s for request, each in zip(timed, times, strict=True))
    return SideFigures(attainment=in_time / len(timed), wait_p50_s=quantile(waits, 0.5), wait_p99_s=quantile(waits, 0.99))


def _text(found: SideFigures) -> str:
    return f"{found.attainment:.1%} in time, waits {found.wait_p50_s:.2f} s and {found.wait_p99_s:.2f} s"


def in_virtual_time(timed: Sequence[TimedRequest], path: Path, profiles: ProfileSnapshot, seed: int) -> list[RequestTimes]:
    """The cluster of the file, with a simulated engine at the speed of `profiles`: no bias, and STEP_NOISE a step."""
    cluster = describe(str(path), [INSTANCE], {})
    instance = cluster.instances[0].changed({"models": (MODEL,)}, {"host_kv_gb": 0.0, "step_noise": STEP_NOISE, "bias_max": 0.0})
    # As on the real cluster, a batch is served before: the model's load is excluded from the comparison.
    warm_up = [TimedRequest(at_s=0.0, output_tokens=WARM_UP_TOKENS, slo_s=WARM_UP_S)] * SEATS
    row = profiles.hardware[0]
    start_s = row.load_disk_to_cpu_s + row.load_cpu_to_gpu_s + AFTER_WARM_UP_S
    requests = [
        SimRequest(
            request_id=f"r{number}",
            arrival_s=request.at_s,
            model=MODEL,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=request.output_tokens,
            output_tokens_max=request.output_tokens,
            slo=Slo(kind=SloKind.COMPLETION, seconds=request.slo_s),
            content=number,
            greedy=True,
        )
        for number, request in enumerate([*warm_up, *(replace(request, at_s=start_s + request.at_s) for request in timed)])
    ]
    models = tuple(replace(model, vocabulary_size=32_000) for model in cluster.models)  # prompts name the answer's length in a token
    described = replace(cluster, models=models, instances=(instance,), profiles=profiles)
    result = simulate(described, requests, seed=seed, limit_s=LIMIT_S, poll_every_s=POLL_EVERY_S)
    unended = [outcome.request_id for outcome in result.outcomes if outcome.state is None]
    if unended:
        raise NotServed(f"{len(unended)} simulated requests did not end within {LIMIT_S:g} s")
    return [
        RequestTimes(wait_s=each.first_token_s - each.accepted_s, latency_s=each.finished_s - each.accepted_s)
        for each in result.outcomes[len(warm_up) :]
    ]
