"""Which part measures what: a table, so that a part is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from qlm_load.bench.parts import Measured
from qlm_load.bench_planner import figures
from qlm_planner.policy import Policy
from qlm_planner.search.problem import Problem, Solution

Case = TypeVar("Case")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. `scale`: share of the cases and of the reference's time, 1 for figures to report. `only`: the keys that were
    asked for, () for all."""

    traces: Path | None
    seed: int
    scale: float
    processes: int
    say: Callable[[str], None]
    only: Sequence[str] = ()

    def wants(self, key: str) -> bool:
        """For a part that measures some of its keys by themselves."""
        return not self.only or key in self.only

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
    from qlm_planner.search import solve

    return solve(problem, moves=Policy().replan_moves(problem.groups), seed=seed)


def _exactness(plan: Plan) -> Measured:
    from qlm_load.bench_planner.exactness import measure

    return measure(plan)


def _gaps(plan: Plan) -> Measured:
    from qlm_load.bench_planner.gaps import measure

    return measure(plan)


def _edf(plan: Plan) -> Measured:
    from qlm_load.bench_planner.rivals import measure_edf

    return measure_edf(plan)


def _eq13(plan: Plan) -> Measured:
    from qlm_load.bench_planner.rivals import measure_eq13

    return measure_eq13(plan)


def _live(plan: Plan) -> Measured:
    from qlm_load.bench_planner.live import measure

    return measure(plan)


def _advice(plan: Plan) -> Measured:
    from qlm_load.bench_planner.advice_error import CASES, case_of, summary
    from qlm_load.bench_planner.advice_scenarios import scenarios

    found = summary(plan.each(case_of, scenarios(plan.some(CASES)), "advice_error"))
    return Measured(values={"advice_error": found.within_one}, details={"advice": asdict(found)})


MEASURES: Mapping[str, Callable[[Plan], Measured]] = {
    figures.EXACTNESS: _exactness,
    figures.GAPS: _gaps,
    figures.EDF: _edf,
    figures.EQ13: _eq13,
    figures.LIVE: _live,
    figures.ADVICE: _advice,
}
"""By part; imported late, since the solver takes half a second to load. A part without a measure leaves its keys empty."""
