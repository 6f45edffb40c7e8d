"""The evaluation of UELLM (He et al., ICSOC 2024, section 5) on QLM's batching (`qlm_core.operations.batching`) and deployers
(`qlm_deploy`).

Engines batch statically, all requests are there at time 0, and times are of two hosts: `accelerate`, the authors' program (token times
fitted to their published runs: src/qlm_deploy/examples/four-3090-accelerate.yaml), and `roofline`, an engine whose hops cost what links do
(four-3090.yaml). All systems answer in full. The authors' program cuts UA's answers at the longest prediction of a batch + 50 tokens, and
leaves the others' uncut: UA's 100 answers there take 2,306 to 2,554 steps, UD's 3,762 to 4,722.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from benchmarks.evaluate.fastserve import Plan
from benchmarks.evaluate.pipeline_stages import pipeline
from benchmarks.evaluate.rows import Range, Row
from benchmarks.evaluate.static_batches import (
    ODBS,
    SLO_DBS,
    Served,
    Workload,
    alpaca_like,
    batch_s,
    first_come,
    program_slos,
    serve_batches,
    serve_continuous,
    serve_s3,
)
from qlm_cli.deploy.command import read_topology
from qlm_core.operations.batching import SLO_ODBS, OdbsRule, Reading, slo_odbs
from qlm_core.profiles.hardware_prior import gpu_facts
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_deploy.deployers import DeviceMap
from qlm_deploy.map_profile import profile_of_map
from qlm_deploy.plan import STRESS_TRIAL_S, describe_map, plan_deployment
from qlm_deploy.plan import Plan as DeploymentPlan
from qlm_deploy.stages import demand_of
from qlm_deploy.topology import LINK_CLASSES, Topology, parse_topology

MODEL = "ChatGLM2-6B"
HOSTS = {"accelerate": "four-3090-accelerate.yaml", "roofline": "four-3090.yaml"}
SYSTEM_REQUESTS, BATCHING_REQUESTS = 100, 200
"""Requests of figures 5 and 4, as in the authors' programs."""
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
LENGTH_WEIGHTS = (0.5, 1.0, 2.0, 4.0)
TABLE_1 = {16: 11.19, 20: 13.09, 24: 14.85, 28: 17.23, 32: 22.55}
"""Layers on GPU#0, of 33 -> average tokens/s."""

SEEDS = (1, 2, 3, 4, 5)
"""One a trial."""
NEAR: Range = (0.9, 1.1)
ABOVE_1: Range = (1.0, None)
BELOW_1: Range = (None, 1.0)
BELOW_0: Range = (None, 0.0)
OPEN: Range = (None, None)

Figures = Mapping[str, float]


def systems(plan: Plan) -> Iterator[Row]:
    """Figure 5, and the figures behind it."""
    for host in HOSTS:
        trials = [_systems(alpaca_like(seed, SYSTEM_REQUESTS), _topology(HOSTS[host])) for seed in plan.seeds]
        yield from _system_rows(trials, host)
        yield from _figure_rows(trials, host)


def batching(plan: Plan) -> Iterator[Row]:
    """Figure 4 (a) and (b), on the host `accelerate`."""
    trials = [_batching(alpaca_like(seed, BATCHING_REQUESTS), _topology(HOSTS["accelerate"])) for seed in plan.seeds]
    yield from _batching_rows(trials)
    yield from _figure_rows(trials, "batching")


def deployers(plan: Plan) -> Iterator[Row]:
    """Figure 4 (c) and (d)."""
    trials = [_deployers(seed) for seed in plan.seeds]
    yield from _deployer_rows(trials)
    yield from _figure_rows(trials, "deployers")


def _figure_rows(trials: Sequence[Mapping[str, Figures]], where: str) -> Iterator[Row]:
    for name, figures in trials[0].items():
        for key in figures:
            yield Row(name=f"{where}: {name}: {key}", claim=OPEN, ours=tuple(trial[name][key] for trial in trials))


def _topology(file: str) -> Topology:
    return read_topology(Path(str(files("qlm_deploy"))) / "examples" / file)


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


