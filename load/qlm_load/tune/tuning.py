"""Tries policies of planner and engines on the first part of a workload, and judges the best one on the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import yaml

from qlm_load.compare.comparison import PolicyRun
from qlm_load.workload.workload import Workload

Settings = Mapping[str, object]
Runner = Callable[[Settings, Workload], PolicyRun]
"""A simulated run of a workload under settings."""
LOOKAHEAD_REQUESTS = 64
"""Requests that wait inside an engine, for its policy to order: a quarter of vLLM's largest batch."""
ENGINES: tuple[Settings, ...] = (
    {},
    *(
        {"agent.engine_policy": name, "agent.engine_policy_options": options, "agent.lookahead_requests": LOOKAHEAD_REQUESTS}
        for name, options in (
            ("fcfs", {}),
            ("edf", {}),
            ("larry", {"weight": 1.0}),
            ("larry", {"weight": 10.0}),
            ("larry", {"weight": 100.0}),
            ("trail", {"c": 0.8}),
            ("ltr", {}),
        )
    ),
)
"""Settings of engines that are tried; the first are the file's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run. `in_time`: share of all requests."""

    settings: Settings
    in_time: float
    run: PolicyRun

    @property
    def merit(self) -> tuple[float, float]:
        """More in time, then the shorter median wait."""
        return (self.in_time, -self.run.wait_p50_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """`trials`: on the first part, the file's own settings first. `own`, `best`: on the part that no choice was made on."""

    trials: tuple[Trial, ...]
    own: Trial
    best: Trial

    @property
    def better(self) -> bool:
        """Whether the best trial is better than the file's settings on the second part too."""
        return self.best.merit > self.own.merit

    @property
    def chosen(self) -> Settings:
        """Settings to add to the file: none where its own are as good."""
        return self.best.settings if self.better else {}

    def document(self) -> str:
        """The chosen settings as YAML, with the evidence in comments."""
        lines = [f"# {'On' if self.better else 'The present settings are as good, on'} requests that no choice was made on:"]
        for name, trial in {named({}): self.own, named(self.best.settings): self.best}.items():
            lines.append(f"#   {name}: {trial.in_time:.1%} in time, median wait {trial.run.wait_p50_s:.2f} s")
        lines.append(f"# {len(self.trials)} settings were tried on the requests before them.")
        tree: dict[str, dict[str, object]] = {}
        for name, value in self.chosen.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return "\n".join(lines) + "\n" + (yaml.safe_dump(tree, sort_keys=True) if tree else "")

    def as_json(self) -> dict[str, object]:
        parts = {"own": asdict(self.own), "best": asdict(self.best), "trials": [asdict(trial) for trial in self.trials]}
        return {"chosen": dict(self.chosen), "better": self.better, **parts}


def tune(workload: Workload, policies: Sequence[str], held_out: float, run: Runner, say: Callable[[str], None]) -> Tuned:
    """Tries the file's settings, then each of `policies` of the planner with each of ENGINES. `held_out`: share of the requests, the last
    ones, for the judgement."""
    first, second = split(workload, held_out)
    candidates: list[Settings] = [{}]
    candidates += [{"planner.policy": policy, **engine} for policy, engine in product(policies, ENGINES)]
    trials: list[Trial] = []
    for settings in candidates:
        trials.append(trial(settings, first, run))
        say(f"{named(settings)}: {trials[-1].in_time:.1%} in time, median wait {trials[-1].run.wait_p50_s:.2f} s")
    best = max(trials, key=lambda trial: trial.merit)
    return Tuned(trials=tuple(trials), own=trial({}, second, run), best=trial(best.settings, second, run))


def split(workload: Workload, held_out: float) -> tuple[Workload, Workload]:
    """A workload's first requests, and the share `held_out` of its last ones, each from 0 s on."""
    at = max(1, min(len(workload.requests) - 1, round(len(workload.requests) * (1.0 - held_out))))
    start_s = workload.requests[at].arrival_s
    later = tuple(replace(request, arrival_s=request.arrival_s - start_s) for request in workload.requests[at:])
    return replace(workload, requests=workload.requests[:at]), replace(workload, requests=later)


def named(settings: Settings) -> str:
    options = settings.get("agent.engine_policy_options")
    parts = [str(settings[name]) for name in ("planner.policy", "agent.engine_policy") if name in settings]
    parts += [f"{name}={value}" for name, value in options.items()] if isinstance(options, Mapping) else []
    return " ".join(parts) or "present settings"


def trial(settings: Settings, workload: Workload, run: Runner) -> Trial:
    found = run(settings, workload)
    counts = dict.fromkeys(found.attainment, 0)
    for request in workload.requests:
        counts[request.slo_class] += 1
    in_time = sum(share * counts[name] for name, share in found.attainment.items()) / len(workload.requests)
    return Trial(settings=settings, in_time=in_time, run=found)
