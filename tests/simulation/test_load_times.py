"""In virtual time agents report how long their loads took, and the estimator learns it: an instance that became slow loads slowly too."""

from __future__ import annotations

import asyncio

import pytest

from qlm_agent.config import AgentSettings
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_process.wire import profile as profile_wire
from qlm_sim import ClusterDescription, InstanceDescription, SimRequest, simulate
from qlm_sim.cluster import Cluster

MODELS = tuple(ModelSpec(name=name, profile=name) for name in ("Mistral-7B", "Vicuna-13B"))
EVERY_S = 15.0
TURNS = 12
SLOWNESS = 2.5


def test_slow_loads_are_learned_in_virtual_time() -> None:
    """One request at a time, of the two models in turn, so that each waits for a swap."""
    requests = [
        SimRequest(
            request_id=f"r{number}",
            arrival_s=5.0 + EVERY_S * number,
            model=MODELS[number % 2].name,
            prompt_tokens=100,
            output_tokens=20,
            slo=Slo(kind=SloKind.COMPLETION, seconds=600.0),
        )
        for number in range(TURNS)
    ]
    rows: list[HardwareProfile] = []

    def slow(cluster: Cluster) -> None:
        cluster.agents[0].set_slowness(SLOWNESS)

    def read(cluster: Cluster) -> None:
        _, body = asyncio.run(cluster.server.queue.read_profiles())
        rows.extend(row for row in profile_wire.from_body(body).hardware if row.instance == "slow")

    instance = InstanceDescription(agent=AgentSettings(name="slow", models=tuple(model.name for model in MODELS)))
    polls = [(0.5, slow), (EVERY_S * (TURNS - 1), read)]
    result = simulate(ClusterDescription(models=MODELS, instances=(instance,)), requests, probes=polls)
    assert result.swaps["slow"] >= TURNS - 2
    assert {row.model for row in rows} == {model.name for model in MODELS}
    for row in rows:
        assert row.swap_warm.samples + row.swap_cold.samples >= TURNS // 2 - 1
        assert row.swap_warm.slowdown == pytest.approx(SLOWNESS, rel=0.3)
