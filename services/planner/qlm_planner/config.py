"""Settings of the planner process."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from qlm_core.model import ModelSpec
from qlm_planner.policy import Order, Policy
from qlm_process.settings import Count, GrpcSettings, ListenAddress, ModelSettings, QueueSettings, Seconds, Section, TelemetrySettings

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number of at least zero."""

DEFAULTS = Policy()


class PlannerSettings(Section):
    """The planner's own section. Durations in seconds, costs in request-seconds of tardiness (see `qlm_planner.policy` for the reasons)."""

    name: str = Field("planner-0", min_length=1, max_length=64, description="Name of this process in logs, metrics and traces.")
    listen: ListenAddress = Field("127.0.0.1:0", description="Where the Planner service listens.")
    advertise: str = Field("", description='"host:port" that others reach it at, published with the lease. Empty: as it listens.')
    grpc: GrpcSettings = Field(default_factory=GrpcSettings, description="Limits of the gRPC server.")
    policy: Order = Field(DEFAULTS.order, description="slo: order by objectives; fcfs: first come first served, to compare with.")
    delta: Seconds = Field(DEFAULTS.delta, description="A group holds at most delta x the average batch of its instance.")
    group_service_fraction: Seconds = Field(
        DEFAULTS.group_service_fraction, description="Serving what waits in a group takes at most this share of its SLO."
    )
    group_spread_fraction: Seconds = Field(
        DEFAULTS.group_spread_fraction, description="Deadlines in a group are at most this share of the SLO apart."
    )
    late_weight: Weight = Field(DEFAULTS.late_weight, description="Cost of a late request.")
    tardiness_weight: Weight = Field(DEFAULTS.tardiness_weight, description="Cost of a request-second of tardiness.")
    work_weight: Weight = Field(DEFAULTS.work_weight, description="Cost of a GPU-second of swapping.")
    completion_weight: Weight = Field(DEFAULTS.completion_weight, description="Cost of a request-second until completion.")
    head_gain: Weight = Field(DEFAULTS.head_gain, description="Least gain for which a group with another model displaces a queue's head.")
    starvation_slos: Weight = Field(
        DEFAULTS.starvation_slos, description="Nobody is overtaken who would then end more than so many SLOs late."
    )
    slo_band: int = Field(DEFAULTS.slo_band, ge=-1000, le=1000, description="Priority band in which requests with an SLO are served.")
    replan_every_s: Seconds = Field(DEFAULTS.replan_every_s, description="Least time between two replans that nobody asked for.")
    overview_every_s: Seconds = Field(DEFAULTS.overview_every_s, description="How often the whole queue is read and compared.")
    profiles_every_s: Seconds = Field(1.0, description="How often the profiles are read.")
    publish_every_s: Seconds = Field(0.25, description="Least time between two plans sent to those who watch.")
    watchers_max: Count = Field(100, description="Most watchers of the plan; more are refused.")
    inbox_max: Count = Field(1000, description="Events that wait for the planner's decision; calls beyond it are refused.")


class PlannerConfig(Section):
    """What the planner reads of the file."""

    queue: QueueSettings = Field(default_factory=QueueSettings)
    models: tuple[ModelSettings, ...] = Field(min_length=1, description="The models that the queue serves.")
    planner: PlannerSettings = Field(default_factory=PlannerSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    def policy(self) -> Policy:
        """The machine's settings."""
        own = self.planner
        return replace(
            DEFAULTS,
            order=own.policy,
            delta=own.delta,
            group_service_fraction=own.group_service_fraction,
            group_spread_fraction=own.group_spread_fraction,
            late_weight=own.late_weight,
            tardiness_weight=own.tardiness_weight,
            work_weight=own.work_weight,
            completion_weight=own.completion_weight,
            head_gain=own.head_gain,
            starvation_slos=own.starvation_slos,
            slo_band=own.slo_band,
            replan_every_s=own.replan_every_s,
            overview_every_s=own.overview_every_s,
            overview_every_max_s=max(DEFAULTS.overview_every_max_s, own.overview_every_s),
            lease_ttl_s=self.queue.lease_ttl_s,
        )

    def catalogue(self) -> dict[str, ModelSpec]:
        return {model.name: model.spec() for model in self.models}
