"""Load balancers: round robin, random, two random choices, least loaded; by agents' reports also least KV and SAL.

Random choices are checksums of the seed and the request's queue id, equal in replays, on standbys and in the simulator.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.operations import balancing
from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Seating
from qlm_planner.policies.queue_ends import QueueEnds, aged, end_model, least_loaded_of, loads_of


class Balancer(Baseline):
    """A policy that picks an instance by `choose`."""

    @abstractmethod
    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        """One of the instances `names` (at least one) for a request or group id. `loads`: requests of each; `serving`: those without a
        model swap for it."""

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return QueueEnds(board=board, estimates=table.estimates, pick=_Chosen(policy=self, board=board, loads=loads_of(board)).pick)

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home:
        """Chooses as for a request, by the loads of `lines`; the position is by age."""
        able = {line.slot.facts.name: line for line in lines}
        loads = {name: line.load for name, line in able.items()}
        serving = [name for name, line in able.items() if line.end_model in ("", group.traits.key.model)]
        return aged(able[self.choose(list(able), group.group_id, loads, serving)], group, board)


@dataclass(slots=True, kw_only=True)
class _Chosen:
    """Counts its choices, so that the requests of one batch are spread."""

    policy: Balancer
    board: Board
    loads: dict[str, int]

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        by_name = {slot.facts.name: slot for slot in able}
        serving = [name for name, slot in by_name.items() if end_model(self.board, slot) in ("", facts.model)]
        name = self.policy.choose(list(by_name), facts.queue_id, self.loads, serving)
        self.loads[name] += 1
        return by_name[name]


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
        return names[balancing.random_server(len(names), self.seed, key)]


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Balancer):
    """The less loaded of two different random instances (Mitzenmacher's two choices)."""

    seed: int = 0

    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        pair = balancing.two_servers(len(names), self.seed, key)
        return min((names[at] for at in pair), key=lambda name: (loads[name], name))


class LeastLoaded(Balancer):
    """The instance with the fewest requests, first of those whose queue ends with the model, as a balancer in front of servers that swap
    models chooses (`queue_ends.least_loaded_of`)."""

    def choose(self, names: Sequence[str], key: str, loads: dict[str, int], serving: Sequence[str] = ()) -> str:
        return least_loaded_of(names, serving, loads)
