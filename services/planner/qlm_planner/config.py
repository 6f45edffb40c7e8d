"""Settings of the planner process."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from qlm_core.vocabulary.overload import Overload
from qlm_planner.board.tenants import Tenant, Tenants
from qlm_planner.policies.selection import order_of
from qlm_planner.policy import Policy
from qlm_planner.shell.solver_requests import Choice
from qlm_process.settings import Count, GrpcSettings, ListenAddress, ModelSettings, PositiveNumber, Seconds, Section, ServiceConfig

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number >= 0."""
DEFAULTS = Policy()
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""Above 0 and at most 1, which is no limit."""
TENANTS_MAX = 1_000
"""Most tenants with settings of their own."""


class TenantSettings(Section):
    """Settings of one tenant (`qlm_planner.board.tenants`)."""

    name: str = Field(min_length=1, max_length=256, description="The tenant's name in requests.")
    weight: PositiveNumber = Field(1.0, description="Weight of a late request, as the nearest power of two from 1/16 to 16.")
    share_max: Share = Field(1.0, description="Share of the served work above which others of its band precede it. 1: no limit.")

    def tenant(self) -> Tenant:
        return Tenant(name=self.name, weight=self.weight, share_max=self.share_max)


class PlannerSettings(Section):
    """The planner's section. Durations in seconds, costs in request-seconds of tardiness (reasons: `qlm_planner.policy`)."""

    name: str = Field("planner-0", min_length=1, max_length=64, description="Name of this process in logs, metrics and traces.")
    listen: ListenAddress = Field("127.0.0.1:0", description="Address on which the Planner service listens.")
    advertise: str = Field("", description='"host:port" for clients, published with the lease. Empty: the address of listen.')
    grpc: GrpcSettings = Field(default_factory=GrpcSettings, description="Limits of the gRPC server.")
    policy: Annotated[str, AfterValidator(order_of)] = Field(
        DEFAULTS.order, description="slo: order by objectives; others: comparison policies; module:Class: a comparison policy of your own."
    )
    seed: int = Field(DEFAULTS.seed, ge=0, description="Seed of the random policies.")
    stay_s: Weight = Field(
        DEFAULTS.stay_s, description="Policy batched: only requests that arrive within this time overtake another model's."
    )
    overload: Overload = Field(
        DEFAULTS.overload,
        description="When no order meets the SLOs: best_effort: the cost decides who is late; edf: earliest deadline first; "
        "shed: fail late requests, lowest value first; refuse: gateways refuse requests that would be late.",
    )
    delta: Seconds = Field(DEFAULTS.delta, description="A group holds at most delta x the average batch of its instance.")
    group_service_fraction: Seconds = Field(
        DEFAULTS.group_service_fraction, description="A group's waiting requests take at most this share of its SLO to serve."
    )
    group_spread_fraction: Seconds = Field(
        DEFAULTS.group_spread_fraction, description="Deadlines in a group are at most this share of the SLO apart."
    )
    group_overtake_fraction: Weight = Field(
        DEFAULTS.group_overtake_fraction,
        description="No request joins a group in front of others of its model and SLO class with deadlines earlier by more than this share "
        "of their wait.",
    )
    late_weight: Weight = Field(DEFAULTS.late_weight, description="Cost of a late request.")
    tardiness_weight: Weight = Field(DEFAULTS.tardiness_weight, description="Cost of a request-second of tardiness.")
    work_weight: Weight = Field(DEFAULTS.work_weight, description="Cost of a GPU-second of swapping.")
    completion_weight: Weight = Field(DEFAULTS.completion_weight, description="Cost of a request-second until completion.")
    wait_max_slos: float = Field(
        DEFAULTS.wait_max_slos,
        ge=2,
        allow_inf_nan=False,
        description="No request within its tenant's share waits longer than this x its SLO while others of its band are served in time.",
    )
    wait_max_s: Weight = Field(DEFAULTS.wait_max_s, description="The least bound by wait_max_slos, in seconds.")
    tenants: tuple[TenantSettings, ...] = Field((), max_length=TENANTS_MAX, description="Tenants with settings of their own.")
    tenant_weight: PositiveNumber = Field(1.0, description="`weight` of every other tenant.")
    tenant_share_max: Share = Field(1.0, description="`share_max` of every other tenant; at most 64 of them at a time are limited.")
    share_window_s: Seconds = Field(DEFAULTS.share_window_s, description="Window of the shares of the served work.")
    slo_band: int = Field(DEFAULTS.slo_band, ge=-1000, le=1000, description="Priority band of requests with an SLO.")
    replan_every_s: Seconds = Field(DEFAULTS.replan_every_s, description="Least time between two automatic replans.")
    overview_every_s: Seconds = Field(
        DEFAULTS.overview_every_s, description="Period of overviews: leases, queues and counts of some groups are read and compared."
    )
    profiles_every_s: Seconds = Field(1.0, description="Period of reading the profiles.")
    advice_every_s: Seconds = Field(10.0, description="Period of advice, while misses are expected or instances are idle.")
    solver: Choice = Field(
        Choice.HEURISTIC, description="The solver of plans. exact-highs, exact-glpk: proven best orders for small queues, in limited time."
    )
    solve_timeout_s: Seconds = Field(20.0, description="Longest job of the solver; after it its process restarts.")
    inbox_max: Count = Field(1000, description="Most events that wait for the machine; calls beyond it are refused.")

    @field_validator("tenants")
    @classmethod
    def _names_once(cls, tenants: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
        if len({tenant.name for tenant in tenants}) != len(tenants):
            raise ValueError("each name at most once")
        return tenants


class PlannerConfig(ServiceConfig):
    """The settings that the planner reads."""

    models: tuple[ModelSettings, ...] = Field(min_length=1, description="The models that the queue serves.")
    planner: PlannerSettings = Field(default_factory=PlannerSettings)

    def policy(self) -> Policy:
        """The machine's settings."""
        own = self.planner
        same = {each.name: getattr(own, each.name) for each in fields(Policy) if each.name in PlannerSettings.model_fields}
        changed = {
            "order": own.policy,
            "tenants": Tenants(
                named=tuple(each.tenant() for each in own.tenants), others=Tenant(weight=own.tenant_weight, share_max=own.tenant_share_max)
            ),
            "overview_every_max_s": max(DEFAULTS.overview_every_max_s, own.overview_every_s),
            "lease_ttl_s": self.queue.lease_ttl_s,
        }
        return replace(DEFAULTS, **{**same, **changed})
