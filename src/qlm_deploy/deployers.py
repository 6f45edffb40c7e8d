"""The deployers by name: each gives a path of devices and the layers of each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from qlm_deploy.beam import best_by_beam
from qlm_deploy.exact import EXACT_DEVICES_MAX, best_exact
from qlm_deploy.objective import Found, Weights
from qlm_deploy.stages import Problem, filled, map_latency_ms

WEIGHTS: Mapping[str, Weights] = {
    "helr": Weights(latency=1.0, devices=1.0),
    "he": Weights(latency=0.0, devices=1.0),
    "lr": Weights(latency=1.0, devices=0.0),
}
"""a1 and a2 of UELLM. `he`: a1 = 0, the fewest devices, of these the least latency. `lr`: the least latency; UELLM's a1 of "10:1" stands
for it. `helr`: a share of the least latency counts as much as the same share of the fewest devices."""
STRESS_TRIALS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """Devices and layers in the order of the stages. `gap`: see `Found`; None where the deployer has no bound. `trials`: maps
    that the deployer would have to run on the devices."""

    path: tuple[int, ...]
    layers: tuple[int, ...]
    gap: float | None = None
    trials: int = 0


def searched(problem: Problem, weights: Weights) -> DeviceMap | None:
    """Exact to EXACT_DEVICES_MAX devices, else by beam. None where no map is found."""
    search: Callable[[Problem, Weights], Found | None] = best_exact if len(problem.capacity) <= EXACT_DEVICES_MAX else best_by_beam
    found = search(problem, weights)
    return None if found is None else DeviceMap(path=found.path, layers=_fill(problem, found.path), gap=found.gap)


def greedy(problem: Problem) -> DeviceMap | None:
    """UELLM's baseline BGS, which it does not define: the fastest device is filled, then the fastest that is linked to it, and so on. It
    weighs no links, and turns back nowhere: None where it ends before the layers do."""
    path: list[int] = []
    layers: list[int] = []
    for _ in problem.capacity:
        free = (
            device
            for device in problem.by_speed
            if device not in path and problem.capacity[device] and (not path or np.isfinite(problem.hop_ms[path[-1], device]))
        )
        if (device := next(free, None)) is None:
            return None
        path.append(int(device))
        layers.append(int(min(problem.capacity[device], problem.layers - sum(layers))))
        if sum(layers) == problem.layers:
            return DeviceMap(path=tuple(path), layers=tuple(layers))
    return None


def stress(problem: Problem) -> DeviceMap | None:
    """A search by trial such as Morphling's: maps over the fastest 1, 2, 3 ... devices, filled by speed and split evenly, each run under
    load, and the fastest kept. A trial's outcome is the latency of the model here; its time is the caller's to add (`DeviceMap.trials`).
    At most STRESS_TRIALS_MAX trials."""
    best: DeviceMap | None = None
    best_ms, trials = np.inf, 0
    usable = [int(device) for device in problem.by_speed if problem.capacity[device]]
    for count in range(1, min(len(usable), problem.layers) + 1):
        path = _nearest_neighbours(problem, usable[:count])
        if path is None or problem.capacity[list(path)].sum() < problem.layers:
            continue
        for layers in dict.fromkeys((_fill(problem, path), _even(problem, path))):
            if trials == STRESS_TRIALS_MAX:
                break
            trials += 1
            latency_ms = map_latency_ms(problem, path, layers)
            if latency_ms < best_ms:
                best, best_ms = DeviceMap(path=path, layers=layers), latency_ms
    return None if best is None else replace(best, trials=trials)


def even(problem: Problem) -> DeviceMap | None:
    """Layers split evenly over all devices with memory, in order of distance from the fastest: vLLM's default, and that of the programs
    that UELLM's authors compare with. None where a device has no link to the next, or all of them do not hold the model."""
    usable = [int(device) for device in problem.by_speed if problem.capacity[device]][: problem.layers]
    path = _nearest_neighbours(problem, usable) if usable else None
    if path is None or problem.capacity[list(path)].sum() < problem.layers:
        return None
    return DeviceMap(path=path, layers=_even(problem, path))


DEPLOYERS: Mapping[str, Callable[[Problem], DeviceMap | None]] = {
    **{name: partial(searched, weights=weights) for name, weights in WEIGHTS.items()},
    "greedy": greedy,
    "even": even,
    "stress": stress,
}


def _fill(problem: Problem, path: tuple[int, ...]) -> tuple[int, ...]:
    members = np.zeros((1, len(problem.capacity)), dtype=np.bool_)
    members[0, list(path)] = True
    return tuple(int(layers) for layers in filled(problem, members)[0][0, list(path)])


def _even(problem: Problem, path: tuple[int, ...]) -> tuple[int, ...]:
    """As vLLM splits where nothing is said, moved on where a device is full."""
    layers = [0] * len(path)
    for _ in range(problem.layers):
        free = [stage for stage, device in enumerate(path) if layers[stage] < problem.capacity[device]]
        layers[min(free, key=lambda stage: layers[stage])] += 1
    return tuple(layers)


def _nearest_neighbours(problem: Problem, devices: list[int]) -> tuple[int, ...] | None:
    path, rest = [devices[0]], devices[1:]
    while rest:
        nearest = min(rest, key=lambda device: float(problem.hop_ms[path[-1], device]))
        if not np.isfinite(problem.hop_ms[path[-1], nearest]):
            return None
        path.append(nearest)
        rest.remove(nearest)
    return tuple(path)
