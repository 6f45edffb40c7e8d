"""Settings of the estimator process."""

from __future__ import annotations

from dataclasses import fields

from pydantic import Field

from qlm_estimator.machine import Learning
from qlm_process.settings import Count, GrpcSettings, ListenAddress, Seconds, Section, ServiceConfig


class EstimatorSettings(Section):
    """The section `estimator`, or an entry of `estimators`."""

    name: str = Field("estimator", min_length=1, max_length=64, description="Name of this process in logs and traces.")
    listen: ListenAddress = Field("127.0.0.1:0", description="Where the Estimator service listens; port 0: any free one.")
    advertise: str = Field("", description='"host:port" that others reach it at, published with the lease. Empty: as it listens.')
    publish_every_s: Seconds = Field(1.0, description="Least time between two published profile snapshots.")
    memory_requests: float = Field(
        1000.0, ge=2.0, le=1e9, description="Finished requests of a class after which an old one weighs 1 / e in its lengths."
    )
    workload_rows_max: Count = Field(4096, description="Most request classes that are kept.")
    hardware_rows_max: Count = Field(4096, description="Most pairs of instance and model that are kept.")
    overview_every_s: Seconds = Field(2.0, description="How often the queue's instances and groups are read.")
    events_read_max: int = Field(1000, ge=1, le=10_000, description="Most entries of the event stream in one read.")
    read_block_s: Seconds = Field(0.5, description="How long a read of the event stream waits for news.")
    read_gap_s: Seconds = Field(
        0.1, description="Pause between two reads of the event stream that found news: each costs the server as much as a request does."
    )
    retry_s: Seconds = Field(0.5, description="Pause before the queue is asked again after it could not be reached.")
    grpc: GrpcSettings = Field(default_factory=GrpcSettings, description="Limits of the gRPC server.")

    def learning(self) -> Learning:
        """Returns the machine's part of these settings."""
        return Learning(**{each.name: getattr(self, each.name) for each in fields(Learning)})


class EstimatorConfig(ServiceConfig):
    """All that the process reads."""

    estimator: EstimatorSettings = Field(default_factory=EstimatorSettings)
