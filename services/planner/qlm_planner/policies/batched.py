"""First come first served by model, as Ollama and llama-swap serve several models on one GPU: an instance keeps its active model while
requests for it wait, then serves the model with the oldest request.

A request is overtaken only by requests of other models that arrive within `Policy.stay_s` of it, so a busy model delays others by that time
and its work at most, without a timer. Objectives and priorities change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Seating
from qlm_planner.policies.queue_ends import join_or_open, least_loaded_of, loads_of


def oldest_arrival_s(group: Group) -> float:
    """Arrival of the oldest waiting request, in seconds of the queue's clock; minus infinity without a deadline."""
    arrived_s = group.next_deadline_s - group.traits.slo_s
    return arrived_s if math.isfinite(arrived_s) else -math.inf


def place_by_model(groups: Sequence[Group], model: str, running: bool, arrived_s: float, stay_s: float) -> int:
    """Position of a request: behind the last group of its model, or in front if its model runs, unless it would overtake a request that
    arrived more than `stay_s` earlier; else at the end."""
    for at in range(len(groups), 0, -1):
        if groups[at - 1].traits.key.model == model:
            return at
        if arrived_s - oldest_arrival_s(groups[at - 1]) > stay_s:
            return len(groups)
    return 0 if running else len(groups)


def runs(slot: Slot, model: str) -> bool:
    """Whether an engine runs requests of a model, and has not swapped it."""
    return slot.active_model in ("", model) and any(each.traits.key.model == model for each in slot.runners.values())


@dataclass(slots=True, kw_only=True)
class ByModel:
    """Seats requests by model."""

    board: Board
    estimates: Estimates
    loads: dict[str, int]

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group in front of the position, if it has the request's key and room, else `alone` there. O(groups)."""
        board, estimates = self.board, self.estimates
        able = [slot for slot in board.serving if estimates.can_serve(slot, facts.model)]
        names = [slot.facts.name for slot in able]
        serving = [slot.facts.name for slot in able if self._serves(slot, facts.model)]
        queue = least_loaded_of(names, serving, self.loads) if able else UNASSIGNED
        groups = board.queue_groups(queue)
        slot = board.slots.get(queue)
        place = len(groups)
        if slot is not None:
            self.loads[queue] += 1
            running = runs(slot, facts.model)
            place = place_by_model(groups, facts.model, running, facts.accepted_s, estimates.policy.stay_s)
        return join_or_open(board, estimates, queue, place, facts, alone)

    def _serves(self, slot: Slot, model: str) -> bool:
        """Whether the model is active there, or waits there, or the instance is empty and has no model."""
        models = {group.traits.key.model for group in self.board.queue_groups(slot.facts.name)}
        return model == slot.active_model or model in models or (not slot.active_model and not models)


class Batched(Baseline):
    """First come first served by model."""

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return ByModel(board=board, estimates=table.estimates, loads=loads_of(board))

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home:
        """As for a request that arrives with the group's oldest."""
        able = {line.slot.facts.name: line for line in lines}
        model, arrived_s = group.traits.key.model, oldest_arrival_s(group)
        loads = {name: line.load for name, line in able.items()}
        serving = [
            name for name, line in able.items() if model in (line.slot.active_model, *(each.traits.key.model for each in line.groups))
        ]
        line = able[least_loaded_of(list(able), serving, loads)]
        return line, place_by_model(line.groups, model, runs(line.slot, model), arrived_s, table.estimates.policy.stay_s)
