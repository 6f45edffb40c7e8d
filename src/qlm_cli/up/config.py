"""The settings of `qlm up`, and the processes they request."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qlm_process.config import OVERRIDES_VARIABLE
from qlm_process.settings import Count, QueueSettings, Seconds, Section, SecuritySettings, TelemetrySettings


class Entry(BaseModel):
    """One process of a list; its service reads the rest."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")


class UpSection(Section):
    """Supervision."""

    start_timeout_s: Seconds = Field(60.0, description="How long a process may take until it serves.")
    stop_timeout_s: Seconds = Field(30.0, description="How long a process may take to drain and end before it is killed.")
    restart_backoff_s: Seconds = Field(0.2, description="Pause before the first restart of a process; it doubles with each further one.")
    restart_backoff_max_s: Seconds = Field(5.0, description="Longest pause before a restart.")
    restarts_max: Count = Field(10, description="Restarts of one process within restart_window_s after which all is stopped.")
    restart_window_s: Seconds = Field(60.0, description="See restarts_max; also the time after which the pause starts anew.")
    log_bytes_max: Count = Field(32 << 20, description="Size of a process's log at which it is renamed to .1 and begun anew.")
    metrics_port_base: int = Field(
        0, ge=0, le=65_000, description="First of the metrics ports, one a process in the table's order; 0: any free ones."
    )


class UpConfig(Section):
    """The part of the file that `qlm up` reads."""

    queue: QueueSettings = Field(default_factory=QueueSettings)
    security: SecuritySettings = Field(default_factory=SecuritySettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    up: UpSection = Field(default_factory=UpSection)
    gateways: tuple[Entry, ...] = Field((Entry(name="gateway-0"),), min_length=1)
    planners: tuple[Entry, ...] = Field((Entry(name="planner-0"),), min_length=1)
    estimators: tuple[Entry, ...] = Field((Entry(name="estimator-0"),), min_length=1)
    agents: tuple[Entry, ...] = Field((), description="One an instance.")

    def services(self) -> Mapping[str, tuple[Entry, ...]]:
        """Service -> its processes, in the order of the table."""
        return {"gateway": self.gateways, "planner": self.planners, "estimator": self.estimators, "agent": self.agents}

    @model_validator(mode="after")
    def _names_differ(self) -> UpConfig:
        names = [entry.name for entries in self.services().values() for entry in entries]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two processes are named {name!r}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to run: its name, its service, its command and what it is given in the environment."""

    name: str
    service: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def process_specs(config: UpConfig, config_path: str, overrides: Mapping[str, object], queue_url: str) -> tuple[ProcessSpec, ...]:
    """All processes in the order of the table. Settings of `up` itself are last and win. Settings go by the environment."""
    specs: list[ProcessSpec] = []
    for service, entries in config.services().items():
        for entry in entries:
            base = config.up.metrics_port_base
            own: dict[str, object] = {
                **{key: value for key, value in overrides.items() if key != "queue.url"},
                "queue.url": queue_url,  # after "queue", if that is given
                "telemetry.log_format": "json",
                "telemetry.metrics_port": base + len(specs) if base else 0,
            }
            command = (sys.executable, "-m", f"qlm_{service}", "--config", config_path, "--name", entry.name)
            specs.append(ProcessSpec(name=entry.name, service=service, command=command, environment={OVERRIDES_VARIABLE: json.dumps(own)}))
    return tuple(specs)
