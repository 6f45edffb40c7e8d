"""The stochastic program of QLM (equations 6-13) as a mixed-integer linear program, corrected:

- The objective is the design's: equation 13 as printed, the sum of completion - SLO, ignores deadlines, as the SLOs are a constant in it.
- Equation 12, the chance constraint, is a penalty on late requests of a scenario at a quantile: under overload no order keeps it.
- Equation 9: a switch is s[q, j, m] >= y[q, j, m] - y[q, j - 1, m] with y the sum of x over the groups of a model, so s need not be an
  integer; the active model stands before position 0.
- Equation 10 lacks the swap into a group's own position, and the running requests; here a start has both.
- Positions of a queue are filled from the front; bands never fall.

A swap takes its full time, without warming, as in the paper ("a constant conservative estimate"); a run's drain is included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyomo.environ as pyo

from qlm_planner.cost.order_cost import FAR_S
from qlm_planner.exact.solver import Scenario
from qlm_planner.search.group_cost import FIRST_SHARE, POINTS, STEP_SHARE, front_cost, opening
from qlm_planner.search.packing import DEADLINE, REQUESTS, SPREAD, Packed
from qlm_planner.search.problem import Floats, Orders, Problem

SHARES = tuple(FIRST_SHARE + STEP_SHARE * number for number in range(POINTS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A Pyomo model and the meaning of its variables. `seats`: (group, queue, position)."""

    model: pyo.ConcreteModel
    queues: int
    seats: Sequence[tuple[int, int, int]]

    def orders(self) -> Orders:
        """The orders of the variables' values."""
        found: list[dict[int, int]] = [{} for _ in range(self.queues)]
        for group, queue, position in self.seats:
            if pyo.value(self.model.x[group, queue, position]) > 0.5:
                found[queue][position] = group
        return Orders.of([[group for _, group in sorted(queue.items())] for queue in found])


