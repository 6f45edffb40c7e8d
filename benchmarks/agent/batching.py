"""Urgent requests beside patient ones on real vLLM: the share in time with `agent.batch` slo and max, the same requests on a cluster each.

The patient ones are there from the start and want every seat; urgent ones arrive at random. Their SLO is half way between a request's time
alone and in a full batch, by the row measured just before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.agent.figures import BATCH_MODES
from benchmarks.agent.measured_cluster import PROMPT_TOKENS, SEATS, MeasuredAgent, TimedRequest, measured_agent, replayed, serving
from benchmarks.agent.model_config import run_quietly, vocabulary_of
from benchmarks.agent.parts import Plan
from benchmarks.parts import Measured

URGENT, URGENT_TOKENS = 20, 100
PATIENT, PATIENT_TOKENS, PATIENT_SLO_S = 4 * SEATS, 200, 3_600.0
APART = 2.0
"""Mean time between two urgent requests, in times of one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`urgent`, `later`: share in time of the urgent requests, and of the second half of them."""

    urgent: float
    later: float
    tokens_per_s: float


def measure(plan: Plan) -> Measured:
    with TemporaryDirectory(prefix="qlm-bench-cluster-") as scratch:
        measured, timed, served = run_quietly(_served(plan, Path(scratch)))
    details: dict[str, object] = {
        "urgent_slo_s": timed[-1].slo_s,
        "later_half": {mode: found.later for mode, found in served.items()},
        "tokens_per_s": {mode: found.tokens_per_s for mode, found in served.items()},
        **measured.calibration,
    }
    return Measured(values={"urgent_in_time": {mode: found.urgent for mode, found in served.items()}}, details=details)


async def _served(plan: Plan, folder: Path) -> tuple[MeasuredAgent, Sequence[TimedRequest], dict[str, Served]]:
    measured = await measured_agent(plan, folder / "calibration")
    timed, vocabulary = workload(plan, measured), vocabulary_of(plan.model)
    found: dict[str, Served] = {}
    for mode in BATCH_MODES:
        agent = measured.config.agent.model_copy(update={"batch": mode})
        chosen = replace(measured, config=measured.config.model_copy(update={"agent": agent}))
        async with serving(chosen, folder / mode, vocabulary) as (client, _):
            times = [timing for _, timing in await replayed(client, timed, vocabulary)]
        in_time = [
            each.finished_s - each.accepted_s <= request.slo_s
            for request, each in zip(timed, times, strict=True)
            if request.slo_s < PATIENT_SLO_S
        ]
        later = in_time[len(in_time) // 2 :]
        took_s = max(each.finished_s for each in times) - min(each.accepted_s for each in times)
        tokens_per_s = sum(request.output_tokens for request in timed) / took_s
        found[mode] = Served(urgent=sum(in_time) / len(in_time), later=sum(later) / len(later), tokens_per_s=tokens_per_s)
        plan.say(f"batch {mode}: {found[mode]}")
    return measured, timed, found


def workload(plan: Plan, measured: MeasuredAgent) -> list[TimedRequest]:
    """The patient requests, then the urgent ones at Poisson times."""
    dice, row = random.Random(plan.seed), measured.row
    alone_s, full_s = (URGENT_TOKENS * row.decode_step_s(seats, seats * (PROMPT_TOKENS + URGENT_TOKENS / 2)) for seats in (1, SEATS))
    timed = [TimedRequest(at_s=0.0, output_tokens=PATIENT_TOKENS, slo_s=PATIENT_SLO_S)] * plan.some(PATIENT)
    at_s = 0.0
    for _ in range(plan.some(URGENT)):
        at_s += dice.expovariate(1.0 / (APART * alone_s))
        timed.append(
            TimedRequest(at_s=at_s, output_tokens=URGENT_TOKENS, slo_s=row.prefill_work_s(PROMPT_TOKENS) + (alone_s + full_s) / 2.0)
        )
    return timed
