"""Predicted waits of clients against real ones, on a `qlm up` cluster whose agent runs vLLM.

First the engine is measured in serving, and the estimator of a fresh cluster gets the row. Then requests exceed capacity, so that waits
grow from nothing to many batches. Predicted: the median of the wait that the gateway sent at acceptance. Real: from acceptance until the
engine began.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.agent.measured_cluster import MODEL, OUTPUT_TOKENS, PROMPT_TOKENS, SEATS, MeasuredAgent, measured_agent, serving
from benchmarks.agent.model_config import made_up_prompt, run_quietly, spread, vocabulary_of
from benchmarks.agent.own_agent import NotServed
from benchmarks.agent.parts import Plan
from benchmarks.estimator.scores import r2
from benchmarks.figures import Values
from benchmarks.parts import Measured
from qlm import AsyncClient, RequestState

REQUESTS = 300
OVERLOAD = 1.3
"""Arrival rate over the profile's capacity."""
SLO_S = 3_600.0
ANSWER_S = 900.0


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
    async with serving(measured, folder / "judged", vocabulary_of(plan.model)) as (client, _):
        return measured, await _in_an_overload(plan, client, measured.request_s / OVERLOAD)


async def _in_an_overload(plan: Plan, client: AsyncClient, gap_s: float) -> list[WaitSample]:
    dice = random.Random(plan.seed)
    vocabulary = vocabulary_of(plan.model)
    plan.say(f"waits: the cluster serves; a request every {gap_s:.3f} s")
    tasks = []
    for number in range(plan.some(REQUESTS)):
        prompt = made_up_prompt(vocabulary, 1_000 + number, PROMPT_TOKENS)
        tasks.append(asyncio.create_task(_wait(client, prompt, dice.randint(*OUTPUT_TOKENS))))
        await asyncio.sleep(dice.expovariate(1.0 / gap_s))
    waits: Sequence[WaitSample | None] = await asyncio.gather(*tasks)
    return [wait for wait in waits if wait is not None]


async def _wait(client: AsyncClient, prompt: list[int], output_tokens: int) -> WaitSample | None:
    """None without a prediction. Raises NotServed."""
    accepted = await client.submit(MODEL, prompt, slo_s=SLO_S, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    result = await client.result(accepted.request_id, ANSWER_S)
    if result is None or result.state is not RequestState.COMPLETED:
        raise NotServed(f"request {accepted.request_id} was not completed: {result and result.error_message}")
    if accepted.prediction is None:
        return None
    return WaitSample(predicted_s=accepted.prediction.wait_p50_s, actual_s=result.timing.started_s - result.timing.accepted_s)
