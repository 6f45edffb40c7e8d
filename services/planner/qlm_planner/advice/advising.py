"""The smallest fleet that is enough, by forecasts: instances to add, of each kind, and instances that could go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qlm_planner.advice.forecast import Forecast, forecast
from qlm_planner.advice.question import Member, Miss, Question

SHARE = 0.99
"""Attainment that is enough."""

ADDED_MAX = 64
"""Most instances of one kind that are advised; beyond it the advice says that they are not enough."""

SAME = 1e-3
"""A difference in attainment that is none."""

HOPEFUL_MIN = 8
"""So many are tried in any case: a load of far more than the fleet serves shows nothing of the first ones."""


class AdviceFailedError(Exception):
    """There is no advice; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """So many more instances of one kind. `attainment`: expected with them; `enough`: that is the share asked for, or as much as any
    number of them gives."""

    gpu: str
    n_gpu: int
    models: tuple[str, ...]
    instances: int
    attainment: float
    enough: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`late`: requests that the plan expects to be late, `misses` the worst groups; `unserved`: requests that no instance serves.
    `attainment`: expected of the fleet as it is. `options`: the best first; none where it is enough. `spare`: instances that could go.
    `model`: the one that is late most, "" for none."""

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
        """In one line, for people."""
        if self.options:
            best = self.options[0]
            what = f"{best.instances} more {best.gpu}" + (f" x{best.n_gpu}" if best.n_gpu > 1 else "")
            asked = f"add {what}" if best.enough else f"{what} would not be enough"
            whom = f", {self.model} most" if self.model else ""
            return f"{asked}: {self.attainment:.0%} in time now, {best.attainment:.0%} then{whom}"
        if self.unserved and not self.spare:
            return f"{self.unserved} requests wait for a model that no known GPU serves"
        if self.spare:
            return f"{len(self.spare)} of the instances could go: {', '.join(self.spare[:4])}"
        return "the instances are enough"


Play = Callable[[Question, Sequence[Member]], Forecast]
"""`forecast`, or the same with pauses."""


def advise(question: Question, share: float = SHARE, play: Play = forecast) -> Advice:
    """Costs a bounded number of forecasts: about 2 log2(ADDED_MAX) for each kind."""
    base = play(question, question.fleet)
    late = dict.fromkeys((load.model for load in question.classes), 0.0)
    for load, count in zip(question.classes, base.late, strict=True):
        late[load.model] += count
    worst = max(late, key=lambda model: (late[model], model), default="")
    options: list[Option] = []
    spare: tuple[str, ...] = ()
    if base.attainment < share or question.unserved:
        options = _options(question, base, share, play)
    elif question.fleet:
        spare = _spare(question, base, share, play)
    return Advice(
        made_s=question.made_s,
        attainment=base.attainment,
        late=question.late,
        unserved=question.unserved,
        misses=question.misses,
        options=tuple(options),
        model=worst if late.get(worst, 0.0) > 0.0 else "",
        spare=spare,
    )


def _options(question: Question, base: Forecast, share: float, play: Play) -> list[Option]:
    """The best first. Where the SLOs are met but for models that nobody serves, only kinds that serve one of them."""
    missing = _unserved(question, question.fleet)
    found: list[tuple[int, Option]] = []
    for number, kind in enumerate(question.kinds):
        left = sum(kind.served[each] is None for each in missing)
        if base.attainment < share or left < len(missing):
            option = _option(question, number, base, share, play)
            found += [] if option is None else [(left, option)]
    # Kinds are in order: of two that cost as many GPUs, the one that serves here already.
    found.sort(key=lambda each: (not each[1].enough, each[0], each[1].instances * each[1].n_gpu))
    return [option for _, option in found]


def _unserved(question: Question, fleet: Sequence[Member]) -> frozenset[int]:
    """The classes that nobody of a fleet serves."""
    kinds = {member.kind for member in fleet}
    return frozenset(
        number for number in range(len(question.classes)) if all(question.kinds[kind].served[number] is None for kind in kinds)
    )


def _models(question: Question, fleet: Sequence[Member]) -> frozenset[str]:
    """The models that a fleet serves."""
    return frozenset(model for kind in {member.kind for member in fleet} for model in question.kinds[kind].models)


def _option(question: Question, kind: int, base: Forecast, share: float, play: Play) -> Option | None:
    """The fewest instances of a kind that are enough; None where more of it change nothing."""
    seen: dict[int, float] = {0: base.attainment}

    def reaches(count: int) -> float:
        if count not in seen:
            added = [Member(name=f"+{number}", kind=kind) for number in range(count)]
            seen[count] = play(question, (*question.fleet, *added)).attainment
        return seen[count]

    count = _fewest(
        lambda number: reaches(number) >= share, ADDED_MAX, lambda low, high: high < HOPEFUL_MIN or reaches(high) > reaches(low) + SAME
    )
    enough = count is not None
    if count is None:
        # More of them do not reach it: outputs that are too long for their SLO stay late. As many as help.
        most = max(seen.values())
        count = min(number for number, value in seen.items() if value >= most - SAME)
    if count == 0:
        return None
    each = question.kinds[kind]
    return Option(gpu=each.gpu, n_gpu=each.n_gpu, models=each.models, instances=count, attainment=seen[count], enough=enough)


def _fewest(enough: Callable[[int], bool], most: int, hopeful: Callable[[int, int], bool] = lambda low, high: True) -> int | None:
    """The least number from 1 to `most` that is enough, taken as monotone: doubling, then bisection. None where `most` is not, or where
    (not `hopeful`) twice as many changed nothing."""
    low, high = 0, 1
    while not enough(high):
        if high >= most or not hopeful(low, high):
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _spare(question: Question, base: Forecast, share: float, play: Play) -> tuple[str, ...]:
    """Instances without which the rest would still be enough, and would serve every model, also one that nobody asks for now: the least
    used go first."""
    fleet = question.fleet
    served = _models(question, fleet)
    alone = {at for at in range(len(fleet)) if _models(question, [*fleet[:at], *fleet[at + 1 :]]) != served}
    order = sorted(range(len(fleet)), key=lambda at: (at in alone, base.used_s[at], fleet[at].name))

    def too_few(gone: int) -> bool:
        left = set(order[gone:])
        rest = [member for at, member in enumerate(fleet) if at in left]
        return _models(question, rest) != served or play(question, rest).attainment < share

    first = _fewest(too_few, len(order))
    gone = len(order) if first is None else first - 1
    return tuple(sorted(question.fleet[at].name for at in order[:gone]))
