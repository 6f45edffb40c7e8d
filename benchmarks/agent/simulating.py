"""The simulator, given a row measured as the engine serves, against real vLLM: the same requests on a cluster and in virtual time.

One agent with SEATS seats; 300 requests of two SLO classes for each of three seeds, and more of them than the row says are served, so that
the order of the queue decides who is in time. Each seed has a row of its own, which was measured just before on such a cluster under a
load of another seed and other sizes, since machines change their speed from minute to minute; and a cluster of its own, whose estimator
has learned nothing but the row. Both sides tell the times of acceptance, first token and end as the queue has them.

One run says little of the longest waits: which group is late where not all can be in time hangs on milliseconds. So each workload is
simulated again with arrivals shifted a little, and the details tell how far that scatters, and what the mean is off by. They also tell
what the runs of the real side say of the row, and what virtual time makes of the workload with that: no figure, since it is known only
afterwards, but what is left of an error then is not the row's.
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
    measured_agent,
    serving,
    taught,
)
from benchmarks.agent.model_config import INSTANCE, made_up_prompt, run_quietly, vocabulary_of
from benchmarks.agent.own_agent import NotServed
from benchmarks.agent.parts import Plan
from benchmarks.figures import Values
from benchmarks.parts import Measured
from qlm import AsyncClient, RequestState
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import Slo, SloKind
from qlm_load.replay.ledger import quantile
from qlm_sim import SimRequest, simulate
from qlm_sim.from_config import describe

SEEDS = 3
REQUESTS = 300
OVERLOAD = 2.0
"""Arrivals over what the profile says is served."""
URGENT_SHARE = 0.3
URGENT_SLO = 10.0
"""Of urgent requests, in times of a request on a full batch."""
LATER_SLO_SHARE = 0.6
"""SLO of the others, as a share of the time in which all are served: not all of them can be in time."""
AFTER_WARM_UP_S = 10.0
"""Virtual seconds from the end of the model's load to the first request."""
LIMIT_S = 3_600.0
ANSWER_S = 900.0
STEP_NOISE = 0.05
SHIFTED = 5
"""Further runs in virtual time for each seed."""
SHIFT_MAX_S = 0.02
"""Each arrival of them is earlier or later by up to so much."""
LOOK_EVERY_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, `at_s` after the start."""

    at_s: float
    output_tokens: int
    slo_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Went:
    """Seconds from acceptance."""

    wait_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side made of a workload."""

    attainment: float
    wait_p50_s: float
    wait_p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A workload on both sides, and the row that it was simulated with. `shifted`: with other arrivals. `decode_a_ms`: of that row, as the
    runs of the real side have it; `afterwards`: simulated with it. Both None where there were too few runs."""

    measured: MeasuredAgent
    real: Side
    simulated: Side
    shifted: tuple[Side, ...]
    decode_a_ms: float | None
    afterwards: Side | None


def measure(plan: Plan) -> Measured:
    with TemporaryDirectory(prefix="qlm-bench-cluster-") as scratch:
        compared = run_quietly(_compared(plan, Path(scratch)))
    gaps = [100.0 * abs(each.simulated.attainment - each.real.attainment) for each in compared]
    p50 = [relative_error(each.simulated.wait_p50_s, each.real.wait_p50_s) for each in compared]
    p99 = [relative_error(each.simulated.wait_p99_s, each.real.wait_p99_s) for each in compared]
    values: Values = {"sim_attainment_gap": fmean(gaps), "sim_wait_p50_err": fmean(p50), "sim_wait_p99_err": fmean(p99)}
    details: dict[str, object] = {
        "figures": "mean over the seeds of what each is off by",
        "requests": plan.some(REQUESTS),
        "seeds": [{"real": asdict(each.real), "simulated": asdict(each.simulated)} for each in compared],
        "gaps_points": gaps,
        "p50_errors": p50,
        "p99_errors": p99,
        "shifted": [[asdict(side) for side in each.shifted] for each in compared],
        "shifted_by_at_most_s": SHIFT_MAX_S,
        "of_shifted_means": [asdict(off_by(mean_of(each.shifted), each.real)) for each in compared],
        "rows": [each.measured.calibration for each in compared],
        "decode_a_ms_of_real_runs": [each.decode_a_ms for each in compared],
        "simulated_afterwards": [each.afterwards and asdict(each.afterwards) for each in compared],
        "of_simulated_afterwards": [each.afterwards and asdict(off_by(each.afterwards, each.real)) for each in compared],
        "seats": SEATS,
        "overload": OVERLOAD,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return Measured(values=values, details=details)


def relative_error(found: float, true: float) -> float:
    return abs(found - true) / max(1e-9, true)


def mean_of(sides: Sequence[Side]) -> Side:
    return Side(
        attainment=fmean(side.attainment for side in sides),
        wait_p50_s=fmean(side.wait_p50_s for side in sides),
        wait_p99_s=fmean(side.wait_p99_s for side in sides),
    )


def off_by(found: Side, true: Side) -> Side:
    """Points of attainment, and shares of the waits."""
    return Side(
        attainment=100.0 * abs(found.attainment - true.attainment),
        wait_p50_s=relative_error(found.wait_p50_s, true.wait_p50_s),
        wait_p99_s=relative_error(found.wait_p99_s, true.wait_p99_s),
    )


async def _compared(plan: Plan, folder: Path) -> list[Compared]:
    return [await _of_seed(replace(plan, seed=plan.seed + number), folder / str(number)) for number in range(SEEDS)]


async def _of_seed(plan: Plan, folder: Path) -> Compared:
    measured = await measured_agent(plan, folder / "calibration")
    vocabulary = vocabulary_of(plan.model)
    asked = workload(plan.some(REQUESTS), plan.seed, measured.request_s)
    async with serving(measured, folder, vocabulary) as cluster:
        real = side(asked, await _replayed(cluster.client, asked, vocabulary))
        row = await taught(measured, cluster)

    def simulated(asks: Sequence[Ask], profiles: ProfileSnapshot = measured.profiles) -> Side:
        return side(asks, in_virtual_time(asks, folder / FILE, profiles, plan.seed))

    same = await asyncio.to_thread(simulated, asked)
    others = [await asyncio.to_thread(simulated, shifted(asked, turn)) for turn in range(plan.some(SHIFTED))]
    afterwards = None if row is None else await asyncio.to_thread(simulated, asked, replace(measured.profiles, hardware=(row,)))
    spread = ", ".join(f"{other.wait_p99_s:.2f}" for other in others)
    plan.say(f"simulator, seed {plan.seed}: real {_told(real)}; simulated {_told(same)}; p99 with shifted arrivals {spread} s")
    if row is not None and afterwards is not None:
        times = row.decode_a_ms / measured.row.decode_a_ms
        plan.say(f"simulator, seed {plan.seed}: the real runs took {times:.3f} times what the row says; simulated so {_told(afterwards)}")
    return Compared(
        measured=measured,
        real=real,
        simulated=same,
        shifted=tuple(others),
        decode_a_ms=None if row is None else row.decode_a_ms,
        afterwards=afterwards,
    )


def shifted(asked: Sequence[Ask], turn: int) -> list[Ask]:
    """The same requests, each up to SHIFT_MAX_S earlier or later; another turn, other shifts."""
    dice = random.Random(turn)
    return [replace(ask, at_s=max(0.0, ask.at_s + dice.uniform(-SHIFT_MAX_S, SHIFT_MAX_S))) for ask in asked]


def workload(count: int, seed: int, request_s: float) -> list[Ask]:
    """Poisson arrivals, OVERLOAD times as fast as `request_s` says they are served."""
    dice = random.Random(seed)
    urgent_s, later_s = URGENT_SLO * request_s * SEATS, LATER_SLO_SHARE * count * request_s
    at_s, asked = 0.0, []
    for _ in range(count):
        slo_s = urgent_s if dice.random() < URGENT_SHARE else max(later_s, 2 * urgent_s)
        asked.append(Ask(at_s=at_s, output_tokens=dice.randint(*OUTPUT_TOKENS), slo_s=slo_s))
        at_s += dice.expovariate(OVERLOAD / request_s)
    return asked


def side(asked: Sequence[Ask], went: Sequence[Went]) -> Side:
    waits = [each.wait_s for each in went]
    in_time = sum(each.latency_s <= ask.slo_s for ask, each in zip(asked, went, strict=True))
    return Side(attainment=in_time / len(asked), wait_p50_s=quantile(waits, 0.5), wait_p99_s=quantile(waits, 0.99))


def _told(found: Side) -> str:
    return f"{found.attainment:.1%} in time, waits {found.wait_p50_s:.2f} s and {found.wait_p99_s:.2f} s"


async def _replayed(client: AsyncClient, asked: Sequence[Ask], vocabulary: int) -> list[Went]:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    tasks = []
    for number, ask in enumerate(asked):
        await asyncio.sleep(max(0.0, start_s + ask.at_s - loop.time()))
        tasks.append(asyncio.create_task(_served(client, ask, made_up_prompt(vocabulary, 1_000 + number, PROMPT_TOKENS))))
    return list(await asyncio.gather(*tasks))


async def _served(client: AsyncClient, ask: Ask, prompt: list[int]) -> Went:
    """Raises NotServed."""
    accepted = await client.submit(MODEL, prompt, slo_s=ask.slo_s, max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True)
    result = await client.result(accepted.request_id, ANSWER_S)
    if result is None or result.state is not RequestState.COMPLETED:
        raise NotServed(f"request {accepted.request_id} was not completed: {result and result.error_message}")
    timing = result.timing
    return Went(wait_s=timing.first_token_s - timing.accepted_s, latency_s=timing.finished_s - timing.accepted_s)


def in_virtual_time(asked: Sequence[Ask], path: Path, profiles: ProfileSnapshot, seed: int) -> list[Went]:
    """The cluster of the file, with a simulated engine that is as fast as `profiles` says: no bias, and STEP_NOISE a step."""
    cluster = describe(str(path), [INSTANCE], {})
    instance = cluster.instances[0].changed({"models": (MODEL,)}, {"host_kv_gb": 0.0, "step_noise": STEP_NOISE, "bias_max": 0.0})
    # As on the real cluster, a batch is served before: the model's load is no part of the comparison.
    warm_up = [Ask(at_s=0.0, output_tokens=WARM_UP_TOKENS, slo_s=WARM_UP_S)] * SEATS
    row = profiles.hardware[0]
    start_s = row.load_disk_to_cpu_s + row.load_cpu_to_gpu_s + AFTER_WARM_UP_S
    requests = [
        SimRequest(
            request_id=f"r{number}",
            arrival_s=ask.at_s,
            model=MODEL,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=ask.output_tokens,
            output_tokens_max=ask.output_tokens,
            slo=Slo(kind=SloKind.COMPLETION, seconds=ask.slo_s),
            content=number,
            greedy=True,
        )
        for number, ask in enumerate([*warm_up, *(replace(ask, at_s=start_s + ask.at_s) for ask in asked)])
    ]
    models = tuple(replace(model, vocabulary_size=32_000) for model in cluster.models)  # prompts name the answer's length in a token
    described = replace(cluster, models=models, instances=(instance,), profiles=profiles)
    result = simulate(described, requests, seed=seed, limit_s=LIMIT_S, look_every_s=LOOK_EVERY_S)
    unended = [outcome.request_id for outcome in result.outcomes if outcome.state is None]
    if unended:
        raise NotServed(f"{len(unended)} simulated requests did not end within {LIMIT_S:g} s")
    return [
        Went(wait_s=each.first_token_s - each.accepted_s, latency_s=each.finished_s - each.accepted_s)
        for each in result.outcomes[len(warm_up) :]
    ]
