"""SHEPHERD as the baseline of QLM section 8: fixed batches, placed and ordered by an integer program over deterministic times.

A group is a batch of a fixed size: the seats of its kind on the instance. The program (HiGHS by `scipy.optimize.milp`) selects the batches
that each instance ends in time, with the most requests, in the order of deadlines:

    maximise sum n_i x_ik;  sum_k x_ik <= 1;  lead_k + sum_{j <= i} p_jk x_jk <= d_i + M (1 - x_ik)

Its times p are mean work, without variance and swaps. Other batches follow by deadline, on the queue that is free first. Engines batch
continuously, unlike SHEPHERD's: the comparison favours it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.policies.baseline import Orders, Seating
from qlm_planner.policies.deadlines import ByDeadline, DatedQueue, Edf, able_queues, by_deadline, heads_and_rest, orders_of
from qlm_planner.policies.queue_work import Work

BATCHES_MAX = 24
"""Most batches in one program, the most urgent ones; others follow by deadline."""
NODES_MAX = 2_000
"""Most nodes of the search: the same bound on every machine."""
TIME_LIMIT_S = 0.5
"""A bound for slow machines."""


@dataclass(slots=True, kw_only=True)
class FixedBatches:
    """Seats requests in batches of a fixed size."""

    by_deadline: ByDeadline

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The newest batch of its key, while it has room and no request was pulled, else a new one in the order of deadlines."""
        board = self.by_deadline.board
        batch = board.newest.get(alone.traits.key)
        if batch is not None and batch.live == batch.waiting and batch.live < self._size(batch):
            board.add_request(batch, facts)
            self.by_deadline.count_request(batch)
            return batch
        found = self.by_deadline.first_end(alone)
        if found is None:
            return self.by_deadline.join(facts, alone)
        queue, place, work = found
        self.by_deadline.open(queue, place, alone, work)
        return alone

    def _size(self, batch: Group) -> int:
        estimates = self.by_deadline.works.table.estimates
        slot = self.by_deadline.board.slots.get(batch.instance)
        return max(1, int(estimates.limits_at(slot, batch).live / estimates.policy.delta))


class Shepherd(Edf):
    """SHEPHERD. `fallbacks`: orders by deadline alone, because the program was not solved within its bounds."""

    slow = True

    def __init__(self, *, nodes_max: int = NODES_MAX, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._nodes_max = nodes_max
        self._time_limit_s = time_limit_s

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return FixedBatches(by_deadline=ByDeadline.of(board, self.works(table)))

    def reorder(self, board: Board, table: ClassTable, now_s: float) -> Orders | None:
        works = self.works(table)
        queues, rest, named = heads_and_rest(board, works)
        if not queues or not rest:
            return None
        first = rest[:BATCHES_MAX]
        able = able_queues(queues, rest, works)
        on = [{queue.work.slot.facts.name: work for queue, work in zip(*each, strict=True)} for each in able]
        chosen = self._in_time(queues, first, on[:BATCHES_MAX], now_s)
        if chosen is None:
            self.fallbacks += 1
            return by_deadline(board, works)
        behind: list[int] = []
        for number, group in enumerate(rest):
            queue = chosen[number] if number < len(first) else None
            if queue is None:
                behind.append(number)
            else:
                queue.insert(len(queue.groups), group, on[number][queue.work.slot.facts.name])
        for number in behind:
            queue = min(able[number][0], key=lambda each: each.work.last_s)
            queue.insert(len(queue.groups), rest[number], on[number][queue.work.slot.facts.name])
        for queue in queues:
            queue.groups.sort(key=lambda group: group.rank)  # bands never fall along a queue
        return orders_of(queues, board, named)

    def _in_time(
        self, queues: Sequence[DatedQueue], batches: Sequence[Group], on: Sequence[Mapping[str, Work]], now_s: float
    ) -> list[DatedQueue | None] | None:
        """The queue on which each batch ends in time, None for a late batch; None if the program was not solved. `batches`: by deadline;
        `on`: the work of each, by instance."""
        # Local import: it takes 0.3 s, and few planners use this policy.
        from scipy.optimize import Bounds, LinearConstraint, milp

        count, width = len(batches), len(queues)
        deadlines_s = np.array([min(group.first_deadline_s - now_s, 1e7) for group in batches])
        works_s = np.array([[_time_s(each.get(queue.work.slot.facts.name)) for queue in queues] for each in on])
        leads_s = np.array([queue.work.last_s for queue in queues])
        able = np.isfinite(works_s)
        works_s = np.where(able, works_s, 0.0)
        big = float(works_s.sum(axis=0).max() + leads_s.max() + np.abs(deadlines_s).max() + 1.0)
        entries: list[tuple[int, int, float]] = []
        bounds: list[float] = []
        for i in range(count):
            for k in range(width):
                row = count + i * width + k
                entries.append((i, i * width + k, 1.0))
                entries += [(row, j * width + k, works_s[j, k] + (big if j == i else 0.0)) for j in range(i + 1)]
                bounds.append(deadlines_s[i] - leads_s[k] + big)
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(count * (width + 1), count * width))
        found = milp(
            -np.repeat([float(group.waiting) for group in batches], width),
            constraints=LinearConstraint(matrix, ub=np.concatenate([np.ones(count), bounds])),
            integrality=np.ones(count * width),
            bounds=Bounds(0.0, able.ravel().astype(float)),
            options={"time_limit": self._time_limit_s, "node_limit": self._nodes_max},
        )
        if found.x is None or found.status != 0:
            return None
        chosen = np.asarray(found.x).reshape(count, width) > 0.5
        return [queues[int(row.argmax())] if row.any() else None for row in chosen]


def _time_s(work: Work | None) -> float:
    """Deterministic time of a batch, infinite if it is not served."""
    return math.inf if work is None else work.work_s + work.own_s
