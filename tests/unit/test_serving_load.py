"""What the agent's bench takes from an estimator: the speed of the runs of its load, without those before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.agent.serving_load import OUTPUT_TOKENS, PER_SEAT, PROMPT_TOKENS, RUNS_LEAST

from qlm_agent.config import AgentSettings
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_process.wire import profile as profile_wire
from qlm_sim import ClusterDescription, InstanceDescription, SimRequest, simulate
from qlm_sim.cluster import Cluster
from small_cpu_row import ROW

SEATS = 8
LOAD_FROM_S, WARM_S, LOAD_UNTIL_S = 30.0, 45.0, 105.0
SLOWNESS = 1.1
FIRST_SLOWNESS = 1.6


def test_the_row_is_the_engines_whatever_its_first_runs_were() -> None:
    """A whole cluster in virtual time, as in the bench: eight requests for a start, then eight for each seat, which drain at the end. The
    engine is SLOWNESS times as slow as its row, and more so until the load has begun."""
    dice = random.Random(3)
    spec = ModelSpec(name="m", profile="small", vocabulary_size=32_000, context_tokens_max=1_024)
    settings = {"step_noise": 0.05, "bias_max": 0.0, "host_kv_gb": 0.0}
    agent = AgentSettings.model_validate(
        {"name": "a", "gpu": "CPU", "engine": "simulated", "batch_max": SEATS, "models": ("m",), "simulated": settings}
    )
    requests = [_request(number, 1.0, 64, 50) for number in range(SEATS)]
    requests += [
        _request(number, LOAD_FROM_S + at_s, dice.choice(PROMPT_TOKENS), dice.randint(*OUTPUT_TOKENS))
        for number, at_s in enumerate([*[0.0] * (PER_SEAT * SEATS), *[dice.uniform(0.0, 50.0) for _ in range(100)]], SEATS)
    ]
    seen: list[ProfileSnapshot] = []

    def slow_at_first(cluster: Cluster) -> None:
        cluster.agents[0].set_slowness(FIRST_SLOWNESS * SLOWNESS)

    def slow(cluster: Cluster) -> None:
        cluster.agents[0].set_slowness(SLOWNESS)

    def poll(cluster: Cluster) -> None:
        seen.append(profile_wire.from_body(cluster.server.queue.state.profiles[1]))

    simulate(
        ClusterDescription(
            models=(spec,), instances=(InstanceDescription(agent=agent),), profiles=replace(shipped_snapshot(), hardware=(ROW,))
        ),
        requests,
        probes=[(0.5, slow_at_first), (LOAD_FROM_S + 5.0, slow), (WARM_S, poll), (LOAD_UNTIL_S, poll)],
        poll_every_s=0.002,
    )
    earlier, later = (next((row for row in each.hardware if row.instance == "a"), None) for each in seen)
    assert earlier is not None
    assert later is not None
    assert later.samples - earlier.samples > 3 * RUNS_LEAST
    assert later.as_measured().decode_a_ms / ROW.decode_a_ms == pytest.approx(SLOWNESS, rel=0.02)


def _request(number: int, at_s: float, prompt_tokens: int, output_tokens: int) -> SimRequest:
    return SimRequest(
        request_id=f"r{number}",
        arrival_s=at_s,
        model="m",
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_max=output_tokens,
        slo=Slo(kind=SloKind.COMPLETION, seconds=86_400.0),
        content=number,
        greedy=True,
    )
