"""How much of each part is measured, and processes of their own for engines."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

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
