"""Balancers by agents' reports: SAL and least KV (`qlm_core.operations.balancing`), on the planner's board.

A server's columns are its agent's last heartbeat (`agent.heartbeat_s`; the paper polls 10 times a second), corrected by the board's events:
what waits on the virtual queue, and what its agent has pulled since. Both take KV before a new request does, as requests sent since the
report do in the paper.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qlm_core.operations import balancing
from qlm_core.operations.balancing import Servers
from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Seating
from qlm_planner.policies.queue_ends import QueueEnds, aged, end_model


class ReportBalancer(Baseline):
    """A policy that picks a server by its columns."""

    @abstractmethod
    def choose(self, servers: Servers, prompt_tokens: int) -> int:
        """The index of one of the servers, at least one, for so many prompt tokens."""

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return QueueEnds(board=board, estimates=table.estimates, pick=_Picker(policy=self, board=board, estimates=table.estimates).pick)

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home:
        """Chooses as for a request with all prompts of the group; the position is by age."""
        queues, ends = [line.groups for line in lines], [line.end_model for line in lines]
        servers = servers_of([line.slot for line in lines], queues, ends, table.estimates, group.traits.key.model)
        return aged(lines[self.choose(servers, group.waiting_prompt_tokens)], group, board)


class ServerAware(ReportBalancer):
    """SAL: the server on which the request would wait least."""

    def choose(self, servers: Servers, prompt_tokens: int) -> int:
        return balancing.server_aware(servers, prompt_tokens)


class LeastKv(ReportBalancer):
    """The server with the least share of KV in use."""

    def choose(self, servers: Servers, prompt_tokens: int) -> int:
        return balancing.least_kv(servers)


@dataclass(slots=True, kw_only=True)
class _Picker:
    """Adds each choice to the columns of its model, which spreads a batch. Other models see it at the next batch."""

    policy: ReportBalancer
    board: Board
    estimates: Estimates
    servers: dict[str, Servers] = field(default_factory=dict)

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        servers = self.servers.get(facts.model)
        if servers is None:
            queues = [self.board.queue_groups(slot.facts.name) for slot in able]
            ends = [end_model(self.board, slot) for slot in able]
            servers = self.servers[facts.model] = servers_of(able, queues, ends, self.estimates, facts.model)
        at = self.policy.choose(servers, facts.prompt_tokens)
        servers.add(at, facts.prompt_tokens)
        return able[at]


def servers_of(slots: Sequence[Slot], queues: Sequence[Sequence[Group]], ends: Sequence[str], estimates: Estimates, model: str) -> Servers:
    """The columns of instances, all of which can serve the model. `queues`: their waiting groups; `ends`: the model of the last group, or
    the active one. O(groups)."""
    rows = [_row(slot, queue, end, estimates, model) for slot, queue, end in zip(slots, queues, ends, strict=True)]
    queued, kv_used, kv_capacity, token_rate, freeing_rate, lead_s = np.array(rows, dtype=np.float64).T.copy()
    return Servers(queued=queued, kv_used=kv_used, kv_capacity=kv_capacity, token_rate=token_rate, freeing_rate=freeing_rate, lead_s=lead_s)


def _row(slot: Slot, queue: Sequence[Group], end: str, estimates: Estimates, model: str) -> tuple[float, ...]:
    hardware, workload = estimates.hardware(slot.facts, model), estimates.workload(model)
    assert hardware is not None, (slot.facts.name, model)
    load = slot.load
    running, waiting = max(1, slot.running), sum(group.waiting_prompt_tokens for group in queue)
    kv_used = load.kv_used_tokens + slot.pulled_tokens
    token_s = load.token_s or hardware.decode_step_s(running, kv_used)
    return (
        load.prefill_left_tokens + slot.pulled_tokens + waiting,
        kv_used + waiting,
        load.kv_capacity_tokens or hardware.kv_capacity_tokens,
        balancing.prefill_rate(hardware, slot.running, kv_used),
        balancing.freeing_rate(running / token_s, workload.prompt_tokens_mean, workload.output_tokens_mean),
        0.0 if end in ("", model) else hardware.swap_s(model in slot.warm_models),
    )
