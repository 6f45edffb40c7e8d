"""A workload in virtual time: a run of `qlm_sim`, measured as the ledger measures a live run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.request import RequestState, Slo, SloKind
from qlm_load.compare.comparison import PolicyRun
from qlm_load.replay.ledger import quantile
from qlm_load.workload.workload import Workload
from qlm_sim.comparison import COARSE_S, PlannedKill, SimulationResult, simulate
from qlm_sim.from_config import describe, policy_of
from qlm_sim.requests import SimRequest

LIMIT_S = 3_600.0
"""Virtual seconds (real ones of the simulated run) after which a simulated run ends in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A configuration file, its overrides, and its simulated processes."""

    path: str
    overrides: Mapping[str, object]
    agents: Sequence[str]
    gateways: int
    planners: int


def simulated_run(
    policy: str,
    workload: Workload,
    time_scale: float,
    file: ClusterFile,
    kills: Sequence[PlannedKill],
) -> PolicyRun:
    """The workload on the cluster of a file under `policy` ("slo" or "fcfs"): seconds to minutes of a core. Raises ConfigError, and
    ValueError for a kill of an unknown process."""
    requests = [
        SimRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_s / time_scale,
            model=request.model,
            prompt_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            output_tokens_max=request.output_tokens_max,  # as its client sends it in a live run
            greedy=True,
            slo=Slo(kind=SloKind.COMPLETION, seconds=request.slo_s / time_scale),
            content=request.index,
        )
        for request in workload.requests
    ]
    followed = policy_of(file.path, {**file.overrides, "planner.policy": policy})
    cluster = describe(file.path, file.agents, file.overrides, gateways=file.gateways, planners=file.planners)
    result = simulate(
        cluster,
        requests,
        followed,
        seed=workload.seed,
        limit_s=LIMIT_S,
        poll_every_s=COARSE_S / time_scale,
        kills=kills,
    )
    return _measured(policy, workload, time_scale, result)


def _measured(policy: str, workload: Workload, time_scale: float, result: SimulationResult) -> PolicyRun:
    outcomes = result.outcomes
    attained: dict[str, list[bool]] = {}
    for request, outcome in sorted(zip(workload.requests, outcomes, strict=True), key=lambda pair: pair[0].slo_s):
        completed = outcome.state is RequestState.COMPLETED
        in_time = completed and outcome.finished_s * time_scale - request.arrival_s <= request.slo_s
        attained.setdefault(request.slo_class, []).append(in_time)
    ended = [outcome for outcome in outcomes if outcome.state is not None]
    waits = [(outcome.first_token_s - outcome.accepted_s) * time_scale for outcome in ended if outcome.first_token_s]
    return PolicyRun(
        policy=policy,
        simulated=True,
        requests=len(outcomes),
        ended=len(ended),
        attainment={name: sum(each) / len(each) for name, each in attained.items()},
        wait_p50_s=quantile(waits, 0.5),
        wait_p99_s=quantile(waits, 0.99),
        run_s=max((outcome.finished_s for outcome in ended), default=0.0) * time_scale,
        swaps=sum(result.swaps.values()),
        gave_way=result.displaced,
    )
