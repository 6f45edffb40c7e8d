"""Advises on the smallest sufficient fleet, by the cost of orders: instances to add, of each kind, and spare instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr

from qlm_planner.cost.service_times import Floats
from qlm_planner.overload.advice_question import Miss, Question
from qlm_planner.search.problem import FIELDS, Integers, Problem

SHARE = 0.99
"""Sufficient attainment."""
ADDED_MAX = 64
"""Most instances of one kind that are advised; the advice says if they are not enough."""
SAME = 1e-3
"""Differences in attainment below this are ignored."""
MISSES_MAX = 100
"""Most groups named as expected misses, those with the most late requests."""
LATE_MIN = 0.5
"""Expected late requests from which a group is named and a plan misses SLOs."""


class AdviceFailedError(Exception):
    """There is no advice; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Instances of one kind to add. `attainment`: expected with them; `enough`: it reaches the sufficient share, or the most that any
    number of them reaches."""

    gpu: str
    n_gpu: int
    models: tuple[str, ...]
    instances: int
    attainment: float
    enough: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`late`: expected late requests of the plan, `misses` its worst groups; `unserved`: requests without an instance. `attainment`:
    expected of the present fleet. `options`: best first; none if the fleet is enough. `spare`: instances that could be removed. `model`:
    with the most late requests, "" for none."""

    made_s: float
    attainment: float
    late: float
    unserved: int
    misses: tuple[Miss, ...]
    options: tuple[Option, ...]
    model: str
    spare: tuple[str, ...]

    @property
    def line(self) -> str:
        """The advice in one line, for people."""
        if self.options:
            best = self.options[0]
            more = f"{best.instances} more {best.gpu}" + (f" x{best.n_gpu}" if best.n_gpu > 1 else "")
            advised = f"add {more}" if best.enough else f"{more} would not be enough"
            model = f", {self.model} most" if self.model else ""
            return f"{advised}: {self.attainment:.0%} in time now, {best.attainment:.0%} then{model}"
        if self.unserved and not self.spare:
            return f"{self.unserved} requests wait for a model that no known GPU serves"
        if self.spare:
            return f"{len(self.spare)} of the instances could go: {', '.join(self.spare[:4])}"
        return "the instances are enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetForecast:
    """Forecast of a fleet. `attainment`: share in time of the counted requests. `late`: of them, by model. `used_s`: by queue."""

    attainment: float
    late: Floats
    used_s: Floats


Measure = Callable[[Question, Sequence[int]], FleetForecast]
"""`forecast`, perhaps with pauses."""


def forecast(question: Question, fleet: Sequence[int]) -> FleetForecast:
    """Forecasts the constructed orders on some of the question's queues; a queue may occur several times."""
    from qlm_planner.search.solver import construct, group_lateness  # local: it loads the compiler

    if question.problem is None:
        return FleetForecast(attainment=1.0, late=np.zeros(0), used_s=np.zeros(len(fleet)))
    share, used_s, late = np.ones(len(question.due)), np.zeros(len(fleet)), np.zeros(question.problem.models)
    if fleet:
        problem = _on(question.problem, np.asarray(fleet, dtype=np.int32))
        orders = construct(problem).orders
        queue, groups = np.repeat(np.arange(len(fleet), dtype=np.int32), np.diff(orders.first)), orders.groups
        np.add.at(used_s, queue, problem.work_s[problem.kind[queue], groups])
        share = group_lateness(problem, orders)[:, 0]
        share[groups] = np.maximum(share[groups], _longer(question, problem, queue, groups, used_s))
    np.add.at(late, question.problem.model, question.due * share)
    attainment = max(0.0, 1.0 - float(late.sum()) / max(float(question.due.sum()), 1e-9))
    return FleetForecast(attainment=attainment, late=late, used_s=used_s)


def _longer(question: Question, problem: Problem, queue: Integers, groups: Integers, used_s: Floats) -> Floats:
    """Share of each group's requests that run longer than their SLO (orders may start them before they arrive). At a load u a batch holds x
    of its sequences, with x = u stay(x) / stay(1) (Little's law) and a stay that grows linearly with x."""
    at = (problem.kind[queue], groups)
    full_s, load = np.maximum(problem.own_s[at], 1e-9), np.minimum(used_s[queue] / question.horizon_s, 1.0)
    alone = np.clip(question.alone_s[at] / full_s, 1e-9, 1.0)
    run_s = full_s * alone / (1.0 - load * (1.0 - alone))
    longer: Floats = ndtr((run_s - problem.slo_s[groups]) / np.maximum(np.sqrt(problem.own_variance[at]), 1e-9))
    return longer


