"""The life of an incarnation: it registers, serves, and ends with its lease; then the next one registers.

All calls to the server share one backoff (`ServerLink`).
"""

from __future__ import annotations

from enum import Enum

from qlm_agent.decisions.effects import Effect, Register
from qlm_agent.decisions.events import RegisterAnswer

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0


class ServerLink:
    """One backoff for all calls: they share one server. It doubles with each failed try and ends with the first answer."""

    def __init__(self) -> None:
        self._number = 0
        self._backoff_s = 0.0
        self._away_until_s: float | None = None

    @property
    def away_until_s(self) -> float | None:
        """No call is made earlier; None while the server answers."""
        return self._away_until_s

    def next_call(self) -> int:
        self._number += 1
        return self._number

    def usable(self, now_s: float) -> bool:
        return self._away_until_s is None or now_s >= self._away_until_s

    def handle_loss(self, now_s: float) -> None:
        """A call was not answered. Several that were under way together count once."""
        if self.usable(now_s):
            self._backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * self._backoff_s))
            self._away_until_s = now_s + self._backoff_s

    def handle_answer(self) -> None:
        self._backoff_s = 0.0
        self._away_until_s = None


SHORT_LIFE_S = 5.0
REGISTER_PAUSE_S = 1.0
"""After an incarnation of less than SHORT_LIFE_S the next one waits REGISTER_PAUSE_S. While an older process serves the instance, none
registers: of two agents with one name the later yields."""


class Life(Enum):
    """State of the incarnation."""

    NONE = "none"  # to be registered
    SERVING = "serving"
    LEAVING = "leaving"  # its lease is lost
    STOPPED = "stopped"


class Registration:
    """`incarnation`: the last one, "" before the first."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self.life = Life.NONE
        self.incarnation = ""
        self._call: int | None = None
        self._count = 0
        self._registered_s = 0.0
        self._yields = False
        self._not_before_s: float | None = None

    @property
    def under_way(self) -> bool:
        """An answer is awaited."""
        return self._call is not None

    @property
    def next_wakeup_s(self) -> float | None:
        return self._not_before_s

    def decide(self, now_s: float) -> list[Effect]:
        """Registers, when that may be."""
        assert self.life is Life.NONE
        waits = self._not_before_s is not None and now_s < self._not_before_s
        if waits or self._call is not None or not self._link.usable(now_s):
            return []
        self._call = self._link.next_call()
        return [Register(call=self._call, nonce_number=self._count, yields=self._yields)]

    def handle_registration(self, now_s: float, answer: RegisterAnswer) -> bool:
        """Whether a new incarnation begins with this."""
        if answer.call != self._call:
            return False
        self._call = None
        self._count += 1
        self._registered_s = now_s
        self.incarnation = answer.incarnation
        self.life = Life.SERVING
        return True

    def handle_lease_loss(self, now_s: float, incarnation: str) -> bool:
        """Whether it was this incarnation's."""
        if self.life is not Life.SERVING or incarnation != self.incarnation:
            return False
        self.life = Life.LEAVING
        self._yields = True
        self._not_before_s = now_s + REGISTER_PAUSE_S if now_s - self._registered_s < SHORT_LIFE_S else None
        return True

    def handle_loss(self, call: int) -> None:
        """The call, perhaps its own, was not answered."""
        if call == self._call:
            self._call = None
