"""Finishes of a model in the order in which the requests started, not in which they ended.

Requests that start together end in the order of their lengths: where a batch fills at once and drains before the next model comes, the
first of its finishes are all short and the last all long. A window over finishes would take each for a change of all outputs. Here a finish
is held back until all that started before it have ended. One that outlasts many later ones is left behind. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

HELD_MAX = 256
"""Finishes that are held back for the oldest request that runs: of more, it is waited for no longer."""
STARTED_MAX = 65_536
"""Requests that are followed; beyond it the oldest is forgotten."""

Told = tuple[float, float, float]
"""The mean and the median that were expected of an output, and what it was."""


@dataclass(slots=True)
class StartOrder:
    """Of one model."""

    _started: dict[str, Told | None] = field(default_factory=dict)  # None: it runs
    _held: int = 0

    def begin(self, queue_id: str) -> None:
        """A request started."""
        if queue_id not in self._started:
            self._started[queue_id] = None
        while len(self._started) > STARTED_MAX:
            self._drop_first()

    def leave(self, queue_id: str) -> None:
        """It will tell no length."""
        if queue_id in self._started and self._started[queue_id] is None:
            del self._started[queue_id]

    def end(self, queue_id: str, told: Told) -> Iterator[Told]:
        """It ended; gives those whose turn it is. One whose start was not seen started now."""
        if self._started.get(queue_id) is None:
            self._held += 1
        self._started[queue_id] = told  # keeps its place
        while self._started:
            first = next(iter(self._started.values()))
            if first is None and self._held < HELD_MAX:
                return
            self._drop_first()
            if first is not None:
                yield first

    def forget_ended(self) -> None:
        """What is held back was expected to be as before a change."""
        self._started = {queue_id: None for queue_id, told in self._started.items() if told is None}
        self._held = 0

    def _drop_first(self) -> None:
        if self._started.pop(next(iter(self._started))) is not None:
            self._held -= 1
