"""The question of an advice: waiting and expected groups, on serving instances and on those that could be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qlm_core.vocabulary.instance import InstanceFacts
from qlm_planner.board.board import Board
from qlm_planner.board.demand import Demand, Rate
from qlm_planner.board.group import Group, GroupTraits, group_of_one
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import OWN
from qlm_planner.cost.service_times import ClassTable, Floats, GroupColumns, service_times
from qlm_planner.cost.virtual_queues import mean_crowd
from qlm_planner.plan.solver_problem import kinds_of, problem_of, standing
from qlm_planner.search.problem import Orders, Problem

HORIZON_S = 300.0
"""Time for which requests are expected."""
SETTLE_S = 60.0
"""Requests due sooner do not count: an added instance cannot help them."""
EXPECTED_MAX = 10_000
"""Most expected groups; beyond it they are larger."""
KINDS_MAX = 8
"""Most kinds of instances to try: registered ones, then those of the profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A group with expected late requests: their number, and the mean delay of the latest, in seconds."""

    group_id: str
    model: str
    slo_class: str
    instance: str
    waiting: int
    late: float = 0.0
    over_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An instance that serves, or (`name` is "") one that could be added. `models`: those that it can serve."""

    name: str
    gpu: str
    n_gpu: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """An immutable view of one moment. `problem` has a queue for each of `members` (the `size` serving instances, then an empty one of each
    kind to add) and the groups of `waiting`, in the plan's `orders`, before the expected groups; None without groups or queues. `alone_s`:
    `own_s` of a request that runs alone. `models`: by number. `liable`: requests of each waiting group that can miss an SLO; `due`:
    requests of each group that count. `unserved`: requests without an instance; `idle`: instances without requests."""

    made_s: float
    problem: Problem | None
    orders: Orders
    members: tuple[Member, ...]
    size: int
    models: tuple[str, ...]
    waiting: tuple[Miss, ...]
    liable: Floats
    due: Floats
    alone_s: Floats
    horizon_s: float
    unserved: int
    idle: int

    @property
    def needs_advice(self) -> bool:
        """Whether groups wait or an instance is idle."""
        return bool(self.waiting) or self.idle > 0


def question_of(board: Board, table: ClassTable, demand: Demand, now_s: float) -> Question:
    """The question now, without paused groups. O(groups + instances + EXPECTED_MAX). Raises ProblemError for profiles without valid
    figures."""
    estimates, slots = table.estimates, board.serving
    rates = [rate for rate in demand.rates(now_s) if not board.is_paused(rate.key)]
    queues = {slot.facts.name: board.queue_groups(slot.facts.name) for slot in slots}
    waiting = [group for queue in queues.values() for group in queue]
    others = (group for _, group in sorted(board.groups.items()) if group.open and group.instance not in queues)
    waiting += [group for group in others if not board.is_paused(group.traits.key)]
    wanted = {group.traits.key.model for group in waiting} | {rate.key.model for rate in rates}
    tried = _kinds(slots, [slot for _, slot in sorted(board.slots.items())], estimates, wanted)
    clock = max((slot.facts.time_scale for slot in slots), default=1.0)
    horizon_s = HORIZON_S / clock
    here = table.columns(waiting)
    columns = here.beside(_expected(rates, tried, table, board.slo_band, now_s, horizon_s))
    orders, heads = standing(estimates, [*slots, *tried], [*queues.values(), *([] for _ in tried)])
    problem, alone_s = None, np.zeros((0, 0))
    if (slots or tried) and columns.ids:
        # Waiting and expected groups stand on the queues, so no model is missed.
        missed = np.zeros(len(slots) + len(tried))
        problem = problem_of([*slots, *tried], columns, mean_crowd(slots, here.count), orders, heads, table, now_s, missed)
        kinds = kinds_of([*slots, *tried], estimates, table)[1]
        shared = table.classes(kinds, np.arange(len(kinds), dtype=np.int64)[:, None], columns)
        one = replace(columns, count=np.ones(len(columns.ids)), prompt_tokens=columns.prompt_tokens / columns.count)
        alone_s = service_times(shared, one, 1.0)[OWN]
        # Expected requests meet full batches in a fleet that is just enough.
        crowded = service_times(shared, columns, np.inf)[OWN]
        own_s = np.concatenate((problem.own_s[:, : len(waiting)], crowded[:, len(waiting) :]), axis=1)
        problem = replace(problem, own_s=np.where(np.isnan(own_s), np.inf, own_s))
    unserved = {model for model in wanted if not any(estimates.can_serve(slot, model) for slot in slots)}
    return Question(
        made_s=now_s,
        problem=problem,
        orders=orders,
        members=tuple(_member(slot.facts, estimates) for slot in (*slots, *tried)),
        size=len(slots),
        models=tuple(table.models(columns)[0]),
        waiting=tuple(_miss(group) for group in waiting),
        liable=here.count * here.due_share,
        due=_due(columns, now_s + SETTLE_S / clock),
        alone_s=alone_s,
        horizon_s=horizon_s,
        unserved=sum(group.waiting for group in waiting if group.traits.key.model in unserved),
        idle=sum(1 for slot in slots if slot.running == 0 and not queues[slot.facts.name]),
    )


