"""The machine's calls to the queue: each effect becomes one call of the port, and its answer an event. Raises Unavailable and LeaseLost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from qlm_agent.decisions.delivery import ITEMS_MAX
from qlm_agent.decisions.effects import Complete, Deregister, Describe, Emit, GiveBack, Pull, ReadOwned, Register
from qlm_agent.decisions.events import CallAnswered, Event, ItemsAnswered, Outcome, OwnedAnswered, PullAnswered, PulledRun, RegisterAnswer
from qlm_agent.decisions.runs import ReturnCause
from qlm_agent.delivery.held_run import HeldOutput, HeldRun, run_id_of
from qlm_agent.delivery.requests import pulled_run, read_behind, read_head, read_pulled
from qlm_agent.delivery.results import completion_of, failure_result
from qlm_agent.telemetry.metrics import AgentTelemetry
from qlm_core.prediction.reported_runs import ReportedRuns
from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.queue.leases import LeaseKeeper, new_nonce
from qlm_process.wire.instance import from_body
from qlm_process.wire.running import to_body
from qlm_queue.port import Queue
from qlm_queue.values import BATCH_MAX, Lease, PullBudget, Pulled, RequeueCause, StepStatus

ServerEffect = Register | Describe | Deregister | Pull | ReadOwned | Emit | Complete | GiveBack

OUTCOMES = {
    StepStatus.DONE: Outcome.DONE,
    StepStatus.STALE: Outcome.STALE,
    StepStatus.GAP: Outcome.GAP,
    StepStatus.ENDED: Outcome.ENDED,
}
CAUSES = {
    ReturnCause.EVICTED: RequeueCause.EVICTED,
    ReturnCause.DRAINED: RequeueCause.DRAINED,
    ReturnCause.FAILED: RequeueCause.FAILED,
    ReturnCause.SUSPECTED: RequeueCause.SUSPECTED,
    ReturnCause.AWAY: RequeueCause.DRAINED,
}

assert ITEMS_MAX <= BATCH_MAX


class ServerCalls:
    """`held`: the runs of this agent, shared with the shell; a pull adds to it. Keeps the lease."""

    def __init__(
        self,
        queue: Queue,
        facts: InstanceFacts,
        held: dict[str, HeldRun],
        telemetry: AgentTelemetry,
        *,
        now_s: Callable[[], float],
        text_output: bool,
        lease_ttl_s: float,
        lease_renew_s: float,
        slo_band: int = 0,
        nonce: str = "",
        engine_clock: Callable[[], float] = time.monotonic,
        keep: Callable[[Lease], LeaseKeeper] | None = None,
    ) -> None:
        """`slo_band`: of requests with an SLO, for the engine's policy. `nonce`: distinguishes this process from others of its name, "" for
        a new one. `keep`: makes the keeper of a lease."""
        self._queue = queue
        self._held = held
        self._telemetry = telemetry
        self._now_s = now_s
        self._text_output = text_output
        self._lease_ttl_s = lease_ttl_s
        self._lease_renew_s = lease_renew_s
        self._slo_band = slo_band
        self._engine_clock = engine_clock
        self._keep = keep or self._kept
        self._process_nonce = nonce or new_nonce()
        self._runs_published = False
        self._draining = False
        self.facts = facts
        self.keeper: LeaseKeeper | None = None

    def held_by(self, effect: ServerEffect) -> tuple[HeldRun, ...]:
        """The runs of an effect. Call it when the machine returns the effect: a run may be cancelled before the call begins."""
        match effect:
            case Emit() | Complete():
                return tuple(self._held[item.run_id] for item in effect.items)
            case GiveBack():
                return tuple(self._held[run_id] for run_id in effect.run_ids)
            case _:
                return ()

    async def perform(self, effect: ServerEffect, runs: Sequence[HeldRun]) -> Event:
        """Makes the call and returns its answer. `runs`: the result of `held_by`."""
        match effect:
            case Register():
                return await self._register(effect)
            case Describe():
                assert self.keeper is not None
                self._draining = True
                self.facts = replace(self.facts, draining=True)
                await self._queue.describe(self.keeper.lease, to_body(self.facts))
                return CallAnswered(call=effect.call)
            case Deregister():
                assert self.keeper is not None
                await self.keeper.stop()
                await self._queue.deregister(self.keeper.lease)
                return CallAnswered(call=effect.call)
            case Pull():
                return await self._pull(effect)
            case ReadOwned():
                began_s = self._now_s()
                owned = await self._queue.owned(self.facts.incarnation)
                return OwnedAnswered(call=effect.call, owned=self._take(owned, began_s))
            case Emit():
                return await self._emit(effect, runs)
            case Complete():
                return await self._complete(effect, runs)
            case GiveBack():
                return await self._give_back(effect, runs)
            case _:
                assert_never(effect)

    async def publish(
        self, active: str, swapping_to: str, warm: Sequence[str], batch: int, runs: ReportedRuns | None, *, failing: bool = False
    ) -> None:
        """Publishes changes of the active model, the model being loaded ("": none) with its start, the models in host memory and the batch;
        and the running requests. An instance with a `failing` engine takes nothing, as one that drains. Raises Unavailable, LeaseLost."""
        if self.keeper is None:
            return
        since_s = self.facts.loading_since_s if swapping_to == self.facts.active_model else 0.0
        model, models = swapping_to or active, tuple(warm)
        since_s = (since_s or self._now_s()) if swapping_to else 0.0

        def now(facts: InstanceFacts) -> InstanceFacts:
            draining = self._draining or failing
            return replace(facts, active_model=model, warm_models=models, loading_since_s=since_s, batch=batch, draining=draining)

        facts = now(self.facts)
        running = runs is not None and bool(runs.groups)
        if facts == self.facts and not running and not self._runs_published:
            return
        await self._queue.describe(self.keeper.lease, to_body(facts, runs))
        self.facts = now(self.facts)  # the incarnation may be another
        self._runs_published = running

    async def stop(self) -> None:
        """Stops renewing the lease, which then expires. Safe twice."""
        if self.keeper is not None:
            await self.keeper.stop()

    async def _register(self, effect: Register) -> Event:
        await self.stop()
        if effect.yields:
            await self._yield_to_another()
        nonce = f"{self._process_nonce}-{effect.nonce_number}"
        incarnation, lease = await self._queue.register(self.facts.name, nonce, to_body(self.facts), self._lease_ttl_s)
        self.facts = replace(self.facts, incarnation=incarnation)
        self.keeper = self._keep(lease)
        await self.keeper.start()
        return RegisterAnswer(call=effect.call, incarnation=incarnation)

    async def _yield_to_another(self) -> None:
        """Raises Unavailable while an older process serves the instance."""
        overview = await self._queue.overview(())
        for record in overview.instances:
            other = record.name == self.facts.name and record.alive and record.incarnation != self.facts.incarnation
            if other and 0.0 < from_body(record.body).started_s < self.facts.started_s:
                text = f"another process serves instance {record.name} of this queue as {record.incarnation}: give one of them another name"
                raise Unavailable(text, details={"retry_after_s": f"{self._lease_ttl_s:g}"})

    def _kept(self, lease: Lease) -> LeaseKeeper:
        return LeaseKeeper(self._queue, lease, ttl_s=self._lease_ttl_s, renew_s=self._lease_renew_s)

    async def _pull(self, effect: Pull) -> Event:
        assert self.keeper is not None
        began_s = self._now_s()
        budget = PullBudget(
            requests_max=effect.requests_max,
            kv_tokens=effect.kv_tokens,
            output_reserve_tokens=effect.output_reserve_tokens,
            owned_aside=effect.owned_aside,
            suspects=effect.suspects,
            behind_max=BATCH_MAX if effect.behind else 0,
        )
        result = await self._queue.pull(self.keeper.lease, effect.model, budget)
        return PullAnswered(
            call=effect.call,
            pulled=self._take(result.pulled, began_s),
            head=read_head(result.head),
            blocked_tokens=result.blocked_tokens,
            behind=tuple(map(read_behind, result.behind)) if effect.behind else None,
            suspect=result.suspect,
        )

    def _take(self, found: Sequence[Pulled], began_s: float) -> tuple[PulledRun, ...]:
        """Holds the new runs; `began_s`: start of the call that returned them."""
        now_s = self._now_s()
        new: list[HeldRun] = []
        runs: list[PulledRun] = []
        for pulled in found:
            run_id = run_id_of(pulled.queue_id, pulled.attempt)
            held = self._held.get(run_id)
            if held is None:
                held = read_pulled(
                    pulled,
                    text_output=self._text_output,
                    pulled_s=now_s,
                    engine_clock_s=self._engine_clock() - now_s,
                    slo_band=self._slo_band,
                )
                self._held[run_id] = held
                new.append(held)
            runs.append(pulled_run(held, len(HeldOutput(pulled.progress, text=self._text_output))))
        self._telemetry.record_pull(new, began_s, now_s)
        return tuple(runs)

    async def _emit(self, effect: Emit, runs: Sequence[HeldRun]) -> Event:
        emissions = [held.emission(item.start, item.end) for held, item in zip(runs, effect.items, strict=True)]
        statuses = await self._queue.emit(self.facts.incarnation, emissions)
        done = (item.end - item.start for item, status in zip(effect.items, statuses, strict=True) if status is StepStatus.DONE)
        self._telemetry.metrics.emitted.inc(sum(done))
        return _items_answered(effect.call, statuses)

    async def _complete(self, effect: Complete, runs: Sequence[HeldRun]) -> Event:
        began_s = self._now_s()
        completions = [completion_of(held, item, began_s) for held, item in zip(runs, effect.items, strict=True)]
        statuses = await self._queue.complete(self.facts.incarnation, completions)
        ended_s = self._now_s()
        metrics = self._telemetry.metrics
        for held, item, completion, status in zip(runs, effect.items, completions, statuses, strict=True):
            if status is StepStatus.DONE:
                metrics.emitted.inc(item.end - item.start)
                metrics.ended.labels(state=completion.state.name).inc()
                self._telemetry.record_completion(held, item, began_s, ended_s)
        return _items_answered(effect.call, statuses)

    async def _give_back(self, effect: GiveBack, runs: Sequence[HeldRun]) -> Event:
        began_s = self._now_s()
        owned = [held.owned for held in runs]
        if effect.cause in (ReturnCause.UNSTARTED, ReturnCause.DISPLACED):
            behind_head = effect.cause is ReturnCause.DISPLACED
            statuses = await self._queue.unpull(self.facts.incarnation, owned, behind_head=behind_head)
        else:
            failure = failure_result(effect.failure)
            statuses = await self._queue.requeue(self.facts.incarnation, owned, CAUSES[effect.cause], failure)
        done = [held for held, status in zip(runs, statuses, strict=True) if status is StepStatus.DONE]
        self._telemetry.metrics.returned.labels(cause=effect.cause.value).inc(len(done))
        self._telemetry.lso.record_return(effect.cause, done, began_s, self._now_s())
        return _items_answered(effect.call, statuses)


def _items_answered(call: int, statuses: Sequence[StepStatus]) -> ItemsAnswered:
    return ItemsAnswered(call=call, outcomes=tuple(OUTCOMES[status] for status in statuses))
