"""What is expected of all virtual queues as they are ordered now: which groups will have how many late requests, when a request at any
place starts and ends, and what a new request would find.

On one profile snapshot. A queue that changed costs O(its groups). A request at a known place, and a new one that joins a group, cost O(1),
on arrays less than a microsecond; a new one that would be a group of its own costs a pass over the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from qlm_core.calibration import CalibrationProfile
from qlm_core.errors import Unavailable
from qlm_core.model import ModelSpec
from qlm_core.new_request import calibration_of, place_new, predict_new, prediction_of
from qlm_core.normal_arrays import Floats
from qlm_core.planned_waits import WaitCurve
from qlm_core.prediction_service import ServiceFigures
from qlm_core.prediction_views import GroupView, QueueView, RequestPrediction
from qlm_core.profile import ProfileSnapshot
from qlm_core.queue_columns import SERVICE, QueueGroups, together
from qlm_core.queue_model import Integers
from qlm_core.queue_reader import QueueReader
from qlm_core.queue_times import queue_times
from qlm_core.request_times import TABLE_ROWS, Calibrations, RequestTable, RequestTimes, lateness


class Assessment:
    """Keeps what was worked out of each queue until that queue changes. Queues that hold a group without a profile of its model there are
    in `unpredictable`, and nothing else is said of them."""

    def __init__(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot, views: Iterable[QueueView] = ()) -> None:
        """Costs O(groups of `views`)."""
        self.profiles = profiles
        self._reader = QueueReader(catalogue, profiles)
        self._calibrated = {row.instance for row in profiles.calibration.rows}
        every = list(views)
        kept, self._groups = self._reader.read(every)
        self._views = {view.instance.name: view for view in kept}
        self.unpredictable = {view.instance.name for view in every} - self._views.keys()
        self._worked_out: RequestTable | None = None
        self._late: tuple[float, Floats, Floats] | None = None
        # By group the queue and the place on it, and by queue how many requests are before each of its groups; made when first asked for.
        self._place_of: dict[str, tuple[str, int]] | None = None
        self._before: dict[str, list[int]] = {}
        self._numbered()

    @property
    def instances(self) -> tuple[str, ...]:
        """The queues that are predicted, in the order of their numbers."""
        return tuple(self._views)

    @property
    def table(self) -> RequestTable:
        """What single requests are predicted from. The number of a group is `first[queue]` + its place on the queue. Costs O(groups) when
        it is first asked for."""
        if self._worked_out is None:
            self._worked_out = self._work_out(list(self._views.values()), self._groups)
        return self._worked_out

    @property
    def first(self) -> Integers:
        """[queues + 1]: the number of each queue's first group, and of all groups."""
        return self._groups.first

    # Changing ---------------------------------------------------------------------------------------------------------

    def update(self, view: QueueView) -> None:
        """A queue as it is now, new or changed. Costs O(its groups)."""
        name = view.instance.name
        try:
            groups = self._reader.read_one(view)
        except Unavailable:
            self.remove(name)
            self.unpredictable.add(name)
            return
        self.unpredictable.discard(name)
        known = self._index.get(name)
        begin, end = (len(self._index), len(self._index)) if known is None else (known, known + 1)
        self._leave(name)
        self._views[name] = view
        self._enter(view)
        self._replace(begin, end, [view], groups)

    def remove(self, instance: str) -> None:
        """A queue that is there no more."""
        self.unpredictable.discard(instance)
        number = self._index.get(instance)
        if number is not None:
            self._leave(instance)
            del self._views[instance]
            self._replace(number, number + 1, [], self._groups.queues(0, 0))

    def _leave(self, instance: str) -> None:
        """Forgets the places on a queue; a group that is on another by now keeps that."""
        self._before.pop(instance, None)
        view = self._views.get(instance)
        if self._place_of is None or view is None:
            return
        for group in view.groups:
            if self._place_of.get(group.group_id, ("", 0))[0] == instance:
                del self._place_of[group.group_id]

    def _enter(self, view: QueueView) -> None:
        if self._place_of is not None:
            self._place_of.update((group.group_id, (view.instance.name, place)) for place, group in enumerate(view.groups))

    def _replace(self, begin: int, end: int, views: Sequence[QueueView], groups: QueueGroups) -> None:
        """Puts queues in the place of queues [begin, end)."""
        before = self._groups
        low, high = int(before.first[begin]), int(before.first[end])
        self._groups = together([before.queues(0, begin), groups, before.queues(end, len(before.first) - 1)])
        old, late = self._worked_out, self._late
        self._numbered()
        if old is None:
            return
        new = self._work_out(views, groups)
        columns = np.concatenate((old.columns[:low], new.columns, old.columns[high:]))
        self._worked_out = RequestTable(columns=columns, calibrated=old.calibrated or new.calibrated)
        if late is not None:
            fresh = lateness(new, groups.rows, late[0])
            counts, seconds = (np.concatenate((was[:low], now, was[high:])) for was, now in zip(late[1:], fresh, strict=True))
            self._late = (late[0], counts, seconds)

    def _numbered(self) -> None:
        self._index = {name: number for number, name in enumerate(self._views)}
        self._late = None

    def _work_out(self, views: Sequence[QueueView], groups: QueueGroups) -> RequestTable:
        busy = np.flatnonzero(np.diff(groups.first))
        if not len(busy):
            return RequestTable(columns=np.zeros((0, TABLE_ROWS)), calibrated=False)
        times = queue_times(groups if len(busy) == len(views) else groups.chosen(busy))
        return RequestTable.of(times, self._calibrations(views))

    def _calibrations(self, views: Sequence[QueueView]) -> Calibrations | None:
        if not self.profiles.calibration.rows:
            return None
        rows: list[tuple[CalibrationProfile, CalibrationProfile]] = []
        known: dict[tuple[str, str, int, str], int] = {}
        of: list[int] = []
        for view in views:
            facts = view.instance
            own = facts.name if facts.name in self._calibrated else ""
            number: dict[str, int] = {}
            for group in view.groups:
                model = group.model
                if model not in number:
                    key = (model, facts.gpu, facts.n_gpu, own)
                    if key not in known:
                        known[key] = len(rows)
                        rows.append(calibration_of(self.profiles, view, model))
                    number[model] = known[key]
                of.append(number[model])
        return Calibrations(rows=rows, of=np.array(of, dtype=np.int64))

    # Asking -----------------------------------------------------------------------------------------------------------

    def late(self, now_s: float) -> tuple[Floats, Floats]:
        """Expected late requests, and expected tardiness in request-seconds, of each group in the order of the numbers. `now_s`: by the
        clock that deadlines have. Costs O(groups), once for each `now_s`."""
        if self._late is None or self._late[0] != now_s:
            self._late = (now_s, *lateness(self.table, self._groups.rows, now_s))
        return self._late[1], self._late[2]

    def number_of(self, group_id: str) -> tuple[str, int] | None:
        """The instance and the number of a group; None for one that is not here."""
        if self._place_of is None:
            self._place_of = {}
            for view in self._views.values():
                self._enter(view)
        found = self._place_of.get(group_id)
        return None if found is None else (found[0], self._first(found[0]) + found[1])

    def waiting(self, group_id: str, requests_ahead: int, *, request: GroupView | None = None) -> RequestPrediction | None:
        """A request of a group with so many before it on its virtual queue; None where the group is not here. `request`: itself, as a
        group of one, where more is known of it than of its group. Costs O(1)."""
        found = self.number_of(group_id)
        if found is None:
            return None
        instance, number = found
        position = min(max(requests_ahead - self._requests_before(instance, number), 0), max(int(self._groups.count[number]) - 1, 0))
        view, model = self._views[instance], self._group(instance, number).model
        if request is None or request.model != model:
            times = self.table.times([number], [float(position)], calibrated=False)
        else:
            times = self._times_of(view, number, float(position), request)
        return prediction_of(self.profiles, view, model, times, 0, requests_ahead)

    def joining(self, group_id: str, request: GroupView) -> RequestPrediction | None:
        """A new request, as a group of one, that becomes the last of a group of its model; None where that group is not here. Who waits
        behind the group is thought to wait behind the request too. Costs O(1)."""
        found = self.number_of(group_id)
        if found is None:
            return None
        instance, number = found
        view, waiting = self._views[instance], float(self._groups.count[number])
        times = self._times_of(view, number, waiting, request)
        return prediction_of(self.profiles, view, request.model, times, 0, self._requests_before(instance, number) + int(waiting))

    def arriving(self, request: GroupView, group_id: str, now_s: float) -> RequestPrediction | None:
        """A new request that joins a group, or for "" and one that cannot be predicted, is a group of its own: `joining`, else `new`."""
        return (self.joining(group_id, request) if group_id else None) or self.new(request, now_s)

    def new(self, request: GroupView, now_s: float | None = None) -> RequestPrediction | None:
        """A new request, as a group of one (`qlm_core.new_request`), on the instance where it would end first. None where no instance that
        serves its model can be predicted. `now_s`: the clock that deadlines have, to tell where the agent would evict what runs. Costs one
        pass over the groups."""
        return predict_new(self._reader, list(self._views.values()), self._groups, request, now_s)

    def newcomer(self, request: GroupView, group_id: str, now_s: float, more: Sequence[float]) -> tuple[QueueView, int, WaitCurve] | None:
        """A new request, as a group of one, as `arriving` has it: its queue, the requests ahead of it, and the waits of those like it that
        come with `more` of them between, which begins with 0."""
        found = self.number_of(group_id) if group_id else None
        if found is not None:
            instance, number = found
            count = float(self._groups.count[number])
            curve = self.table.curve([number] * len(more), [count + each for each in more], more)
            return self._views[instance], self._requests_before(instance, number) + int(count), curve
        place = place_new(self._reader, list(self._views.values()), self._groups, request, now_s)
        if place is None:
            return None
        return place.view, place.requests_ahead, place.table.curve([place.number] * len(more), more, more)

    def queue_curve(self, instance: str, knots_max: int) -> WaitCurve | None:
        """The waits along a queue by the requests ahead, at the first and the last requests of its groups, or of some where these are
        more than `knots_max`. None for a queue that is empty or cannot be predicted."""
        view = self._views.get(instance)
        if view is None or not view.groups:
            return None
        chosen = np.unique(np.linspace(0, len(view.groups) - 1, max(1, knots_max // 2)).round().astype(np.int64))
        numbers = np.repeat(self._first(instance) + chosen, 2)
        places = np.maximum(self._groups.count[numbers] - 1.0, 0.0)
        places[::2] = 0.0
        before = np.array([self._requests_before(instance, int(number)) for number in numbers[::2]], dtype=np.float64)
        return self.table.curve(numbers, places, (np.repeat(before, 2) + places).tolist())

    def _times_of(self, view: QueueView, number: int, place: float, request: GroupView) -> RequestTimes:
        """One request at a place of a group of its model, with its own prompt and output, as the formulas have them."""
        own = ServiceFigures(*self._reader.request_rows([view], request)[SERVICE:])
        return self.table.times(
            [number],
            [place],
            prompt_tokens=[float(request.waiting_prompt_tokens)],
            output_tokens=own.output,
            output_variance=own.output_variance,
            calibrated=False,
        )

    def _first(self, instance: str) -> int:
        """The number of the first group of a queue."""
        return int(self._groups.first[self._index[instance]])

    def _group(self, instance: str, number: int) -> GroupView:
        return self._views[instance].groups[number - self._first(instance)]

    def _requests_before(self, instance: str, number: int) -> int:
        """Requests on the queue of an instance before a group of it. Costs O(groups of that queue) once."""
        if instance not in self._before:
            self._before[instance] = [0, *accumulate(group.waiting for group in self._views[instance].groups)]
        return self._before[instance][number - self._first(instance)]