def _member(facts: InstanceFacts, estimates: Estimates) -> Member:
    models = tuple(model for model in facts.models if estimates.hardware(facts, model) is not None)
    return Member(name=facts.name, gpu=facts.gpu, n_gpu=facts.n_gpu, models=models)


def _miss(group: Group) -> Miss:
    key = group.traits.key
    return Miss(group_id=group.group_id, model=key.model, slo_class=key.slo_class, instance=group.instance, waiting=group.waiting)


def _due(groups: GroupColumns, from_s: float) -> Floats:
    """Requests of each group with deadlines from then on, without answered ones and those without a deadline."""
    later = np.clip((groups.deadline_s + groups.spread_s - from_s) / np.maximum(groups.spread_s, 1e-9), 0.0, 1.0)
    due: Floats = np.where(np.isfinite(groups.deadline_s), groups.count * groups.due_share * later, 0.0)
    return due


def _expected(
    rates: Sequence[Rate], kinds: Sequence[Slot], table: ClassTable, slo_band: int, now_s: float, horizon_s: float
) -> GroupColumns:
    """Expected groups of each key until the horizon: the arrivals of a time window, no more than `GroupAssignment` admits. Orders may start
    them before they arrive: orders by deadline rarely do in a fleet that is just enough, and never in a smaller one."""
    per_s, slo_s = np.array([rate.per_s for rate in rates]), np.array([rate.slo_s for rate in rates])
    most = np.array([_most(rate, kinds, table.estimates) for rate in rates], dtype=np.float64)
    longest_s = np.minimum(np.minimum(horizon_s, most / per_s), table.estimates.policy.group_spread_fraction * slo_s)
    windows = np.ceil(np.minimum(horizon_s / longest_s, max(1.0, EXPECTED_MAX / max(1, len(rates))))).astype(np.int64)
    key = np.repeat(np.arange(len(rates)), windows)
    window_s = (horizon_s / windows)[key]
    begin_s = window_s * (np.arange(len(key)) - (np.cumsum(windows) - windows)[key])
    one = table.columns([_request(rate, slo_band, now_s) for rate in rates]).take(key)
    count = per_s[key] * window_s
    return replace(
        one,
        ids=[""] * len(key),
        count=count,
        prompt_tokens=one.prompt_tokens * count,
        deadline_s=one.deadline_s + begin_s,
        spread_s=np.where(np.isfinite(one.deadline_s), window_s, 0.0),
    )


def _most(rate: Rate, kinds: Sequence[Slot], estimates: Estimates) -> int:
    """Most waiting requests of a key in one group, on any kind of instance that serves them."""
    able: list[Slot | None] = [slot for slot in kinds if estimates.can_serve(slot, rate.key.model)]
    return min(estimates.limits(slot, rate.key, rate.slo_s, rate.prompt_tokens).waiting for slot in able or [None])


def _request(rate: Rate, slo_band: int, now_s: float) -> Group:
    """One request of a key that arrives now, as a group."""
    traits = GroupTraits(key=rate.key, slo_s=rate.slo_s, priority=rate.priority)
    return group_of_one(repr(rate.key), traits, slo_band, now_s + rate.slo_s, round(rate.prompt_tokens))


def _kind(facts: InstanceFacts) -> str:
    """The kind of an instance: equal for interchangeable ones."""
    return repr((facts.gpu, facts.n_gpu, sorted(facts.models), facts.batch_max, facts.time_scale))


def _kinds(slots: Sequence[Slot], known: Sequence[Slot], estimates: Estimates, models: set[str]) -> list[Slot]:
    """An empty instance of each kind: those that serve, those that did, and GPUs of the profiles with all models that they can hold, if one
    of these is on no such GPU. Serving kinds stay beyond the limit, kinds that serve unserved models precede others."""
    facts = [slot.facts for slot in (*slots, *known)]
    scale = known[0].facts.time_scale if known else 1.0
    for gpu, n_gpu in estimates.gpus():
        new = InstanceFacts(name="", incarnation="", gpu=gpu, n_gpu=n_gpu, engine="", models=tuple(sorted(models)), time_scale=scale)
        able = tuple(model for model in new.models if estimates.hardware(new, model) is not None)
        if not {model for each in facts if (each.gpu, each.n_gpu) == (gpu, n_gpu) for model in each.models}.issuperset(able):
            facts.append(replace(new, models=able))
    # The incarnation is the key of cached estimates.
    kinds = {_kind(each): replace(each, name="", incarnation=_kind(each), draining=False, active_model="") for each in facts}
    batches = {_kind(slot.facts): slot.batches for slot in slots}
    found = [Slot(facts=each, batches=batches.get(kind, {})) for kind, each in kinds.items()]
    present = len({_kind(slot.facts) for slot in slots})
    missing = [model for model in models if not any(estimates.can_serve(slot, model) for slot in slots)]
    others = sorted(found[present:], key=lambda slot: not any(estimates.can_serve(slot, model) for model in missing))
    return [*found[:present], *others][: max(KINDS_MAX, present)]