@dataclass(slots=True, kw_only=True, eq=False)
class _Builder:
    problem: Problem
    packed: Packed
    positions: int
    horizon_s: float
    model: pyo.ConcreteModel

    def __post_init__(self) -> None:
        self.model.x = pyo.Var(self.seats(), domain=pyo.Binary)
        places = range(self.problem.queues), range(1, self.positions), range(self.problem.models)
        self.model.s = pyo.Var(*places, bounds=(0.0, 1.0))
        self.model.rules = pyo.ConstraintList()

    def groups(self, queue: int) -> list[int]:
        return np.flatnonzero(self.packed.serves[self.packed.kind[queue]]).tolist()

    def seats(self) -> list[tuple[int, int, int]]:
        return [
            (group, queue, position)
            for queue in range(self.problem.queues)
            for group in self.groups(queue)
            for position in range(self.positions)
        ]

    def at(self, queue: int, position: int, weights: Mapping[int, float] | None = None) -> pyo.Expression:
        """The weighted sum over the groups at a position."""
        return sum(
            (1.0 if weights is None else weights.get(group, 0.0)) * self.model.x[group, queue, position] for group in self.groups(queue)
        )

    def assign(self) -> None:
        """Adds equations 6 and 9, bands, and positions without gaps."""
        rules, packed = self.model.rules, self.packed
        for group in np.flatnonzero(packed.serves[packed.kind].any(axis=0)).tolist():
            rules.add(sum(self.model.x[seat] for seat in self.seats() if seat[0] == group) == 1)
        for queue in range(self.problem.queues):
            groups = self.groups(queue)
            if not groups:
                continue
            rules.add(self.at(queue, 0) <= 1)
            for position in range(1, self.positions):
                rules.add(self.at(queue, position) <= self.at(queue, position - 1))
                for band in sorted({int(packed.band[group]) for group in groups})[1:]:
                    high = {group: 1.0 for group in groups if packed.band[group] >= band}
                    low = {group: 1.0 for group in groups if packed.band[group] < band}
                    rules.add(self.at(queue, position - 1, high) + self.at(queue, position, low) <= 1)
                for model in {int(packed.model[group]) for group in groups}:
                    own = {group: 1.0 for group in groups if packed.model[group] == model}
                    here, before = self.at(queue, position, own), self.at(queue, position - 1, own)
                    rules.add(self.model.s[queue, position, model] >= here - before)

    def switch(self, queue: int, position: int) -> pyo.Expression:
        models = {int(self.packed.model[group]) for group in self.groups(queue)}
        return sum(self.model.s[queue, position, model] for model in models)

    def swap_s(self, queue: int, position: int) -> pyo.Expression:
        models = {int(self.packed.model[group]) for group in self.groups(queue)}
        return sum(float(self.packed.swap[queue, model]) * self.model.s[queue, position, model] for model in models)

    def front(self) -> pyo.Expression:
        """Costs of swaps and openings."""
        packed, weights = self.packed, self.problem.weights
        cost = 0.0
        for queue in range(self.problem.queues):
            groups = self.groups(queue)
            first = {}
            for group in groups:
                _, _, _, _, swap_s, evicts = opening(packed, queue, group)
                first[group] = front_cost(packed, queue, group, swap_s, evicts)
            if groups:
                cost += self.at(queue, 0, first)
                cost += weights.work * sum(self.swap_s(queue, position) for position in range(1, self.positions))
        return cost

    def starts(self, name: str, scenario: Scenario) -> pyo.Var:
        """Adds equation 10; returns a lower bound of each group's first start."""
        packed, rules, positions = self.packed, self.model.rules, self.positions
        start = pyo.Var(range(self.problem.queues), range(positions), bounds=(0.0, self.horizon_s))
        of_group = pyo.Var(range(self.problem.groups), bounds=(0.0, self.horizon_s))
        self.model.add_component(f"start_{name}", start)
        self.model.add_component(f"of_group_{name}", of_group)
        work_s = finite(scenario.work_s)
        for queue in range(self.problem.queues):
            groups, kind = self.groups(queue), int(packed.kind[queue])
            if not groups:
                continue
            opened = {group: opening(packed, queue, group) for group in groups}
            rules.add(start[queue, 0] >= self.at(queue, 0, {group: times[0] for group, times in opened.items()}))
            drains = {group: float(self.problem.drain_s[kind, group]) for group in groups}
            works = {group: float(work_s[kind, group]) for group in groups}
            longest_s = max(drains.values())
            busy = self.at(queue, 0, {group: times[3] for group, times in opened.items()})
            busy_max_s = max(times[3] for times in opened.values())
            for position in range(1, positions):
                ended = start[queue, position - 1] + self.at(queue, position - 1, works)
                rules.add(start[queue, position] >= ended)
                switch, swap_s = self.switch(queue, position), self.swap_s(queue, position)
                rules.add(start[queue, position] >= ended + self.at(queue, position - 1, drains) + swap_s - longest_s * (1.0 - switch))
                rules.add(start[queue, position] >= busy + swap_s - busy_max_s * (1.0 - switch))
            for group in groups:
                for position in range(positions):
                    rules.add(of_group[group] >= start[queue, position] - self.horizon_s * (1.0 - self.model.x[group, queue, position]))
        return of_group

    def seated(self, group: int, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> pyo.Expression:
        """A figure [K, G] of the group, on its kind."""
        kinds = self.packed.kind
        return sum(float(values[kinds[seat[1]], seat[0]]) * self.model.x[seat] for seat in self.seats() if seat[0] == group)

    def waiting(self, name: str, scenario: Scenario) -> pyo.Expression:
        """Costs of the groups in a scenario: lateness, tardiness, completion."""
        packed, rules, weights = self.packed, self.model.rules, self.problem.weights
        start = self.starts(name, scenario)
        groups = np.flatnonzero(packed.serves[packed.kind].any(axis=0)).tolist()
        over = pyo.Var(groups, range(POINTS), bounds=(0.0, None))
        late = pyo.Var(groups, range(POINTS), domain=pyo.Binary)
        for part, variable in (("over", over), ("late", late)):
            self.model.add_component(f"{part}_{name}", variable)
        cost = 0.0
        for group in groups:
            requests, deadline_s, spread_s = (float(packed.group[group, column]) for column in (REQUESTS, DEADLINE, SPREAD))
            own, work = self.seated(group, finite(scenario.own_s)), self.seated(group, finite(scenario.work_s))
            cost += scenario.share * weights.completion * requests * (start[group] + own + 0.5 * work)
            if deadline_s >= FAR_S:
                continue
            for point, share in enumerate(SHARES):
                gap = start[group] + own + share * work - deadline_s - share * spread_s
                rules.add(over[group, point] >= gap)
                cost += scenario.share * weights.tardiness * requests / POINTS * over[group, point]
                if scenario.late_share > 0.0:
                    rules.add(gap <= (2.0 * self.horizon_s + max(0.0, -deadline_s)) * late[group, point])
                    cost += scenario.late_share * weights.late * requests / POINTS * late[group, point]
        return cost


def program_of(problem: Problem, packed: Packed, scenarios: Sequence[Scenario], positions: int) -> Program:
    """The program of a problem, with a number of positions on each queue."""
    horizon_s = _horizon_s(problem, packed)
    builder = _Builder(problem=problem, packed=packed, positions=positions, horizon_s=horizon_s, model=pyo.ConcreteModel())
    builder.assign()
    cost = builder.front() + sum(builder.waiting(str(number), scenario) for number, scenario in enumerate(scenarios))
    builder.model.cost = pyo.Objective(expr=cost, sense=pyo.minimize)
    return Program(model=builder.model, queues=problem.queues, seats=builder.seats())


def _horizon_s(problem: Problem, packed: Packed) -> float:
    """Latest start: all groups on one queue, each with a swap, and three deviations longer."""
    work = finite(problem.work_s + 3.0 * np.sqrt(problem.work_variance)).max(axis=0) + finite(problem.drain_s).max(axis=0)
    swaps = np.where(packed.swap < FAR_S, packed.swap, 0.0).max() if packed.swap.size else 0.0
    own = finite(problem.own_s + 3.0 * np.sqrt(problem.own_variance)).max(initial=0.0)
    return float(work.sum() + (problem.groups + 1) * swaps + problem.drain_lead_s.max() + problem.lead_s.max() + own + 1.0)


def finite(values: Floats) -> Floats:
    """Values with zeros where a kind cannot serve a group."""
    return np.where(np.isfinite(values), values, 0.0) if not math.isfinite(float(values.sum())) else values
