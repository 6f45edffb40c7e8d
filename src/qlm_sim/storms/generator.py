"""Small clusters and workloads by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_agent.config import AgentSettings, SimulatedSettings
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_queue.values import Bounds
from qlm_sim.description import ClusterDescription, InstanceDescription
from qlm_sim.processes.client import Behaviour
from qlm_sim.requests import SimRequest
from qlm_sim.world.chance import Chance

MODELS = (
    ModelSpec(name="mistral-7b", profile="Mistral-7B", context_tokens_max=2048),
    ModelSpec(name="mistral-7b-code", profile="Mistral-7B", context_tokens_max=2048),
    ModelSpec(name="vicuna-13b", profile="Vicuna-13B", context_tokens_max=2048),
)

LEASE_TTL_S = 3.0
ARRIVALS_S = 25.0
REQUESTS_MAX = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A seed's run: each request with its client's behaviour."""

    cluster: ClusterDescription
    requests: tuple[tuple[SimRequest, Behaviour], ...]


def scenario_of(chance: Chance) -> Scenario:
    """Every model has an instance that serves it, so that all requests can end."""
    models = MODELS[: chance.pick((1, 1, 2, 3))]
    cluster = ClusterDescription(
        models=models,
        instances=tuple(_instance(chance, number, models) for number in range(chance.whole(1, 3))),
        gateways=chance.whole(1, 2),
        planners=chance.whole(1, 2),
        estimators=chance.whole(1, 2),
        bounds=Bounds(queue_max=chance.pick((25, 500, 500)), attempts_max=chance.pick((2, 3, 8)), frames_max=chance.pick((50, 20_000))),
        lease_ttl_s=LEASE_TTL_S,
        lease_renew_s=LEASE_TTL_S / 3.0,
        clock_skew_max_s=0.02,
        stream_buffer_tokens_max=chance.pick((16, 64, 4_096)),
    )
    count = chance.pick((chance.whole(4, 20), chance.whole(20, REQUESTS_MAX)))
    return Scenario(cluster=cluster, requests=tuple((_request(chance, number, models), _behaviour(chance)) for number in range(count)))


def _instance(chance: Chance, number: int, models: Sequence[ModelSpec]) -> InstanceDescription:
    # The first serves all models; others perhaps only some.
    served = tuple(model.name for model in models) if number == 0 else tuple(model.name for model in models[: chance.whole(1, len(models))])
    time_scale, batch_max = chance.pick((2.0, 5.0)), chance.pick((2, 6, 64))
    engine = SimulatedSettings(
        time_scale=time_scale,
        prefill_chunk_tokens=chance.pick((64, 2048)),
        host_memory_gb=chance.pick((0.0, 20.0, 64.0)),
        host_kv_gb=chance.pick((0.0, 0.2, 16.0, 16.0)),
        kv_capacity_tokens=chance.pick((900, 3_000, 20_000)),
        tell_every_s=0.04,
    )
    lookahead_requests, coalesce_s = chance.pick((0, 0, 3)), chance.pick((0.05, 0.2))
    buffer_tokens_max, owned_check_s = chance.pick((150, 500_000)), chance.pick((5.0, 15.0))
    agent = AgentSettings(
        name=f"agent-{number}",
        models=served,
        batch_max=batch_max,
        lookahead_requests=lookahead_requests,
        coalesce_s=coalesce_s,
        buffer_tokens_max=buffer_tokens_max,
        drain_finish_s=chance.pick((0.5, 5.0)),
        simulated=engine,
    )
    return InstanceDescription(agent=agent, owned_check_s=owned_check_s, wake_min_s=0.02)


def _request(chance: Chance, number: int, models: Sequence[ModelSpec]) -> SimRequest:
    kind = chance.pick((SloKind.COMPLETION, SloKind.COMPLETION, SloKind.FIRST_TOKEN, SloKind.PRIORITY))
    slo = (
        Slo(kind=kind, priority=chance.whole(-2, 2))
        if kind is SloKind.PRIORITY
        else Slo(kind=kind, seconds=chance.pick((2.0, 20.0, 200.0)))
    )
    return SimRequest(
        request_id=f"r{number}",
        tenant=chance.pick(("one", "two")),
        arrival_s=chance.pick((chance.between(0.0, 2.0), chance.between(0.0, ARRIVALS_S))),
        model=chance.pick(models).name,
        prompt_tokens=chance.pick((chance.whole(2, 40), chance.whole(40, 600))),
        output_tokens=chance.pick((1, chance.whole(2, 40), chance.whole(40, 600), chance.whole(100, 600))),
        slo=slo,
        expire_after_s=chance.between(0.5, 30.0) if chance.happens(0.1) else None,
        resumable=not chance.happens(0.25),
    )


def _behaviour(chance: Chance) -> Behaviour:
    return Behaviour(
        submits=chance.happens(0.15),
        reattach_after_s=chance.wait_s(5.0),
        leaves_after=chance.whole(1, 4) if chance.happens(0.2) else 0,
        think_s=chance.wait_s(0.3) if chance.happens(0.15) else 0.0,
        cancels_after_s=chance.wait_s(8.0) if chance.happens(0.15) else None,
        repeats=chance.happens(0.1),
        conflicts=chance.happens(0.05),
    )