def _figures(workload: Workload, served: Served, plan: DeploymentPlan) -> Figures:
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
        where = f"UA over {rival}, {host}"
        pairs = [(trial["UA"], trial[rival]) for trial in trials]
        for name, key in (("latency", "latency_s"), ("mean latency of a request", "mean_latency_s")):
            change = tuple(100.0 * (mine[key] / other[key] - 1.0) for mine, other in pairs)
            yield Row(name=f"{where}: {name}, %", claim=(-90.3, -72.3), ours=change, order=BELOW_0)
        for name, key, claim in (("throughput", "tokens_per_s", (1.92, 4.98)), ("utilisation", "utilisation", (1.2, 4.1))):
            ratio = tuple(mine[key] / other[key] for mine, other in pairs)
            yield Row(name=f"{where}: {name}, x", claim=claim, ours=ratio, order=ABOVE_1)
        points = tuple(100.0 * (mine["violations"] - other["violations"]) for mine, other in pairs)
        yield Row(name=f"{where}: SLO violations, points", claim=(-48.2, -29.6), ours=points, order=BELOW_0)
    attained = {name: tuple(100.0 * (1.0 - trial[name]["violations"]) for trial in trials) for name in PAPER_SYSTEMS}
    mean = {name: float(np.mean(values)) for name, values in attained.items()}
    second = max(found for name, found in mean.items() if name != "UA")
    yield Row(name=f"UB, {host}: SLO attainment, %", claim=(87.4, 87.4), ours=attained["UB"], order=(mean["UD"], mean["UA"]))
    yield Row(name=f"UA, {host}: SLO attainment, %", claim=(100.0, 100.0), ours=attained["UA"], order=(second, None))
    by_deployer = tuple(trial["S3"]["latency_s"] / trial["UD"]["latency_s"] for trial in trials)
    yield Row(name=f"S3 over UD, {host}: latency, x", claim=ABOVE_1, ours=by_deployer, order=ABOVE_1)


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
    for reading in Reading:
        saved = tuple(1.0 - trial[f"ODBS {reading}"]["mean_latency_s"] / trial["FIFO"]["mean_latency_s"] for trial in trials)
        yield Row(name=f"ODBS, {reading}: mean latency saved over FIFO, share", claim=OPEN, ours=saved, order=(0.0, None))
    both, slo, length = (f"{name} {Reading.PROGRAM}" for name in ("SLO-ODBS", "SLO-DBS", "ODBS"))
    for rival, claim in ((length, NEAR), ("FIFO", BELOW_1), (slo, BELOW_1)):
        latency = tuple(trial[both]["mean_latency_s"] / trial[rival]["mean_latency_s"] for trial in trials)
        yield Row(name=f"SLO-ODBS over {rival}: mean latency, x", claim=claim, ours=latency, order=claim)
    for rival, claim in ((slo, NEAR), ("FIFO", ABOVE_1), (length, ABOVE_1)):
        attained = tuple((1.0 - trial[both]["violations"]) / (1.0 - trial[rival]["violations"]) for trial in trials)
        yield Row(name=f"SLO-ODBS over {rival}: SLO attainment, x", claim=claim, ours=attained, order=claim)


# Figure 4 (c), (d): deployers -----------------------------------------------------------------------------------------


def _deployers(seed: int) -> dict[str, Figures]:
    """Means over random hosts of unlike devices."""
    found: dict[str, list[DeploymentPlan]] = {name: [] for name in ("helr", "he", "lr", "greedy", "even", "stress")}
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
    for rival, key, claim in (
        ("lr", "tokens_per_s", NEAR),
        ("he", "utilisation", NEAR),
        ("greedy", "tokens_per_s", ABOVE_1),
        ("greedy", "utilisation", ABOVE_1),
        ("even", "tokens_per_s", ABOVE_1),
    ):
        ratio = tuple(trial["helr"][key] / trial[rival][key] for trial in trials)
        yield Row(name=f"HELR over {rival}: {key}, x", claim=claim, ours=ratio, order=claim)


# Reasons of what differs from the paper -------------------------------------------------------------------------------


def reasons(plan: Plan) -> Iterator[Row]:
    """Measurements behind what differs from the paper, on the host `accelerate` and on random hosts."""
    topology, demand = _topology(HOSTS["accelerate"]), demand_of(MODEL, 1024, 8192)
    drawn = [_systems(program_slos(alpaca_like(seed, SYSTEM_REQUESTS), seed), topology) for seed in plan.seeds]
    for name, claim in (("UB", 87.4), ("UA", 100.0)):
        attained = tuple(100.0 * (1.0 - trial[name]["violations"]) for trial in drawn)
        yield Row(name=f"{name}, SLOs of the authors' program: SLO attainment, %", claim=(claim, claim), ours=attained)
    profile = profile_of_map(topology, demand, plan_deployment("helr", topology, demand))
    own = tuple(_too_short(alpaca_like(seed, SYSTEM_REQUESTS), profile) for seed in plan.seeds)
    yield Row(name="UA: violations with an SLO below the time of their own batch, share", claim=OPEN, ours=own)
    yield from _length_weights(plan, profile)
    yield from _one_trial(plan, topology)
    yield from _links(plan)


def _too_short(workload: Workload, profile: HardwareProfile) -> float:
    batches, slo_s = slo_odbs(workload.requests), workload.requests.slo_s
    late = serve_batches(workload, batches, profile).ends_s > slo_s
    alone_s = np.zeros(len(slo_s))
    for batch in map(list, batches):
        alone_s[batch] = batch_s(profile, workload.requests.prompt_tokens[batch], workload.output_tokens[batch])
    return float((late & (alone_s > slo_s)).sum() / late.sum())


