"""Kills processes in the middle of a run, by seed, while they hold live requests.

For each role (one agent, the planner, one gateway) the seed chooses who and an earliest point inside the middle third of the run,
measured as the share of requests that have ended. At the first sample from there on at which that process holds at least `held_min` live
requests it gets SIGKILL; that it comes back is its supervisor's work, which the kill log states. Where it has not held so many half way
from its earliest point to the end of the middle third, another of its role that does takes its place. If none did by the end of the
middle third, nobody of the role is killed, and the run says so.

What a process holds: an agent, the requests RUNNING on it; the planner that leads, the live requests of its queue, and a standby nothing;
a gateway, the open streams bound to it, by the client's own view.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

WINDOW = (1 / 3, 2 / 3)
"""The middle third, as shares of requests that have ended."""
LATEST_START = 0.55
"""No earliest point is later, so that each plan has some of the window left to reach its load."""


class Role(StrEnum):
    AGENT = "agent"
    PLANNER = "planner"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A kill of a role's process, and the share of ended requests from which it is due: the first of `candidates` rather than the others,
    but the planner that leads."""

    role: Role
    candidates: tuple[str, ...]
    from_share: float

    def due(self, share: float) -> tuple[str, ...]:
        """Processes that may be killed at this share of ended requests."""
        if not self.from_share <= share <= WINDOW[1]:
            return ()
        anybody = self.role is Role.PLANNER or share >= (self.from_share + WINDOW[1]) / 2
        return self.candidates if anybody else self.candidates[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """The run at one moment. `ended_share`: ended requests / all; `held`: live requests by process name."""

    now_s: float
    ended_share: float
    held: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class Kill:
    """One entry of the kill log. `at_s`: seconds since the start of the run; `restarted_s`: seconds until it was up again, None if it
    was not (yet)."""

    role: Role
    process: str
    pid: int
    held: int
    at_s: float
    at_utc: str
    ended_share: float
    seed: int
    new_pid: int | None = None
    restarted_s: float | None = None


def plan_kills(seed: int, agents: Sequence[str], planners: Sequence[str], gateways: Sequence[str]) -> tuple[Plan, ...]:
    """One of each role by seed."""
    choice = random.Random(seed)
    return tuple(
        Plan(role=role, candidates=tuple(choice.sample(sorted(names), len(names))), from_share=choice.uniform(WINDOW[0], LATEST_START))
        for role, names in ((Role.AGENT, agents), (Role.PLANNER, planners), (Role.GATEWAY, gateways))
    )


class Chaos:
    """Decides at each sample who dies, keeps the log, and notices restarts."""

    def __init__(
        self, plans: Sequence[Plan], *, held_min: int, seed: int, start_s: float, kill: Callable[[int], None] | None = None
    ) -> None:
        """`kill` sends the signal (SIGKILL by default)."""
        self._waiting = list(plans)
        self._held_min = held_min
        self._seed = seed
        self._start_s = start_s
        self._kill = kill if kill is not None else _sigkill
        self.log: list[Kill] = []

    @property
    def spared(self) -> tuple[Plan, ...]:
        """Kills of which no process was killed yet."""
        return tuple(self._waiting)

    @property
    def next_from_share(self) -> float:
        """The share of ended requests from which samples matter; above 1 when nobody is left."""
        return min((plan.from_share for plan in self._waiting), default=2.0)

    def poll(self, sample: RunSample, pids: Mapping[str, int]) -> list[Kill]:
        """Kills whom this sample says to kill; the new entries of the log. `pids`: serving processes by name."""
        self.note_restarts(sample.now_s, pids)
        killed: list[Kill] = []
        for plan in list(self._waiting):
            able = [name for name in plan.due(sample.ended_share) if name in pids and sample.held.get(name, 0) >= self._held_min]
            if not able:
                continue
            process, pid = able[0], pids[able[0]]
            self._kill(pid)
            self._waiting.remove(plan)
            killed.append(
                Kill(
                    role=plan.role,
                    process=process,
                    pid=pid,
                    held=sample.held[process],
                    at_s=sample.now_s - self._start_s,
                    at_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
                    ended_share=sample.ended_share,
                    seed=self._seed,
                )
            )
        self.log += killed
        return killed

    def note_restarts(self, now_s: float, pids: Mapping[str, int]) -> None:
        """Completes the log: who of the killed serves again. `pids`: serving processes by name."""
        for entry in self.log:
            pid = pids.get(entry.process)
            if entry.new_pid is None and pid is not None and pid != entry.pid:
                entry.new_pid, entry.restarted_s = pid, now_s - self._start_s - entry.at_s


def _sigkill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
