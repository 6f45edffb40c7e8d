"""Pseudo-random numbers of the annealing: xorshift64*, the same on every machine for a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search.compile_cache import lean

State = NDArray[np.uint64]


def chance_of(seed: int) -> State:
    """The first state of a seed; adjacent seeds give independent streams (splitmix64)."""
    mixed = (seed + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return np.array([(mixed ^ mixed >> 31) or 1], dtype=np.uint64)


@lean
def uniform(state: State) -> float:
    """A number in [0, 1)."""
    value = state[0]
    value ^= value >> np.uint64(12)
    value ^= value << np.uint64(25)
    value ^= value >> np.uint64(27)
    state[0] = value
    return float((value * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@lean
def below(state: State, bound: int) -> int:
    """A number from 0 to bound - 1."""
    return int(uniform(state) * bound)
