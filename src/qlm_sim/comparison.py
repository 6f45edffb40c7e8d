"""Comparison runs: a workload over a described cluster under one policy of the planner, without faults but planned kills."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from qlm.api.v1.gateway_pb2 import StreamResponse, SubmitRequest
from qlm.api.v1.request_pb2 import Result
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.overload import WOULD_BE_LATE
from qlm_core.vocabulary.request import RequestKey, RequestState, Slo
from qlm_planner.policy import Order, Policy
from qlm_queue.values import PLANNER_ROLE
from qlm_sim.cluster import START_S, Cluster, Member, quiet_logs
from qlm_sim.description import ClusterDescription, InstanceDescription
from qlm_sim.processes.gateway import ServerCall, SimGateway
from qlm_sim.requests import SimRequest, message
from qlm_sim.world.network import Command
from qlm_sim.world.server import READ_ONLY

SUBMIT_RETRY_S = 1.0
"""A request refused by a full queue is sent again after this."""

COARSE_S = 0.1
"""Comparison runs poll engines, and report their tokens, this often, in seconds of an engine at real speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedKill:
    """SIGKILL of an agent, planner or estimator ("a100-0", "planner-0"; "planner": the leader at that time, if any) `at_s` after the start;
    it is restarted `down_s` later."""

    process: str
    at_s: float
    down_s: float


RESULT_KEPT_S = 60.0
"""The queue keeps results so long: they are judged at once."""

GARBAGE_OBJECTS = 50_000
"""New objects between two garbage collections: most of them are no cycles."""

PROFILES_EVERY_S = 5.0
"""How often the estimator's findings are published and read in comparison runs, where no reader waits for them."""


