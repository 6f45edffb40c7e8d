"""The estimator's findings about an engine whose policy reorders and pauses: paused runs must not look like slow hardware.

One A100 at LOAD of what it sustains, in bursts, with as many requests inside the engine as `qlm tune` lets in, and few seats, so that most
of them wait there. Measured are the speed factor that the estimator published last over the engine's hidden one, and R2 of the median waits
that clients heard at their acceptance, which are until the engine begins: against those until the first token, and until the agent pulls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluate.fastserve import Plan
from benchmarks.evaluate.rows import Row
from benchmarks.evaluate.together import GPU, MODEL, inside, write_cluster
from qlm_agent.engines.simulated.timing import BIAS_MAX, STEP_NOISE_MIN, InstanceNoise
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_load.matrix.cells import Cell, Traffic, capacity_per_s
from qlm_load.matrix.lengths import AZURE
from qlm_load.matrix.runs import requests_of
from qlm_process.wire.profile import from_body
from qlm_sim.cluster import Cluster
from qlm_sim.comparison import simulate
from qlm_sim.from_config import describe, policy_of

POLICIES = ("fcfs", "larry", "fastserve")
SEATS = 32
LOAD = 0.6
"""Over the capacity with the most seats: about what SEATS sustain."""
REQUESTS_PER_S = 10.0
"""Requests for a second of `--duration`."""


def pausing(plan: Plan) -> Iterator[Row]:
    """Three rows a policy."""
    with TemporaryDirectory() as folder:
        file = write_cluster(Path(folder), 1)
        for engine in ("", *POLICIES):
            found = [learned(engine, file, seed, round(REQUESTS_PER_S * plan.duration_s)) for seed in plan.seeds]
            speeds, pulls, firsts = zip(*found, strict=True)
            name = f"{engine or 'fcfs'}, {'inside' if engine else 'no lookahead'}"
            plan.say(f"pausing, {name}: learned over hidden speed {speeds}, R2 of waits {pulls}, {firsts}")
            yield Row(name=f"learned over hidden speed: {name}", claim=(0.95, 1.05), ours=speeds, order=(0.9, 1.1))
            yield Row(name=f"R2 of the wait until the pull: {name}", claim=(None, 1.0), ours=pulls)
            yield Row(name=f"R2 of the wait until the first token: {name}", claim=(None, 1.0), ours=firsts)


def learned(engine: str, file: Path, seed: int, requests: int) -> tuple[float, float, float]:
    """The learned speed factor over the hidden one, and R2 of the waits until the pull and until the first token. `engine`: "" for the
    default without lookahead."""
    slo = Slo(kind=SloKind.COMPLETION, seconds=300.0)
    rate_per_s = LOAD * capacity_per_s((MODEL,), (GPU,), AZURE, {MODEL.name: 1.0})
    cell = Cell(
        key="pausing",
        models=(MODEL,),
        gpus=(GPU,),
        traffic=(Traffic(model=MODEL.name, slo_class="answer", slo=slo, share=1.0),),
        arrivals="bursty",
        lengths=AZURE,
        rate_per_s=rate_per_s,
        requests=requests,
    )
    settings = {**(inside(engine) if engine else {}), "agent.batch_max": SEATS, "agent.batch": "max"}
    clusters: list[Cluster] = []
    sent, _ = requests_of(cell, seed)
    result = simulate(
        describe(str(file), ["gpu-0"], settings), sent, policy_of(str(file), settings), seed=seed, probes=[(0.0, clusters.append)]
    )
    predicted = [each for each in result.outcomes if each.predicted_wait_s is not None and each.first_token_s]
    predicted_s = np.array([each.predicted_wait_s for each in predicted], np.float64)
    accepted_s, pulled_s, first_s = np.array([(each.accepted_s, each.started_s, each.first_token_s) for each in predicted]).T
    _, body = clusters[0].server.queue.state.profiles
    (row,) = (row for row in from_body(body).hardware if row.instance == "gpu-0")
    hidden = InstanceNoise(seed=seed, instance="gpu-0", step_noise=STEP_NOISE_MIN, bias_max=BIAS_MAX).bias
    return row.slowdown / hidden, _r2(predicted_s, pulled_s - accepted_s), _r2(predicted_s, first_s - accepted_s)


def _r2(predicted: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    return float(1.0 - ((predicted - found) ** 2).sum() / ((found - found.mean()) ** 2).sum())
