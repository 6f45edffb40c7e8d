"""What a comparison policy decides: where a request goes, where a group that lost its instance, and whether the order changes later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from qlm_core.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.queue_work import Works

Orders = Mapping[str, Sequence[str]]
"""Group ids by queue, first served first; queues that are not named stay as they are."""

Home = tuple[Line, int]
"""A queue and a position there."""


class Seating(Protocol):
    """Takes one batch of arrivals in, on the board at once."""

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group that takes a request: an open one, or `alone`, a group of nothing but this request, which it opens."""


class Baseline(ABC):
    """A policy. `by_age`: it keeps the order of arrival, in which bands and deadlines count nothing; else the order of deadlines inside
    bands. `slow`: an order of few groups may take a second. `fallbacks`: orders for which it could not do what it stands for, and did
    something simpler."""

    by_age = True
    slow = False
    fallbacks = 0
    _works: Works | None = None

    @abstractmethod
    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        """For one batch of arrivals."""

    @abstractmethod
    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home | None:
        """For a group whose instance serves it no more; None if no line can serve it."""

    def reorder(self, board: Board, table: ClassTable, now_s: float) -> Orders | None:
        """Asked when misses are expected, an instance idles or is new, or somebody asks; None: the order stays."""
        return None

    def works(self, table: ClassTable) -> Works:
        """For those that predict by mean work."""
        self._works = self._works or Works(table=table)
        return self._works
