"""Which part measures what: a table, so that a part is a module and a line here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from qlm_load.bench.parts import Measured
from qlm_load.bench_agent import figures

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. `model`: folder of the model; `device`: "cpu" or "cuda"; `scale`: share of the repetitions, 1 for figures to
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
    """Calls it in a fresh process: engines leave much behind in theirs."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args, **kwargs).result()


def _throughput(plan: Plan) -> Measured:
    from qlm_load.bench_agent.throughput import measure

    return measure(plan)


def _urgent(plan: Plan) -> Measured:
    from qlm_load.bench_agent.urgent import measure

    return measure(plan)


def _resume(plan: Plan) -> Measured:
    from qlm_load.bench_agent.resuming import measure

    return measure(plan)


def _model_swap(plan: Plan) -> Measured:
    from qlm_load.bench_agent.model_swap import measure

    return measure(plan)


def _kv_swap(plan: Plan) -> Measured:
    from qlm_load.bench_agent.kv_swap import measure

    return measure(plan)


def _waiting(plan: Plan) -> Measured:
    from qlm_load.bench_agent.waiting import measure

    return measure(plan)


def _simulating(plan: Plan) -> Measured:
    from qlm_load.bench_agent.simulating import measure

    return measure(plan)


MEASURES: Mapping[str, Callable[[Plan], Measured]] = {
    figures.THROUGHPUT: _throughput,
    figures.URGENT: _urgent,
    figures.RESUME: _resume,
    figures.KV_SWAP: _kv_swap,
    figures.MODEL_SWAP: _model_swap,
    figures.WAIT: _waiting,
    figures.SIMULATOR: _simulating,
}
"""By part; imported late."""
