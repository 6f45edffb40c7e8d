"""Which group a new request would most likely join: the newest that it may (QLM algorithm 1).

The planner puts a request into the newest open group of its key, wherever that is, and chooses an instance only for a new group. What is
known of a queue from outside does not tell its limits exactly, so this is a guess with the planner's defaults, good for a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from qlm_core.prediction_views import GroupView, QueueView
from qlm_core.request import SloKind

BATCHES = 4.0
"""A group holds at most so many batches (delta)."""
SPREAD_FRACTION = 0.5
"""Deadlines in a group are at most this share of the SLO apart."""
OVERTAKE_FRACTION = 0.1
"""Nobody joins in front of others of the model and SLO class with deadlines earlier by more than this share of how long the first of them
waits."""
OVERTAKE_MIN_S = 1.0
"""But by so much anybody may."""
OVERTAKEN_LOOK = 32
"""Groups among which those are looked for, behind the one to join and from the head of its queue."""

_Key = tuple[str, SloKind, str, str]


class OpenGroups:
    """The newest group of each key on queues that serve. Costs O(groups) to make, O(1) to ask."""

    def __init__(self, views: Iterable[QueueView]) -> None:
        self._newest: dict[_Key, tuple[QueueView, int]] = {}
        for view in views:
            if view.instance.draining:
                continue
            for place, group in enumerate(view.groups):
                known = self._newest.get(_key(group))
                if known is None or group.first_deadline_s > known[0].groups[known[1]].first_deadline_s:
                    self._newest[_key(group)] = (view, place)

    def group_for(self, request: GroupView, slo_s: float) -> str:
        """Id of the group that a request, as a group of one with an SLO of `slo_s`, would join; "" for none."""
        found = self._newest.get(_key(request))
        if found is None:
            return ""
        view, place = found
        group = view.groups[place]
        if group.waiting >= BATCHES * view.instance.batch_max:
            return ""
        if request.slo_kind is SloKind.PRIORITY:
            return group.group_id
        near = abs(request.first_deadline_s - group.first_deadline_s) <= SPREAD_FRACTION * slo_s
        return group.group_id if near and not _overtakes(request, view, place) else ""


def _overtakes(request: GroupView, view: QueueView, place: int) -> bool:
    """Whether it would come before others, by joining the group there, that came much earlier."""
    groups = view.groups
    behind = _first_alike(islice(groups, place + 1, place + 1 + OVERTAKEN_LOOK), request)
    if behind is None:
        return False
    first = _first_alike(islice(groups, min(place, OVERTAKEN_LOOK)), request) or groups[place]
    waited_s = OVERTAKE_FRACTION * (request.first_deadline_s - first.first_deadline_s)
    return request.first_deadline_s - behind.first_deadline_s > max(OVERTAKE_MIN_S, waited_s)


def _first_alike(groups: Iterable[GroupView], request: GroupView) -> GroupView | None:
    of = (request.model, request.slo_kind, request.slo_class, request.band)
    return next((group for group in groups if (group.model, group.slo_kind, group.slo_class, group.band) == of), None)


def _key(group: GroupView) -> _Key:
    return (group.model, group.slo_kind, group.slo_class, group.token_class)
