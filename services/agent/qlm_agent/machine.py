"""The agent's decisions: `AgentMachine.step(now_s, event) -> effects`. No IO, no clock, no randomness.

An incarnation registers, serves, and ends by draining or by losing its lease. Work under way is state here: calls to the server,
transfers of models, runs on the engine. After every event all that could be done is looked at again, so no order of events is needed.

Owning a request needs no lease (`qlm_queue.port`): an agent that lost its lease first writes what it holds and gives back what it runs, and
then registers again as a new incarnation.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import assert_never

from qlm_agent.delivery import Delivery
from qlm_agent.effects import (
    AbortRuns,
    Deregister,
    Describe,
    DrainAnswer,
    Effect,
    ForgetRun,
    PauseEngine,
    Register,
    ResumeEngine,
    StartRun,
    Stop,
)
from qlm_agent.engine import FailureKind, FinishReason
from qlm_agent.events import (
    CallAnswered,
    CallLost,
    DrainAsked,
    EngineEnd,
    EngineTold,
    Event,
    ItemsAnswered,
    LeaseWasLost,
    LoadAsked,
    Message,
    ModelLoaded,
    ModelNotLoaded,
    Outcome,
    OwnedAnswered,
    PullAnswered,
    PulledRun,
    Registered,
    Started,
    TimePassed,
    Told,
)
from qlm_agent.machine_settings import MachineSettings
from qlm_agent.pulling import Pulling
from qlm_agent.runs import Ending, Fate, ReturnCause, Run, RunPhase, RunTable
from qlm_agent.server_link import ServerLink
from qlm_agent.swapping import Swapping

BUFFER_RESUME_SHARE = 0.5
"""The engine goes on when what is held is down to this share of the bound."""


SHORT_LIFE_S = 5.0
REGISTER_PAUSE_S = 1.0
"""An incarnation that lived less than SHORT_LIFE_S is followed by the next after REGISTER_PAUSE_S: two agents that were given one name
would else take it from each other without end."""


class Life(Enum):
    """Of the incarnation."""

    NONE = "none"  # to be registered
    SERVING = "serving"
    LEAVING = "leaving"  # its lease is lost
    STOPPED = "stopped"


class AgentMachine:
    """See the module. `next_wakeup_s` tells when TimePassed is wanted at the latest."""

    def __init__(self, settings: MachineSettings) -> None:
        self._settings = settings
        self.runs = RunTable()
        self._link = ServerLink()
        self.delivery = Delivery(self.runs, self._link, settings.coalesce_s)
        self.pulling = Pulling(settings, self.runs, self._link)
        self.swapping = Swapping(settings.models)
        self.life = Life.NONE
        self.incarnation = ""
        self.paused = False
        self.draining = False
        self._now_s = 0.0
        self._register_call: int | None = None
        self._registrations = 0
        self._registered_s = 0.0
        self._register_at_s: float | None = None  # not before
        self._describe_call: int | None = None
        self._described = False
        self._deregister_call: int | None = None
        self._stop = False
        self._finish_by_s: float | None = None  # the drain's end, None when what ran then was given back
        self._give_up_at_s: float | None = None
        self._drain_asks: list[int] = []
        self._drain_base = (0, 0)  # finished and given back before the drain

    @property
    def next_wakeup_s(self) -> float | None:
        """Seconds of the clock that is passed in; None: nothing but an event will change anything."""
        if self.life is Life.STOPPED:
            return None
        away_until_s = self._link.away_until_s
        times = [away_until_s, self._register_at_s, self._finish_by_s, self._give_up_at_s]
        calls = [self.delivery.next_wakeup_s]
        if self.life is Life.SERVING and not self.draining:
            times.append(self.swapping.next_wakeup_s)
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
                for run_id, tokens in event.counts:
                    run = self.runs.get(run_id)
                    if run is not None and run.phase is RunPhase.RUNNING:
                        self.delivery.produced(now_s, run, tokens)
                for end in event.ended:
                    self._engine_ended(end)
            case ItemsAnswered():
                self._link.answered()
                for run, fate in self.delivery.answered(now_s, event.call, event.outcomes):
                    self._forget(run, effects, fate)
                if Outcome.GAP in event.outcomes:
                    self.pulling.read_owned()
            case PullAnswered():
                self._link.answered()
                if self.pulling.pull_answered(event.call, event.head_model, event.blocked_tokens):
                    for pulled in event.pulled:
                        self._own(pulled, effects)
            case OwnedAnswered():
                self._link.answered()
                if self.pulling.owned_answered(event.call):
                    self._owned(event.owned, effects)
            case Told():
                self._told(now_s, event, effects)
            case Registered():
                self._link.answered()
                if event.call == self._register_call:
                    self._register_call = None
                    self._registrations += 1
                    self._registered_s = now_s
                    self.incarnation = event.incarnation
                    self.life = Life.SERVING
                    self._described = False
                    self.pulling.reset(now_s)
            case LeaseWasLost():
                if self.life is Life.SERVING and event.incarnation == self.incarnation:
                    self.life = Life.LEAVING
                    self._register_at_s = now_s + REGISTER_PAUSE_S if now_s - self._registered_s < SHORT_LIFE_S else None
                    self._take_off_engine(ReturnCause.DRAINED, effects)
            case CallAnswered():
                self._link.answered()
                self._call_ended(event.call, effects)
            case CallLost():
                self._link.lost(now_s)
                self._lost(now_s, event.call, effects)
            case ModelLoaded():
                effects += self.swapping.loaded(event.model, event.tier, event.took_s, event.active, event.warm, event.kv_capacity_tokens)
                self.pulling.model_changed()
            case ModelNotLoaded():
                effects += self.swapping.not_loaded(now_s, event.model, event.tier, event.message, event.active, event.warm)
            case LoadAsked():
                effects += self.swapping.asked(event.ask, event.model, event.tier)
            case DrainAsked():
                self._drain(now_s, event.finish_s, stop=event.stop)
                if event.ask:
                    self._drain_asks.append(event.ask)
            case Started() | TimePassed():
                pass
            case _:
                assert_never(event)

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
                self._drain(now_s, self._settings.drain_finish_s, stop=False)
            case _:
                assert_never(event.message)

    def _engine_ended(self, end: EngineEnd) -> None:
        run = self.runs.get(end.run_id)
        if run is None or run.phase is not RunPhase.RUNNING:
            return
        self.runs.produced(run, end.tokens)
        match end.failure:
            case None:
                assert end.finish is not None
                self.pulling.finished(run.model, run.produced)
                self.delivery.ended(run, Ending(finish=end.finish))
            case FailureKind.REFUSED:
                self.delivery.ended(run, Ending(reason="ENGINE_FAILURE", message=end.message))
            case FailureKind.KV_CAPACITY:
                self.delivery.ended(run, Ending(reason="KV_CAPACITY_EXCEEDED", message=end.message))
            case FailureKind.BROKEN:
                self.delivery.give_back(run, ReturnCause.FAILED, end.message)
            case _:
                assert_never(end.failure)

    def _own(self, pulled: PulledRun, effects: list[Effect]) -> None:
        """Starts a run that was not known, or ends or returns it at once."""
        if pulled.run_id in self.runs:
            return
        expected = self.pulling.expected_output_tokens(pulled.model)
        run = Run(
            run_id=pulled.run_id,
            queue_id=pulled.queue_id,
            model=pulled.model,
            prompt_tokens=pulled.prompt_tokens,
            output_tokens_max=pulled.output_tokens_max,
            resumed=pulled.stored,
            produced=pulled.stored,
            stored=pulled.stored,
            kv_reserved=pulled.prompt_tokens + min(pulled.output_tokens_max, max(expected, pulled.stored + 1)),
        )
        self.runs.add(run)
        if pulled.refusal:
            self.delivery.ended(run, Ending(reason="ENGINE_FAILURE", message=pulled.refusal))
        elif run.stored >= run.output_tokens_max:
            # An earlier attempt made all of it and was lost before it could say so.
            self.delivery.ended(run, Ending(finish=FinishReason.LENGTH))
        elif self.life is not Life.SERVING or self.draining or run.model != self.swapping.active:
            self.delivery.give_back(run, ReturnCause.UNSTARTED)
        elif run.prompt_tokens + run.stored + 1 > self.swapping.kv_capacity_tokens:
            message = f"{run.prompt_tokens + run.stored} tokens do not fit in {self.swapping.kv_capacity_tokens} tokens of KV"
            self.delivery.ended(run, Ending(reason="KV_CAPACITY_EXCEEDED", message=message))
        else:
            effects.append(StartRun(run_id=run.run_id))

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
        if call == self._register_call:
            self._register_call = None
        elif call == self._describe_call:
            self._describe_call = None
        elif call == self._deregister_call:
            # The lease ends by itself.
            self._call_ended(call, effects)

    def _call_ended(self, call: int, effects: list[Effect]) -> None:
        if call == self._describe_call:
            self._describe_call = None
            self._described = True
        elif call == self._deregister_call:
            self._deregister_call = None
            self._end(effects)

    def _drain(self, now_s: float, finish_s: float, *, stop: bool) -> None:
        finish_by_s = now_s + finish_s
        if not self.draining:
            self.draining = True
            self._finish_by_s = finish_by_s
            self._drain_base = (self.delivery.finished, self.delivery.given_back)
        elif self._finish_by_s is not None:
            self._finish_by_s = min(self._finish_by_s, finish_by_s)
        if stop:
            self._stop = True
            self._give_up_at_s = finish_by_s + self._settings.give_up_s

    # Decisions --------------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float, effects: list[Effect]) -> None:
        if self.life is Life.STOPPED:
            return
        if self._give_up_at_s is not None and now_s >= self._give_up_at_s:
            self._end(effects)
            return
        if self.life is Life.LEAVING and not len(self.runs) and not self.pulling.under_way:
            self.life = Life.NONE
        if self.life is Life.NONE:
            self._decide_registration(now_s, effects)
            return
        self._pause_or_resume(effects)
        if self.life is Life.LEAVING:
            effects += self.pulling.decide(now_s, "", 0, may_pull=False)
        elif self.draining:
            self._decide_drain(now_s, effects)
        else:
            empty = self.runs.running == 0 and not self.pulling.under_way
            effects += self.swapping.decide(now_s, self.pulling.head_model, engine_empty=empty)
            may_pull = not self.paused and not self.swapping.swapping_to
            effects += self.pulling.decide(now_s, self.swapping.active, self.swapping.kv_capacity_tokens, may_pull=may_pull)
        effects += self.delivery.decide(now_s)

    def _decide_registration(self, now_s: float, effects: list[Effect]) -> None:
        if self._stop:
            self._end(effects)
        elif self._register_at_s is not None and now_s < self._register_at_s:
            return
        elif self._register_call is None and self._link.usable(now_s):
            self._register_call = self._link.next_call()
            effects.append(Register(call=self._register_call, nonce_number=self._registrations))

    def _decide_drain(self, now_s: float, effects: list[Effect]) -> None:
        if self._finish_by_s is not None and now_s >= self._finish_by_s:
            self._finish_by_s = None
            self._take_off_engine(ReturnCause.DRAINED, effects)
        if not self._link.usable(now_s):
            return
        if not self._described and self._describe_call is None:
            self._describe_call = self._link.next_call()
            effects.append(Describe(call=self._describe_call))
        if len(self.runs) or self.pulling.under_way:
            effects += self.pulling.decide(now_s, "", 0, may_pull=False)
            return
        self._answer_drain(effects)
        if self._stop and self._deregister_call is None:
            self._deregister_call = self._link.next_call()
            effects.append(Deregister(call=self._deregister_call))

    def _pause_or_resume(self, effects: list[Effect]) -> None:
        held, bound = self.runs.held_tokens, self._settings.buffer_tokens_max
        if not self.paused and held > bound:
            self.paused = True
            effects.append(PauseEngine())
        elif self.paused and held <= bound * BUFFER_RESUME_SHARE:
            self.paused = False
            effects.append(ResumeEngine())

    def _take_off_engine(self, cause: ReturnCause, effects: list[Effect]) -> None:
        """Aborts all that runs; what made no token yet counts as not started."""
        runs = self.runs.on_engine()
        if runs:
            effects.append(AbortRuns(run_ids=tuple(run.run_id for run in runs)))
        for run in runs:
            self.delivery.give_back(run, cause if run.produced > run.resumed else ReturnCause.UNSTARTED)

    def _forget(self, run: Run, effects: list[Effect], fate: Fate) -> None:
        """The run is not the agent's any more."""
        if run.phase is RunPhase.RUNNING:
            effects.append(AbortRuns(run_ids=(run.run_id,)))
        self.delivery.forget(run)
        effects.append(ForgetRun(run_id=run.run_id, fate=fate))

    def _answer_drain(self, effects: list[Effect]) -> None:
        if self._drain_asks:
            asks, self._drain_asks = tuple(self._drain_asks), []
            finished, given_back = self._drain_base
            effects.append(
                DrainAnswer(asks=asks, finished=self.delivery.finished - finished, given_back=self.delivery.given_back - given_back)
            )

    def _end(self, effects: list[Effect]) -> None:
        self._answer_drain(effects)
        self.life = Life.STOPPED
        effects.append(Stop())
