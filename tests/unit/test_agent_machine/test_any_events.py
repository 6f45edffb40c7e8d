"""Any events in any order, checked by nobody: the machine keeps its counts, and requests nothing of runs that it does not own."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qlm_agent.decisions.effects import (
    AbortRuns,
    Complete,
    Deregister,
    Describe,
    Effect,
    Emit,
    ForgetRun,
    GiveBack,
    LoadModel,
    OffloadRuns,
    Pull,
    ReadOwned,
    Register,
    RestoreRuns,
    StartRun,
)
from qlm_agent.decisions.events import (
    AgentStart,
    CallAnswered,
    CallLost,
    ControlMessage,
    DrainCommand,
    EngineEnd,
    EngineProgress,
    Event,
    ItemsAnswered,
    LeaseLoss,
    LoadCommand,
    Message,
    ModelLoaded,
    ModelNotLoaded,
    OtherLoad,
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

from .transcript import HARDWARE, waiting_groups

MODELS = ("m", "n", "o")
BATCH_MAX = 3

models = st.sampled_from(MODELS)
names = st.integers(0, 12)
dues = st.sampled_from([0.5, 5.0, 600.0, math.inf])
priorities = st.sampled_from([None, None, None, -1, 1])
outcomes = st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.DONE, *Outcome])


class AnyEvents(RuleBasedStateMachine):
    """Answers fit the calls that were made in kind and size; everything else is arbitrary."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.calls: dict[int, Effect] = {}
        self.loads: list[LoadModel] = []
        self.resumable: dict[str, bool] = {}
        self.on_gpu: set[str] = set()  # as the engine has it
        self.in_host: set[str] = set()
        self.machine = AgentMachine(
            MachineSettings(
                models=MODELS, batch_max=BATCH_MAX, lookahead_requests=1, buffer_tokens_max=100, hardware=HARDWARE, host_memory_gb=25.0
            )
        )
        self.feed(AgentStart())

    def feed(self, event: Event) -> None:
        known = {run.run_id for run in self.machine.runs.all()}
        if isinstance(event, PullAnswered | OwnedAnswered):
            known |= {run.run_id for run in (event.pulled if isinstance(event, PullAnswered) else event.owned)}
        for effect in self.machine.step(self.now_s, event):
            match effect:
                case Register() | Describe() | Deregister() | Pull() | ReadOwned():
                    self.calls[effect.call] = effect
                case Emit() | Complete():
                    assert {item.run_id for item in effect.items} <= known
                    self.calls[effect.call] = effect
                case GiveBack():
                    assert set(effect.run_ids) <= known
                    if effect.cause is ReturnCause.EVICTED:
                        assert all(self.resumable[run_id] for run_id in effect.run_ids)
                    assert not set(effect.run_ids) & (self.on_gpu | self.in_host), "it is off the engine first"
                    self.calls[effect.call] = effect
                case StartRun():
                    assert effect.run_id in known
                    assert effect.run_id not in self.on_gpu | self.in_host
                    self.on_gpu.add(effect.run_id)
                case AbortRuns():
                    assert set(effect.run_ids) <= known
                    self.on_gpu -= set(effect.run_ids)
                    self.in_host -= set(effect.run_ids)
                case OffloadRuns():
                    assert set(effect.run_ids) <= self.on_gpu
                case RestoreRuns():
                    assert set(effect.run_ids) <= self.in_host
                    self.in_host -= set(effect.run_ids)
                    self.on_gpu |= set(effect.run_ids)
                case LoadModel():
                    assert effect.tier is not Tier.ACTIVE or not self.on_gpu, "nobody is on the GPU when its model goes"
                    self.loads.append(effect)
                case ForgetRun():
                    assert effect.run_id in known
                    assert effect.run_id not in self.on_gpu | self.in_host
                case _:
                    pass

    def open_call(self, pick: int, *kinds: type) -> Effect | None:
        found = [number for number, call in self.calls.items() if isinstance(call, kinds)]
        return self.calls.pop(found[pick % len(found)]) if found else None

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 20.0]))
    def time(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(TimePassed())

    @rule(pick=names)
    def answer(self, pick: int) -> None:
        call = self.open_call(pick, Register, Describe, Deregister)
        if isinstance(call, Register):
            self.feed(RegisterAnswer(call=call.call, incarnation=f"a/{call.call}"))
        elif isinstance(call, Describe | Deregister):
            self.feed(CallAnswered(call=call.call))

    @rule(
        pick=names,
        count=st.integers(0, BATCH_MAX + 1),
        model=st.one_of(st.none(), models),
        due=dues,
        priority=priorities,
        head=st.one_of(st.none(), models),
        head_due=dues,
        stored=st.integers(0, 60),
        resumable=st.booleans(),
    )
    def answer_pull(
        self,
        pick: int,
        count: int,
        model: str | None,
        due: float,
        priority: int | None,
        head: str | None,
        head_due: float,
        stored: int,
        resumable: bool,
    ) -> None:
        call = self.open_call(pick, Pull, ReadOwned)
        if call is None:
            return
        assert isinstance(call, Pull | ReadOwned)
        pulled_model = call.model if isinstance(call, Pull) else "m"
        runs = []
        for _ in range(count if pulled_model else 0):
            run_id = f"{len(self.resumable)}/1"
            self.resumable[run_id] = resumable
            deadline_s = math.inf if priority is not None else self.now_s + due
            runs.append(
                PulledRun(
                    run_id=run_id,
                    queue_id=run_id,
                    model=model or pulled_model,
                    prompt_tokens=100,
                    output_tokens_max=50,
                    stored=stored,
                    deadline_s=deadline_s,
                    priority=priority,
                    resumable=resumable,
                )
            )
        if isinstance(call, ReadOwned):
            self.feed(OwnedAnswered(call=call.call, owned=tuple(runs)))
            return
        first = None
        if head is not None:
            first = QueueHead(
                group_id=f"{head}{head_due}", model=head, waiting=2, waiting_prompt_tokens=200, first_deadline_s=self.now_s + head_due
            )
        self.feed(PullAnswered(call=call.call, pulled=tuple(runs), head=first, blocked_tokens=0, behind=waiting_groups(*MODELS)))

    @rule(pick=names, outcome=outcomes)
    def answer_items(self, pick: int, outcome: Outcome) -> None:
        call = self.open_call(pick, Emit, Complete, GiveBack)
        if call is not None:
            assert isinstance(call, Emit | Complete | GiveBack)
            size = len(call.run_ids if isinstance(call, GiveBack) else call.items)
            self.feed(ItemsAnswered(call=call.call, outcomes=[outcome] * size))

    @rule(pick=names)
    def lose(self, pick: int) -> None:
        if self.calls:
            number = sorted(self.calls)[pick % len(self.calls)]
            del self.calls[number]
            self.feed(CallLost(call=number))

    @rule(tokens=st.integers(1, 5))
    def tokens(self, tokens: int) -> None:
        self.feed(EngineProgress(counts=[(run_id, tokens) for run_id in sorted(self.on_gpu)]))

    @rule(runs=st.sampled_from([0, 1, 9]), kv_tokens=st.sampled_from([0, 300, 1_000]))
    def others(self, runs: int, kv_tokens: int) -> None:
        self.feed(OtherLoad(runs=runs, kv_tokens=kv_tokens))

    @rule(pick=names, failure=st.one_of(st.none(), st.sampled_from(FailureKind)))
    def end(self, pick: int, failure: FailureKind | None) -> None:
        if self.on_gpu:
            run_id = sorted(self.on_gpu)[pick % len(self.on_gpu)]
            self.on_gpu.discard(run_id)
            self.feed(
                EngineProgress(ended=[EngineEnd(run_id=run_id, tokens=1, finish=None if failure else FinishReason.STOP, failure=failure)])
            )

    @rule(stranger=st.booleans(), done=st.booleans())
    def offload(self, stranger: bool, done: bool) -> None:
        requested = tuple(run.run_id for run in self.machine.runs.all() if run.phase is RunPhase.OFFLOADING)
        if done:
            self.on_gpu -= set(requested)
            self.in_host |= set(requested)
        named = (*requested, "stranger/1") if stranger else requested
        self.feed(RunsOffloaded(requested=named, done=named if done else ()))

    @rule(stranger=st.booleans(), done=st.booleans())
    def restore(self, stranger: bool, done: bool) -> None:
        requested = tuple(run.run_id for run in self.machine.runs.all() if run.phase is RunPhase.RESTORING)
        if not done:
            self.on_gpu -= set(requested)
            self.in_host |= set(requested)
        named = (*requested, "stranger/1") if stranger else requested
        self.feed(RunsRestored(requested=named, done=named if done else ()))

    @rule(done=st.booleans(), host_kv_tokens=st.sampled_from([0, 300, 5_000]))
    def load(self, done: bool, host_kv_tokens: int) -> None:
        if not self.loads:
            return
        load, active = self.loads.pop(0), self.machine.model_swap.active
        if not done:
            self.feed(ModelNotLoaded(model=load.model, tier=load.tier, message="broken", active=active, warm=()))
            return
        self.feed(
            ModelLoaded(
                model=load.model,
                tier=load.tier,
                took_s=1.0,
                active=load.model if load.tier is Tier.ACTIVE else active,
                warm=(load.model,) if load.tier is Tier.WARM else (),
                kv_capacity_tokens=1_000,
                host_kv_capacity_tokens=host_kv_tokens,
            )
        )

    @rule(message=st.sampled_from([Message.WAKE, Message.HEAD_CHANGED, Message.CANCEL, Message.GATEWAY_REBOUND]), pick=names)
    def message(self, message: Message, pick: int) -> None:
        runs = self.machine.runs.all()
        self.feed(ControlMessage(message=message, run_id=runs[pick % len(runs)].run_id if runs else "stranger/1"))

    @rule(current=st.booleans())
    def lease(self, current: bool) -> None:
        self.feed(LeaseLoss(incarnation=self.machine.incarnation if current else "a/0"))

    @rule(model=models, tier=st.sampled_from([Tier.WARM, Tier.COLD]))
    def ask(self, model: str, tier: Tier) -> None:
        self.feed(LoadCommand(caller=1, model=model, tier=tier))

    @rule(rare=st.integers(0, 9), finish_s=st.sampled_from([0.0, 30.0]))
    def drain(self, rare: int, finish_s: float) -> None:
        if rare == 0:
            self.feed(DrainCommand(finish_s=finish_s, stop=False))

    @invariant()
    def counts_are_right(self) -> None:
        runs = self.machine.runs
        on_gpu = [run for run in runs.all() if run.phase in ON_GPU]
        assert {run.run_id for run in on_gpu} == self.on_gpu
        assert {run.run_id for run in runs.offloaded()} == self.in_host
        assert runs.running == len(on_gpu)
        assert runs.kv_reserved == sum(run.kv_reserved for run in on_gpu)
        assert runs.offloading == sum(run.phase is RunPhase.OFFLOADING for run in on_gpu)
        assert runs.held_tokens == sum(run.unstored for run in runs.all())

    @invariant()
    def wakes_later(self) -> None:
        wakeup_s = self.machine.next_wakeup_s
        assert wakeup_s is None or wakeup_s > self.now_s


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=60)
