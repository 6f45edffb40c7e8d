"""A model on a topology as numbers: layers a device can hold, milliseconds a layer, milliseconds between two stages.

Layers are taken to be alike, as in UELLM's algorithm 2 (m = M / Layer(M)): embedding and head are spread over them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from qlm_core.profiles.hardware_prior import GpuFacts, decode_terms, model_facts, usable_gb
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import BYTES_PER_VALUE, ModelFacts
from qlm_deploy.topology import Device, Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

GIB_PER_GB = 1e9 / 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The work to place. `context_tokens`: those in front of the token whose time is predicted; `kv_tokens`: KV to keep room for."""

    model: str
    facts: ModelFacts
    context_tokens: int = 1024
    kv_tokens: int = 8192

    @property
    def layer_gib(self) -> float:
        """Weights of one layer, and its KV of `kv_tokens`."""
        total_gb = self.facts.weights_gb + self.facts.kv_bytes_per_token * self.kv_tokens * 1e-9
        return total_gb / self.facts.layers * GIB_PER_GB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Arrays in the order of the devices. `capacity`: layers; `hop_ms[i, j]`: one token's activations from i to j, infinite without a
    link; symmetric."""

    layers: int
    capacity: Ints
    layer_ms: Floats
    hop_ms: Floats

    @property
    def by_speed(self) -> Ints:
        """Devices, the fastest first; of equals the larger (algorithm 2, line 9)."""
        return np.lexsort((-self.capacity, self.layer_ms))


def demand_of(model: str, context_tokens: int, kv_tokens: int) -> Demand:
    """Raises ConfigError for an unknown model."""
    facts = model_facts().get(model)
    if facts is None:
        raise ConfigError(f"model {model!r}: must be one of {', '.join(model_facts())}")
    return Demand(model=model, facts=facts, context_tokens=context_tokens, kv_tokens=kv_tokens)


def problem_of(topology: Topology, demand: Demand) -> Problem:
    """Raises ConfigError for a device whose speed is not known for this model.

    A hop takes the link's latency and hidden_size values of 16 bits over its bandwidth."""
    place = {device.name: position for position, device in enumerate(topology.devices)}
    hop_ms = np.full((len(place), len(place)), np.inf)
    activation_bytes = demand.facts.hidden_size * BYTES_PER_VALUE
    for link in topology.links:
        first, second = place[link.first], place[link.second]
        hop_ms[first, second] = hop_ms[second, first] = link.latency_us * 1e-3 + activation_bytes / (link.bandwidth_gb_s * 1e6)
    return Problem(
        layers=demand.facts.layers,
        capacity=np.array([layers_held(device, demand) for device in topology.devices], dtype=np.int64),
        layer_ms=np.array([layer_time_ms(device, demand) for device in topology.devices]),
        hop_ms=hop_ms,
    )


def usable_gib(device: Device) -> float:
    """Memory for weights and KV: vLLM's share of it less work space, as `hardware_prior` takes it (T of algorithm 2, line 13)."""
    return max(0.0, usable_gb(device.memory_gib / GIB_PER_GB) * GIB_PER_GB)


def layers_held(device: Device, demand: Demand) -> int:
    """Whole layers in the usable memory: min(Layer(M), (Memory(i) - T) / m) of algorithm 2."""
    return min(demand.facts.layers, math.floor(usable_gib(device) / demand.layer_gib + 1e-9))


def layer_time_ms(device: Device, demand: Demand) -> float:
    """One layer for one token of one sequence: the measured time of the model over its layers, else the decode step of the roofline
    (`hardware_prior.decode_terms`) over its layers and `speed_share`."""
    if demand.model in device.token_ms:
        return device.token_ms[demand.model] / demand.facts.layers
    if device.card is None:
        raise ConfigError(f"device {device.name}: token_ms: must have {demand.model}, or give bandwidth_gb_s and tflops, or a known gpu")
    return roofline_token_ms(device.card, demand) / demand.facts.layers / device.speed_share


def roofline_token_ms(card: GpuFacts, demand: Demand) -> float:
    """One token of one sequence through all layers on one card."""
    step_ms, sequence_ms, context_token_ms = decode_terms(card, 1, demand.facts)
    return step_ms + sequence_ms + context_token_ms * demand.context_tokens


def filled(problem: Problem, members: Bools) -> tuple[Ints, Floats]:
    """Layers (rows, devices) of the least compute time on each row's members, one layer on each at least, and that time; infinite where
    the row does not hold the model, or has more members than layers.

    One layer each, the rest on the fastest that have room: time is linear in the layers, so no exchange improves it."""
    counts = members.astype(np.int64)
    rest = problem.layers - counts.sum(axis=1)
    possible = (rest >= 0) & ~(members & (problem.capacity < 1)).any(axis=1) & members.any(axis=1)
    for device in problem.by_speed:
        more = np.where(members[:, device], np.minimum(rest, problem.capacity[device] - 1), 0).clip(min=0)
        counts[:, device] += more
        rest = rest - more
    return counts, np.where(possible & (rest == 0), counts @ problem.layer_ms, np.inf)


def hops_ms(problem: Problem, path: tuple[int, ...]) -> float:
    return float(sum(problem.hop_ms[here, there] for here, there in pairwise(path)))


def map_latency_ms(problem: Problem, path: tuple[int, ...], layers: tuple[int, ...]) -> float:
    """One token through a map: each stage's layers, and the hop between stages that follow each other."""
    return float(np.dot(problem.layer_ms[list(path)], layers)) + hops_ms(problem, path)