def _on(problem: Problem, queues: Integers) -> Problem:
    """The same groups on other queues, without waiting heads."""
    arrays = {name: getattr(problem, name)[queues] for name, (shape, _, _) in FIELDS.items() if shape[0] == "q"}
    return replace(problem, **arrays)


def advise(question: Question, share: float = SHARE, measure: Measure = forecast) -> Advice:
    """The advice. Measures a bounded number of fleets: about 2 log2(ADDED_MAX) of each kind."""
    base = measure(question, range(question.size))
    misses, late = _misses(question)
    short = base.attainment < share or question.unserved > 0
    return Advice(
        made_s=question.made_s,
        attainment=base.attainment,
        late=late,
        unserved=question.unserved,
        misses=misses,
        options=_options(question, base, share, measure) if short else (),
        model=question.models[int(base.late.argmax())] if base.late.max(initial=0.0) >= LATE_MIN else "",
        spare=() if short else _spare(question, base, share, measure),
    )


def _misses(question: Question) -> tuple[tuple[Miss, ...], float]:
    """The groups that the plan expects to be late, worst first, and all its expected late requests, without answered and unserved ones."""
    from qlm_planner.search.solver import group_lateness  # local: it loads the compiler

    if question.problem is None or not question.waiting:
        return (), 0.0
    each = group_lateness(question.problem, question.orders)[: len(question.waiting)]
    share, over_s = np.where(np.isfinite(each[:, 1:]), each, 0.0).T
    late = share * question.liable
    worst = sorted(np.flatnonzero(late >= LATE_MIN).tolist(), key=lambda at: (-late[at], question.waiting[at].group_id))[:MISSES_MAX]
    found = tuple(replace(question.waiting[at], late=float(late[at]), over_s=max(0.0, float(over_s[at]))) for at in worst)
    return found, float(late.sum())


def _models(question: Question, fleet: Sequence[int]) -> frozenset[str]:
    """Models that a fleet serves."""
    return frozenset(model for at in fleet for model in question.members[at].models)


def _options(question: Question, base: FleetForecast, share: float, measure: Measure) -> tuple[Option, ...]:
    """Options, best first. Where only unserved models miss SLOs, only kinds that serve one of them."""
    missing = {*question.models} - _models(question, range(question.size))
    found: list[tuple[int, Option]] = []
    for kind in range(question.size, len(question.members)):
        left = len(missing - _models(question, [kind]))
        if base.attainment < share or left < len(missing):
            option = _option(question, kind, base, share, measure)
            found += [] if option is None else [(left, option)]
    # Kinds are sorted: of two that cost as many GPUs, the one that already serves is first.
    found.sort(key=lambda each: (not each[1].enough, each[0], each[1].instances * each[1].n_gpu))
    return tuple(option for _, option in found)


def _option(question: Question, kind: int, base: FleetForecast, share: float, measure: Measure) -> Option | None:
    """The fewest sufficient instances of a kind; None if more of it change nothing."""
    seen: dict[int, float] = {0: base.attainment}

    def reaches(count: int) -> float:
        if count not in seen:
            seen[count] = measure(question, [*range(question.size), *[kind] * count]).attainment
        return seen[count]

    count = _fewest(lambda number: reaches(number) >= share, ADDED_MAX)
    enough = count is not None
    if count is None:
        # Outputs that are too long for their SLO stay late: as many instances as help.
        most = max(seen.values())
        count = min(number for number, value in seen.items() if value >= most - SAME)
    if count == 0:
        return None
    each = question.members[kind]
    return Option(gpu=each.gpu, n_gpu=each.n_gpu, models=each.models, instances=count, attainment=seen[count], enough=enough)


def _fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """The least sufficient number from 1 to `most`, by doubling and bisection (taken as monotone); None if `most` is not."""
    low, high = 0, 1
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _spare(question: Question, base: FleetForecast, share: float, measure: Measure) -> tuple[str, ...]:
    """Instances without which the others still suffice and serve every model, also without present demand: the least used first."""
    fleet, members = range(question.size), question.members
    served = _models(question, fleet)
    alone = {at for at in fleet if _models(question, [other for other in fleet if other != at]) != served}
    order = sorted(fleet, key=lambda at: (at in alone, base.used_s[at], members[at].name))

    def too_few(gone: int) -> bool:
        rest = sorted(order[gone:])
        return _models(question, rest) != served or measure(question, rest).attainment < share

    first = _fewest(too_few, len(order)) if order else 1
    return tuple(sorted(members[at].name for at in order[: len(order) if first is None else first - 1]))
