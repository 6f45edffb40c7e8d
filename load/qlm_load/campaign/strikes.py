"""The strikes of a campaign, their processes and times: by seed, or as written on the command line.

A strike is due at a share of ended requests, so that strikes are spread over the run however fast it is. A process that is down when its
strike is due gets it as soon as it lives again, serving or still starting.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from qlm_core.vocabulary.errors import ConfigError

SERVER = "server"
"""The embedded server's name in the state file."""
SPREAD = (0.03, 0.92)
"""Shares of ended requests between which drawn strikes lie: while there is load, and with time left to recover in."""


class Action(StrEnum):
    """KILL: SIGKILL. TERM: SIGTERM, upon which it drains, ends and is started again. STOP: SIGSTOP, and SIGCONT after some seconds: the
    process wakes up as a zombie whose leases are gone. STOPKILL: SIGSTOP, and SIGKILL after some seconds."""

    KILL = "kill"
    TERM = "term"
    STOP = "stop"
    STOPKILL = "stopkill"

    @property
    def stops(self) -> bool:
        """It takes a time, after which a second signal is sent."""
        return self in {Action.STOP, Action.STOPKILL}


FIRST_SIGNAL = {
    Action.KILL: signal.SIGKILL,
    Action.TERM: signal.SIGTERM,
    Action.STOP: signal.SIGSTOP,
    Action.STOPKILL: signal.SIGSTOP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One strike at one process, due when `share` of the requests have ended. `for_s`: real seconds of a stop."""

    action: Action
    process: str
    share: float
    for_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Struck:
    """One entry of the log. `at_s`, `again_s`: seconds since the start of the run; `again_s`: when a process that was ended was seen
    serving with a new pid, or a stopped one was sent its second signal; None where that has not happened."""

    strike: Strike
    pid: int
    at_s: float
    at_utc: str
    ended_share: float
    new_pid: int | None = None
    again_s: float | None = None

    @property
    def ends(self) -> bool:
        """The process does not outlive it."""
        return self.strike.action is not Action.STOP

    @property
    def kills(self) -> bool:
        return self.strike.action in {Action.KILL, Action.STOPKILL}


def draw_strikes(seed: int, kills: int, server_kills: int, processes: Sequence[str]) -> tuple[Strike, ...]:
    """`kills` SIGKILLs at `processes`, each struck once before any is struck again, and `server_kills` at the server, spread evenly."""
    choice = random.Random(seed)
    victims = [SERVER] * server_kills
    while len(victims) < kills + server_kills:
        victims += choice.sample(sorted(processes), min(len(processes), kills + server_kills - len(victims)))
    choice.shuffle(victims)
    width = (SPREAD[1] - SPREAD[0]) / max(1, len(victims))
    return tuple(
        Strike(action=Action.KILL, process=name, share=SPREAD[0] + (slot + choice.random()) * width) for slot, name in enumerate(victims)
    )


def parse_strikes(text: str) -> tuple[Strike, ...]:
    """`kill:` or `term:NAME[+NAME...]@SHARE`, `stop:` or `stopkill:NAME[+NAME...]:SECONDS@SHARE`. Raises ConfigError."""
    try:
        what, share = text.rsplit("@", 1)
        action, names, *seconds = what.split(":")
        kind = Action(action)
        if len(seconds) != int(kind.stops) or not 0 <= float(share) < 1 or not all(names.split("+")):
            raise ValueError(text)
        for_s = float(seconds[0]) if seconds else 0.0
        if not 0 <= for_s < float("inf"):
            raise ValueError(text)
    except ValueError:
        shape = "kill:NAME[+NAME]@SHARE, term:..., stop:NAME[+NAME]:SECONDS@SHARE or stopkill:..."
        raise ConfigError(f"{text!r}: a strike is written {shape}, with a share of ended requests from 0 to below 1") from None
    return tuple(Strike(action=kind, process=name, share=float(share), for_s=for_s) for name in names.split("+"))


class Striker:
    """Decides at each poll which processes to strike, sends the signals and keeps the log."""

    def __init__(self, strikes: Sequence[Strike], *, start_s: float, send: Callable[[int, int], None] = os.kill) -> None:
        """`start_s`: the start of the run by the caller's clock; `send` takes a pid and a signal."""
        self._waiting = sorted(strikes, key=lambda strike: strike.share)
        self._stopped: list[Struck] = []
        self._start_s = start_s
        self._send = send
        self.log: list[Struck] = []

    @property
    def waiting(self) -> tuple[Strike, ...]:
        return tuple(self._waiting)

    def poll(self, now_s: float, ended_share: float, pids: Mapping[str, int], serving: Mapping[str, int]) -> list[Struck]:
        """Strikes who is due; the new entries of the log. `pids`: living processes by name; `serving`: those of them that serve."""
        self.wake(now_s)
        self._note_restarts(now_s, serving)
        struck: list[Struck] = []
        for strike in [each for each in self._waiting if each.share <= ended_share]:
            pid = pids.get(strike.process)
            if pid is None or any(each.pid == pid for each in (*self._stopped, *struck)):
                continue
            if not self._sent(pid, FIRST_SIGNAL[strike.action]):
                continue
            self._waiting.remove(strike)
            utc = datetime.now(UTC).isoformat(timespec="milliseconds")
            struck.append(Struck(strike=strike, pid=pid, at_s=now_s - self._start_s, at_utc=utc, ended_share=ended_share))
        self._stopped += [each for each in struck if each.strike.action.stops]
        self.log += struck
        return struck

    def wake(self, now_s: float, *, all_now: bool = False) -> None:
        """Sends the second signal to those whose stop is over (`all_now`: to all, at the end of a run)."""
        for entry in list(self._stopped):
            if all_now or now_s - self._start_s >= entry.at_s + entry.strike.for_s:
                self._stopped.remove(entry)
                if entry.strike.action is Action.STOP:
                    entry.again_s = now_s - self._start_s
                    self._sent(entry.pid, signal.SIGCONT)
                else:
                    self._sent(entry.pid, signal.SIGKILL)

    def _note_restarts(self, now_s: float, serving: Mapping[str, int]) -> None:
        for entry in self.log:
            pid = serving.get(entry.strike.process)
            if entry.ends and entry.new_pid is None and pid is not None and pid != entry.pid:
                entry.new_pid, entry.again_s = pid, now_s - self._start_s

    def _sent(self, pid: int, number: int) -> bool:
        try:
            self._send(pid, number)
        except ProcessLookupError:
            return False  # it has just ended by itself
        return True
