"""The actors of the property test and what each believes: two planners, several agents; and how a history is brought to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.overview import Overview
from qlm_queue.values import (
    PLANNER_ROLE,
    Bounds,
    GroupPlacement,
    Lease,
    LiveRequest,
    PlanChunk,
    PullBudget,
    Pulled,
    PullResult,
    QueueSegment,
    RequestPlacement,
    StepStatus,
)

from .property_driver import Driver, answer_of, top_of
from .scenario import FAILURE, TTL_S, completion, placement
from .subjects import MemorySubject, Subject

BOUNDS = Bounds(queue_max=14, tenant_max=10, class_max=12, attempts_max=3)
KEYS = [RequestKey(tenant, f"r{number}") for tenant in ("t", "u:{%}") for number in range(8)]
GROUPS = {"g0": "m", "g1": "m", "g2": "n", "g3": "m"}
INSTANCES = ("a", "b")
QUEUES = (*INSTANCES, "unassigned", "nobody")
RUNS_REMEMBERED = 10
AGENTS_MAX = 5
DRAIN_ROUNDS_MAX = 40


@dataclass
class Run:
    """An agent's knowledge of a request that it pulled. `produced`: output tokens that it believes to be stored."""

    pulled: Pulled
    produced: int


@dataclass
class Agent:
    """One incarnation, alive or a zombie: it continues with what it knows."""

    lease: Lease
    runs: list[Run] = field(default_factory=list)

    def learn(self, pulled: Pulled) -> None:
        self.runs = [*self.runs, Run(pulled, len(pulled.progress) // 4)][-RUNS_REMEMBERED:]


@dataclass
class Planner:
    """A planner, leading or deposed: it continues with the lease and the view that it had."""

    lease: Lease | None = None
    nonce: int = 0
    overview: Overview | None = None
    requests: dict[str, LiveRequest] = field(default_factory=dict)


class QueueWorld(RuleBasedStateMachine):
    """`make_subject` makes the queue under test, with `BOUNDS`; `mirrored`: every call is compared with the memory twin."""

    def __init__(self, make_subject: Callable[[], Subject], mirrored: bool) -> None:
        super().__init__()
        self.driver = Driver(make_subject, MemorySubject("twin", BOUNDS) if mirrored else None)
        self.planners = [Planner(), Planner()]
        self.agents: list[Agent] = []
        self.incarnations: list[str] = []
        self.accepted: dict[str, RequestKey] = {}
        self.forgotten: set[str] = set()
        self.paused: set[tuple[PauseKind, str]] = set()
        self.nonces = 0
        self.plan_version = 0
        self.broken = False

    def call(self, operation: str, *args: Any, answer: str = "heard") -> Any:
        """None for an answer that is lost for good."""
        self.broken = True  # until this call has passed all checks
        outcome = self.driver.call(operation, *args, twice=answer == "repeated")
        self.broken = False
        return None if answer == "unheard" else outcome

    # Steps that several rules take -------------------------------------------------------------------------------------------

    def elect(self, index: int) -> None:
        planner = self.planners[index % 2]
        planner.nonce += 1
        lease = self.call("acquire_lease", PLANNER_ROLE, f"p{index % 2}-{planner.nonce}", TTL_S, f"host:{index % 2}")
        planner.lease = lease or planner.lease

    def leading(self) -> Lease:
        """The lease of the planner that leads, after an election if none does."""
        for planner in self.planners:
            if planner.lease is not None and self.driver.state.leases.get(PLANNER_ROLE, ("", ""))[0] == planner.lease.token:
                return planner.lease
        self.driver.hook("expire_lease", PLANNER_ROLE)
        self.elect(0)
        lease = self.planners[0].lease
        assert lease is not None
        return lease

    def start_agent(self, instance: str, answer: str) -> Agent:
        self.nonces += 1
        wanted = (instance, f"n{self.nonces}", instance.encode(), TTL_S)
        incarnation, lease = self.call("register", *wanted, answer=answer) or self.call("register", *wanted)
        self.incarnations.append(incarnation)
        self.agents.append(Agent(lease))
        return self.agents[-1]

    def alive(self) -> list[Agent]:
        """Agents whose lease holds, zombies not among them."""
        return [agent for agent in self.agents if agent.lease.role in self.driver.state.leases]

    def remember_accepted(self) -> None:
        for request in self.driver.state.requests:
            self.accepted[request.queue_id] = request.key

    def take(self, agent: Agent, model: str, budget: PullBudget, answer: str) -> None:
        """Pulls, and the agent learns what it hears."""
        outcome = self.call("pull", agent.lease, model, budget, answer=answer)
        if isinstance(outcome, PullResult):
            for pulled in outcome.pulled:
                assert not self.paused & {(PauseKind.MODEL, GROUPS[pulled.group_id]), (PauseKind.TENANT, pulled.key.tenant)}
                agent.learn(pulled)

    def place_in(self, lease: Lease, group: GroupPlacement, requests: list[LiveRequest], answer: str) -> None:
        wanted = [RequestPlacement(queue_id=request.queue_id, key=request.key, group_id=group.group_id) for request in requests]
        waits = {request.queue_id: (request.state, request.group_id) for request in self.driver.state.requests}
        statuses = self.call("place", lease, [group], wanted, answer=answer)
        if isinstance(statuses, list) and answer == "heard":
            may = ((RequestState.ACCEPTED, ""), (RequestState.PLACED, group.group_id))
            expected = [StepStatus.DONE if waits.get(item.queue_id) in may else StepStatus.STALE for item in wanted]
            assert statuses == expected, "place took what it may not, or left what it may"

    # The end ------------------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if not self.broken and self.agents:
                self._drain()
        finally:
            self.driver.close()

    def _drain(self) -> None:
        """Pauses end and all agents die; one fresh agent serves what is left; then nothing may be left."""
        for kind, name in sorted(self.paused):
            self.call("resume", kind, name)
        for incarnation in self.incarnations:
            self.driver.hook("expire_lease", incarnation)
        lease = self.leading()
        for incarnation in self.driver.state.incarnations:
            while self.call("reclaim", lease, incarnation, FAILURE):
                pass
        agent = self.start_agent("a", "heard")
        for _ in range(DRAIN_ROUNDS_MAX):
            if not self.driver.state.requests:
                break
            self._drain_once(lease, agent)
        assert not self.driver.state.requests, "requests are left that nobody can serve"
        assert not self.driver.state.groups
        assert self.driver.run(self.driver.subject.leftovers()) == []
        ended = {record.queue_id for record in self.driver.state.terminals}
        missing = set(self.accepted) - ended - self.forgotten
        assert not missing, f"accepted and never ended: {missing}"

    def _drain_once(self, lease: Lease, agent: Agent) -> None:
        unplaced = self.call("read_unplaced", "", 20)
        if unplaced:
            self.place_in(lease, placement("g0", "a", "", 5.0, "m"), unplaced, "heard")
        overview = self.call("overview")
        open_groups = [group_id for group_id, group in overview.groups.items() if group.instance not in ("", "a")]
        if open_groups:
            versions = {queue.instance: queue.version for queue in overview.virtual_queues}
            segment = QueueSegment(instance="a", start=0, group_ids=open_groups)
            self.call("apply_plan", lease, PlanChunk(plan_version=overview.plan_version, versions=versions, segments=[segment]))
        for model in ("m", "n"):
            budget = PullBudget(requests_max=10, kv_tokens=1_000, output_reserve_tokens=2)
            result = self.call("pull", agent.lease, model, budget)
            assert not isinstance(result, QlmError)
            completions = [
                completion(pulled, len(pulled.progress) // 4, answer_of(pulled.key)[len(pulled.progress) // 4 :], top=top_of(pulled.key))
                for pulled in result.pulled
            ]
            assert set(self.call("complete", agent.lease.role, completions)) <= {StepStatus.DONE}
