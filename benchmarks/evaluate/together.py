"""QLM's plan over engines that follow a policy, against each one alone, over all traces of a folder.

Two A100 with one model, so that no model swap decides, and with few seats, so that requests wait; the first ones of a trace, scaled to LOAD
of what both engines sustain of them, with the SLO classes of `qlm_load demo`. Alone is an engine policy behind a balancer, with all
requests inside the engines, or QLM's plan with the engine's default. The engine policy inside QLM is the best on the first requests of a
trace, and all are judged on the rest (`qlm_load.tune`): the share of requests in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml

from benchmarks.evaluate.fastserve import Plan
from benchmarks.evaluate.rows import Row
from benchmarks.evaluate.server import Server, serve
from benchmarks.evaluate.workloads import Jobs
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelSpec
from qlm_load.compare.virtual_run import ClusterFile, simulated_run
from qlm_load.tune.tuning import LOOKAHEAD_REQUESTS, Settings, Trial, split, trial
from qlm_load.workload.trace import read_trace
from qlm_load.workload.workload import ModelShare, Workload, make_workload

MODEL = ModelSpec(name="model", profile="Mistral-7B", context_tokens_max=8_192)
GPU, INSTANCES = "A100-80GB", 2
SEATS = 16
REQUESTS_PER_S = 20.0
"""Requests of each trace for a second of `--duration`."""
HELD_OUT = 0.4
LOAD = 1.3
"""Arrivals over what the engines sustain: in time or late is a matter of order."""
CHUNK_TOKENS = 2_048
"""As shipped (`agent.simulated.prefill_chunk_tokens`)."""
ENGINES: Mapping[str, Mapping[str, object]] = {"fcfs": {}, "edf": {}, "larry": {}, "trail": {}, "ltr": {}, "fastserve": {}}
ALONE = (*(("least_loaded", engine) for engine in ENGINES), ("sal", "fcfs"), ("sal", "larry"))
"""A balancer and an engine policy: the best simple one with all, SAL with the paper's."""
ALL_REQUESTS = 10_000
"""`agent.lookahead_requests` of engines that get every request at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Shares of requests in time on the part that no choice was made on. `engine`: inside QLM."""

    engine: str
    together: float
    alone: Mapping[str, float]

    @property
    def gain(self) -> float:
        """Points over the best of those alone."""
        return 100.0 * (self.together - max(self.alone.values()))


def inside(engine: str) -> Settings:
    """QLM's plan with an engine policy."""
    return {"planner.policy": "slo", **_engine(engine, LOOKAHEAD_REQUESTS)}


def alone() -> dict[str, Settings]:
    """QLM's plan with the engine's default, then each engine policy behind a balancer."""
    found: dict[str, Settings] = {"qlm": {"planner.policy": "slo"}}
    return found | {f"{balancer} {engine}": {"planner.policy": balancer, **_engine(engine, ALL_REQUESTS)} for balancer, engine in ALONE}


def _engine(name: str, lookahead: int) -> Settings:
    return {"agent.engine_policy": name, "agent.engine_policy_options": ENGINES[name], "agent.lookahead_requests": lookahead}


def compare(workload: Workload, file: Path, plan: Plan) -> Compared:
    """Chooses on the first part, judges on the rest."""
    first, second = split(workload, HELD_OUT)

    def measure(settings: Settings, part: Workload) -> Trial:
        names = [f"gpu-{number}" for number in range(INSTANCES)]
        overrides = {**settings, "agent.batch_max": SEATS, "agent.simulated.seed": part.seed}
        cluster = ClusterFile(path=str(file), overrides=overrides, agents=names, gateways=1, planners=1)
        return trial(settings, part, lambda given, requests: simulated_run(str(given["planner.policy"]), requests, 1.0, cluster, ()))

    tried = {engine: measure(inside(engine), first) for engine in ENGINES} | {"": measure({"planner.policy": "slo"}, first)}
    engine = max(tried, key=lambda name: tried[name].merit)
    singles = {name: measure(settings, second).in_time for name, settings in alone().items()}
    together = measure(inside(engine), second).in_time if engine else singles["qlm"]
    plan.say(f"QLM with {engine or 'its default'}: {together:.3f}; alone " + ", ".join(f"{k} {v:.3f}" for k, v in singles.items()))
    return Compared(engine=engine or "default", together=together, alone=singles)


def workload_of(trace: Path, requests: int, seed: int) -> Workload:
    """The first requests of a trace at LOAD."""
    share = ModelShare(name=MODEL.name, share=1.0, context_tokens_max=MODEL.context_tokens_max)
    rows = read_trace(trace).head(requests)
    rate_per_s = LOAD * INSTANCES * sustained_per_s(make_workload(rows, (share,), seed))
    return make_workload(rows, (share,), seed, rate_per_s=rate_per_s)


def sustained_per_s(workload: Workload) -> float:
    """Requests a second that an engine ends while all of them wait, without start and end."""
    profile = shipped_snapshot().hardware_of_pair(GPU, 1, MODEL)
    assert profile is not None, "it is shipped"
    lengths = np.array([(request.input_tokens, request.output_tokens) for request in workload.requests], np.int64)
    waiting = Jobs(arrived_s=np.zeros(len(lengths)), prompts=lengths[:, 0], outputs=lengths[:, 1])
    ends_s = np.sort(serve(waiting, Server(profile=profile, seats=SEATS, prefill_tokens=CHUNK_TOKENS), "fcfs").end_s)
    tenth = max(1, len(ends_s) // 10)
    return float((len(ends_s) - 2 * tenth) / (ends_s[-tenth - 1] - ends_s[tenth - 1]))


def together(plan: Plan) -> Iterator[Row]:
    """Points in time over the best alone: one row a trace, then their mean."""
    traces = sorted(path for path in plan.traces.glob("*.csv.gz") if not path.name.startswith("lengths_")) if plan.traces else []
    if not traces:
        raise ConfigError("the part together needs --traces, a folder of traces with arrivals")
    requests = round(REQUESTS_PER_S * plan.duration_s)
    gains: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        file = write_cluster(Path(folder), INSTANCES)
        for trace in traces:
            name, began_s = trace.name.removesuffix(".csv.gz"), time.monotonic()
            found = [compare(workload_of(trace, requests, seed), file, plan) for seed in plan.seeds]
            gains[name] = [each.gain for each in found]
            note = "; ".join(
                f"{each.engine} {100 * each.together:.1f}%, alone {max(each.alone, key=each.alone.__getitem__)} "
                f"{100 * max(each.alone.values()):.1f}%"
                for each in found
            )
            plan.say(f"together, {name}: {gains[name]} points ({time.monotonic() - began_s:.0f} s)")
            yield Row(name=f"together, {name}: points over the best alone", claim=(0.0, None), ours=tuple(gains[name]), note=note)
    means = tuple(sum(each) / len(each) for each in zip(*gains.values(), strict=True))
    yield Row(name="together, mean of all traces: points over the best alone", claim=(0.0, None), ours=means, order=(0.0, None))


def write_cluster(folder: Path, instances: int) -> Path:
    """The configuration file of instances `gpu-0`, `gpu-1`, ... of the model."""
    model = {"name": MODEL.name, "profile": MODEL.profile, "context_tokens_max": MODEL.context_tokens_max}
    agents = [{"name": f"gpu-{number}", "gpu": GPU, "engine": "simulated", "models": [MODEL.name]} for number in range(instances)]
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"models": [model], "agents": agents}), encoding="utf-8")
    return file
