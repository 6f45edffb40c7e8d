"""The plan of a deployment: stages, predictions, and the flags of vLLM that realise it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from qlm_core.profiles.hardware_prior import DISK_GB_S
from qlm_core.vocabulary.errors import ConfigError
from qlm_deploy.deployers import DEPLOYERS, DeviceMap
from qlm_deploy.stages import Demand, Problem, map_latency_ms, problem_of, usable_gib
from qlm_deploy.topology import Topology

STRESS_TRIAL_S = 60.0
"""Load of one trial of `stress`, beside the time to load the weights; a default that a user may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers `first_layer` to `first_layer + layers - 1` on one device. `compute_ms`: for one token; `memory_gib`: weights and KV, of
    `usable_gib`."""

    device: str
    first_layer: int
    layers: int
    compute_ms: float
    memory_gib: float
    usable_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`latency_ms`: of one token of one sequence, `hops_ms` of it between stages. `tokens_per_s`: of one sequence;
    `pipelined_tokens_per_s`: of one sequence a stage, by the slowest stage and its hop. `utilisation`: mean share of time that a device of
    the map computes, with one sequence. `gap`: see `DeviceMap`. `search_s`: time of trials on the devices."""

    deployer: str
    model: str
    stages: tuple[Stage, ...]
    latency_ms: float
    hops_ms: float
    tokens_per_s: float
    pipelined_tokens_per_s: float
    utilisation: float
    gap: float | None
    search_s: float
    environment: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]


def plan_deployment(deployer: str, topology: Topology, demand: Demand, trial_s: float = STRESS_TRIAL_S) -> Plan:
    """Raises ConfigError for a model that does not fit, with the memory that is short, and for a device of unknown speed."""
    problem = problem_of(topology, demand)
    found = DEPLOYERS[deployer](problem)
    if found is None:
        raise ConfigError(_why_none(deployer, topology, demand, problem))
    return describe_map(deployer, topology, demand, found, trial_s)


def describe_map(deployer: str, topology: Topology, demand: Demand, found: DeviceMap, trial_s: float = STRESS_TRIAL_S) -> Plan:
    """Predictions for a map, whoever made it."""
    problem = problem_of(topology, demand)
    latency_ms = map_latency_ms(problem, found.path, found.layers)
    compute_ms = problem.layer_ms[list(found.path)] * found.layers
    out_ms = [float(problem.hop_ms[here, there]) for here, there in pairwise(found.path)]
    firsts = np.cumsum((0, *found.layers[:-1]))
    devices = [topology.devices[place] for place in found.path]
    return Plan(
        deployer=deployer,
        model=demand.model,
        stages=tuple(
            Stage(
                device=device.name,
                first_layer=int(first),
                layers=layers,
                compute_ms=float(time_ms),
                memory_gib=layers * demand.layer_gib,
                usable_gib=usable_gib(device),
            )
            for device, first, layers, time_ms in zip(devices, firsts, found.layers, compute_ms, strict=True)
        ),
        latency_ms=latency_ms,
        hops_ms=sum(out_ms),
        tokens_per_s=1e3 / latency_ms,
        pipelined_tokens_per_s=1e3 / float((compute_ms + np.array([*out_ms, 0.0])).max()),
        utilisation=float(compute_ms.sum()) / latency_ms / len(devices),
        gap=found.gap,
        search_s=found.trials * (trial_s + demand.facts.weights_gb / DISK_GB_S),
        environment=_environment([device.index for device in devices], found.layers),
        flags=("--pipeline-parallel-size", str(len(devices)), "--tensor-parallel-size", "1"),
    )


def _environment(indexes: list[int | None], layers: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    """Variables of vLLM's process: its stage r takes the r-th visible device and the r-th count of layers. CUDA numbers the fastest
    device first unless it is to number as `nvidia-smi` does."""
    visible = [str(index) for index in indexes if index is not None]
    known = len(visible) == len(indexes)
    devices = [("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", ",".join(visible))] if known else []
    partition = [("VLLM_PP_LAYER_PARTITION", ",".join(map(str, layers)))] if len(layers) > 1 else []
    return (*devices, *partition)


def _why_none(deployer: str, topology: Topology, demand: Demand, problem: Problem) -> str:
    needed_gib = demand.facts.layers * demand.layer_gib
    held = int(problem.capacity.sum())
    said = (
        f"{demand.model} with KV of {demand.kv_tokens} tokens takes {needed_gib:.2f} GiB in {demand.facts.layers} layers of "
        f"{demand.layer_gib:.2f} GiB"
    )
    if held < problem.layers:
        short_gib = (problem.layers - held) * demand.layer_gib
        usable = sum(usable_gib(device) for device in topology.devices)
        return f"no map fits: {said}; the devices hold {held} layers ({usable:.2f} GiB usable): short by {short_gib:.2f} GiB"
    return f"{deployer} finds no map: {said}; the devices hold {held}, but no path of linked devices that it meets holds them"
