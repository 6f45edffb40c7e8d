"""The agent's decisions: `AgentMachine.step(now_s, event) -> effects`. No IO, no clock, no randomness.

An incarnation registers, serves, and ends by draining or by losing its lease. Work under way is state here: calls to the server,
transfers of models and KV, runs on the engine. After every event all that could be done is looked at again, so no order of events is
needed. What the head of the virtual queue asks for is done in this order (QLM section 5): lookahead goes back, runs make room, runs come
back from host memory, models move, and what fits is pulled.

Owning a request needs no lease (`qlm_queue.port`): an agent that lost its lease first writes what it holds and gives back what it runs, and
then registers again as a new incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

from qlm_agent.decisions.batch_size import BatchSize
from qlm_agent.decisions.delivery import Delivery
from qlm_agent.decisions.drain import Draining
from qlm_agent.decisions.effects import AbortRuns, Effect, ForgetRun, PauseEngine, ResumeEngine, Stop
from qlm_agent.decisions.events import (
    CallAnswered,
    CallLost,
    DrainAsked,
    EngineEnd,
    EngineTold,
    Event,
    HardwareTold,
    ItemsAnswered,
    LeaseWasLost,
    LoadAsked,
    Message,
    ModelLoaded,
    ModelNotLoaded,
    OthersTold,
    Outcome,
    OwnedAnswered,
    PullAnswered,
    PulledRun,
    QueueHead,
    Registered,
    RunsOffloaded,
    RunsRestored,
    Started,
    TimePassed,
    Told,
)
from qlm_agent.decisions.evict import Preempting
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.model_swap import Swapping
from qlm_agent.decisions.pull import Intake, Pulling
from qlm_agent.decisions.registration import Life, Registration, ServerLink
from qlm_agent.decisions.restore import Restoring
from qlm_agent.decisions.runs import Ending, Fate, Operations, ReturnCause, Run, RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.engines.port import FailureKind, Tier
from qlm_core.profile import HardwareProfile

__all__ = ["AgentMachine", "Life"]

BUFFER_RESUME_SHARE = 0.5
"""The engine goes on when what is held is down to this share of the bound."""


class AgentMachine:
    """See the module. `next_wakeup_s` tells when TimePassed is wanted at the latest."""

    def __init__(self, settings: MachineSettings) -> None:
        self._settings = settings
        self._link = ServerLink()
        self._registration = Registration(self._link)
        self.runs = RunTable()
        self.operations = Operations()
        self.expectations = Expectations(settings.hardware)
        self.delivery = Delivery(self.runs, self._link, settings.coalesce_s)
        self._drain = Draining(settings, self.runs, self._link, self.delivery)
        self.batch_size = BatchSize(settings, self.runs, self.expectations)
        self.pulling = Pulling(settings, self.runs, self._link, self.expectations, self.batch_size)
        self.preempting = Preempting(settings, self.runs, self.delivery, self.expectations, self.operations, self.batch_size)
        self.restoring = Restoring(settings, self.runs, self.delivery, self.operations, self.batch_size)
        weights_gb = self._weights_gb(settings.hardware)
        self.swapping = Swapping(settings.models, weights_gb, settings.host_memory_gb, self.operations, ahead=settings.warm_ahead)
        self._intake = Intake(settings, self.runs, self.delivery, self.expectations, self.swapping)
        self.paused = False
        self._broke_together = False  # the engine, with more than one run on it, and its model is not back yet
        self._now_s = 0.0

    @property
    def life(self) -> Life:
        return self._registration.life

    @property
    def incarnation(self) -> str:
        return self._registration.incarnation

    @property
    def serves(self) -> str:
        """The model that is active or becomes so now: the planner hears of a change at once."""
        return self.swapping.swapping_to or self.swapping.active

    @property
    def draining(self) -> bool:
        return self._drain.draining

    @property
    def batch_reported(self) -> int:
        """Most requests of the active model to run at once; 0 while another one is made active, for which none was chosen yet."""
        return 0 if self.swapping.swapping_to else self.batch_size.reported

    @property
    def next_wakeup_s(self) -> float | None:
        """Seconds of the clock that is passed in; None: nothing but an event will change anything."""
        if self.life is Life.STOPPED:
            return None
        away_until_s = self._link.away_until_s
        times = [away_until_s, self._registration.next_wakeup_s, *self._drain.wakeups_s]
        calls = [self.delivery.next_wakeup_s]
        if self.life is Life.SERVING:
            times += [self.swapping.next_wakeup_s, self.restoring.next_wakeup_s]
            if not self.draining:
                times.append(self.preempting.next_wakeup_s)
                calls.append(self.pulling.next_wakeup_s)
        after_s = -math.inf if away_until_s is None else away_until_s
        times += [max(time_s, after_s) for time_s in calls if time_s is not None]
        # What was due at the last step was looked at then, and waits for an event.
        return min((time_s for time_s in times if time_s is not None and time_s > self._now_s), default=None)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Takes an event at a time that does not go back."""
        if self.life is Life.STOPPED:
            return []
        self._now_s = now_s
        effects: list[Effect] = []
        self._take(now_s, event, effects)
        self._decide(now_s, effects)
        return effects

    # Events -----------------------------------------------------------------------------------------------------------

    def _take(self, now_s: float, event: Event, effects: list[Effect]) -> None:
        match event:
            case EngineTold():
                self._engine_told(now_s, event)
            case RunsOffloaded():
                self.preempting.offloaded(now_s, event)
            case RunsRestored():
                effects += self.restoring.restored(now_s, event)
            case ItemsAnswered():
                self._link.answered()
                for run, fate in self.delivery.answered(now_s, event.call, event.outcomes):
                    self._forget(run, effects, fate)
                if Outcome.GAP in event.outcomes:
                    self.pulling.read_owned()
            case PullAnswered():
                self._link.answered()
                if self.pulling.pull_answered(event):
                    self.preempting.look_again()
                    for pulled in event.pulled:
                        self.batch_size.pulled(pulled)
                        self._own(pulled, effects)
            case OwnedAnswered():
                self._link.answered()
                if self.pulling.owned_answered(event.call):
                    self._owned(event.owned, effects)
            case Told():
                self._told(now_s, event, effects)
            case HardwareTold():
                self.expectations.hardware = event.hardware
                self.swapping.weights_told(self._weights_gb(event.hardware))
            case Registered():
                self._link.answered()
                if self._registration.registered(now_s, event):
                    self._drain.registered()
                    self.pulling.reset(now_s)
            case LeaseWasLost():
                if self._registration.lease_lost(now_s, event.incarnation):
                    effects += self._drain.take_off_engine(self.runs.on_engine())
            case CallAnswered():
                self._link.answered()
                if self._drain.call_answered(event.call):
                    self._end(effects)
            case CallLost():
                self._link.lost(now_s)
                self._lost(now_s, event.call, effects)
            case OthersTold():
                self.runs.others_runs, self.runs.others_kv_tokens = event.runs, event.kv_tokens
            case ModelLoaded():
                self._broke_together = False
                self.preempting.host_kv_capacity_tokens = event.host_kv_capacity_tokens
                effects += self.swapping.loaded(event.model, event.tier, event.took_s, event.active, event.warm, event.kv_capacity_tokens)
                if event.tier is Tier.ACTIVE:
                    self.pulling.model_changed(event.active)
            case ModelNotLoaded():
                self._broke_together = self._broke_together or (bool(self.swapping.active) and self.runs.running > 1)
                effects += self.swapping.not_loaded(now_s, event.model, event.tier, event.message, event.active, event.warm)
                if event.tier is Tier.ACTIVE:
                    effects += self.restoring.model_failed(event.model)
            case LoadAsked():
                effects += self.swapping.asked(event.ask, event.model, event.tier)
            case DrainAsked():
                self._drain.asked(now_s, event)
            case Started() | TimePassed():
                pass
            case _:
                assert_never(event)

    def _weights_gb(self, hardware: Mapping[str, HardwareProfile]) -> Mapping[str, float]:
        return {**{model: row.weights_gb for model, row in hardware.items()}, **self._settings.weights_gb}

    def _told(self, now_s: float, event: Told, effects: list[Effect]) -> None:
        run = self.runs.get(event.run_id)
        match event.message:
            case Message.WAKE | Message.HEAD_CHANGED:
                self.pulling.signalled()
            case Message.CANCEL:
                if run is not None:
                    self._forget(run, effects, Fate.GONE)
            case Message.GATEWAY_REBOUND:
                if run is not None:
                    self.delivery.hurry(run)
            case Message.DRAIN:
                self._drain.begin(now_s, self._settings.drain_finish_s)
            case _:
                assert_never(event.message)

    def _engine_told(self, now_s: float, event: EngineTold) -> None:
        seconds, tokens_told, model = 0.0, 0, ""
        sequences = self.runs.running + self.runs.others_runs
        for run_id, tokens in event.counts:
            run = self.runs.get(run_id)
            if run is None or not run.on_engine:
                continue
            run.started = True
            if run.told_s is not None:
                seconds += now_s - run.told_s
                tokens_told += tokens
                model = run.model
            run.told_s = now_s
            self.delivery.produced(now_s, run, tokens)
        if tokens_told:
            self.expectations.told(model, seconds, tokens_told, sequences)
        broken = sum(end.failure is FailureKind.BROKEN for end in event.ended)
        if broken > 1:
            self._broke_together = True
        for end in event.ended:
            self._engine_ended(end)
        if self.swapping.active:
            self._broke_together = False

    def _engine_ended(self, end: EngineEnd) -> None:
        run = self.runs.get(end.run_id)
        if run is None or not run.on_engine:
            return
        self.runs.produced(run, end.tokens)
        match end.failure:
            case None:
                assert end.finish is not None
                self.expectations.finished(run)
                self.delivery.ended(run, Ending(finish=end.finish))
            case FailureKind.REFUSED:
                self.delivery.ended(run, Ending(reason="ENGINE_FAILURE", message=end.message))
            case FailureKind.KV_CAPACITY:
                self.delivery.ended(run, Ending(reason="KV_CAPACITY_EXCEEDED", message=end.message))
            case FailureKind.BROKEN:
                self.delivery.give_back(run, ReturnCause.SUSPECTED if self._broke_together else ReturnCause.FAILED, end.message)
            case FailureKind.AWAY:
                self.delivery.give_back(run, ReturnCause.AWAY)
            case _:
                assert_never(end.failure)

    def _own(self, pulled: PulledRun, effects: list[Effect]) -> None:
        effects += self._intake.own(pulled, serving=self.life is Life.SERVING and not self.draining)

    def _owned(self, owned: tuple[PulledRun, ...], effects: list[Effect]) -> None:
        """What the server says this incarnation owns: takes what is not known, and mends gaps."""
        by_id = {pulled.run_id: pulled for pulled in owned}
        for run in self.runs.all():
            if run.gap:
                if run.run_id in by_id:
                    self.delivery.progress_read(run, by_id[run.run_id].stored)
                else:
                    self._forget(run, effects, Fate.GONE)
        for pulled in owned:
            self._own(pulled, effects)

    def _lost(self, now_s: float, call: int, effects: list[Effect]) -> None:
        self.delivery.lost(now_s, call)
        self.pulling.lost(call)
        self._registration.lost(call)
        if self._drain.lost(call):
            self._end(effects)

    # Decisions --------------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float, effects: list[Effect]) -> None:
        if self.life is Life.STOPPED:
            return
        if self._drain.gives_up(now_s):
            self._end(effects)
            return
        if self.life is Life.LEAVING and not len(self.runs) and not self.pulling.under_way:
            self._registration.life = Life.NONE
        if self.life is Life.NONE:
            if not self._drain.stop:
                effects += self._registration.decide(now_s)
            elif not self._registration.under_way:  # else it is deregistered once it is known by what name
                self._end(effects)
            return
        self._pause_or_resume(effects)
        if self.life is Life.LEAVING:
            effects += self.pulling.decide(now_s, "", 0, may_pull=False)
        elif self.draining:
            self._decide_drain(now_s, effects)
        else:
            self._decide_service(now_s, effects)
        effects += self.delivery.decide(now_s)

    def _decide_service(self, now_s: float, effects: list[Effect]) -> None:
        swapping, pulling = self.swapping, self.pulling
        self.batch_size.choose(now_s, swapping.active, pulling.head)
        head = pulling.head if pulling.head is not None and pulling.head.model in self._settings.models else None
        urgency = None if head is None else self.preempting.head_urgency(head)
        if not self.paused and not swapping.swapping_to and pulling.head_is_fresh:
            if head is not None and self.restoring.first(now_s, urgency) is None:
                self._make_room(now_s, head, effects)
            effects += self.restoring.decide(now_s, urgency, swapping.active, swapping.kv_capacity_tokens)
        # An offloaded run that comes before the head needs the room, or its model: nothing is taken meanwhile.
        first = self.restoring.first(now_s, urgency)
        models = [*([first.model] if first else []), *([head.model] if head else []), *pulling.models_ahead]
        if not models and not swapping.active and len(self._settings.models) == 1:
            models = list(self._settings.models)  # without it this is no place for a request that cannot wait for the load
        if not models and swapping.failing:
            models = [swapping.failing]  # what waited for it went elsewhere
        empty = self.runs.running == 0 and not pulling.under_way
        effects += swapping.decide(now_s, list(dict.fromkeys(models)), engine_empty=empty)
        may_pull = not self.paused and not swapping.swapping_to
        effects += pulling.decide(now_s, swapping.active, swapping.kv_capacity_tokens, may_pull=may_pull, may_take=first is None)

    def _make_room(self, now_s: float, head: QueueHead, effects: list[Effect]) -> None:
        active, capacity = self.swapping.active, self.swapping.kv_capacity_tokens
        if self._settings.lookahead_requests and self.pulling.head_is_new:
            effects += self.preempting.displace_lookahead(head, capacity)
        blocked = head.model == active and self.pulling.blocked(capacity)
        warm = self.swapping.is_warm(head.model)
        needs = self.pulling.blocked_tokens if blocked else 0
        effects += self.preempting.decide(now_s, head, active, capacity, blocked=blocked, blocked_tokens=needs, warm=warm)

    def _decide_drain(self, now_s: float, effects: list[Effect]) -> None:
        effects += self._drain.give_back(now_s)
        if not self.paused and not self.swapping.swapping_to and self.runs.offloaded():
            effects += self.restoring.decide(now_s, None, self.swapping.active, self.swapping.kv_capacity_tokens)
            first = self.restoring.first(now_s, None)
            empty = self.runs.running == 0 and not self.pulling.under_way
            if first is not None and empty:
                effects += self.swapping.decide(now_s, [first.model], engine_empty=True)
        owns_nothing = not len(self.runs) and not self.pulling.under_way
        effects += self._drain.decide(now_s, owns_nothing=owns_nothing)
        if not owns_nothing:
            effects += self.pulling.decide(now_s, "", 0, may_pull=False)

    def _pause_or_resume(self, effects: list[Effect]) -> None:
        held, bound = self.runs.held_tokens, self._settings.buffer_tokens_max
        if not self.paused and held > bound:
            self.paused = True
            effects.append(PauseEngine())
        elif self.paused and held <= bound * BUFFER_RESUME_SHARE:
            self.paused = False
            for run in self.runs.on_gpu():
                run.told_s = None
            effects.append(ResumeEngine())

    def _forget(self, run: Run, effects: list[Effect], fate: Fate) -> None:
        """The run is not the agent's any more."""
        if run.on_engine:
            effects.append(AbortRuns(run_ids=(run.run_id,)))
        self.delivery.forget(run)
        effects.append(ForgetRun(run_id=run.run_id, fate=fate))

    def _end(self, effects: list[Effect]) -> None:
        effects += self._drain.answer()
        self._registration.life = Life.STOPPED
        effects.append(Stop())
