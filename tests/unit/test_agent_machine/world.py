"""A small world around a machine: a server and an engine that lose answers, leases and progress, by seed."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from qlm_agent.decisions.effects import (
    AbortRuns,
    Complete,
    Deregister,
    Describe,
    Effect,
    Emit,
    GiveBack,
    LoadModel,
    OffloadRuns,
    Pull,
    ReadOwned,
    Register,
    RestoreRuns,
    StartRun,
    Stop,
)
from qlm_agent.decisions.events import (
    AgentStart,
    CallAnswered,
    CallLost,
    ControlMessage,
    EngineEnd,
    EngineProgress,
    Event,
    ItemsAnswered,
    LeaseLoss,
    Message,
    ModelLoaded,
    Outcome,
    OwnedAnswered,
    PullAnswered,
    PulledRun,
    QueueHead,
    RegisterAnswer,
    RunsOffloaded,
    RunsRestored,
    TimePassed,
)
from qlm_agent.decisions.machine import AgentMachine
from qlm_agent.decisions.runs import ON_GPU, ReturnCause, RunPhase
from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.engines.port import FailureKind, FinishReason, Tier

from .stored_request import Stored
from .transcript import profile

REQUESTS = 60
CAPACITY = 5_000
BATCH_MAX = 8
DISPLACEMENTS_MAX = 3
SLOS_S = (0.3, 1.5, 1_000.0)
ATTEMPTS_MAX = 5


@dataclass
class World:
    """The server, the engine and what goes wrong. Events are delivered in the order of their times."""

    seed: int
    now_s: float = 0.0
    events: list[tuple[float, int, Event]] = field(default_factory=list)
    incarnation: int = 0
    leased: bool = False
    on_engine: dict[str, Stored] = field(default_factory=dict)
    offloaded: dict[str, Stored] = field(default_factory=dict)
    moved: int = 0
    active: str = ""
    stopped: bool = False
    away_until_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.loss = self.random.choice([0.0, 0.02, 0.15])
        self.trouble = self.random.choice([0.0, 0.005, 0.02])
        self.order = itertools.count()
        self.arrived = 0
        models = ["m", "n"] if self.random.random() < 0.5 else ["m"]
        slos_s = SLOS_S if self.random.random() < 0.7 else (math.inf,)
        self.requests = [self.make(number, models, slos_s) for number in range(REQUESTS)]
        self.host_kv_tokens = self.random.choice([0, 300, 10_000])
        self.machine = AgentMachine(
            MachineSettings(
                models=("m", "n"),
                batch_max=BATCH_MAX,
                lookahead_requests=self.random.choice([0, 0, 3]),
                buffer_tokens_max=200,
                poll_s=0.5,
                owned_check_s=3.0,
                hardware={model: profile(model) for model in ("m", "n")},
                host_memory_gb=15.0,
                displacements_max=DISPLACEMENTS_MAX,
                offloaded_max_s=self.random.choice([0.5, 60.0]),
            )
        )

    def make(self, number: int, models: list[str], slos_s: tuple[float, ...]) -> Stored:
        """Two of three are there at once, and mostly have time; the others come over a few seconds, and mostly have none."""
        at_once = number % 3 > 0
        return Stored(
            queue_id=f"{number:03}",
            model=self.random.choice(models),
            target=self.random.randint(1, 100 if at_once else 30),
            arrives_s=0.0 if at_once else self.random.uniform(0.0, 3.0),
            slo_s=slos_s[-1] if at_once and self.random.random() < 0.9 else self.random.choice(slos_s),
            resumable=self.random.random() < 0.9,
        )

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
            self.later(LeaseLoss(incarnation=self.machine.incarnation), 0.1)

    def serve(self, effect: Effect, call: int) -> Event | None:
        match effect:
            case Register():
                if not self.leased:
                    self.incarnation += 1
                    self.leased = True
                return RegisterAnswer(call=call, incarnation=f"a/{self.incarnation}")
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
        """As an earliest deadline first plan has it."""
        here = [request for request in self.requests if not request.owner and not request.ended and request.arrives_s <= self.now_s]
        return sorted(here, key=lambda request: (request.deadline_s, request.queue_id))

    def pull(self, effect: Pull, call: int) -> PullAnswered:
        taken: list[PulledRun] = []
        while (waiting := self.waiting()) and waiting[0].model == effect.model and len(taken) < effect.requests_max:
            request = waiting[0]
            request.owner, request.attempt = f"a/{self.incarnation}", request.attempt + 1
            taken.append(self.pulled(request))
        head = None
        if waiting := self.waiting():
            first = waiting[0]
            count = sum(request.group_id == first.group_id for request in waiting)
            head = QueueHead(
                group_id=first.group_id,
                model=first.model,
                waiting=count,
                waiting_prompt_tokens=10 * count,
                first_deadline_s=first.deadline_s,
            )
        return PullAnswered(call=call, pulled=tuple(taken), head=head, blocked_tokens=0, models_ahead=("n", "m"))

    def pulled(self, request: Stored) -> PulledRun:
        return PulledRun(
            run_id=request.run_id,
            queue_id=request.queue_id,
            model=request.model,
            prompt_tokens=10,
            output_tokens_max=100,
            stored=request.progress,
            deadline_s=request.deadline_s,
            resumable=request.resumable,
            displacements=max(0, request.attempt - 1 - request.failed),
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
        request.evictions += cause is ReturnCause.EVICTED
        assert cause is not ReturnCause.EVICTED or request.resumable, run_id
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
                    self.offloaded.pop(run_id, None)
            case OffloadRuns():
                self.later(RunsOffloaded(requested=effect.run_ids, done=self.offload(effect.run_ids)), 0.02)
            case RestoreRuns():
                self.later(RunsRestored(requested=effect.run_ids, done=self.restore(effect.run_ids)), 0.02)
            case LoadModel():
                assert effect.tier is not Tier.ACTIVE or not self.on_engine
                if effect.tier is Tier.ACTIVE:
                    self.active = effect.model
                loaded = ModelLoaded(
                    model=effect.model,
                    tier=effect.tier,
                    took_s=0.1,
                    active=self.active,
                    warm=("m", "n"),
                    kv_capacity_tokens=CAPACITY,
                    host_kv_capacity_tokens=self.host_kv_tokens,
                )
                self.later(loaded, 0.05)
            case Stop():
                self.stopped = True
            case _:
                pass

    def offload(self, run_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Some are refused: they did not start, or for no reason that the machine could know."""
        done = [run_id for run_id in run_ids if run_id in self.on_engine and self.random.random() < 0.9]
        for run_id in done:
            self.offloaded[run_id] = self.on_engine.pop(run_id)
        self.moved += len(done)
        return tuple(done)

    def restore(self, run_ids: tuple[str, ...]) -> tuple[str, ...]:
        done = [run_id for run_id in run_ids if run_id in self.offloaded and self.random.random() < 0.9]
        for run_id in done:
            assert self.offloaded[run_id].model == self.active, run_id
            self.on_engine[run_id] = self.offloaded.pop(run_id)
        return tuple(done)

    def engine_step(self) -> EngineProgress:
        counts: list[tuple[str, int]] = []
        ends: list[EngineEnd] = []
        for run_id, run in list(self.on_engine.items())[:BATCH_MAX]:
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
        return EngineProgress(counts=counts, ended=ends)

    def make_trouble(self) -> None:
        if self.random.random() > self.trouble:
            return
        match self.random.choice(["lease", "away", "cancel", "reclaim", "rollback"]):
            case "lease":
                self.leased = False
                self.later(LeaseLoss(incarnation=f"a/{self.incarnation}"))
            case "away":
                self.away_until_s = self.now_s + self.random.uniform(0.1, 3.0)
            case "cancel":
                request = self.random.choice(self.requests)
                if not request.ended:
                    request.ended = "cancelled"
                    self.later(ControlMessage(message=Message.CANCEL, run_id=request.run_id))
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
        self.check()

    def check(self) -> None:
        """What the machine counts is so, and what it thinks of a run is what the engine knows."""
        runs = self.machine.runs
        on_gpu = [run for run in runs.all() if run.phase in ON_GPU]
        assert runs.running == len(on_gpu)
        assert runs.kv_reserved == sum(run.kv_reserved for run in on_gpu)
        assert runs.held_tokens == sum(run.unstored for run in runs.all())
        assert {run.run_id for run in runs.offloaded()} == {run.run_id for run in runs.all() if run.phase is RunPhase.OFFLOADED}
        assert not self.on_engine.keys() & self.offloaded.keys()
        for run in runs.offloaded():
            assert run.run_id in self.offloaded or run.run_id in self.on_engine  # its restore is being told
        assert all(self.machine.runs.get(run_id) is not None for run_id in (*self.on_engine, *self.offloaded))

    def run(self, until_s: float) -> None:
        """Until all have ended."""
        next_engine_s = next_timer_s = 0.0
        self.feed(AgentStart())
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
                self.arrivals()
                if not self.machine.paused:
                    self.feed(self.engine_step())
            else:
                self.feed(TimePassed())

    def arrivals(self) -> None:
        """Tells of requests that have come since the last look, most of the time."""
        arrived = sum(request.arrives_s <= self.now_s for request in self.requests)
        if arrived != self.arrived and self.random.random() < 0.9:
            self.later(ControlMessage(message=Message.HEAD_CHANGED))
        self.arrived = arrived

    def reclaim_orphans(self) -> None:
        """What the planner does in the end with requests of dead incarnations."""
        for request in self.requests:
            if request.owner and not request.ended and request.owner not in (f"a/{self.incarnation}", self.machine.incarnation):
                request.owner = ""
