"""Predicts all virtual queues as they are ordered now: when a request at any place starts and ends, and what a new request
would find.

On one profile snapshot. A request at a known place, and a new one that joins a group, cost O(1), on arrays less than a microsecond; a new
one that would be a group of its own costs a pass over the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count

import numpy as np

from qlm_core.prediction.new_request import place_new
from qlm_core.prediction.planned_waits import WaitCurve
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.prediction.queue_reader import QueueReader
from qlm_core.prediction.queue_times import queue_times
from qlm_core.prediction.request_times import TABLE_ROWS, RequestTable
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.model import ModelSpec

Placed = tuple[QueueView, int, WaitCurve]
"""Of a new request: its queue, the requests ahead of it, and the waits of those like it that arrive with `more` of them between, which
begins with 0."""


class Assessment:
    """Queues that hold a group without a profile of its model there are left out."""

    def __init__(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot, views: Iterable[QueueView] = ()) -> None:
        """Costs O(groups of `views`)."""
        self._reader = QueueReader(catalogue, profiles)
        kept, self._groups = self._reader.read(list(views))
        self._views = {view.instance.name: view for view in kept}
        self._index = {name: number for number, name in enumerate(self._views)}

    @property
    def instances(self) -> tuple[str, ...]:
        """The queues that are predicted, in the order of their numbers."""
        return tuple(self._views)

    @cached_property
    def table(self) -> RequestTable:
        """Inputs of predictions for single requests: the groups of all queues, in the order of `instances`. Costs O(groups)."""
        busy = np.flatnonzero(np.diff(self._groups.first))
        if not len(busy):
            return RequestTable(columns=np.zeros((0, TABLE_ROWS)))
        return RequestTable.of(queue_times(self._groups if len(busy) == len(self._views) else self._groups.chosen(busy)))

    def number_of(self, group_id: str) -> tuple[str, int] | None:
        """The instance and the number of a group; None for one that is not here."""
        return self._numbers.get(group_id)

    def joining(self, group_id: str, more: Sequence[float]) -> Placed | None:
        """A new request that joins a group. None for one that is not here."""
        found = self.number_of(group_id)
        if found is None:
            return None
        instance, number = found
        waiting = float(self._groups.count[number])
        curve = self.table.curve([number] * len(more), [waiting + each for each in more], more)
        return self._views[instance], int(self._before[number + 1] - self._before[self._first(instance)]), curve

    def alone(self, requests: Sequence[GroupView], now_s: float, more: Sequence[float]) -> list[Placed | None]:
        """New requests that join no group, each as a group of one and without the others. None for one that no instance can be predicted
        for."""
        places = place_new(self._reader, list(self._views.values()), self._groups, requests, now_s)
        return [
            None if place is None else (place.view, place.requests_ahead, place.table.curve([place.number] * len(more), more, more))
            for place in places
        ]

    def queue_curve(self, instance: str, knots_max: int) -> WaitCurve | None:
        """The waits along a queue by the requests ahead, at the first and the last requests of its groups, or of some where these are
        more than `knots_max`. None for a queue that is empty or cannot be predicted."""
        view = self._views.get(instance)
        if view is None or not view.groups:
            return None
        chosen = np.unique(np.linspace(0, len(view.groups) - 1, max(1, knots_max // 2)).round().astype(np.int64))
        first = self._first(instance)
        numbers = np.repeat(first + chosen, 2)
        places = np.maximum(self._groups.count[numbers] - 1.0, 0.0)
        places[::2] = 0.0
        return self.table.curve(numbers, places, (self._before[numbers] - self._before[first] + places).tolist())

    @cached_property
    def _numbers(self) -> dict[str, tuple[str, int]]:
        numbers = count()
        return {group.group_id: (name, next(numbers)) for name, view in self._views.items() for group in view.groups}

    @cached_property
    def _before(self) -> Floats:
        """[groups + 1]: requests in all groups of smaller numbers."""
        return np.concatenate(([0.0], np.cumsum(self._groups.count)))

    def _first(self, instance: str) -> int:
        """The number of the first group of a queue."""
        return int(self._groups.first[self._index[instance]])
