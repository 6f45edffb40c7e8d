"""The parts of the benchmark and how much of each is measured."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.agent import figures
from benchmarks.parts import Measured

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Amount of measurement. `model`: folder of the model; `device`: "cpu" or "cuda"; `scale`: share of the repetitions, 1 for figures to
    report."""

    model: Path
    dtype: str
    device: str
    seed: int
    scale: float
    say: Callable[[str], None]

    def some(self, repetitions: int) -> int:
        return max(2, round(repetitions * self.scale))


def apart(measure: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
    """Calls it in a fresh process, since engines leave much state in theirs."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args, **kwargs).result()


MODULES: Mapping[str, str] = {
    figures.THROUGHPUT: "throughput",
    figures.URGENT: "urgent",
    figures.RESUME: "resuming",
    figures.KV_SWAP: "kv_swap",
    figures.MODEL_SWAP: "model_swap",
    figures.WAIT: "waiting",
    figures.SIMULATOR: "simulating",
    figures.POLICIES: "engine_policies",
}
"""By part, the module with its `measure`."""


def measure(part: str, plan: Plan) -> Measured:
    """Imports the module of a part only now: vLLM takes seconds."""
    found: Callable[[Plan], Measured] = import_module(f"benchmarks.agent.{MODULES[part]}").measure
    return found(plan)
