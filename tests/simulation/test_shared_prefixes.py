"""In virtual time, over a whole cluster: engines report what their prefix caches had of prompts; what is left is learned and published."""

from __future__ import annotations

import asyncio

import pytest

from qlm_agent.config import AgentSettings
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_process.wire import profile as profile_wire
from qlm_sim import ClusterDescription, InstanceDescription, SimRequest, simulate
from qlm_sim.cluster import Cluster

REQUESTS, BEGIN_S, EVERY_S = 60, 20.0, 0.5
PROMPT, PREFIX = 3_000, 2_400


@pytest.mark.parametrize(("prefix_tokens", "share"), [(PREFIX, 1.0 - PREFIX / PROMPT), (0, 1.0)])
def test_shared_prefixes_are_learned_in_virtual_time(prefix_tokens: int, share: float) -> None:
    requests = [
        SimRequest(
            request_id=f"r{number}",
            arrival_s=BEGIN_S + EVERY_S * number,
            model="m",
            prompt_tokens=PROMPT,
            output_tokens=20,
            slo=Slo(kind=SloKind.COMPLETION, seconds=64.0),
            content=number,
        )
        for number in range(REQUESTS)
    ]
    found: list[ProfileSnapshot] = []
    agents: list[float] = []

    def read(cluster: Cluster) -> None:
        _, body = asyncio.run(cluster.server.queue.read_profiles())
        found.append(profile_wire.from_body(body))
        agents.append(cluster.agents[0].machine.expectations.uncached_share("m", "64s"))

    simulated = {"bias_max": 0.0, "shared_prefix_tokens": prefix_tokens}
    agent = AgentSettings.model_validate({"name": "a", "models": ("m",), "simulated": simulated})
    described = ClusterDescription(models=(ModelSpec(name="m", profile="Mistral-7B"),), instances=(InstanceDescription(agent=agent),))
    simulate(described, requests, probes=[(BEGIN_S + EVERY_S * (REQUESTS - 1), read)])
    assert agents == [pytest.approx(share, abs=0.02)]
    assert found[0].workload_for("m", "64s", "4096").uncached_share == pytest.approx(share, abs=0.02)
