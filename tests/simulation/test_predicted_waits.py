"""Predicted waits of requests against the real ones: one instance with more arrivals than it can serve, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from benchmarks.estimator.scores import r2

from qlm_agent.config import AgentSettings
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_sim import ClusterDescription, InstanceDescription, SimRequest, simulate
from small_cpu_row import ROW

REQUESTS, EVERY_S, BEGIN_S = 300, 0.46, 20.0
"""1.3 times as fast as eight seats serve them."""
SLOWNESS = 0.9


def _waits(seed: int) -> list[tuple[float, float]]:
    """Predicted and real, by arrival. Answers are of 100 to 300 tokens, which are two token classes once the length model has learned to
    distinguish them; most are of the first."""
    dice = random.Random(seed)
    settings = {"step_noise": 0.05, "bias_max": 0.0, "host_kv_gb": 0.0}
    agent = AgentSettings.model_validate(
        {"name": "a", "gpu": "CPU", "engine": "simulated", "batch_max": 8, "models": ("m",), "simulated": settings}
    )
    spec = ModelSpec(name="m", profile="small", vocabulary_size=32_000, context_tokens_max=1_024)
    at_s, requests = BEGIN_S, []
    for number in range(REQUESTS):
        output = dice.randint(100, 300)
        requests.append(
            SimRequest(
                request_id=f"r{number}",
                arrival_s=at_s,
                model="m",
                prompt_tokens=64,
                output_tokens=output,
                output_tokens_max=output,
                slo=Slo(kind=SloKind.COMPLETION, seconds=3_600.0),
                content=number,
                greedy=True,
            )
        )
        at_s += dice.expovariate(1.0 / EVERY_S)
    described = ClusterDescription(
        models=(spec,), instances=(InstanceDescription(agent=agent),), profiles=replace(shipped_snapshot(), hardware=(ROW,))
    )
    result = simulate(
        described, requests, seed=seed, poll_every_s=0.002, probes=[(0.5, lambda cluster: cluster.agents[0].set_slowness(SLOWNESS))]
    )
    return [
        (each.predicted_wait_s, each.started_s - each.accepted_s)
        for each in sorted(result.outcomes, key=lambda outcome: outcome.accepted_s)
        if each.predicted_wait_s is not None
    ]


def _score(waits: Sequence[tuple[float, float]]) -> float:
    predicted, real = np.array(waits).T
    return r2(predicted, real)


def test_waits_are_as_predicted_whatever_the_class_of_a_request() -> None:
    """The engine is a tenth faster than its row says: the speed is learned while the queue grows, and what calibration learned of waits
    that were predicted before must not be added to it."""
    runs = [_waits(seed) for seed in (31, 32)]
    assert all(len(waits) == REQUESTS for waits in runs)
    assert fmean(map(_score, runs)) > 0.92
    assert min(map(_score, runs)) > 0.88
    late = [pair for waits in runs for pair in waits[REQUESTS // 2 :]]
    predicted_s, real_s = (fmean(column) for column in zip(*late, strict=True))
    assert real_s > 10.0
    assert predicted_s == pytest.approx(real_s, rel=0.1)
