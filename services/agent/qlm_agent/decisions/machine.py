"""The agent's decisions: `AgentMachine.step(now_s, event) -> effects`. No IO, no clock, no randomness.

An incarnation registers, serves, and ends by draining or by losing its lease. Work under way is state here: calls to the server, transfers
of models and KV, runs on the engine. Every event triggers all decisions, so events may arrive in any order. The head of the virtual queue
is served in this order (QLM section 5): unpull lookahead, make room, restore offloaded runs, move models, pull requests that fit.

Owning a request needs no lease (`qlm_queue.port`): an agent that lost its lease first writes its output and gives back its runs, and then
registers again as a new incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

from qlm_agent.decisions.batch_size import BatchSize
from qlm_agent.decisions.delivery import Delivery
from qlm_agent.decisions.drain import DrainControl
from qlm_agent.decisions.effects import AbortRuns, Effect, ForgetRun, PauseEngine, ResumeEngine, Stop
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
    ProfilesUpdated,
    PullAnswered,
    PulledRun,
    QueueHead,
    RegisterAnswer,
    RunsOffloaded,
    RunsRestored,
    TimePassed,
)
from qlm_agent.decisions.evict import EvictionControl
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.model_swap import ModelSwapControl
from qlm_agent.decisions.pull import Intake, PullControl
from qlm_agent.decisions.registration import Life, Registration, ServerLink
from qlm_agent.decisions.restore import RestoreControl
from qlm_agent.decisions.runs import Ending, Operations, RemovalCause, ReturnCause, Run, RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.engines.port import FailureKind, Tier
from qlm_core.profiles.profile import HardwareProfile

__all__ = ["AgentMachine", "Life"]

BUFFER_RESUME_SHARE = 0.5
"""The engine resumes when held output is down to this share of the bound."""


class AgentMachine:
    """See the module. `next_wakeup_s`: the latest time for TimePassed."""

    def __init__(self, settings: MachineSettings) -> None:
        self._settings = settings
        self._link = ServerLink()
        self._registration = Registration(self._link)
        self.runs = RunTable()
        self.operations = Operations()
        self.expectations = Expectations(settings.hardware)
        self.delivery = Delivery(self.runs, self._link, settings.coalesce_s)
        self._drain = DrainControl(settings, self.runs, self._link, self.delivery)
        self.batch_size = BatchSize(settings, self.runs, self.expectations)
        self.pull = PullControl(settings, self.runs, self._link, self.expectations, self.batch_size)
        self.eviction = EvictionControl(settings, self.runs, self.delivery, self.expectations, self.operations)
        self.restore = RestoreControl(settings, self.runs, self.delivery, self.operations, self.batch_size)
        weights_gb = self._weights_gb(settings.hardware)
        self.model_swap = ModelSwapControl(settings.models, weights_gb, settings.host_memory_gb, self.operations, ahead=settings.warm_ahead)
        self._intake = Intake(settings, self.runs, self.delivery, self.expectations, self.model_swap)
        self.paused = False
        self._broke_together = False  # the engine broke with more than one run on it, and its model is not active yet
        self._now_s = 0.0

    @property
    def life(self) -> Life:
        return self._registration.life

    @property
    def incarnation(self) -> str:
        return self._registration.incarnation

    @property
    def serves(self) -> str:
        """The model that is active or is being made active: the planner gets a change at once."""
        return self.model_swap.swapping_to or self.model_swap.active

    @property
    def draining(self) -> bool:
        return self._drain.draining

    @property
    def batch_reported(self) -> int:
        """Most requests of the active model to run at once; 0 while another one is made active, without a choice yet."""
        return 0 if self.model_swap.swapping_to else self.batch_size.reported

    @property
    def next_wakeup_s(self) -> float | None:
        """Seconds of the caller's clock; None: only an event will change anything."""
        if self.life is Life.STOPPED:
            return None
        away_until_s = self._link.away_until_s
        times = [away_until_s, self._registration.next_wakeup_s, *self._drain.wakeups_s]
        calls = [self.delivery.next_wakeup_s]
        if self.life is Life.SERVING:
            times += [self.model_swap.next_wakeup_s, self.restore.next_wakeup_s]
            if not self.draining:
                times.append(self.eviction.next_wakeup_s)
                calls.append(self.pull.next_wakeup_s)
        after_s = -math.inf if away_until_s is None else away_until_s
        times += [max(time_s, after_s) for time_s in calls if time_s is not None]
        # The last step decided everything that was due then; it waits for an event.
        return min((time_s for time_s in times if time_s is not None and time_s > self._now_s), default=None)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Takes an event; time never decreases."""
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
            case EngineProgress():
                self._take_progress(now_s, event)
            case RunsOffloaded():
                self.eviction.handle_offload(now_s, event)
            case RunsRestored():
                effects += self.restore.handle_restore(now_s, event)
            case ItemsAnswered():
                self._link.handle_answer()
                for run, cause in self.delivery.handle_answer(now_s, event.call, event.outcomes):
                    self._forget(run, effects, cause)
                if Outcome.GAP in event.outcomes:
                    self.pull.read_owned()
            case PullAnswered():
                self._link.handle_answer()
                if self.pull.handle_pull(event):
                    self.eviction.mark_changed()
                    for pulled in event.pulled:
                        self.batch_size.record_pull(pulled)
                        self._own(pulled, effects)
            case OwnedAnswered():
                self._link.handle_answer()
                if self.pull.handle_owned(event.call):
                    self._owned(event.owned, effects)
            case ControlMessage():
                self._take_message(now_s, event, effects)
            case ProfilesUpdated():
                self.expectations.hardware = event.hardware
                self.model_swap.update_weights(self._weights_gb(event.hardware))
            case RegisterAnswer():
                self._link.handle_answer()
                if self._registration.handle_registration(now_s, event):
                    self._drain.handle_registration()
                    self.pull.reset(now_s)
            case LeaseLoss():
                if self._registration.handle_lease_loss(now_s, event.incarnation):
                    effects += self._drain.take_off_engine(self.runs.on_engine())
            case CallAnswered():
                self._link.handle_answer()
                if self._drain.handle_answer(event.call):
                    self._end(effects)
            case CallLost():
                self._link.handle_loss(now_s)
                self._lost(now_s, event.call, effects)
            case OtherLoad():
                self.runs.others_runs, self.runs.others_kv_tokens = event.runs, event.kv_tokens
            case ModelLoaded():
                self._broke_together = False
                self.eviction.host_kv_capacity_tokens = event.host_kv_capacity_tokens
                effects += self.model_swap.end_load(
                    event.model, event.tier, event.took_s, event.active, event.warm, event.kv_capacity_tokens
                )
                if event.tier is Tier.ACTIVE:
                    self.pull.set_model(event.active)
            case ModelNotLoaded():
                self._broke_together = self._broke_together or (bool(self.model_swap.active) and self.runs.running > 1)
                effects += self.model_swap.fail_load(now_s, event.model, event.tier, event.message, event.active, event.warm)
                if event.tier is Tier.ACTIVE:
                    effects += self.restore.give_up_model(event.model)
            case LoadCommand():
                effects += self.model_swap.request(event.caller, event.model, event.tier)
            case DrainCommand():
                self._drain.request(now_s, event)
            case AgentStart() | TimePassed():
                pass
            case _:
                assert_never(event)

    def _weights_gb(self, hardware: Mapping[str, HardwareProfile]) -> Mapping[str, float]:
        return {**{model: row.weights_gb for model, row in hardware.items()}, **self._settings.weights_gb}

    def _take_message(self, now_s: float, event: ControlMessage, effects: list[Effect]) -> None:
        run = self.runs.get(event.run_id)
        match event.message:
            case Message.WAKE | Message.HEAD_CHANGED:
                self.pull.note_signal()
            case Message.CANCEL:
                if run is not None:
                    self._forget(run, effects, RemovalCause.NOT_OWNED)
            case Message.GATEWAY_REBOUND:
                if run is not None:
                    self.delivery.send_soon(run)
            case Message.DRAIN:
                self._drain.begin(now_s, self._settings.drain_finish_s)
            case _:
                assert_never(event.message)

    def _take_progress(self, now_s: float, event: EngineProgress) -> None:
        seconds, tokens_made, model = 0.0, 0, ""
        decoding = list[int]()  # tokens of context of each
        for run_id, cached_tokens in event.cached:
            if (run := self.runs.get(run_id)) is not None:
                run.cached_tokens = cached_tokens
                self.expectations.record_cached(run)
        for run_id, tokens in event.counts:
            run = self.runs.get(run_id)
            if run is None or not run.on_engine:
                continue
            run.started = True
            if run.reported_s is not None:
                seconds += now_s - run.reported_s
                tokens_made += tokens
                model = run.model
                decoding.append(run.context_tokens)
            elif any(each.reported_s is not None for each in self.runs.on_gpu()):
                self.expectations.record_prefill(run.context_tokens, run.cached_tokens)
            run.reported_s = now_s
            self.delivery.add_output(now_s, run, tokens)
        if tokens_made:
            self.expectations.record_tokens(model, seconds, tokens_made, decoding, self.runs.others_runs)
        broken = sum(end.failure is FailureKind.BROKEN for end in event.ended)
        if broken > 1:
            self._broke_together = True
        for end in event.ended:
            self._engine_ended(end)
        if self.model_swap.active:
            self._broke_together = False

    def _engine_ended(self, end: EngineEnd) -> None:
        run = self.runs.get(end.run_id)
        if run is None or not run.on_engine:
            return
        self.runs.add_output(run, end.tokens)
        match end.failure:
            case None:
                assert end.finish is not None
                self.expectations.record_completion(run)
                self.delivery.queue_end(run, Ending(finish=end.finish))
            case FailureKind.REFUSED:
                self.delivery.queue_end(run, Ending(reason="ENGINE_FAILURE", message=end.message))
            case FailureKind.KV_CAPACITY:
                self.delivery.queue_end(run, Ending(reason="KV_CAPACITY_EXCEEDED", message=end.message))
            case FailureKind.BROKEN:
                self.delivery.give_back(run, ReturnCause.SUSPECTED if self._broke_together else ReturnCause.FAILED, end.message)
            case FailureKind.AWAY:
                self.delivery.give_back(run, ReturnCause.AWAY)
            case _:
                assert_never(end.failure)

    def _own(self, pulled: PulledRun, effects: list[Effect]) -> None:
        effects += self._intake.own(pulled, serving=self.life is Life.SERVING and not self.draining)

    def _owned(self, owned: tuple[PulledRun, ...], effects: list[Effect]) -> None:
        """Takes unknown runs that this incarnation owns on the server, and closes gaps."""
        by_id = {pulled.run_id: pulled for pulled in owned}
        for run in self.runs.all():
            if run.gap:
                if run.run_id in by_id:
                    self.delivery.set_progress(run, by_id[run.run_id].stored)
                else:
                    self._forget(run, effects, RemovalCause.NOT_OWNED)
        for pulled in owned:
            self._own(pulled, effects)

    def _lost(self, now_s: float, call: int, effects: list[Effect]) -> None:
        self.delivery.handle_loss(now_s, call)
        self.pull.handle_loss(call)
        self._registration.handle_loss(call)
        if self._drain.handle_loss(call):
            self._end(effects)

    # Decisions --------------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float, effects: list[Effect]) -> None:
        if self.life is Life.STOPPED:
            return
        if self._drain.gives_up(now_s):
            self._end(effects)
            return
        if self.life is Life.LEAVING and not len(self.runs) and not self.pull.under_way:
            self._registration.life = Life.NONE
        if self.life is Life.NONE:
            if not self._drain.stop:
                effects += self._registration.decide(now_s)
            elif not self._registration.under_way:  # else it deregisters once its name is known
                self._end(effects)
            return
        self._pause_or_resume(effects)
        if self.life is Life.LEAVING:
            effects += self.pull.decide(now_s, "", 0, may_pull=False)
        elif self.draining:
            self._decide_drain(now_s, effects)
        else:
            self._decide_service(now_s, effects)
        effects += self.delivery.decide(now_s)

    def _decide_service(self, now_s: float, effects: list[Effect]) -> None:
        model_swap, pull = self.model_swap, self.pull
        self.batch_size.choose(now_s, model_swap.active, pull.head, pull.behind)
        head = pull.head if pull.head is not None and pull.head.model in self._settings.models else None
        urgency = None if head is None else self.eviction.head_urgency(head)
        if not self.paused and not model_swap.swapping_to and pull.head_is_fresh:
            if head is not None and self.restore.first(now_s, urgency) is None:
                self._make_room(now_s, head, effects)
            effects += self.restore.decide(now_s, urgency, model_swap.active, model_swap.kv_capacity_tokens)
        # An offloaded run that precedes the head needs the room, or its model: nothing is pulled.
        first = self.restore.first(now_s, urgency)
        models = [*([first.model] if first else []), *([head.model] if head else []), *(group.model for group in pull.behind)]
        if not models and not model_swap.active and len(self._settings.models) == 1:
            models = list(self._settings.models)  # without it this is no place for a request that cannot wait for the load
        if not models and model_swap.failing:
            models = [model_swap.failing]  # its requests moved to other instances
        empty = self.runs.running == 0 and not pull.under_way
        effects += model_swap.decide(now_s, list(dict.fromkeys(models)), engine_empty=empty)
        may_pull = not self.paused and not model_swap.swapping_to
        effects += pull.decide(now_s, model_swap.active, model_swap.kv_capacity_tokens, may_pull=may_pull, may_take=first is None)

    def _make_room(self, now_s: float, head: QueueHead, effects: list[Effect]) -> None:
        active, capacity = self.model_swap.active, self.model_swap.kv_capacity_tokens
        if self._settings.lookahead_requests and self.pull.head_is_new:
            effects += self.eviction.displace_lookahead(head, capacity)
        blocked = head.model == active and self.pull.blocked(capacity)
        warm = self.model_swap.is_warm(head.model)
        needs = self.pull.blocked_tokens if blocked else 0
        effects += self.eviction.decide(now_s, head, active, capacity, blocked=blocked, blocked_tokens=needs, warm=warm)

    def _decide_drain(self, now_s: float, effects: list[Effect]) -> None:
        effects += self._drain.give_back(now_s)
        if not self.paused and not self.model_swap.swapping_to and self.runs.offloaded():
            effects += self.restore.decide(now_s, None, self.model_swap.active, self.model_swap.kv_capacity_tokens)
            first = self.restore.first(now_s, None)
            empty = self.runs.running == 0 and not self.pull.under_way
            if first is not None and empty:
                effects += self.model_swap.decide(now_s, [first.model], engine_empty=True)
        owns_nothing = not len(self.runs) and not self.pull.under_way
        effects += self._drain.decide(now_s, owns_nothing=owns_nothing)
        if not owns_nothing:
            effects += self.pull.decide(now_s, "", 0, may_pull=False)

    def _pause_or_resume(self, effects: list[Effect]) -> None:
        held, bound = self.runs.held_tokens, self._settings.buffer_tokens_max
        if not self.paused and held > bound:
            self.paused = True
            effects.append(PauseEngine())
        elif self.paused and held <= bound * BUFFER_RESUME_SHARE:
            self.paused = False
            for run in self.runs.on_gpu():
                run.reported_s = None
            effects.append(ResumeEngine())

    def _forget(self, run: Run, effects: list[Effect], cause: RemovalCause) -> None:
        """The run is not the agent's any more."""
        if run.on_engine:
            effects.append(AbortRuns(run_ids=(run.run_id,)))
        self.delivery.forget(run)
        effects.append(ForgetRun(run_id=run.run_id, cause=cause))

    def _end(self, effects: list[Effect]) -> None:
        effects += self._drain.answer()
        self._registration.life = Life.STOPPED
        effects.append(Stop())
