"""A machine against a small world that loses answers, leases and progress, by seed: every request ends exactly once, its output whole."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from qlm_agent.effects import (
    AbortRuns,
    Complete,
    Deregister,
    Describe,
    Effect,
    Emit,
    GiveBack,
    LoadModel,
    Pull,
    ReadOwned,
    Register,
    StartRun,
    Stop,
)
from qlm_agent.engine import FailureKind, FinishReason, Tier
from qlm_agent.events import (
    CallAnswered,
    CallLost,
    DrainAsked,
    EngineEnd,
    EngineTold,
    Event,
    ItemsAnswered,
    LeaseWasLost,
    Message,
    ModelLoaded,
    Outcome,
    OwnedAnswered,
    PullAnswered,
    PulledRun,
    Registered,
    Started,
    TimePassed,
    Told,
)
from qlm_agent.machine import AgentMachine, Life
from qlm_agent.machine_settings import MachineSettings
from qlm_agent.runs import ReturnCause

REQUESTS = 60
CAPACITY = 5_000
ATTEMPTS_MAX = 5


@dataclass
class Stored:
    """A request at the server."""

    queue_id: str
    model: str
    target: int
    owner: str = ""
    attempt: int = 0
    failed: int = 0
    progress: int = 0
    ended: str = ""

    @property
    def run_id(self) -> str:
        return f"{self.queue_id}/{self.attempt}"


@dataclass
class World:
    """The server, the engine and what goes wrong. Events are delivered in the order of their times."""

    seed: int
    now_s: float = 0.0
    events: list[tuple[float, int, Event]] = field(default_factory=list)
    incarnation: int = 0
    leased: bool = False
    on_engine: dict[str, Stored] = field(default_factory=dict)
    active: str = ""
    stopped: bool = False
    away_until_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.loss = self.random.choice([0.0, 0.02, 0.15])
        self.trouble = self.random.choice([0.0, 0.005, 0.02])
        self.order = itertools.count()
        models = ["m", "n"] if self.random.random() < 0.5 else ["m"]
        self.requests = [Stored(f"{number:03}", self.random.choice(models), self.random.randint(1, 60)) for number in range(REQUESTS)]
        self.machine = AgentMachine(MachineSettings(models=("m", "n"), batch_max=8, buffer_tokens_max=200, poll_s=0.5, owned_check_s=3.0))

    @property
    def by_id(self) -> dict[str, Stored]:
        return {request.queue_id: request for request in self.requests}

    def later(self, event: Event, delay_s: float | None = None) -> None:
        due_s = self.now_s + (self.random.uniform(0.0005, 0.01) if delay_s is None else delay_s)
        heapq.heappush(self.events, (due_s, next(self.order), event))

    # The server -------------------------------------------------------------------------------------------------------

    def owned(self, run_id: str) -> Stored | None:
        request = self.by_id[run_id.partition("/")[0]]
        mine = request.owner == self.machine.incarnation and request.run_id == run_id and not request.ended
        return request if mine else None

    def call(self, effect: Effect, call: int) -> None:
        if self.now_s < self.away_until_s:
            self.later(CallLost(call=call), 0.1)
            return
        lost = self.random.random() < self.loss
        if lost and self.random.random() < 0.5:
            self.later(CallLost(call=call), 0.1)
            return
        answer = self.serve(effect, call)
        self.later(CallLost(call=call) if lost or answer is None else answer, 0.1 if lost else None)
        if answer is None:
            self.later(LeaseWasLost(incarnation=self.machine.incarnation), 0.1)

    def serve(self, effect: Effect, call: int) -> Event | None:
        match effect:
            case Register():
                if not self.leased:
                    self.incarnation += 1
                    self.leased = True
                return Registered(call=call, incarnation=f"a/{self.incarnation}")
            case Pull():
                if not self.leased:
                    return None
                return self.pull(effect, call)
            case ReadOwned():
                mine = [request for request in self.requests if request.owner == self.machine.incarnation and not request.ended]
                return OwnedAnswered(call=call, owned=tuple(self.pulled(request) for request in mine))
            case Emit():
                return ItemsAnswered(call=call, outcomes=[self.emit(item.run_id, item.start, item.end) for item in effect.items])
            case Complete():
                return ItemsAnswered(
                    call=call,
                    outcomes=[self.complete(item.run_id, item.start, item.end, item.ending.finish is not None) for item in effect.items],
                )
            case GiveBack():
                return ItemsAnswered(call=call, outcomes=[self.give_back(run_id, effect.cause) for run_id in effect.run_ids])
            case Deregister():
                self.leased = False
                return CallAnswered(call=call)
            case _:
                return CallAnswered(call=call)

    def waiting(self) -> list[Stored]:
        return [request for request in self.requests if not request.owner and not request.ended]

    def pull(self, effect: Pull, call: int) -> PullAnswered:
        taken: list[PulledRun] = []
        while (waiting := self.waiting()) and waiting[0].model == effect.model and len(taken) < effect.requests_max:
            request = waiting[0]
            request.owner, request.attempt = f"a/{self.incarnation}", request.attempt + 1
            taken.append(self.pulled(request))
        head = waiting[0].model if (waiting := self.waiting()) else ""
        return PullAnswered(call=call, pulled=tuple(taken), head_group=head, head_model=head, blocked_tokens=0)

    def pulled(self, request: Stored) -> PulledRun:
        return PulledRun(
            run_id=request.run_id,
            queue_id=request.queue_id,
            model=request.model,
            prompt_tokens=10,
            output_tokens_max=100,
            stored=request.progress,
        )

    def emit(self, run_id: str, start: int, end: int) -> Outcome:
        request = self.owned(run_id)
        if request is None:
            return Outcome.STALE
        if start > request.progress:
            return Outcome.GAP
        request.progress = max(request.progress, end)
        return Outcome.DONE

    def complete(self, run_id: str, start: int, end: int, finished: bool) -> Outcome:
        named = self.by_id[run_id.partition("/")[0]]
        if named.ended == run_id:
            return Outcome.DONE
        request = self.owned(run_id)
        if request is None:
            return Outcome.STALE
        if start > request.progress:
            return Outcome.GAP
        assert not finished or end == request.target, (run_id, end, request)
        request.progress, request.ended = end, run_id
        return Outcome.DONE

    def give_back(self, run_id: str, cause: ReturnCause) -> Outcome:
        request = self.owned(run_id)
        if request is None:
            return Outcome.STALE
        request.failed += cause is ReturnCause.FAILED
        if request.failed >= ATTEMPTS_MAX:
            request.ended = "failed"
            return Outcome.ENDED
        request.owner = ""
        return Outcome.DONE

    # The engine and trouble -------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        match effect:
            case Register() | Describe() | Deregister() | Pull() | ReadOwned() | Emit() | Complete() | GiveBack():
                self.call(effect, effect.call)
            case StartRun():
                request = self.by_id[effect.run_id.partition("/")[0]]
                assert request.model == self.active
                assert effect.run_id not in self.on_engine
                run = self.machine.runs.get(effect.run_id)
                assert run is not None
                self.on_engine[effect.run_id] = Stored(request.queue_id, request.model, request.target, progress=run.produced)
            case AbortRuns():
                for run_id in effect.run_ids:
                    self.on_engine.pop(run_id, None)
            case LoadModel():
                assert effect.tier is not Tier.ACTIVE or not self.on_engine
                if effect.tier is Tier.ACTIVE:
                    self.active = effect.model
                loaded = ModelLoaded(
                    model=effect.model, tier=effect.tier, took_s=0.1, active=self.active, warm=("m", "n"), kv_capacity_tokens=CAPACITY
                )
                self.later(loaded, 0.05)
            case Stop():
                self.stopped = True
            case _:
                pass

    def engine_step(self) -> EngineTold:
        counts: list[tuple[str, int]] = []
        ends: list[EngineEnd] = []
        for run_id, run in list(self.on_engine.items()):
            tokens = min(self.random.randint(0, 4), run.target - run.progress)
            run.progress += tokens
            if run.progress == run.target:
                ends.append(EngineEnd(run_id=run_id, tokens=tokens, finish=FinishReason.STOP))
            elif self.random.random() < self.trouble:
                ends.append(EngineEnd(run_id=run_id, tokens=tokens, failure=FailureKind.BROKEN, message="broken"))
            elif tokens:
                counts.append((run_id, tokens))
        for end in ends:
            del self.on_engine[end.run_id]
        return EngineTold(counts=counts, ended=ends)

    def make_trouble(self) -> None:
        if self.random.random() > self.trouble:
            return
        match self.random.choice(["lease", "away", "cancel", "reclaim", "rollback"]):
            case "lease":
                self.leased = False
                self.later(LeaseWasLost(incarnation=f"a/{self.incarnation}"))
            case "away":
                self.away_until_s = self.now_s + self.random.uniform(0.1, 3.0)
            case "cancel":
                request = self.random.choice(self.requests)
                if not request.ended:
                    request.ended = "cancelled"
                    self.later(Told(message=Message.CANCEL, run_id=request.run_id))
            case "reclaim":
                for request in self.requests:
                    if request.owner and not request.ended and (request.owner != f"a/{self.incarnation}" or not self.leased):
                        request.owner = ""
            case "rollback":  # a server that came back without its last writes
                request = self.random.choice(self.requests)
                if not request.ended:
                    request.progress = self.random.randint(0, request.progress)

    # A run ------------------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        for effect in self.machine.step(self.now_s, event):
            self.perform(effect)

    def run(self, until_s: float) -> None:
        """Until all have ended."""
        next_engine_s = next_timer_s = 0.0
        self.feed(Started())
        while not self.stopped and (any(not request.ended for request in self.requests) or len(self.machine.runs)):
            assert self.now_s < until_s, "something waits for ever"
            next_event_s = self.events[0][0] if self.events else until_s
            wakeup_s = self.machine.next_wakeup_s
            next_timer_s = until_s if wakeup_s is None else wakeup_s
            self.now_s = max(self.now_s, min(next_event_s, next_timer_s, next_engine_s))
            if self.now_s == next_event_s:
                self.feed(heapq.heappop(self.events)[2])
            elif self.now_s == next_engine_s:
                next_engine_s = self.now_s + 0.02
                self.make_trouble()
                self.reclaim_orphans()
                if not self.machine.paused:
                    self.feed(self.engine_step())
            else:
                self.feed(TimePassed())

    def reclaim_orphans(self) -> None:
        """What the planner does in the end with requests of dead incarnations."""
        for request in self.requests:
            if request.owner and not request.ended and request.owner not in (f"a/{self.incarnation}", self.machine.incarnation):
                request.owner = ""


@pytest.mark.parametrize("seed", range(150))
def test_every_request_ends_once_and_whole(seed: int) -> None:
    world = World(seed)
    world.run(until_s=600.0)
    for request in world.requests:
        assert request.ended, f"seed {seed}: {request}"
        if "/" in request.ended:
            assert request.progress == request.target, f"seed {seed}: {request}"
    assert world.machine.runs.held_tokens == 0
    assert world.machine.runs.kv_reserved == 0
    assert world.machine.runs.running == 0


@pytest.mark.parametrize("seed", range(150, 200))
def test_a_drain_in_the_middle_leaves_nothing_owned(seed: int) -> None:
    world = World(seed)
    world.later(DrainAsked(finish_s=0.2, stop=True), world.random.uniform(0.1, 2.0))
    world.run(until_s=600.0)
    assert world.machine.life is Life.STOPPED or all(request.ended for request in world.requests)
    if world.loss == 0.0 and world.trouble == 0.0:
        assert all(request.ended or not request.owner for request in world.requests), f"seed {seed}"
