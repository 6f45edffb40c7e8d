"""Predicted waits of clients against real ones, on a `qlm up` cluster whose agent runs vLLM.

First the engine is measured in serving, and the estimator of a fresh cluster gets the row. Then requests exceed capacity, so that waits
grow from nothing to many batches. Predicted: the median of the wait that the gateway sent at acceptance. Real: from acceptance until the
engine began.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.agent.measured_cluster import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SEATS,
    MeasuredAgent,
    TimedRequest,
    measured_agent,
    replayed,
    serving,
)
from benchmarks.agent.model_config import run_quietly, spread, vocabulary_of
from benchmarks.agent.parts import Plan
from benchmarks.estimator.scores import r2
from benchmarks.figures import Values
from benchmarks.parts import Measured

REQUESTS = 300
OVERLOAD = 1.3
"""Arrival rate over the profile's capacity."""
SLO_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSample:
    """Seconds from acceptance: `predicted_s`, and `actual_s`, until the engine began."""

    predicted_s: float
    actual_s: float


def measure(plan: Plan) -> Measured:
    with TemporaryDirectory(prefix="qlm-bench-cluster-") as scratch:
        measured, waits = run_quietly(_waits(plan, Path(scratch)))
    predicted, actual = np.array([wait.predicted_s for wait in waits]), np.array([wait.actual_s for wait in waits])
    score = r2(predicted, actual)
    plan.say(f"waits: R² {score:.4f} over {len(waits)} requests")
    values: Values = {"r2_wait": score}
    details: dict[str, object] = {
        "requests": len(waits),
        "actual_s": {**spread(actual.tolist()), "max": float(actual.max())},
        "bias_s": float((predicted - actual).mean()),
        "tenths": tenths(waits),
        "r2_with_one_factor": r2(predicted * float((predicted @ actual) / max(1e-9, predicted @ predicted)), actual),
        **measured.calibration,
        "seats": SEATS,
        "overload": OVERLOAD,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return Measured(values=values, details=details)


def tenths(waits: Sequence[WaitSample]) -> list[dict[str, float]]:
    """Means in seconds for each tenth of `waits`, in the order of their arrival; ten or as many as there are. They show a drift."""
    parts = np.array_split(np.array([(wait.predicted_s, wait.actual_s) for wait in waits]).reshape(-1, 2), 10)
    return [
        {
            "predicted_s": float(part[:, 0].mean()),
            "actual_s": float(part[:, 1].mean()),
            "off_s": float(np.abs(part[:, 0] - part[:, 1]).mean()),
        }
        for part in parts
        if len(part)
    ]


async def _waits(plan: Plan, folder: Path) -> tuple[MeasuredAgent, list[WaitSample]]:
    measured = await measured_agent(plan, folder / "calibration")
    vocabulary, dice = vocabulary_of(plan.model), random.Random(plan.seed)
    at_s, timed = 0.0, []
    for _ in range(plan.some(REQUESTS)):
        timed.append(TimedRequest(at_s=at_s, output_tokens=dice.randint(*OUTPUT_TOKENS), slo_s=SLO_S))
        at_s += dice.expovariate(OVERLOAD / measured.request_s)
    async with serving(measured, folder / "judged", vocabulary) as (client, _):
        found = await replayed(client, timed, vocabulary)
    waits = [(predicted_s, timing.started_s - timing.accepted_s) for predicted_s, timing in found]
    return measured, [WaitSample(predicted_s=each, actual_s=actual_s) for each, actual_s in waits if each is not None]
