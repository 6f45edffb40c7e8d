"""Victims of a more urgent request group: whether evicting them pays, and how (QLM section 5: request eviction, GPU-CPU state swapping).

The paper evicts whenever the head of the virtual queue changes. These rules evict only what a head needs that would be late otherwise:

- A head that makes its deadline while the batch makes room by itself pushes nobody out. One of another model that misses it in any case
  does so only where all wait less in sum.
- Only strictly less urgent requests are evicted: an earlier band, then an earlier deadline, is more urgent. First those whose deadlines are
  further away (by factors of two of the time left: nearer than that they count as alike), then those that lose least work.
- One late request is not traded for another: inside a band no request is evicted that only the eviction would make late.
- A request that was evicted `displacements_max` times is protected, so that nothing waits for ever.
- A head of another model needs the whole GPU (section 5: model swapping flushes the KV): all are evicted or none, and while one of the
  batch may not, the others go on beside it. A request that can be continued from its tokens returns to the queue: KV in host memory would
  tie it to this engine, which would have to swap models back for it, whatever the planner plans. That swap is part of what it costs.

An evicted request is always less urgent than the one in its place, and returns behind it, so the two never evict each other in turn.

Times are seconds: `now_s` and deadlines on the queue's clock, all others durations. KV is counted in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from qlm_core.profiles.profile import HardwareProfile

_FOR_EVER = 1_100
"""Distance of a deadline that never passes: above every exponent of a float."""


@dataclass(frozen=True, slots=True, order=True)
class Urgency:
    """Sorts the most urgent first. `band`: lower is served first; `deadline_s` is infinite for strict priorities."""

    band: int
    deadline_s: float


class EvictionMethod(StrEnum):
    """How a request is evicted."""

    ABORT = "abort"  # back to the queue; its KV is computed again from prompt + output, in one prefill
    OFFLOAD = "offload"  # its KV moves to host memory and returns


class Occupant(NamedTuple):
    """A request that has a seat. `left_s`: expected until it ends. `kv_tokens`: what is free when it goes; `context_tokens`: what of it is
    written, and moved or computed again. `answered`: its SLO cannot be missed any more (its first token is made). `abortable`: it can be
    continued faithfully from its tokens; `offloadable`: its KV is whole. `displacements`: how often it was evicted. (A tuple, since each
    decision makes one of every run.)"""

    run_id: str
    urgency: Urgency
    left_s: float
    kv_tokens: int
    context_tokens: int
    answered: bool = False
    abortable: bool = True
    offloadable: bool = True
    displacements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """The group at the head of a virtual queue that found no room. `requests`: waiting in it; `kv_tokens`: need of one of them;
    `service_s`: expected from its place to what its SLO bounds, a model swap included."""

    urgency: Urgency
    requests: int
    kv_tokens: int
    service_s: float

    def slack_s(self, now_s: float) -> float:
        """How long it may wait and still be in time, negative when it is late anyway. A strict priority waits for nobody: 0."""
        return self.urgency.deadline_s - now_s - self.service_s if self.urgency.deadline_s < math.inf else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Free room: seats of the batch and KV on the GPU, and KV in host memory (0: nothing can be offloaded)."""

    seats: int
    kv_tokens: int
    host_kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`displacements_max`: most evictions of a request. `victims_max`: most victims at once."""

    displacements_max: int = 3
    victims_max: int = 100


@dataclass(frozen=True, slots=True)
class Victim:
    """An evicted request; `cost_s`: work that it loses."""

    run_id: str
    method: EvictionMethod
    cost_s: float


def eviction_cost_s(method: EvictionMethod, context_tokens: int, hardware: HardwareProfile | None) -> float:
    """Engine time that an eviction costs: the KV is copied there and back, or computed again; each has a part that is fixed and one that
    grows with the context. 0 where nobody measured it."""
    if hardware is None:
        return 0.0
    return 2.0 * hardware.kv_swap_s(context_tokens) if method is EvictionMethod.OFFLOAD else hardware.recompute_s(context_tokens)


def swap_back_s(hardware: HardwareProfile | None) -> float:
    """To make the active model active again, which has left the GPU for another one, from host memory. 0 where nobody measured it."""
    return 0.0 if hardware is None else hardware.swap_s(warm=True)


def offload_pays(hardware: HardwareProfile) -> tuple[float, float]:
    """From which to which context, in tokens, KV swap costs less than to compute again (figure 4 of the paper); equal bounds: never."""
    both_ways, again = 2.0 * hardware.kv_swap.slowdown, hardware.slowdown
    fixed_us = 1e3 * (both_ways * hardware.kv_swap_base_ms - again * hardware.recompute_base_ms)
    each_us = again * hardware.recompute_us_per_token - both_ways * hardware.kv_swap_us_per_token
    if each_us > 0.0:
        return max(0.0, fixed_us / each_us), math.inf
    if fixed_us < 0.0:
        return 0.0, fixed_us / each_us if each_us else math.inf
    return math.inf, math.inf


def cheapest_eviction(occupant: Occupant, host_kv_tokens: int, hardware: HardwareProfile | None) -> Victim | None:
    """Returns its cheaper eviction on this GPU, None if there is none. Without a measurement an abort: it needs no host memory."""
    methods: list[EvictionMethod] = []
    if occupant.abortable:
        methods.append(EvictionMethod.ABORT)
    if occupant.offloadable and occupant.context_tokens <= host_kv_tokens:
        methods.append(EvictionMethod.OFFLOAD)
    found = [Victim(occupant.run_id, method, eviction_cost_s(method, occupant.context_tokens, hardware)) for method in methods]
    return min(found, key=lambda victim: victim.cost_s, default=None)


def make_room(
    now_s: float, head: Contender, batch: Sequence[Occupant], room: Room, hardware: HardwareProfile | None, rule: Rule
) -> tuple[Victim, ...]:
    """Victims for a head of the active model: as many as its requests need that would be late if they waited for the batch to
    make room, least urgent first. Empty where they are in time, or where all evictable ones do not make room for one of them. A head
    that is late in any case evicts no request of its own band: that one would wait as long as the head, and lose work."""
    slack_s = head.slack_s(now_s)
    in_time = [occupant for occupant in batch if occupant.left_s <= slack_s]
    seats = room.seats + len(in_time)
    kv_tokens = room.kv_tokens + sum(occupant.kv_tokens for occupant in in_time)
    wanted = min(head.requests, rule.victims_max)
    host_kv_tokens = room.host_kv_tokens
    chosen: list[Victim] = []
    lower = [each for each in batch if slack_s >= 0.0 or each.urgency.band > head.urgency.band]
    candidates = iter(_by_rank(now_s, (each for each in lower if each.left_s > slack_s and _may_yield(each, head, rule))))
    for _ in range(wanted):
        taken: list[Victim] = []
        while seats < 1 or kv_tokens < head.kv_tokens:
            occupant = next(candidates, None)
            if occupant is None or len(chosen) + len(taken) == rule.victims_max:
                return tuple(chosen)
            victim = cheapest_eviction(occupant, host_kv_tokens, hardware)
            if victim is None or occupant.left_s <= victim.cost_s or _made_late(now_s, occupant, victim.cost_s, head):
                continue
            taken.append(victim)
            seats += 1
            kv_tokens += occupant.kv_tokens
            host_kv_tokens -= occupant.context_tokens if victim.method is EvictionMethod.OFFLOAD else 0
        chosen += taken
        seats -= 1
        kv_tokens -= head.kv_tokens
    return tuple(chosen)


def clear(
    now_s: float, head: Contender, batch: Sequence[Occupant], room: Room, hardware: HardwareProfile | None, rule: Rule
) -> tuple[Victim, ...]:
    """Victims for a head of another model: all, except those that end sooner by themselves, or none. None where the
    head is in time when the batch ends by itself, where one of the batch may not be evicted, where as many requests would be late by it as
    it brings, or where it is late in any case and the batch would wait longer for it than it for the batch, over all their requests.
    `hardware`: of the model that is active."""
    slack_s = head.slack_s(now_s)
    back_s = swap_back_s(hardware)
    drain_s = max((occupant.left_s for occupant in batch), default=0.0)
    if drain_s <= slack_s:
        return ()
    host_kv_tokens = room.host_kv_tokens
    chosen: list[Victim] = []
    harmed = 0
    for occupant in _by_rank(now_s, batch):
        if not _may_yield(occupant, head, rule):
            return ()
        victim = cheapest_eviction(occupant, 0 if occupant.abortable else host_kv_tokens, hardware)
        if victim is None:
            return ()
        if occupant.left_s <= victim.cost_s:
            continue
        chosen.append(victim)
        harmed += _made_late(now_s, occupant, back_s + victim.cost_s, head)
        host_kv_tokens -= occupant.context_tokens if victim.method is EvictionMethod.OFFLOAD else 0
    lost_s = len(chosen) * (head.service_s + back_s) + sum(victim.cost_s for victim in chosen)
    worth_it = head.urgency.deadline_s >= now_s or head.requests * drain_s > lost_s
    return tuple(chosen) if worth_it and harmed < head.requests else ()


def _may_yield(occupant: Occupant, head: Contender, rule: Rule) -> bool:
    return occupant.urgency > head.urgency and occupant.displacements < rule.displacements_max


def _made_late(now_s: float, occupant: Occupant, cost_s: float, head: Contender) -> bool:
    """Whether it would be late only by its eviction for a head of its own band."""
    urgency = occupant.urgency
    if urgency.band != head.urgency.band or occupant.answered:
        return False
    slack_s = urgency.deadline_s - now_s - occupant.left_s
    return 0.0 <= slack_s < cost_s + head.service_s


def _by_rank(now_s: float, batch: Iterable[Occupant]) -> list[Occupant]:
    """Least urgent first, and of those alike the one that loses least work."""

    def rank(occupant: Occupant) -> tuple[int, int, int, float, str]:
        urgency = occupant.urgency
        return (-urgency.band, -_far(urgency.deadline_s - now_s), occupant.context_tokens, -urgency.deadline_s, occupant.run_id)

    return sorted(batch, key=rank)


def _far(left_s: float) -> int:
    """How far a deadline is away, as a power of two of seconds."""
    if left_s == math.inf:
        return _FOR_EVER
    return math.frexp(max(left_s, 0.0))[1]
