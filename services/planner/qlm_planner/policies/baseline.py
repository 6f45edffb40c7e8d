"""The interface of a comparison policy: assigns requests to groups, finds queues for groups that must move, and may reorder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.queue_work import Works

Orders = Mapping[str, Sequence[str]]
"""Instance -> group ids, first served first; queues that are not named stay."""
Home = tuple[Line, int]
"""A queue and a position on it."""


class Seating(Protocol):
    """Assigns one batch of arrivals to groups on the board."""

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group of a request: an open one, or `alone`, a new group of this request, which it opens."""


class Baseline(ABC):
    """A policy. `by_age`: it keeps the order of arrival, without bands and deadlines; else the order of deadlines inside bands. `slow`: a
    step may take a second. `fallbacks`: orders in which it used a simpler rule."""

    by_age = True
    slow = False
    fallbacks = 0
    _works: Works | None = None

    @abstractmethod
    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        """The seating for one batch of arrivals."""

    @abstractmethod
    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home:
        """A position for a group whose instance no longer serves it. `lines`: those that can serve it, at least one, by name."""

    def reorder(self, board: Board, table: ClassTable, now_s: float) -> Orders | None:
        """A new order on expected misses, an idle or new instance, or a requested replan; None: the order stays."""
        return None

    def works(self, table: ClassTable) -> Works:
        """Mean work of groups, for policies that predict by it."""
        self._works = self._works or Works(table=table)
        return self._works
