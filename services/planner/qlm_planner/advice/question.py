"""What advice is asked about: the load that waits and comes, the instances that serve, and the kinds of instances that could."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qlm_core.group import GroupKey
from qlm_core.instance import InstanceFacts
from qlm_core.prediction import Service
from qlm_core.request import SloKind
from qlm_planner.advice.demand import Demand, Rate
from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import GroupTraits, band_of
from qlm_planner.items import Group, Slot
from qlm_planner.queues import lines_of, times_of

CLASSES_MAX = 48
"""Classes of load; those with the least work beyond it count with the others of their model."""

KINDS_MAX = 4
"""Kinds of instances that are tried: those that are registered, then those that profiles know."""

PARTS = 4
"""Parts of a group that are due one after the other, from its first deadline to its last."""

MISSES_MAX = 100
"""Groups that are named as expected misses, those with the most late requests."""

LATE_MIN = 0.5
"""Expected late requests from which a group is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A group that is expected to be late: how many of its requests, and by how much the latest of them, in seconds."""

    group_id: str
    model: str
    slo_class: str
    instance: str
    waiting: int
    late: float
    over_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadClass:
    """Requests alike. `slo_s`: infinite for those without a deadline. `per_s`: that come in a second. `backlog`: (count, seconds from now
    until they are due) of what waits."""

    model: str
    label: str
    band: int
    slo_s: float
    first_token: bool
    per_s: float
    backlog: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedClass:
    """A class on a kind of instance. Seconds: `first_s` to the first token of one by itself, `base_s` and `sequence_s` of a decode step
    and each sequence in it; `join_s`: what another prefill adds."""

    seats: float
    tokens: float
    tokens_deviation: float
    first_s: float
    base_s: float
    sequence_s: float
    join_s: float
    cold_s: float
    warm_s: float

    def stay_s(self, sequences: float) -> float:
        """In a batch of so many: D of QLM equation 4 with its prefill."""
        return self.first_s + self.tokens * (self.base_s + self.sequence_s * sequences) + sequences * self.join_s

    def deviation_s(self, sequences: float) -> float:
        return self.tokens_deviation * (self.base_s + self.sequence_s * sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Instances that are alike. `models`: those that it can serve. `served`: by the number of the class, None where it cannot."""

    gpu: str
    n_gpu: int
    models: tuple[str, ...]
    served: tuple[ServedClass | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An instance of the fleet. `kind`: its number. `busy`: share of its seats that are taken, by what ends in `left_s`."""

    name: str
    kind: int
    active_model: str = ""
    warm_models: tuple[str, ...] = ()
    busy: float = 0.0
    left_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A picture of one moment: it shares nothing that changes. `idle`: instances with nothing to do. `clock`: how many times faster than
    real ones the engines run."""

    made_s: float
    classes: tuple[LoadClass, ...]
    kinds: tuple[Kind, ...]
    fleet: tuple[Member, ...]
    misses: tuple[Miss, ...]
    late: float
    unserved: int
    idle: int
    clock: float = 1.0

    @property
    def worth_asking(self) -> bool:
        """Misses are expected, something waits that nobody serves, or somebody has nothing to do."""
        return self.late >= LATE_MIN or self.unserved > 0 or self.idle > 0


def question_of(board: Board, terms: ClassTerms, demand: Demand, now_s: float) -> Question:
    """Costs O(groups + classes x kinds)."""
    estimates = terms.estimates
    misses, late = _misses(board, terms, now_s)
    serving = [slot for _, slot in sorted(board.slots.items()) if slot.serving]
    loads = _loads(board, demand.rates(now_s), now_s)
    facts = _kinds(serving, [slot for _, slot in sorted(board.slots.items())], estimates, {key.model for key, _, _ in loads})
    kinds = tuple(
        Kind(
            gpu=each.gpu,
            n_gpu=each.n_gpu,
            models=tuple(model for model in each.models if estimates.hardware(each, model) is not None),
            served=tuple(_served(estimates, each, key, prompt_tokens) for key, _, prompt_tokens in loads),
        )
        for each in facts
    )
    numbers = {_alike(each): number for number, each in enumerate(facts)}
    fleet = tuple(_member(slot, numbers[_alike(slot.facts)], estimates) for slot in serving if _alike(slot.facts) in numbers)
    waiting = [group for group in board.groups.values() if group.open]
    models = {group.traits.key.model for group in waiting}
    unserved = {model for model in models if not any(estimates.can_serve(slot, model) for slot in serving)}
    return Question(
        made_s=now_s,
        classes=tuple(load for _, load, _ in loads),
        kinds=kinds,
        fleet=fleet,
        misses=misses,
        late=late,
        unserved=sum(group.waiting for group in waiting if group.traits.key.model in unserved),
        idle=sum(1 for slot in serving if slot.running == 0 and not board.queues[slot.facts.name]),
        clock=max((slot.facts.time_scale for slot in serving), default=1.0),
    )


def _misses(board: Board, terms: ClassTerms, now_s: float) -> tuple[tuple[Miss, ...], float]:
    """Groups that the plan expects to be late, the worst first, and all late requests that it expects: none of those that are answered."""
    found: list[Miss] = []
    lines = lines_of(board, terms, now_s)
    times = times_of(lines, terms) if lines else None
    groups = [group for line in lines for group in line.groups]
    total = 0.0 if times is None else times.costs().late
    for group, share, end_s in zip(groups, times.late if times else (), times.end_s if times else (), strict=True):
        late = group.waiting * group.due_share * float(share)
        if late >= LATE_MIN:
            found.append(
                Miss(
                    group_id=group.group_id,
                    model=group.traits.key.model,
                    slo_class=group.traits.key.slo_class,
                    instance=group.instance,
                    waiting=group.waiting,
                    late=late,
                    over_s=max(0.0, now_s + float(end_s) - group.last_deadline_s),
                )
            )
    return tuple(sorted(found, key=lambda miss: (-miss.late, miss.group_id))[:MISSES_MAX]), total


def _due(group: Group, now_s: float) -> Iterator[tuple[float, float]]:
    """(count, seconds until they are due) of the parts of a group. Who is answered is never due."""
    if group.answered:
        yield group.answered, math.inf
    left = group.waiting - group.answered
    parts = PARTS if group.spread_s > 0.0 else 1
    for part in range(parts if left else 0):
        yield left / parts, group.next_deadline_s + (part + 0.5) / parts * group.spread_s - now_s


def _loads(board: Board, rates: Sequence[Rate], now_s: float) -> list[tuple[GroupKey, LoadClass, float]]:
    """Each key that waits or comes: its load and mean prompt; the most work first, by requests."""
    waiting: dict[GroupKey, list[Group]] = {}
    for group_id in sorted(board.groups):
        group = board.groups[group_id]
        if group.open:
            waiting.setdefault(group.traits.key, []).append(group)
    coming = {rate.key: rate for rate in rates}
    found: list[tuple[float, GroupKey, LoadClass, float]] = []
    for key in sorted({*waiting, *coming}):
        groups, rate = waiting.get(key, []), coming.get(key)
        slo_s = min([group.traits.slo_s for group in groups] + ([rate.slo_s] if rate else []))
        priority = groups[0].traits.priority if groups else rate.priority if rate else 0
        tokens = sum(group.waiting_prompt_tokens for group in groups) / max(1, sum(group.waiting for group in groups))
        load = LoadClass(
            model=key.model,
            label=key.slo_class,
            band=band_of(GroupTraits(key=key, slo_s=slo_s, priority=priority), board.slo_band),
            slo_s=math.inf if key.slo_kind is SloKind.PRIORITY else slo_s,
            first_token=key.slo_kind is SloKind.FIRST_TOKEN,
            per_s=rate.per_s if rate else 0.0,
            backlog=tuple(each for group in groups for each in _due(group, now_s)),
        )
        weight = load.per_s * 60.0 + sum(count for count, _ in load.backlog)
        found.append((weight, key, load, rate.prompt_tokens if rate else tokens))
    found.sort(key=lambda each: (-each[0], each[1]))
    kept = [(key, load, tokens) for _, key, load, tokens in found[:CLASSES_MAX]]
    for _, _, load, _ in found[CLASSES_MAX:]:
        at = next((at for at, (_, other, _) in enumerate(kept) if other.model == load.model), None)
        if at is not None:
            key, other, tokens = kept[at]
            kept[at] = (key, replace(other, per_s=other.per_s + load.per_s, backlog=other.backlog + load.backlog), tokens)
    return kept


Alike = tuple[str, int, tuple[str, ...], int, float]


def _alike(facts: InstanceFacts) -> Alike:
    return (facts.gpu, facts.n_gpu, tuple(sorted(facts.models)), facts.batch_max, facts.time_scale)


def _kinds(serving: Sequence[Slot], known: Sequence[Slot], estimates: Estimates, models: set[str]) -> list[InstanceFacts]:
    """One of each kind: those that serve, those that did, and GPUs that profiles know for all the models that they can hold: others than
    these have, or ones that could hold a model that none of these has. Of too many those that could serve what nobody does stay."""
    found: dict[Alike, InstanceFacts] = {}
    for slot in (*serving, *known):
        found.setdefault(_alike(slot.facts), replace(slot.facts, name="", incarnation="", draining=False, active_model=""))
    now = len({_alike(slot.facts) for slot in serving})
    scale = known[0].facts.time_scale if known else 1.0
    held: dict[tuple[str, int], set[str]] = {}
    for facts in found.values():
        held.setdefault((facts.gpu, facts.n_gpu), set()).update(facts.models)
    for gpu, n_gpu in estimates.gpus() if models else ():
        new = InstanceFacts(name="", incarnation="", gpu=gpu, n_gpu=n_gpu, engine="", models=tuple(sorted(models)), time_scale=scale)
        able = tuple(model for model in new.models if estimates.hardware(new, model) is not None)
        if not held.get((gpu, n_gpu), set()).issuperset(able):
            found.setdefault(_alike(replace(new, models=able)), replace(new, models=able))
    first, others = [*found.values()][:now], [*found.values()][now:]
    unserved = {model for model in models if all(estimates.hardware(each, model) is None for each in first)}
    for each in [*others]:
        holds = {model for model in unserved if estimates.hardware(each, model) is not None}
        if holds:
            unserved -= holds
            first.append(each)
            others.remove(each)
    return [*first, *others][: max(KINDS_MAX, len(first))]


def _served(estimates: Estimates, facts: InstanceFacts, key: GroupKey, prompt_tokens: float) -> ServedClass | None:
    hardware = estimates.hardware(facts, key.model)
    served: Service | None = None if hardware is None else estimates.service(facts, key, prompt_tokens)
    if hardware is None or served is None:
        return None
    return ServedClass(
        seats=served.batch,
        tokens=served.output.mean,
        tokens_deviation=served.output.deviation,
        first_s=served.prefill_s,
        base_s=served.step_base_s,
        sequence_s=served.sequence_s,
        join_s=served.prefill_work_s,
        cold_s=hardware.swap_s(warm=False),
        warm_s=hardware.swap_s(warm=True),
    )


def _member(slot: Slot, kind: int, estimates: Estimates) -> Member:
    engine = estimates.engine(slot)
    return Member(
        name=slot.facts.name,
        kind=kind,
        active_model=slot.active_model,
        warm_models=slot.warm_models,
        busy=0.5,
        left_s=engine.drain_s,
    )