DISPLACED = (("qlm_agent_returned_requests_total", {"cause": "evicted"}), ("qlm_agent_lso_total", {"lso": "kv_offload"}))
"""Counters of agents: evicted and offloaded requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How a request ended. Times in seconds after the start; 0 for events that did not happen, infinite `finished_s` without an end.
    `refused`: it would have been late, and was not accepted (`Overload.REFUSE`). `predicted_wait_s`: the median wait predicted at its
    acceptance, None without a prediction."""

    request_id: str
    model: str
    slo: Slo
    state: RequestState | None
    accepted_s: float
    started_s: float
    first_token_s: float
    finished_s: float
    attempts: int
    output_tokens: int
    instance: str
    refused: bool = False
    predicted_wait_s: float | None = None

    @property
    def in_time(self) -> bool:
        if self.state is not RequestState.COMPLETED:
            return False
        reached_s = self.first_token_s if self.slo.kind == "first_token" else self.finished_s
        return reached_s <= self.slo.deadline_s(self.accepted_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """`outcomes`: in the order of the workload. `swaps`: model swaps, by instance. `displaced`: evictions and KV swaps. `ended_s`: end of
    the last request."""

    outcomes: tuple[RequestOutcome, ...]
    swaps: dict[str, int]
    displaced: int
    ended_s: float
    events: int


def simulate(
    cluster: ClusterDescription,
    workload: Sequence[SimRequest],
    planner_policy: Policy | str = "slo",
    *,
    seed: int = 1,
    limit_s: float = 86_400.0,
    poll_every_s: float = COARSE_S,
    kills: Sequence[PlannedKill] = (),
    probes: Sequence[tuple[float, Callable[[Cluster], None]]] = (),
) -> SimulationResult:
    """Runs until every request has ended or was refused as late, at most `limit_s` virtual seconds. `planner_policy`: a policy, or the name
    of an order ("slo", "fcfs"). `poll_every_s`: least time between two polls of an engine; waits are exact to that. `probes`: (seconds
    after the start, function called with the cluster). The same arguments give the same result, everywhere. Raises ValueError for a kill of
    an unknown process."""
    policy = planner_policy if isinstance(planner_policy, Policy) else replace(Policy(), order=Order(planner_policy))
    with quiet_logs(), _old_objects_apart():
        run = _Comparison(cluster, workload, policy, seed, poll_every_s)
        for kill in kills:
            run.plan(kill)
        for at_s, probe in probes:
            run.probe(at_s, probe)
        try:
            return run.result(limit_s)
        finally:
            run.stop()


class _Comparison:
    """One run. It watches the server for ends."""

    def __init__(
        self,
        description: ClusterDescription,
        workload: Sequence[SimRequest],
        policy: Policy,
        seed: int,
        poll_every_s: float,
    ) -> None:
        coarse = tuple(_coarse(each, poll_every_s) for each in description.instances)
        self._workload = workload
        bounds = replace(description.bounds, result_ttl_s=RESULT_KEPT_S)
        self._cluster = Cluster(replace(description, instances=coarse, profiles_every_s=PROFILES_EVERY_S, bounds=bounds), seed, policy)
        self._cluster.server.watchers.append(self)
        self._ended: dict[RequestKey, Result] = {}
        self._states: dict[RequestKey, RequestState] = {}
        self._refused: set[RequestKey] = set()
        self._predicted_wait_s: dict[RequestKey, float] = {}

    def plan(self, kill: PlannedKill) -> None:
        cluster = self._cluster
        members: dict[str, Member] = {member.process.name: member for member in cluster.members if not isinstance(member, SimGateway)}
        if kill.process not in {*members, PLANNER_ROLE}:
            raise ValueError(f"no agent, planner or estimator is called {kill.process!r}")

        def end() -> None:
            leading = next((planner for planner in cluster.planners if planner.process.alive and planner.machine is not None), None)
            member = leading if kill.process == PLANNER_ROLE else members[kill.process]
            if member is not None:
                member.process.end()
                cluster.schedule.after(kill.down_s, lambda: None if member.process.alive else member.start())

        cluster.schedule.at(START_S + kill.at_s, end)

    def probe(self, at_s: float, probe: Callable[[Cluster], None]) -> None:
        self._cluster.schedule.at(START_S + at_s, lambda: probe(self._cluster))

    def result(self, limit_s: float) -> SimulationResult:
        cluster = self._cluster
        cluster.start()
        for number, request in enumerate(self._workload):
            gateway = cluster.gateways[number % len(cluster.gateways)]
            cluster.schedule.at(START_S + request.arrival_s, partial(self._send, request, gateway))
        while len(self._ended) + len(self._refused) < len(self._workload) and cluster.step(limit_s):
            pass
        return SimulationResult(
            outcomes=tuple(map(self._outcome, self._workload)),
            swaps={agent.process.name: agent.swaps for agent in cluster.agents},
            displaced=round(sum(cluster.site.agent_metrics.registry.get_sample_value(*counter) or 0.0 for counter in DISPLACED)),
            ended_s=cluster.elapsed_s,
            events=cluster.schedule.happened,
        )

    def stop(self) -> None:
        self._cluster.stop()

    def _send(self, request: SimRequest, gateway: SimGateway) -> None:
        def answered(response: StreamResponse | None, error: QlmError | None) -> None:
            if error is not None and error.reason == WOULD_BE_LATE:
                self._refused.add(request.key)
            elif error is not None:
                self._cluster.schedule.after(error.retry_after_s or SUBMIT_RETRY_S, lambda: self._send(request, gateway))
            elif response is not None and response.accepted.HasField("prediction"):
                self._predicted_wait_s[request.key] = response.accepted.prediction.wait_p50_s

        submit = SubmitRequest(request=message(request, self._cluster.site.catalogue[request.model]))
        gateway.serve(submit, ServerCall(gateway.process, answered))

    # Events of the server ---------------------------------------------------------------------------------------------

    def before(self, process: str, command: Command) -> None:
        """Ignored."""

    def after(self, process: str, command: Command, value: object, error: QlmError | None) -> None:
        if command.name in READ_ONLY:
            return
        for key, stored in reversed(self._cluster.server.queue.state.terminals.items()):
            if key in self._ended:
                break
            self._ended[key] = result = Result.FromString(stored.record.result)
            result.ClearField("output_token_ids")
            self._states[key] = stored.record.state

    def _outcome(self, request: SimRequest) -> RequestOutcome:
        result = self._ended.get(request.key)
        timing = Result().timing if result is None else result.timing
        return RequestOutcome(
            request_id=request.request_id,
            model=request.model,
            slo=request.slo,
            state=self._states.get(request.key),
            accepted_s=_after_start(timing.accepted_s),
            started_s=_after_start(timing.started_s),
            first_token_s=_after_start(timing.first_token_s),
            finished_s=_after_start(timing.finished_s) if result is not None else float("inf"),
            attempts=0 if result is None else result.attempts,
            output_tokens=0 if result is None else result.usage.output_tokens,
            instance="" if result is None else result.incarnation.rpartition("/")[0],
            refused=request.key in self._refused,
            predicted_wait_s=self._predicted_wait_s.get(request.key),
        )


def _coarse(instance: InstanceDescription, poll_every_s: float) -> InstanceDescription:
    agent = instance.agent
    changed = instance.changed(
        {"coalesce_s": max(agent.coalesce_s, 10 * poll_every_s)}, {"tell_every_s": max(agent.simulated.tell_every_s, poll_every_s)}
    )
    return replace(changed, wake_min_s=max(instance.wake_min_s, poll_every_s))


@contextmanager
def _old_objects_apart() -> Iterator[None]:
    """Exempts older objects from garbage collection meanwhile, and collects the rest rarely."""
    thresholds = gc.get_threshold()
    gc.collect()  # of an earlier run
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _after_start(time_s: float) -> float:
    return time_s - START_S if time_s else 0.0
