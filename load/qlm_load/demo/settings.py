"""Settings of a demo, from its YAML file: the section `load`, and the models."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qlm_load.workload.workload import REQUESTS_MAX, ModelShare
from qlm_process.settings import Count, ModelSettings, Seconds, Section

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LoadSection(Section):
    """The run."""

    requests: Annotated[int, Field(ge=1, le=REQUESTS_MAX)] = Field(2_700, description="Requests to replay; of a trace, its first rows.")
    rate_per_s: Positive = Field(8.5, description="Mean arrivals per trace second.")
    time_scale: Positive = Field(4.0, description="Trace seconds in a real second, for arrivals, SLOs and simulated engines.")
    seed: int = Field(1, ge=0, description="Seed of the workload, the kill plan and the simulated engines.")
    held_min: Count = Field(20, description="Live requests that a process must hold to be killed.")
    in_flight_max: Count = Field(5_000, description="Most open requests; requests due beyond them are sent later.")
    start_timeout_s: Seconds = Field(60.0, description="Real seconds for the cluster to start.")
    drain_timeout_s: Seconds = Field(90.0, description="Real seconds after the last arrival until open requests are given up.")
    restart_timeout_s: Seconds = Field(30.0, description="Real seconds after the last answer in which a killed process has to serve again.")
    simulation_timeout_s: Seconds = Field(
        120.0, description="Real seconds for the simulated runs of the comparison, which run side by side; longer ones are left out."
    )
    model_shares: dict[str, Positive] = Field(default_factory=dict, description="Relative share of the requests by model; default: equal.")

    class_shares: dict[str, dict[str, Positive]] = Field(
        default_factory=dict, description="By model: relative shares of interactive, batch-1 and batch-2; default: 5, 3 and 2."
    )


class ProcessEntry(BaseModel):
    """One process of a list; its service reads the rest."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str


class DemoConfig(Section):
    """The demo's part of the cluster's configuration file."""

    load: LoadSection = Field(default_factory=LoadSection)
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    gateways: tuple[ProcessEntry, ...] = (ProcessEntry(name="gateway-0"),)
    planners: tuple[ProcessEntry, ...] = (ProcessEntry(name="planner-0"),)
    agents: tuple[ProcessEntry, ...] = ()

    @model_validator(mode="after")
    def _shares_name_models(self) -> DemoConfig:
        for setting, named in (("model_shares", self.load.model_shares), ("class_shares", self.load.class_shares)):
            unknown = named.keys() - {model.name for model in self.models}
            if unknown:
                raise ValueError(f"load.{setting} names {', '.join(sorted(unknown))}, which is not in models")
        return self

    def shares(self) -> tuple[ModelShare, ...]:
        given = self.load.model_shares or {model.name: 1.0 for model in self.models}
        return tuple(
            ModelShare(
                name=model.name,
                share=given[model.name],
                class_shares=self.load.class_shares.get(model.name, {}),
                context_tokens_max=model.context_tokens_max,
                vocabulary_size=model.vocabulary_size,
            )
            for model in self.models
            if model.name in given
        )


def demo_config_path() -> str:
    return str(files("qlm_load").joinpath("data/demo.yaml"))
