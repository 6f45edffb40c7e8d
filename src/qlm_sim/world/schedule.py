"""Virtual time: a heap of (time, sequence, event). Events due at one time happen in the order of their scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Schedule:
    """`now_s` advances from event to event."""

    def __init__(self, start_s: float) -> None:
        self.now_s = start_s
        self.happened = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, Event]] = []

    def after(self, delay_s: float, event: Event) -> None:
        """Has an event happen in `delay_s` seconds."""
        assert delay_s >= 0.0, delay_s
        self.at(self.now_s + delay_s, event)

    def at(self, time_s: float, event: Event) -> None:
        """Schedules an event at a time; at once (after due events) if that has passed."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._sequence, event))

    def step(self, until_s: float) -> bool:
        """Runs the next event; False, with the time at `until_s`, without an earlier one."""
        if not self._heap or self._heap[0][0] > until_s:
            self.now_s = max(self.now_s, until_s)
            return False
        self.now_s, _, event = heapq.heappop(self._heap)
        self.happened += 1
        event()
        return True


class Alarm:
    """One moment at which its owner wakes. It may be moved in both directions any number of times."""

    def __init__(self, schedule: Schedule, ring: Event) -> None:
        self._schedule = schedule
        self._ring = ring
        self._due_s: float | None = None
        self._armed_s: float | None = None  # the earliest event in the heap that is ours

    def set(self, due_s: float | None) -> None:
        """None: not at all."""
        self._due_s = due_s
        if due_s is not None and (self._armed_s is None or due_s < self._armed_s):
            self._arm(due_s)

    def _arm(self, due_s: float) -> None:
        armed_s = max(due_s, self._schedule.now_s)
        self._armed_s = armed_s
        self._schedule.at(armed_s, lambda: self._fired(armed_s))

    def _fired(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return  # it was moved forward
        self._armed_s = None
        if self._due_s is None:
            return
        if self._schedule.now_s < self._due_s:
            self._arm(self._due_s)
            return
        self._due_s = None
        self._ring()
