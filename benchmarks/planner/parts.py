"""How much of each part is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qlm_planner.policy import Policy
from qlm_planner.search.problem import Problem, Solution

Case = TypeVar("Case")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. `scale`: share of the cases and of the reference's time, 1 for figures to report. `only`: the requested
    keys or parts, () for all."""

    traces: Path | None
    seed: int
    scale: float
    processes: int
    say: Callable[[str], None]
    only: Sequence[str] = ()

    def wants(self, key: str, part: str) -> bool:
        """For a part that measures some of its keys by themselves."""
        return not self.only or key in self.only or part in self.only

    def some(self, cases: int) -> int:
        return max(2, round(cases * self.scale))

    def each(self, measure: Callable[[Case], Found], cases: Sequence[Case], name: str) -> list[Found]:
        """In the order of the cases, several at a time; in this process where there are to be none."""
        if self.processes == 0:
            return [measure(case) for case in cases]
        found: list[Found] = []
        with ProcessPoolExecutor(max_workers=self.processes) as pool:
            for number, one in enumerate(pool.map(measure, cases), start=1):
                found.append(one)
                if number % max(1, len(cases) // 5) == 0:
                    self.say(f"{name}: {number} of {len(cases)}")
        return found


def replanned(problem: Problem, seed: int) -> Solution:
    """As the service replans: with its own number of moves."""
    from qlm_planner.search.solver import solve  # local: it loads the compiler

    return solve(problem, moves=Policy().replan_moves(problem.groups), seed=seed)
