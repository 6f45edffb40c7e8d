"""First come first served by model, as Ollama and llama-swap serve several models with one GPU: an instance stays with its active model
while requests for it wait, and then turns to the model whose oldest request waits longest.

The stay is bounded: a request is overtaken only by requests of other models that came within `Policy.stay_s` of it. So a busy model keeps
no other out for longer than that and the work that came with it, and no timer is needed. Objectives and priorities change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_core.instance import UNASSIGNED
from qlm_core.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Seating
from qlm_planner.policies.queue_ends import able_lines, join_or_open, least_loaded_of, loads_of


def waits_since_s(group: Group) -> float:
    """When the oldest request that waits came, in seconds of the queue's clock; minus infinity where it has no deadline to tell."""
    since_s = group.next_deadline_s - group.traits.slo_s
    return since_s if math.isfinite(since_s) else -math.inf


def place_by_model(groups: Sequence[Group], model: str, running: bool, came_s: float, stay_s: float) -> int:
    """Position for a request that came at `came_s`: behind the last group of its model, or in front where its model runs, unless it would
    overtake one that waits for longer than `stay_s`; else at the end."""
    for at in range(len(groups), 0, -1):
        if groups[at - 1].traits.key.model == model:
            return at
        if came_s - waits_since_s(groups[at - 1]) > stay_s:
            return len(groups)
    return 0 if running else len(groups)


def runs(slot: Slot, model: str) -> bool:
    """Its engine still has requests of a model, so that it has not turned to another."""
    return slot.active_model in ("", model) and any(each.traits.key.model == model for each in slot.runners.values())


@dataclass(slots=True, kw_only=True)
class ByModel:
    """A seating in turns of models."""

    board: Board
    estimates: Estimates
    loads: dict[str, int]

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group in front of its place, if it is of the request's kind and has room, else `alone` there. Costs O(groups)."""
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
        """Its model is active there, or has a turn already, or nothing is loaded and nobody waits."""
        models = {group.traits.key.model for group in self.board.queue_groups(slot.facts.name)}
        return model == slot.active_model or model in models or (not slot.active_model and not models)


class Batched(Baseline):
    """The policy."""

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return ByModel(board=board, estimates=table.estimates, loads=loads_of(board))

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home | None:
        """As for a request that came when the group's oldest did."""
        able: Mapping[str, Line] = {line.slot.facts.name: line for line in able_lines(lines, table, group)}
        if not able:
            return None
        model, came_s = group.traits.key.model, waits_since_s(group)
        loads = {name: line.load for name, line in able.items()}
        serving = [
            name for name, line in able.items() if model in (line.slot.active_model, *(each.traits.key.model for each in line.groups))
        ]
        line = able[least_loaded_of(sorted(able), sorted(serving), loads)]
        return line, place_by_model(line.groups, model, runs(line.slot, model), came_s, table.estimates.policy.stay_s)
