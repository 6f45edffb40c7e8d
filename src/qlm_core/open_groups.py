"""Which group a new request would most likely join: the newest that it may (QLM algorithm 1).

The planner puts a request into the newest open group of its key, wherever that is, and chooses an instance only for a new group. What is
known of a queue from outside does not tell its limits exactly, so this is a guess with the planner's defaults, good for a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable

from qlm_core.prediction_views import GroupView, QueueView
from qlm_core.request import SloKind

BATCHES = 4.0
"""A group holds at most so many batches (delta)."""
SPREAD_FRACTION = 0.5
"""Deadlines in a group are at most this share of the SLO apart."""

_Key = tuple[str, SloKind, str, str]


class OpenGroups:
    """The newest group of each key on queues that serve. Costs O(groups) to make, O(1) to ask."""

    def __init__(self, views: Iterable[QueueView]) -> None:
        self._newest: dict[_Key, tuple[QueueView, GroupView]] = {}
        for view in views:
            if view.instance.draining:
                continue
            for group in view.groups:
                known = self._newest.get(_key(group))
                if known is None or group.first_deadline_s > known[1].first_deadline_s:
                    self._newest[_key(group)] = (view, group)

    def group_for(self, request: GroupView, slo_s: float) -> str:
        """Id of the group that a request, as a group of one with an SLO of `slo_s`, would join; "" for none."""
        found = self._newest.get(_key(request))
        if found is None:
            return ""
        view, group = found
        if group.waiting >= BATCHES * view.instance.batch_max:
            return ""
        near = abs(request.first_deadline_s - group.first_deadline_s) <= SPREAD_FRACTION * slo_s
        return group.group_id if near or request.slo_kind is SloKind.PRIORITY else ""


def _key(group: GroupView) -> _Key:
    return (group.model, group.slo_kind, group.slo_class, group.token_class)
