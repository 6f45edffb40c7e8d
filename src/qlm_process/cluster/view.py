"""An observer's view of a cluster, as plain values. Times are seconds of the queue's clock; None: not known, its part is away."""

from __future__ import annotations

from dataclasses import dataclass

from qlm.api.v1 import agent_pb2, estimator_pb2, gateway_pb2, planner_pb2
from qlm.field_copies import value_of
from qlm_core.vocabulary.request import SloKind
from qlm_core.vocabulary.slo_rules import SLO_KINDS

UNASSIGNED = "unassigned"
"""The virtual queue of groups that no instance can serve now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """A process. `problem`: why it did not answer ("down", "no answer", "not known", or a reason of errors.proto); "" where it did."""

    name: str
    address: str
    problem: str = ""

    @property
    def answered(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A request group on a virtual queue. `first_deadline_s`: 0 or infinite where there is none. `completion_*_s`: predicted end of the
    whole group, None where it is not known. `late`: requests that the planner's last advice expects to be late, of the groups with the
    most; 0 of others."""

    group_id: str
    model: str
    slo_kind: SloKind
    slo_class: str
    waiting: int
    first_deadline_s: float
    completion_p50_s: float | None
    completion_p90_s: float | None
    late: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """An agent's own status. `offloaded`: requests whose KV is in host memory. `eviction_choice`: evict or KV swap, and why; "" where
    nothing is evicted. `operations`: LLM serving operations since its start, by name, as in Operations where they are the same. `models`:
    those that it can serve. `batch`: most requests that it runs at once now, 0 during a model swap."""

    incarnation: str
    gpu: str
    n_gpu: int
    engine: str
    draining: bool
    active_model: str
    warm_models: tuple[str, ...]
    swapping_to: str
    running: int
    offloaded: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    host_memory_used_bytes: int
    host_memory_bytes: int
    completed: int
    eviction_choice: str
    operations: dict[str, int]
    models: tuple[str, ...] = ()
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """An instance and its virtual queue, first group first. `alive`: it holds a lease. `owned`: requests that it owns by the queue's
    account."""

    name: str
    part: PartView
    alive: bool | None
    owned: int | None
    active_model: str
    agent: AgentView | None
    groups: tuple[GroupView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """One SLO class over the window (ClassOutcomes)."""

    slo_class: str
    judged: int
    attained: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRowView:
    """Predictions that clients were shown against what happened (CalibrationRow). `time`: "wait" or "completion"; `depth` "" stands for
    any."""

    time: str
    depth: str
    samples: int
    within_p50: float
    within_p90: float
    within_p99: float
    bias_s: float
    r2: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomesView:
    """The last `window_s` seconds of the whole queue. `operations`: LLM serving operations by name."""

    window_s: float
    accepted: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    output_tokens: int
    classes: tuple[ClassView, ...]
    calibration: tuple[CalibrationRowView, ...]
    operations: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All of it at one moment. `parts`: gateways, planner, estimator; agents are with their instances."""

    at_s: float
    queue: str
    live: int | None
    unplaced: int | None
    running: int | None
    plan_version: int | None
    advice: str = ""
    parts: tuple[PartView, ...]
    instances: tuple[InstanceView, ...]
    unassigned: tuple[GroupView, ...]
    outcomes: OutcomesView | None

    @property
    def gateway_answered(self) -> bool:
        return any(part.name == "gateway" and part.answered for part in self.parts)


def group_view(
    group: gateway_pb2.GroupStatus | planner_pb2.PlannedGroup, planned: planner_pb2.PlannedGroup | None, late: float = 0.0
) -> GroupView:
    """A group as a gateway or the plan has it, with the prediction of the plan and the late requests of its advice."""
    predicted = planned if planned is not None and planned.completion_p50_s > 0.0 else None
    return value_of(
        GroupView,
        group,
        slo_kind=SLO_KINDS.get(group.slo_kind, SloKind.COMPLETION),
        completion_p50_s=None if predicted is None else predicted.completion_p50_s,
        completion_p90_s=None if predicted is None else predicted.completion_p90_s,
        late=late,
    )


def agent_view(status: agent_pb2.GetAgentStatusResponse) -> AgentView:
    instance, load = status.instance, status.load
    return value_of(
        AgentView,
        load,
        incarnation=instance.incarnation,
        gpu=instance.gpu,
        n_gpu=instance.n_gpu,
        engine=instance.engine,
        draining=instance.draining,
        warm_models=tuple(model for model in load.warm_models if model != load.active_model),
        operations={
            "models_activated": load.model_swaps,
            "models_warmed": load.warmings,
            "evicted": load.evictions,
            "kv_offloaded": load.kv_offloads,
            "kv_restored": load.kv_restores,
        },
        models=tuple(instance.models),
    )


def outcomes_view(outcomes: estimator_pb2.Outcomes) -> OutcomesView:
    operations = outcomes.operations
    return value_of(
        OutcomesView,
        outcomes,
        classes=tuple(value_of(ClassView, each) for each in outcomes.classes),
        calibration=tuple(value_of(CalibrationRowView, row, time=_TIMES[row.time]) for row in outcomes.calibration if row.time in _TIMES),
        operations={field.name: getattr(operations, field.name) for field in operations.DESCRIPTOR.fields},
    )


_TIMES = {estimator_pb2.PREDICTED_TIME_WAIT: "wait", estimator_pb2.PREDICTED_TIME_COMPLETION: "completion"}
