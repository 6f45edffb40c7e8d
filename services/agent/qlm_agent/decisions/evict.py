"""Chooses the runs that make room for the head of the virtual queue (QLM section 5: request eviction, GPU-CPU state swapping; the rules are
`qlm_core.operations.preemption`), and the lookahead that is unpulled for it.

The agent decides anew when the head or the batch has changed, and every SCAN_EVERY_S while a head waits: a head in time now may be late
soon. It decides nothing while room is being made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qlm_agent.decisions.delivery import Delivery
from qlm_agent.decisions.effects import AbortRuns, Effect, OffloadRuns
from qlm_agent.decisions.events import QueueHead, RunsOffloaded
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.decisions.runs import Operations, ReturnCause, Run, RunPhase, RunTable
from qlm_agent.decisions.settings import MachineSettings
from qlm_core.operations.preemption import Contender, EvictionMethod, Occupant, Room, Rule, Urgency, Victim, clear, make_room, offload_pays
from qlm_core.profiles.profile import HardwareProfile

SCAN_EVERY_S = 0.1


class EvictionControl:
    """`host_kv_capacity_tokens`: as last reported by the engine, 0 if it cannot offload."""

    def __init__(
        self,
        settings: MachineSettings,
        runs: RunTable,
        delivery: Delivery,
        expectations: Expectations,
        operations: Operations,
    ) -> None:
        self._settings = settings
        self._rule = Rule(displacements_max=settings.displacements_max)
        self._runs = runs
        self._delivery = delivery
        self._expectations = expectations
        self._operations = operations
        self._scan_at_s: float | None = None
        self.host_kv_capacity_tokens = 0

    @property
    def next_wakeup_s(self) -> float | None:
        """The time of the next scan, while a head waits."""
        return self._scan_at_s

    def urgency(self, priority: int | None, deadline_s: float) -> Urgency:
        """Urgency of a request with an SLO (`priority` None), or a strict priority."""
        return Urgency(self._settings.slo_band, deadline_s) if priority is None else Urgency(priority, math.inf)

    def head_urgency(self, head: QueueHead) -> Urgency:
        return self.urgency(head.priority, head.first_deadline_s)

    def mark_changed(self) -> None:
        """The head or the batch changed."""
        self._scan_at_s = None

    def handle_offload(self, now_s: float, event: RunsOffloaded) -> None:
        """A run that could not be offloaded continues; this attempt is not offloaded again."""
        done = frozenset(event.done)
        for run_id in event.requested:
            run = self._runs.get(run_id)
            if run is None or run.phase is not RunPhase.OFFLOADING:
                continue
            run.reported_s = None
            if run_id in done:
                self._runs.move(run, RunPhase.OFFLOADED)
                run.offloaded_s = now_s
                run.displacements += 1
                run.refusals = 0
                self._operations.kv_offloads += 1
            else:
                self._runs.move(run, RunPhase.RUNNING)
                run.refusals += 1
        self.mark_changed()

    # Decisions --------------------------------------------------------------------------------------------------------

    def displace_lookahead(self, head: QueueHead, kv_capacity_tokens: int) -> list[Effect]:
        """Unpulls waiting lookahead that is less urgent than a new head."""
        urgency = self.head_urgency(head)
        later = [run for run in self._lookahead(kv_capacity_tokens) if run.urgency > urgency]
        return self._give_back(sorted(later, key=lambda run: run.urgency)[::-1])

    def decide(
        self,
        now_s: float,
        head: QueueHead,
        active_model: str,
        kv_capacity_tokens: int,
        *,
        blocked: bool,
        blocked_tokens: int,
        warm: bool,
    ) -> list[Effect]:
        """Makes room for a waiting head. `blocked`: it is of the active model, without room; `blocked_tokens`: KV of its first request, 0
        if unknown; `warm`: it is of another model, which is in host memory."""
        other_model = head.model != active_model
        if not self._settings.evict or self._runs.offloading or not (blocked or (other_model and self._runs.running)):
            self._scan_at_s = None
            return []
        if self._scan_at_s is not None and now_s < self._scan_at_s:
            return []
        self._scan_at_s = now_s + SCAN_EVERY_S
        urgency = self.head_urgency(head)
        runs = self._runs.on_gpu()
        if not any(run.urgency > urgency for run in runs):
            return []
        swap_s = self._expectations.swap_s(head.model, warm=warm) if other_model else 0.0
        contender = Contender(
            urgency=urgency,
            requests=head.waiting,
            kv_tokens=max(blocked_tokens, self._expectations.head_kv_tokens(head)),
            service_s=self._expectations.service_s(head, swap_s),
        )
        batch = [self._occupant(run) for run in runs]
        seats, kv_tokens = self._runs.room(self._settings.batch_max, kv_capacity_tokens)
        room = Room(seats=seats, kv_tokens=kv_tokens, host_kv_tokens=self._host_kv_left(active_model))
        hardware = self._expectations.hardware.get(active_model)
        rule = clear if other_model else make_room
        return self._displace(rule(now_s, contender, batch, room, hardware, self._rule))

    def choice_text(self, model: str) -> str:
        """Whether requests of a model are evicted or offloaded, and why; "" for neither."""
        if not self._settings.evict or not model:
            return ""
        if not self._settings.kv_swap:
            return "evict (KV swap is turned off)"
        return choice_text(self._expectations.hardware.get(model), self._host_kv_left(model) if self.host_kv_capacity_tokens else -1)

    def _host_kv_left(self, model: str) -> int:
        """Free host KV of the active model, in tokens."""
        apart = self._settings.host_kv_apart
        taken = sum(run.context_tokens for run in self._runs.offloaded() if run.model == model or not apart)
        return max(0, self.host_kv_capacity_tokens - taken)

    def _occupant(self, run: Run) -> Occupant:
        settled = run.phase is RunPhase.RUNNING
        return Occupant(
            run_id=run.run_id,
            urgency=run.urgency,
            left_s=self._expectations.left_s(run),
            kv_tokens=run.kv_reserved,
            context_tokens=run.context_tokens,
            answered=run.first_token and run.produced > 0,
            abortable=settled and (run.resumable or not run.has_output),
            offloadable=settled and run.has_output and self._settings.kv_swap and run.refusals == 0,
            displacements=run.displacements,
        )

    def _displace(self, victims: Sequence[Victim]) -> list[Effect]:
        found = [(victim.method, run) for victim in victims if (run := self._runs.get(victim.run_id)) is not None]
        effects = self._give_back([run for method, run in found if method is EvictionMethod.ABORT])
        offloaded = [run for method, run in found if method is EvictionMethod.OFFLOAD]
        for run in offloaded:
            self._runs.move(run, RunPhase.OFFLOADING)
        if offloaded:
            effects.append(OffloadRuns(run_ids=tuple(run.run_id for run in offloaded)))
        return effects

    def _give_back(self, runs: Sequence[Run]) -> list[Effect]:
        """The least urgent first: each reopened group stands in front of the last one."""
        for run in runs:
            self._delivery.give_back(run, ReturnCause.EVICTED if run.has_output else ReturnCause.DISPLACED)
            self._operations.evictions += run.has_output
        return [AbortRuns(run_ids=tuple(run.run_id for run in runs))] if runs else []

    def _lookahead(self, kv_capacity_tokens: int) -> list[Run]:
        """Unstarted runs for which the engine, taking them in order, has no seat or no KV."""
        seats = self._settings.batch_max - self._runs.others_runs
        kv_tokens = kv_capacity_tokens - self._runs.others_kv_tokens
        waiting: list[Run] = []
        for run in self._runs.on_gpu():
            if run.started or run.phase is not RunPhase.RUNNING:
                seats -= 1
                kv_tokens -= run.kv_reserved
            else:
                waiting.append(run)
        beyond: list[Run] = []
        for run in waiting:
            if seats < 1 or kv_tokens < run.kv_reserved or beyond:
                beyond.append(run)
            else:
                seats -= 1
                kv_tokens -= run.kv_reserved
        return beyond


def choice_text(hardware: HardwareProfile | None, host_kv_tokens: int) -> str:
    """How this GPU evicts requests and why, for people. `host_kv_tokens`: host memory that is left, negative where the engine has none
    for KV."""
    if host_kv_tokens < 0:
        return "evict (no host memory for KV)"
    if hardware is None:
        return "evict (nobody measured this model on this GPU)"
    first, last = offload_pays(hardware)
    if first == last:
        choice = "evict at any context"
    elif first == 0.0:
        choice = "KV swap at any context" if last == math.inf else f"KV swap up to {last:,.0f} tokens, above evict"
    else:
        choice = f"KV swap above {first:,.0f} tokens, up to there evict"
    both_ways = 2.0 * hardware.kv_swap.slowdown
    there_and_back = _cost_text(both_ways * hardware.kv_swap_base_ms, both_ways * hardware.kv_swap_us_per_token)
    again = _cost_text(hardware.slowdown * hardware.recompute_base_ms, hardware.slowdown * hardware.recompute_us_per_token)
    return f"{choice} (there and back {there_and_back}, computed again {again}; host memory left for {host_kv_tokens:,} tokens)"


def _cost_text(fixed_ms: float, each_us: float) -> str:
    """A fixed part of 0 was not measured, or is none."""
    return f"{fixed_ms:.3g} ms + {each_us:.3g} us a token" if fixed_ms else f"{each_us:.3g} us a token"
