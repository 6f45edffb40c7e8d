"""The evaluation of UELLM (He et al., ICSOC 2024, section 5) on QLM's batching (`qlm_core.batching`) and deployers (`qlm_deploy`).

Engines batch statically, all requests are there at time 0, and times are of two hosts: `accelerate`, the authors' program (token times
fitted to their published runs: src/qlm_deploy/examples/four-3090-accelerate.yaml), and `roofline`, an engine whose hops cost what links do
(four-3090.yaml). All systems answer in full. The authors' program cuts UA's answers at the longest prediction of a batch + 50 tokens, and
leaves the others' uncut: UA's 100 answers there take 2,306 to 2,554 steps, UD's 3,762 to 4,722.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.evaluate.static_batches import (
    Served,
    Workload,
    alpaca_like,
    serve_batches,
    serve_continuous,
    serve_s3,
)
from qlm_cli.deploy.command import read_topology
from qlm_core.batching import ODBS, SLO_DBS, SLO_ODBS, Reading, first_come, slo_odbs
from qlm_core.hardware_prior import gpu_facts
from qlm_deploy.deployers import DeviceMap
from qlm_deploy.map_profile import profile_of_map
from qlm_deploy.plan import Plan, describe_map, plan_deployment
from qlm_deploy.stages import demand_of
from qlm_deploy.topology import LINK_CLASSES, Topology, parse_topology

MODEL = "ChatGLM2-6B"
HOSTS = {"accelerate": "four-3090-accelerate.yaml", "roofline": "four-3090.yaml"}
SYSTEM_REQUESTS, BATCHING_REQUESTS = 100, 200
"""Of figures 5 and 4, as in the authors' programs."""
BATCH_MAX = 10
S3_TOKENS, S3_BATCH_MAX = 1024, 20
"""Predicted tokens and requests of a bin of S3, as the authors run it."""
PAPER_SYSTEMS = ("S3", "Morphling", "UD", "UB", "UA")
DEFAULT_MAP = "even"
"""Deployment of systems that only batch: all four GPUs, layers evenly."""
BIG_MODEL, DEVICES = "Qwen2.5-32B", 8
DEVICE_KINDS = ("RTX-3090", "V100-32GB", "A10G", "L4", "T4")
GRAPHS = 20
"""Random hosts a trial for figure 4 (c) and (d): ChatGLM2-6B fits on one of the four GPUs, where all deployers agree."""
BIG_HOST_DEVICES = 64
TABLE_1 = {16: 11.19, 20: 13.09, 24: 14.85, 28: 17.23, 32: 22.55}
"""Layers on GPU#0, of 33 -> average tokens/s."""

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim. `ours`: mean over trials with its 95% interval (Student's t). `held`: whether the whole interval is in the paper's order;
    "near", "similar" and "close" are within 10%."""

    claim: str
    paper: str
    ours: float
    low: float
    high: float
    held: bool

    @property
    def as_json(self) -> dict[str, object]:
        interval = [round(self.low, 4), round(self.high, 4)]
        return {"claim": self.claim, "paper": self.paper, "ours": round(self.ours, 4), "interval": interval, "held": self.held}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`seeds`: one a trial. `accuracy`: of predicted length classes."""

    seeds: Sequence[int]
    accuracy: float = 0.8
    say: Callable[[str], None] = lambda _: None

    def measure(self) -> tuple[list[Row], dict[str, dict[str, Figures]]]:
        """The claims, and the means of all runs by experiment and system."""
        rows: list[Row] = []
        means: dict[str, dict[str, Figures]] = {}
        for host, file in HOSTS.items():
            topology = read_topology(Path(str(files("qlm_deploy"))) / "examples" / file)
            systems = [_systems(alpaca_like(seed, SYSTEM_REQUESTS, self.accuracy), topology) for seed in self.seeds]
            rows += _system_rows(systems, host)
            means[f"systems, {host}"] = _means(systems)
            self.say(f"systems on {host}")
            if host == "accelerate":
                batching = [_batching(alpaca_like(seed, BATCHING_REQUESTS, self.accuracy), topology) for seed in self.seeds]
                rows += _batching_rows(batching)
                means["batching"] = _means(batching)
                self.say("batching")
        deployers = [_deployers(seed) for seed in self.seeds]
        rows += _deployer_rows(deployers)
        means["deployers"] = _means(deployers)
        self.say("deployers")
        return [*rows, _table_1_row(), *_time_rows(self.seeds)], means


# Figure 5: systems ----------------------------------------------------------------------------------------------------


def _systems(workload: Workload, topology: Topology) -> dict[str, Figures]:
    """S3, Morphling, UD, UB and UA. For reference: S3 with bins of all KV instead of the authors' 1,024 tokens and FIFO on S3's map, and
    continuous batching on HELR's. Morphling's latency and throughput include its search, its SLOs count from the start of service (both as
    in the authors' program)."""
    demand = demand_of(MODEL, 1024, 8192)
    plans = {name: plan_deployment(name, topology, demand) for name in (DEFAULT_MAP, "helr", "stress")}
    profiles = {name: profile_of_map(topology, demand, plan) for name, plan in plans.items()}
    fifo, odbs = first_come(workload.requests, BATCH_MAX), slo_odbs(workload.requests)
    arrival = np.arange(len(workload.requests))
    by_rule = np.array([place for batch in odbs for place in batch])
    by_slo = np.argsort(workload.requests.slo_s, kind="stable")
    runs: dict[str, tuple[str, Served]] = {
        "S3": (DEFAULT_MAP, serve_s3(workload, profiles[DEFAULT_MAP], S3_TOKENS, S3_BATCH_MAX)),
        "S3, bins of the KV": (
            DEFAULT_MAP,
            serve_s3(workload, profiles[DEFAULT_MAP], profiles[DEFAULT_MAP].kv_capacity_tokens, BATCH_MAX),
        ),
        "Morphling": ("stress", serve_batches(workload, fifo, profiles["stress"])),
        "FIFO": (DEFAULT_MAP, serve_batches(workload, fifo, profiles[DEFAULT_MAP])),
        "UD": ("helr", serve_batches(workload, fifo, profiles["helr"])),
        "UB": (DEFAULT_MAP, serve_batches(workload, odbs, profiles[DEFAULT_MAP])),
        "UA": ("helr", serve_batches(workload, odbs, profiles["helr"])),
        "continuous": ("helr", serve_continuous(workload, arrival, profiles["helr"], BATCH_MAX)),
        "continuous, SLO order": ("helr", serve_continuous(workload, by_slo, profiles["helr"], BATCH_MAX)),
        "continuous, SLO-ODBS order": ("helr", serve_continuous(workload, by_rule, profiles["helr"], BATCH_MAX)),
    }
    return {name: _figures(workload, served, plans[plan]) for name, (plan, served) in runs.items()}


def _figures(workload: Workload, served: Served, plan: Plan) -> Figures:
    whole_s = served.makespan_s + plan.search_s
    return {
        "latency_s": whole_s,
        "mean_latency_s": float(served.ends_s.mean()) + plan.search_s,
        "tokens_per_s": float(workload.output_tokens.sum()) / whole_s,
        "utilisation": plan.utilisation,
        "violations": float((served.ends_s > workload.requests.slo_s).mean()),
        "decoded": float(served.decoded),
        "requeued": float(served.requeued),
    }


def _system_rows(trials: Sequence[Mapping[str, Figures]], host: str) -> Iterator[Row]:
    for rival in ("S3", "S3, bins of the KV", "Morphling"):
        pairs = [(trial["UA"], trial[rival]) for trial in trials]
        where = f"UA over {rival}, {host}"
        latency = [100.0 * (mine["latency_s"] / other["latency_s"] - 1.0) for mine, other in pairs]
        yield _row(f"{where}: latency, %", "-72.3 to -90.3", latency, lambda mean: mean < 0.0)
        mean_latency = [100.0 * (mine["mean_latency_s"] / other["mean_latency_s"] - 1.0) for mine, other in pairs]
        yield _row(f"{where}: mean latency of a request, %", "-72.3 to -90.3", mean_latency, lambda mean: mean < 0.0)
        throughput = [mine["tokens_per_s"] / other["tokens_per_s"] for mine, other in pairs]
        yield _row(f"{where}: throughput, x", "1.92 to 4.98", throughput, _above)
        busy = [mine["utilisation"] / other["utilisation"] for mine, other in pairs]
        yield _row(f"{where}: utilisation, x", "1.2 to 4.1", busy, _above)
        points = [100.0 * (mine["violations"] - other["violations"]) for mine, other in pairs]
        yield _row(f"{where}: SLO violations, points", "-29.6 to -48.2", points, lambda mean: mean < 0.0)
    attained = {name: [100.0 * (1.0 - trial[name]["violations"]) for trial in trials] for name in PAPER_SYSTEMS}
    mean = {name: float(np.mean(values)) for name, values in attained.items()}
    second = max(found for name, found in mean.items() if name != "UA")
    yield _row(f"UB, {host}: SLO attainment, %", "87.4; below UA", attained["UB"], partial(operator.gt, mean["UA"]))
    yield _row(f"UA, {host}: SLO attainment, %", "100; the best of five", attained["UA"], partial(operator.lt, second))
    over_ud = [100.0 * (trial["UD"]["violations"] - trial["UB"]["violations"]) for trial in trials]
    yield _row(f"UD over UB, {host}: SLO violations, points", "> 0", over_ud, lambda found: found > 0.0)
    by_deployer = [trial["S3"]["latency_s"] / trial["UD"]["latency_s"] for trial in trials]
    yield _row(f"S3 over UD, {host}: latency, x", "> 1", by_deployer, _above)


# Figure 4 (a), (b): batching ------------------------------------------------------------------------------------------


def _batching(workload: Workload, topology: Topology) -> dict[str, Figures]:
    """FIFO, and SLO-ODBS, SLO-DBS (w1 = 0) and ODBS (w2 = 0) under each reading, on HELR's map."""
    demand = demand_of(MODEL, 1024, 8192)
    plan = plan_deployment("helr", topology, demand)
    profile = profile_of_map(topology, demand, plan)
    found = {"FIFO": _figures(workload, serve_batches(workload, first_come(workload.requests, BATCH_MAX), profile), plan)}
    for reading in Reading:
        for name, rule in {"SLO-ODBS": SLO_ODBS, "SLO-DBS": SLO_DBS, "ODBS": ODBS}.items():
            batches = slo_odbs(workload.requests, replace(rule, reading=reading))
            found[f"{name} {reading}"] = _figures(workload, serve_batches(workload, batches, profile), plan)
    return found


def _batching_rows(trials: Sequence[Mapping[str, Figures]]) -> Iterator[Row]:
    def saved(name: str) -> list[float]:
        return [1.0 - trial[name]["mean_latency_s"] / trial["FIFO"]["mean_latency_s"] for trial in trials]

    for reading in Reading:
        yield _row(f"ODBS against FIFO, {reading}: mean latency saved, share", "> 0", saved(f"ODBS {reading}"), lambda mean: mean > 0.05)
    both, slo, length = (f"{name} {Reading.PROGRAM}" for name in ("SLO-ODBS", "SLO-DBS", "ODBS"))
    for rival, paper, held in ((length, "near 1", _near), ("FIFO", "< 1", _below), (slo, "< 1", _below)):
        latency = [trial[both]["mean_latency_s"] / trial[rival]["mean_latency_s"] for trial in trials]
        yield _row(f"SLO-ODBS over {rival}: mean latency, x", paper, latency, held)
    for rival, paper, held in ((slo, "near 1", _near), ("FIFO", "> 1", _above), (length, "> 1", _above)):
        attained = [(1.0 - trial[both]["violations"]) / (1.0 - trial[rival]["violations"]) for trial in trials]
        yield _row(f"SLO-ODBS over {rival}: SLO attainment, x", paper, attained, held)


# Figure 4 (c), (d): deployers -----------------------------------------------------------------------------------------


def _deployers(seed: int) -> dict[str, Figures]:
    """Means over random hosts of unlike devices."""
    found: dict[str, list[Plan]] = {name: [] for name in ("helr", "he", "lr", "greedy", "even", "stress")}
    demand = demand_of(BIG_MODEL, 1024, 8192)
    for graph in range(GRAPHS):
        topology = random_host(1_000 * seed + graph, DEVICES)
        for name, plans in found.items():
            plans.append(plan_deployment(name, topology, demand))
    return {
        name: {
            "tokens_per_s": float(np.mean([plan.tokens_per_s for plan in plans])),
            "utilisation": float(np.mean([plan.utilisation for plan in plans])),
            "devices": float(np.mean([len(plan.stages) for plan in plans])),
            "search_s": float(np.mean([plan.search_s for plan in plans])),
        }
        for name, plans in found.items()
    }


def random_host(seed: int, devices: int) -> Topology:
    """Devices of DEVICE_KINDS at 50 to 100% of their speed, each pair linked by a random class."""
    random = np.random.default_rng(seed)
    names = [f"d{number}" for number in range(devices)]
    kinds = random.choice(DEVICE_KINDS, devices)
    classes = random.choice(list(LINK_CLASSES), (devices, devices))
    return parse_topology(
        {
            "devices": [
                {
                    "name": name,
                    "gpu": str(kind),
                    "memory_gib": gpu_facts()[str(kind)].memory_gb * 1e9 / 2**30,
                    "speed_share": float(random.uniform(0.5, 1.0)),
                }
                for name, kind in zip(names, kinds, strict=True)
            ],
            "links": [
                {"between": [names[first], names[second]], "class": str(classes[first, second])}
                for first in range(devices)
                for second in range(first + 1, devices)
            ],
        }
    )


def _deployer_rows(trials: Sequence[Mapping[str, Figures]]) -> Iterator[Row]:
    def ratios(mine: str, other: str, key: str) -> list[float]:
        return [trial[mine][key] / trial[other][key] for trial in trials]

    yield _row("HELR over LR: throughput, x", "similar", ratios("helr", "lr", "tokens_per_s"), _near)
    yield _row("HELR over HE: utilisation, x", "close", ratios("helr", "he", "utilisation"), _near)
    yield _row("HELR over greedy: throughput, x", "> 1", ratios("helr", "greedy", "tokens_per_s"), _above)
    yield _row("HELR over greedy: utilisation, x", "> 1", ratios("helr", "greedy", "utilisation"), _above)
    yield _row("HELR over even: throughput, x", "> 1", ratios("helr", "even", "tokens_per_s"), _above)


def _table_1_row() -> Row:
    demand = demand_of(MODEL, 1024, 8192)
    demand = replace(demand, facts=replace(demand.facts, layers=33))
    topology = read_topology(Path(str(files("qlm_deploy"))) / "examples" / "v100-and-3090.yaml")
    maps = {paper: DeviceMap(path=(0, 1), layers=(first, 33 - first)) for first, paper in TABLE_1.items()}
    errors = [100.0 * abs(describe_map("", topology, demand, by_hand).tokens_per_s / paper - 1.0) for paper, by_hand in maps.items()]
    worst = max(errors)
    return Row(claim="Table 1: worst error, %", paper="<= 10", ours=worst, low=min(errors), high=worst, held=worst <= 10.0)


def _time_rows(seeds: Sequence[int]) -> Iterator[Row]:
    """`deploy_plan_s`."""
    demand = demand_of("Qwen2.5-72B", 1024, 8192)
    for devices, most_s in ((12, 2.0), (BIG_HOST_DEVICES, 10.0)):
        taken: list[float] = []
        for seed in seeds:
            topology = random_host(seed, devices)
            began_s = time.perf_counter()
            plan_deployment("helr", topology, demand)
            taken.append(time.perf_counter() - began_s)
        yield _row(f"deploy_plan_s, {devices} devices", f"<= {most_s:g}", taken, partial(operator.ge, most_s))


# Rows -----------------------------------------------------------------------------------------------------------------


def _row(claim: str, paper: str, values: Sequence[float], held: Callable[[float], bool]) -> Row:
    found = np.array(values)
    mean, half = float(found.mean()), 0.0
    if len(found) > 1:
        half = float(stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found)))
    return Row(claim=claim, paper=paper, ours=mean, low=mean - half, high=mean + half, held=held(mean - half) and held(mean + half))


def _near(ratio: float) -> bool:
    return 0.9 <= ratio <= 1.1


def _above(ratio: float) -> bool:
    return ratio > 1.0


def _below(ratio: float) -> bool:
    return ratio < 1.0


def _means(trials: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    return {name: {key: float(np.mean([trial[name][key] for trial in trials])) for key in found} for name, found in trials[0].items()}