def _length_weights(plan: Plan, profile: HardwareProfile) -> Iterator[Row]:
    """SLO-ODBS by the weight of a token: w1 = 0.5 is the program's."""
    workloads = [alpaca_like(seed, BATCHING_REQUESTS) for seed in plan.seeds]

    def run(workload: Workload, rule: OdbsRule) -> tuple[float, float]:
        ends_s = serve_batches(workload, slo_odbs(workload.requests, rule), profile).ends_s
        return float(ends_s.mean()), float((ends_s <= workload.requests.slo_s).mean())

    lengths, slos = ([run(workload, rule) for workload in workloads] for rule in (ODBS, SLO_DBS))
    for w1 in LENGTH_WEIGHTS:
        found = [run(workload, replace(SLO_ODBS, w1=w1)) for workload in workloads]
        latency = tuple(mine[0] / other[0] for mine, other in zip(found, lengths, strict=True))
        attained = tuple(mine[1] / other[1] for mine, other in zip(found, slos, strict=True))
        yield Row(name=f"SLO-ODBS, w1 = {w1:g}, over ODBS: mean latency, x", claim=NEAR, ours=latency, order=NEAR)
        yield Row(name=f"SLO-ODBS, w1 = {w1:g}, over SLO-DBS: SLO attainment, x", claim=NEAR, ours=attained, order=NEAR)


def _one_trial(plan: Plan, topology: Topology) -> Iterator[Row]:
    """Morphling's SLOs count from the start of its search, of which only one trial is made."""
    demand = demand_of(MODEL, 1024, 8192)
    profile = profile_of_map(topology, demand, plan_deployment("stress", topology, demand))
    points = []
    for seed in plan.seeds:
        workload = alpaca_like(seed, SYSTEM_REQUESTS)
        slo_s = workload.requests.slo_s
        mine_s, other_s = (
            serve_batches(workload, batches, profile).ends_s
            for batches in (slo_odbs(workload.requests), first_come(workload.requests, BATCH_MAX))
        )
        points.append(100.0 * float((mine_s > slo_s).mean() - (other_s + STRESS_TRIAL_S > slo_s).mean()))
    name = "UA over Morphling, one trial that counts in SLOs, accelerate: SLO violations, points"
    yield Row(name=name, claim=(-48.2, -29.6), ours=tuple(points), order=BELOW_0)


def _links(plan: Plan) -> Iterator[Row]:
    demand = demand_of(BIG_MODEL, 1024, 8192)
    shares = []
    for seed in plan.seeds:
        plans = [plan_deployment("lr", random_host(1_000 * seed + graph, DEVICES), demand) for graph in range(GRAPHS)]
        shares.append(100.0 * float(np.mean([each.hops_ms / each.latency_ms for each in plans])))
    yield Row(name="LR: time between stages, % of a token's", claim=OPEN, ours=tuple(shares))


def table_1(_: Plan) -> Iterator[Row]:
    """The worst error of `qlm_deploy` over the table's five maps."""
    demand = demand_of(MODEL, 1024, 8192)
    demand = replace(demand, facts=replace(demand.facts, layers=33))
    topology = _topology("v100-and-3090.yaml")
    maps = {paper: DeviceMap(path=(0, 1), layers=(first, 33 - first)) for first, paper in TABLE_1.items()}
    errors = [100.0 * abs(describe_map("", topology, demand, by_hand).tokens_per_s / paper - 1.0) for paper, by_hand in maps.items()]
    yield Row(name="table 1: worst error, %", claim=(None, 10.0), ours=(max(errors),), order=(None, 10.0))


def plan_times(plan: Plan) -> Iterator[Row]:
    """`deploy_plan_s`: seconds of one plan, by a beam for more than 12 devices."""
    demand = demand_of("Qwen2.5-72B", 1024, 8192)
    for devices, most_s in ((12, 2.0), (BIG_HOST_DEVICES, 10.0)):
        taken: list[float] = []
        for seed in plan.seeds:
            topology = random_host(seed, devices)
            began_s = time.perf_counter()
            plan_deployment("helr", topology, demand)
            taken.append(time.perf_counter() - began_s)
        yield Row(name=f"deploy_plan_s, {devices} devices", claim=(None, most_s), ours=tuple(taken), order=(None, most_s))


PARTS: Mapping[str, Callable[[Plan], Iterator[Row]]] = {
    "systems": systems,
    "batching": batching,
    "deployers": deployers,
    "reasons": reasons,
    "table_1": table_1,
    "plan_times": plan_times,
    "pipeline": pipeline,
}
