"""Requests that this gateway took since it looked at the queue, which that look does not show. Pure; begins anew with each look.

Without them, all requests of a burst would be told that nobody is ahead of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from qlm_core.prediction_views import GroupView, QueueView

STALE_JOINED_MIN = 8
STALE_SHARE = 0.5
"""A prediction is made anew when so many more have joined its queue, and so large a share of those that were ahead of it."""


@dataclass(slots=True)
class _Alike:
    """Requests that come at the same place: the first of them as a group of one, the group that they join ("": none), their last deadline,
    how many there are and what their prompts hold."""

    first: GroupView
    joins: str
    last_deadline_s: float
    waiting: int = 0
    prompt_tokens: int = 0

    def group(self, group_id: str) -> GroupView:
        return replace(
            self.first,
            group_id=group_id,
            waiting=self.waiting,
            waiting_prompt_tokens=self.prompt_tokens,
            last_deadline_s=self.last_deadline_s,
        )

    def joined(self, group: GroupView) -> GroupView:
        """The group that they join, with them in it."""
        return replace(
            group,
            waiting=group.waiting + self.waiting,
            waiting_prompt_tokens=group.waiting_prompt_tokens + self.prompt_tokens,
            last_deadline_s=max(group.last_deadline_s, self.last_deadline_s),
        )


class Joined:
    """By instance, as groups of requests that are alike."""

    def __init__(self) -> None:
        self._by_instance: dict[str, dict[Hashable, _Alike]] = {}
        self._counts: dict[str, int] = {}

    def count(self, instance: str) -> int:
        return self._counts.get(instance, 0)

    def add(self, instance: str, kind: Hashable, request: GroupView, joins: str = "") -> None:
        """A request, as a group of one, that is expected to be served by an instance. `joins`: the group that it is expected to be in;
        that of the first of its kind counts for all."""
        alike = self._by_instance.setdefault(instance, {})
        known = alike.get(kind)
        if known is None:
            known = alike[kind] = _Alike(request, joins, request.first_deadline_s)
        known.last_deadline_s = max(known.last_deadline_s, request.first_deadline_s)
        known.waiting += 1
        known.prompt_tokens += request.waiting_prompt_tokens
        self._counts[instance] = self.count(instance) + 1

    def on(self, view: QueueView) -> QueueView:
        """The queue with them in their groups, and those that join none of it in their places: before the first group of a later band, or
        of a later first deadline in theirs."""
        alike = self._by_instance.get(view.instance.name)
        if alike is None:
            return view
        groups = {group.group_id: group for group in view.groups}
        alone: list[GroupView] = []
        for number, each in enumerate(alike.values()):
            if each.joins in groups:
                groups[each.joins] = each.joined(groups[each.joins])
            else:
                alone.append(each.group(f"+{number}"))
        return replace(view, groups=tuple(_merged(groups.values(), alone)))


def is_stale(requests_ahead: int, joined_since: int) -> bool:
    """Whether a prediction with so many ahead is off by too much once `joined_since` have joined its queue."""
    return joined_since >= max(STALE_JOINED_MIN, STALE_SHARE * requests_ahead)


def _merged(groups: Iterable[GroupView], joined: Iterable[GroupView]) -> list[GroupView]:
    merged = list(groups)
    for group in joined:
        key = (group.band, group.first_deadline_s)
        place = next((place for place, other in enumerate(merged) if (other.band, other.first_deadline_s) > key), len(merged))
        merged.insert(place, group)
    return merged
