"""Plays a load forward on a fleet, in steps of time, with requests as a fluid: how many would end in time.

An instance has seats, as many as the class that asks has on it. A request takes one until its output is made; the more sit, the longer
each step (QLM section 6). Who sits next is decided by band and deadline inside the active model. An instance whose model has nothing
waiting takes one that no other serves in time; one whose model is busy gives way only to a model whose first request would else be late.
Before a swap what runs ends. That is the plan in outline, at a cost that does not grow with requests.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qlm_planner.advice.late_share import late_share
from qlm_planner.advice.question import Member, Question, ServedClass

HORIZON_S = 300.0
"""So far ahead requests come."""

SETTLE_S = 60.0
"""What is due sooner does not count: no instance that is added now helps it."""

STEPS_MAX = 600
"""Steps of time up to the horizon; as many again until all has ended, or what is left ends in full batches."""

LITTLE = 1e-6
"""Requests that are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`attainment`: share in time of all that are due after SETTLE_S. `late`: requests by class. `used_s`: seat-seconds by member."""

    attainment: float
    late: tuple[float, ...]
    used_s: tuple[float, ...]


@dataclass(slots=True)
class _Engine:
    """`free_at_s`: when its swap ends. `leaving`: for which model it ends what runs. `cohorts`: (end, seats, requests)."""

    member: Member
    model: str
    loaded: set[str]
    free_at_s: float = 0.0
    leaving: str = ""
    taken: float = 0.0
    sequences: float = 0.0
    used_s: float = 0.0
    cohorts: deque[tuple[float, float, float]] = field(default_factory=deque)

    def leave(self, now_s: float) -> None:
        """Those that have ended give their seats back."""
        while self.cohorts and self.cohorts[0][0] <= now_s:
            _, seats, count = self.cohorts.popleft()
            self.taken -= seats
            self.sequences -= count
        if not self.cohorts:
            self.taken = self.sequences = 0.0

    def sit(self, end_s: float, seats: float, count: float) -> None:
        # Ends come nearly in order: one that is earlier than the last leaves with it at the latest a step too late.
        at = len(self.cohorts)
        while at and self.cohorts[at - 1][0] > end_s:
            at -= 1
        self.cohorts.insert(at, (end_s, seats, count))
        self.taken += seats
        self.sequences += count


@dataclass(slots=True)
class _Supply:
    """Of all that have a model, or are about to: requests that they begin in a second, free seats, and seconds until the first is there."""

    per_s: float = 0.0
    seats: float = 0.0
    begin_s: float = math.inf


class _Play:
    """One run."""

    def __init__(self, question: Question, fleet: Sequence[Member]) -> None:
        self.question = question
        self.horizon_s = HORIZON_S / question.clock
        self.settle_s = SETTLE_S / question.clock
        self.step_s = self.horizon_s / STEPS_MAX
        self.engines = [_Engine(member=each, model=each.active_model, loaded={each.active_model, *each.warm_models}) for each in fleet]
        # Of each class: (due in seconds from now, requests).
        self.waiting: list[deque[tuple[float, float]]] = [deque() for _ in question.classes]
        self.amounts = [0.0] * len(question.classes)
        self.late = [0.0] * len(question.classes)
        self.counted = 0.0
        self.now_s = 0.0
        self.supplies: dict[str, _Supply] = {}
        self.full: dict[tuple[int, str], tuple[float, float] | None] = {}
        self.order = sorted(range(len(question.classes)), key=lambda c: (question.classes[c].band, c))
        self.of_model: dict[str, list[int]] = {}
        for number in self.order:
            self.of_model.setdefault(question.classes[number].model, []).append(number)

    def result(self, pause: Callable[[], None]) -> Forecast:
        for number, load in enumerate(self.question.classes):
            for count, due_s in sorted(load.backlog, key=lambda each: each[1]):
                self._come(number, due_s, count)
        for engine in self.engines:
            if engine.member.busy > 0.0 and engine.member.left_s > 0.0:
                self._seat_what_runs(engine)
        last_due_s = self.horizon_s + max((load.slo_s for load in self.question.classes if load.slo_s < math.inf), default=0.0)
        for step in range(2 * STEPS_MAX):
            pause()
            self.now_s = step * self.step_s
            if step < STEPS_MAX:
                for number, load in enumerate(self.question.classes):
                    if load.per_s > 0.0:
                        self._come(number, self.now_s + load.slo_s, load.per_s * self.step_s)
            elif self.now_s > last_due_s or not any(amount > LITTLE for amount in self.amounts):
                break
            self._serve()
        self._end_what_waits()
        return Forecast(
            attainment=max(0.0, 1.0 - sum(self.late) / self.counted) if self.counted > 0.0 else 1.0,
            late=tuple(self.late),
            used_s=tuple(engine.used_s for engine in self.engines),
        )

    def _end_what_waits(self) -> None:
        """What waits when the play is over may be due long after. The engines that can serve it go on with full batches and without swaps,
        the first due first."""
        free_s: dict[int, list[float]] = {}
        for engine in self.engines:
            free_s.setdefault(engine.member.kind, []).append(max(self.now_s, engine.free_at_s))
        for heap in free_s.values():
            heapq.heapify(heap)
        classes, kinds = self.question.classes, self.question.kinds
        left = sorted((classes[number].band, due_s, number, count) for number, queue in enumerate(self.waiting) for due_s, count in queue)
        for _, due_s, number, count in left:
            able = [(heap[0], kind, served) for kind, heap in free_s.items() if (served := kinds[kind].served[number]) is not None]
            if not able:
                self._end(number, count, due_s, math.inf, math.inf, 0.0)
                continue
            begin_s, kind, served = min(able, key=lambda each: each[:2])
            stay_s, first_token = served.stay_s(served.seats), classes[number].first_token
            end_s = begin_s + count * stay_s / served.seats
            heapq.heapreplace(free_s[kind], end_s)
            own_s = served.first_s if first_token else stay_s
            deviation_s = 0.0 if first_token else served.deviation_s(served.seats)
            self._end(number, count, due_s, begin_s + own_s, end_s + own_s, deviation_s)

    def _come(self, number: int, due_s: float, count: float) -> None:
        self.waiting[number].append((due_s, count))
        self.amounts[number] += count
        if due_s >= self.settle_s and due_s < math.inf:
            self.counted += count

    def _seat_what_runs(self, engine: _Engine) -> None:
        """It ends evenly until the last."""
        seats = 1.0
        for number in self.of_model.get(engine.model, ()):
            served = self._served(engine, number)
            seats = max(seats, served.seats if served else 1.0)
        for part in range(1, 5):
            engine.sit(engine.member.left_s * part / 4, engine.member.busy / 4, engine.member.busy * seats / 4)

    def _served(self, engine: _Engine, number: int) -> ServedClass | None:
        return self.question.kinds[engine.member.kind].served[number]

    # One step ---------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        for engine in self.engines:
            engine.leave(self.now_s)
        if len(self.of_model) > 1 or any(engine.model not in self.of_model for engine in self.engines):
            self.supplies.clear()
            for engine in self.engines:
                self._supply(engine, engine.leaving or engine.model, 1.0)
            for engine in sorted(self.engines, key=lambda each: each.taken):
                self._choose_model(engine)
        ready = [each for each in self.engines if each.model and not each.leaving and each.free_at_s <= self.now_s]
        for model, numbers in self.of_model.items():
            active = sorted((each for each in ready if each.model == model), key=lambda each: each.taken)
            # An even share each, then what is left to whoever has seats.
            for rounds in (len(active), 1):
                for place, engine in enumerate(active):
                    self._admit(engine, numbers, 1.0 / max(1, rounds - place) if rounds > 1 else 1.0)
        for engine in self.engines:
            engine.used_s += min(1.0, engine.taken) * self.step_s

    def _admit(self, engine: _Engine, numbers: Sequence[int], share: float) -> None:
        order = sorted(
            (number for number in numbers if self.amounts[number] > LITTLE),
            key=lambda number: (self.question.classes[number].band, self.waiting[number][0][0]),
        )
        for number in order:
            served = self._served(engine, number)
            if served is None:
                continue
            room = (1.0 - engine.taken) * served.seats
            self._seat(engine, number, served, min(room, self.amounts[number] * share))

    def _seat(self, engine: _Engine, number: int, served: ServedClass, count: float) -> None:
        if count <= LITTLE:
            return
        sequences = min(served.seats, engine.sequences + count)
        stay_s, deviation_s = served.stay_s(sequences), served.deviation_s(sequences)
        own_s = served.first_s if self.question.classes[number].first_token else stay_s
        if self.question.classes[number].first_token:
            deviation_s = 0.0
        engine.sit(self.now_s + stay_s, count / served.seats, count)
        self.amounts[number] -= count
        queue = self.waiting[number]
        while count > LITTLE and queue:
            due_s, there = queue.popleft()
            taken = min(there, count)
            count -= taken
            if there - taken > LITTLE:
                queue.appendleft((due_s, there - taken))
            self._end(number, taken, due_s, self.now_s + own_s, self.now_s + own_s + self.step_s, deviation_s)
        if not queue:
            self.amounts[number] = 0.0

    def _end(self, number: int, count: float, due_s: float, begin_s: float, end_s: float, deviation_s: float) -> None:
        if self.settle_s <= due_s < math.inf:
            self.late[number] += count * (1.0 if begin_s == math.inf else late_share(begin_s, end_s, deviation_s, due_s))

    # Models -----------------------------------------------------------------------------------------------------------

    def _choose_model(self, engine: _Engine) -> None:
        if engine.free_at_s > self.now_s:
            return
        if engine.leaving:
            if engine.taken <= LITTLE:
                self._swap(engine, engine.leaving)
            return
        wanted = self._wanted(engine)
        if wanted:
            self._supply(engine, engine.model, -1.0)
            self._supply(engine, wanted, 1.0)
            if engine.taken <= LITTLE:
                self._swap(engine, wanted)
            else:
                engine.leaving = wanted

    def _swap(self, engine: _Engine, model: str) -> None:
        served = next(each for number in self.of_model[model] if (each := self._served(engine, number)) is not None)
        engine.free_at_s = self.now_s + (served.warm_s if model in engine.loaded else served.cold_s)
        engine.loaded.add(model)
        engine.model, engine.leaving = model, ""

    def _wanted(self, engine: _Engine) -> str:
        """The model that it should swap to now, "" for none."""
        own = self._first(engine.model)
        best: tuple[tuple[int, float], str] | None = None
        for model in self.of_model:
            first = self._first(model)
            if model == engine.model or first is None:
                continue
            band, due_s, number = first
            served = self._served(engine, number)
            if served is None:
                continue
            swap_s = served.warm_s if model in engine.loaded else served.cold_s
            need_s = swap_s + served.stay_s(0.5 * served.seats)
            slack_s = due_s - self.now_s - need_s
            wait_s = self._wait_s(model)
            if wait_s < swap_s or wait_s + need_s - swap_s < due_s - self.now_s:
                continue  # others serve it soon, or in time
            if own is not None and (own[0], own[1]) <= (band, due_s) and own[0] <= band:
                continue  # its own are more urgent
            if own is not None and own[0] == band and slack_s > swap_s:
                continue  # it can wait while there is work that needs no swap
            if best is None or (band, due_s) < best[0]:
                best = ((band, due_s), model)
        return "" if best is None else best[1]

    def _first(self, model: str) -> tuple[int, float, int] | None:
        """Band, deadline and class of the most urgent request of a model that waits."""
        found = [
            (self.question.classes[number].band, self.waiting[number][0][0], number)
            for number in self.of_model.get(model, ())
            if self.amounts[number] > LITTLE
        ]
        return min(found, default=None)

    def _wait_s(self, model: str) -> float:
        """Until all that waits of a model would have begun on those that have it, or are about to."""
        supply = self.supplies.get(model)
        if supply is None or supply.per_s <= LITTLE:
            return math.inf
        ahead = max(0.0, sum(self.amounts[number] for number in self.of_model[model]) - supply.seats)
        return supply.begin_s + ahead / supply.per_s

    def _supply(self, engine: _Engine, model: str, sign: float) -> None:
        """Adds an engine to those that have a model, or takes it from them."""
        full = self._full(engine.member.kind, model)
        if full is None:
            return
        seats, per_s = full
        supply = self.supplies.setdefault(model, _Supply())
        supply.per_s += sign * per_s
        supply.seats += sign * (1.0 - engine.taken) * seats
        if sign > 0.0:
            supply.begin_s = min(supply.begin_s, max(0.0, engine.free_at_s - self.now_s))

    def _full(self, kind: int, model: str) -> tuple[float, float] | None:
        """Seats of a kind of instance for a model, and the requests that a full one begins in a second; None where it cannot serve it."""
        if (kind, model) not in self.full:
            served = next((each for c in self.of_model.get(model, ()) if (each := self.question.kinds[kind].served[c]) is not None), None)
            self.full[kind, model] = None if served is None else (served.seats, served.seats / served.stay_s(served.seats))
        return self.full[kind, model]


def forecast(question: Question, fleet: Sequence[Member], pause: Callable[[], None] = lambda: None) -> Forecast:
    """What would become of the load on this fleet. Costs O(steps x (instances + classes) x models). `pause` is called at every step."""
    return _Play(question, fleet).result(pause)
