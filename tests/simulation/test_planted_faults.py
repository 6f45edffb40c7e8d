"""Bugs that were put in on purpose: the seeds find each of them, and say what does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qlm_agent.decisions.events import CallLost
from qlm_agent.decisions.machine import AgentMachine
from qlm_agent.engines.port import EngineOutput
from qlm_agent.engines.simulated.batching.sequences import Progress
from qlm_agent.engines.simulated.core import SimulatedCore
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_planner.board.sweeps import Sweeps
from qlm_queue.memory import planning as memory_planning
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import PLANNER_ROLE, Emission, Lease, Owned, RequeueCause, StepStatus
from qlm_sim.cluster import MakeQueue
from qlm_sim.storms.seed_run import run_seed

SEEDS_MAX = 60
"""A planted fault is found within so many seeds."""


def found(words: str, make_queue: MakeQueue = MemoryQueue, first: int = 1) -> None:
    """The seeds find it, and this is what they say of it. `first`: a seed that found it, which is tried before the others."""
    seeds = [first, *(seed for seed in range(1, SEEDS_MAX + 1) if seed != first)]
    problems = (run_seed(seed, make_queue=make_queue).problem for seed in seeds)
    problem = next((problem for problem in problems if problem), "")
    assert words in problem, problem or f"not found by {SEEDS_MAX} seeds"


class RequeuesAtTheEnd(MemoryQueue):
    """A group that is opened again is placed behind all others."""

    async def requeue(self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes) -> Sequence[StepStatus]:
        closed = {group_id for group_id, group in self.state.groups.items() if not group.instance}
        statuses = await super().requeue(incarnation, requests, cause, failure)
        for queue in self.state.queues.values():
            queue.group_ids.sort(key=lambda group_id: group_id in closed)
        return statuses


class NeverFences(MemoryQueue):
    """A planner that lost its lease continues to place."""

    async def place(self, lease: Lease, groups: object, requests: object) -> Sequence[StepStatus]:
        now_s = self._now_s()
        held = self.state.holder(PLANNER_ROLE, now_s)
        lease = lease if held is None else Lease(role=PLANNER_ROLE, token=held.token)
        statuses: Sequence[StepStatus] = memory_planning.place(self.state, now_s, lease, groups, requests)  # type: ignore[arg-type]
        await self._notify()
        return statuses


class TakesOldAttempts(MemoryQueue):
    """An emission counts whoever sends it."""

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        for emission in emissions:
            request = self.state.live(emission.key, emission.queue_id)
            if request is not None and emission.offset <= len(request.progress):
                more = emission.progress[len(request.progress) - emission.offset :]
                request.progress += more
                self.state.count_bytes(request.key.tenant, request.slo_class, len(more))
        return await super().emit(incarnation, emissions)


class ForgetsArrivals(MemoryQueue):
    """A planner's scan does not find what another planner read."""

    async def read_unplaced(self, after: str, count: int) -> Sequence[object]:  # type: ignore[override]
        return [request for request in await super().read_unplaced(after, count) if request.acceptance_number % 5]


class EndsTwice(MemoryQueue):
    """A cancel ends what has ended."""

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        stored = self.state.terminals.get(key)
        if stored is not None:
            request = SimpleNamespace(key=key, progress=b"", logprobs=b"", slo_class="")
            self.state.end(request, stored.record, "", 0, self._now_s())  # type: ignore[arg-type]
        return await super().cancel(key, result)


@pytest.mark.parametrize(
    ("make_queue", "words", "first"),
    [
        (RequeuesAtTheEnd, "lost its place", 1),
        (NeverFences, "with an old lease is not refused", 57),
        (TakesOldAttempts, "changed it though", 6),
        (ForgetsArrivals, "waits for ever", 1),
        (EndsTwice, "ended twice", 3),
    ],
)
def test_a_fault_of_the_queue(make_queue: MakeQueue, words: str, first: int) -> None:
    found(words, make_queue, first)


def test_an_agent_that_does_not_hear_that_a_call_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    step = AgentMachine.step
    monkeypatch.setattr(AgentMachine, "step", lambda self, now_s, event: [] if isinstance(event, CallLost) else step(self, now_s, event))
    found("waits for ever")


def test_a_planner_that_takes_nothing_back_from_lost_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweeps, "start_round", lambda self, board: None)  # so it knows of none
    found("waits for ever", first=4)


def test_an_engine_that_continues_with_the_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimulatedCore._output  # the answer's place is the engine's, so the fault is put there

    def shifted(self: SimulatedCore, progress: Progress) -> EngineOutput:
        output = answer(self, progress)
        return replace(output, token_ids=output.token_ids[4:] + output.token_ids[:4]) if progress.start else output

    monkeypatch.setattr(SimulatedCore, "_output", shifted)
    found("is not its answer's")
