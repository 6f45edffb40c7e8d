"""Load balancers without time predictions: round robin, random, two random choices, least loaded.

Random choices are checksums of the seed and the request's queue id, equal in replays, on standbys and in the simulator.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Seating
from qlm_planner.policies.queue_ends import QueueEnds, able_lines, aged, least_loaded_of, loads_of


class Balancer(Baseline):
    """A policy that picks an instance by `choose`."""

    @abstractmethod
    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        """One of the instances `names` (at least one) for a request or group id. `loads`: requests of each; `serving`: those without a
        model swap for it."""

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return QueueEnds(board=board, estimates=table.estimates, picker=_Chosen(policy=self, board=board, loads=loads_of(board)))

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home | None:
        """Chooses as for a request, by the loads of `lines`; the position is by age."""
        able = {line.slot.facts.name: line for line in able_lines(lines, table, group)}
        if not able:
            return None
        loads = {name: line.load for name, line in able.items()}
        ends = {name: line.groups[-1].traits.key.model if line.groups else line.slot.active_model for name, line in sorted(able.items())}
        serving = [name for name, model in ends.items() if model in ("", group.traits.key.model)]
        return aged(able[self.choose(sorted(able), group.group_id, loads, serving)], group, board)


@dataclass(slots=True, kw_only=True)
class _Chosen:
    """Counts its choices, so that the requests of one batch are spread."""

    policy: Balancer
    board: Board
    loads: dict[str, int]

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        by_name = {slot.facts.name: slot for slot in able}
        serving = [name for name, slot in by_name.items() if self._end_model(slot) in ("", facts.model)]
        name = self.policy.choose(list(by_name), facts.queue_id, self.loads, serving)
        self.loads[name] += 1
        return by_name[name]

    def _end_model(self, slot: Slot) -> str:
        """Model of the last group on the queue, else the active one."""
        queue = self.board.queues[slot.facts.name]
        return self.board.groups[queue[-1]].traits.key.model if queue else slot.active_model


@dataclass(slots=True)
class RoundRobin(Balancer):
    """Instances in turn, whatever their load. `last`: the previous choice."""

    last: str = ""

    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        """The next instance by name."""
        self.last = next((name for name in names if name > self.last), names[0])
        return self.last


@dataclass(frozen=True, slots=True)
class Chance(Balancer):
    """A random instance, all equally likely."""

    seed: int = 0

    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        return names[draw(self.seed, key, 0) % len(names)]


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Balancer):
    """The less loaded of two different random instances (Mitzenmacher's two choices)."""

    seed: int = 0

    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        first = draw(self.seed, key, 1) % len(names)
        second = (first + 1 + draw(self.seed, key, 2) % max(1, len(names) - 1)) % len(names)
        return min(names[first], names[second], key=lambda name: (loads[name], name))


class LeastLoaded(Balancer):
    """The instance with the fewest requests, first of those whose queue ends with the model, as a balancer in front of servers that swap
    models chooses (`queue_ends.least_loaded_of`)."""

    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        return least_loaded_of(names, serving, loads)


def draw(seed: int, key: str, number: int) -> int:
    """A pseudo-random number, a function of its arguments on every machine."""
    # A checksum alone is linear: draws for one key would differ by the same in all keys.
    mixed = zlib.crc32(f"{number}/{key}/{seed}".encode()) * 2_654_435_769 & 0xFFFF_FFFF
    return mixed ^ mixed >> 15
