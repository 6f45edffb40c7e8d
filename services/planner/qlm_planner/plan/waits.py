"""The waits that the planner publishes: `qlm_core.prediction.assessment` on the present board, before calibration.

A class without an open group costs a pass over the groups, so one publication predicts few of these anew, in turn. Its pieces take
one step of the machine each, so that an event waits for one piece at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from qlm_core.prediction.assessment import Assessment, Placed
from qlm_core.prediction.planned_waits import CLASSES_MAX, KNOTS_MAX, QUEUES_MAX, ClassWaits, PlannedWaits, QueueWaits, WaitCurve, WaitKey
from qlm_core.prediction.prediction_views import GroupView, QueueView, RunningView
from qlm_core.prediction.reported_runs import ReportedRuns, with_reported_outputs
from qlm_core.profiles.profile import WORKLOAD_PRIOR, ProfileSnapshot
from qlm_core.vocabulary.group import GroupKey, slo_class, token_class
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.demand import Demand, Rate
from qlm_planner.board.group import Group, GroupTraits, band_of, group_of_one
from qlm_planner.board.slot import Slot
from qlm_planner.machine.effects import PublishWaits, WaitsFailed

PASSES = 8
PASS_GROUPS = 8_000
"""Most classes without an open group that one publication predicts anew, and most groups read for them; at least one class."""
PIECE_GROUPS = 1_000
"""Most groups read for those of one piece."""
SEED_SLOS_S = (1.0, 10.0, 100.0, 1_000.0, math.inf)
"""SLOs for which a newcomer of each model is predicted always; a new class takes the nearest one."""
MORE = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1_024.0)
"""Knots of a class's curve: newcomers since the publication."""
REPORT_AGE_MAX_S = 10.0
"""Older reports are ignored; agents report every second."""
KNOTS_OF_ALL = 16_384
"""Knots of all queues."""

Joins = Callable[[GroupKey, float], str]
"""Id of the group that a request with this key and deadline joins; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newcomer:
    """A class and one request of it, as a group of one. `group_id`: the group that it joins, "" for none."""

    key: WaitKey
    slo_s: float
    request: GroupView
    group_id: str


@dataclass(slots=True)
class WaitForecast:
    """Needs `load` before `publish`. `due_s`: the next publication; `publishing`: one awaits its answer. Without `holds_waits`
    a publication is empty."""

    due_s: float = 0.0
    holds_waits: bool = True
    publishing: bool = False
    _catalogue: Mapping[str, ModelSpec] = field(default_factory=dict)
    _profiles: ProfileSnapshot | None = None
    _kept: dict[WaitKey, ClassWaits] = field(default_factory=dict)
    _turn: int = 0
    _pieces: Generator[None, None, PlannedWaits] | None = None

    def load(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> None:
        self._catalogue, self._profiles = catalogue, profiles

    @property
    def wake_s(self) -> float:
        return math.inf if self.publishing else self.due_s

    def publish(
        self, board: Board, demand: Demand, joins: Joins, counted_to: int, period_s: float, now_s: float
    ) -> PublishWaits | WaitsFailed | None:
        """Computes the next piece of a publication of the board and the demand as they were at the first piece. Returns the publication
        after the last piece; None before, and without profiles; WaitsFailed for invalid figures. O(groups), and passes over the groups for
        classes without one."""
        if self._profiles is None:
            return None
        if self._pieces is None:
            self._pieces = self._compute(self._profiles, board, demand.rates(now_s), joins, counted_to, now_s)
        try:
            next(self._pieces)
            self.due_s = now_s
            return None
        except StopIteration as end:
            waits: PlannedWaits = end.value
        except (ArithmeticError, ValueError) as error:
            self.due_s, self._pieces = now_s + period_s, None
            return WaitsFailed(reason=f"{type(error).__name__}: {error}")
        self.due_s, self._pieces, self.publishing = now_s + period_s, None, True
        return PublishWaits(waits=waits)

    def _compute(
        self, profiles: ProfileSnapshot, board: Board, rates: list[Rate], joins: Joins, counted_to: int, now_s: float
    ) -> Generator[None, None, PlannedWaits]:
        made = partial(PlannedWaits, made_s=now_s, plan_version=board.plan_version, profile_version=profiles.version, counted_to=counted_to)
        if not self.holds_waits:
            return made(queues=(), classes=(), instances={})
        slots = [slot for _, slot in sorted(board.slots.items()) if slot.alive][:QUEUES_MAX]
        views = views_of(board, slots, sum(rate.per_s for rate in rates), now_s)
        newcomers = self._newcomers(board, rates, joins, now_s)
        yield
        assessment = Assessment(self._catalogue, profiles, views)
        knots = max(2, min(KNOTS_MAX, KNOTS_OF_ALL // max(1, len(views))))
        yield
        classes = yield from self._classes(assessment, newcomers, sum(len(view.groups) for view in views), now_s)
        return made(
            queues=tuple(queue_waits(view, assessment.queue_curve(view.instance.name, knots)) for view in views),
            classes=classes,
            instances={model: sum(1 for slot in slots if model in slot.facts.models) for model in self._catalogue},
        )

    def _classes(
        self, assessment: Assessment, newcomers: list[_Newcomer], groups: int, now_s: float
    ) -> Generator[None, None, tuple[ClassWaits, ...]]:
        known = set(assessment.instances)
        kept, found, alone = self._kept, {}, list[_Newcomer]()
        for each in newcomers:
            in_group = assessment.joining(each.group_id, MORE)
            if in_group is not None:
                found[each.key] = _class_waits(each, in_group)
            else:
                alone.append(each)
        passes = max(1, min(PASSES, PASS_GROUPS // max(1, groups), len(alone)))
        due = [each for each in alone if each.key not in kept or kept[each.key].instance not in known][:passes]
        while alone and len(due) < passes:
            self._turn = (self._turn + 1) % len(alone)
            due.append(alone[self._turn])
        at_once = max(1, PIECE_GROUPS // max(1, groups))
        for first in range(0, len(due), at_once):
            yield
            piece = due[first : first + at_once]
            for each, place in zip(piece, assessment.alone([each.request for each in piece], now_s, MORE), strict=True):
                if place is not None:
                    found[each.key] = _class_waits(each, place)
        for each in alone:
            if each.key not in found and each.key in kept and kept[each.key].instance in known:
                found[each.key] = kept[each.key]
        self._kept = found
        return tuple(found.values())

    def _newcomers(self, board: Board, rates: list[Rate], joins: Joins, now_s: float) -> list[_Newcomer]:
        """Newcomers of recent classes, most frequent first, and of each model's seeds."""
        found = [
            _newcomer(board, joins, rate.key, rate.slo_s, rate.priority, rate.prompt_tokens, now_s)
            for rate in sorted(rates, key=lambda rate: (-rate.per_s, rate.key))
        ]
        for model in sorted(self._catalogue):
            prompt_tokens = WORKLOAD_PRIOR.prompt_tokens_mean
            if self._profiles is not None:
                prompt_tokens = self._profiles.workload_for(model, "", "").prompt_tokens_mean
            for slo_s in SEED_SLOS_S:
                slo = Slo(kind=SloKind.COMPLETION, seconds=slo_s)
                key = GroupKey(model=model, slo_kind=slo.kind, slo_class=slo_class(slo), token_class=token_class(round(prompt_tokens)))
                found.append(_newcomer(board, joins, key, slo_s, 0, prompt_tokens, now_s))
        unique = {each.key: each for each in reversed(found)}
        return list(reversed(unique.values()))[:CLASSES_MAX]


def _newcomer(board: Board, joins: Joins, key: GroupKey, slo_s: float, priority: int, prompt_tokens: float, now_s: float) -> _Newcomer:
    deadline_s = math.inf if key.slo_kind is SloKind.PRIORITY else now_s + slo_s
    traits = GroupTraits(key=key, slo_s=slo_s, priority=priority)
    request = _group_view(group_of_one("", traits, board.slo_band, deadline_s, max(1, round(prompt_tokens))))
    wait_key = (key.model, key.slo_kind, key.slo_class, key.token_class)
    return _Newcomer(key=wait_key, slo_s=slo_s, request=request, group_id=joins(key, deadline_s))


def _class_waits(each: _Newcomer, place: Placed) -> ClassWaits:
    view, ahead, curve = place
    return ClassWaits(key=each.key, slo_s=each.slo_s, instance=view.instance.name, requests_ahead=ahead, curve=curve)


def queue_waits(view: QueueView, curve: WaitCurve | None) -> QueueWaits:
    """The waits along one queue."""
    return QueueWaits(
        instance=view.instance,
        running=view.running,
        waiting=sum(group.waiting for group in view.groups),
        alike=sum(group.waiting for group in view.groups if group.model == view.active_model),
        curve=curve,
    )


def views_of(board: Board, slots: Iterable[Slot], arrivals_per_s: float, now_s: float) -> list[QueueView]:
    """The queues of instances as predictions read them. Arrivals are divided in proportion to the present loads."""
    views = [_view(board, slot, now_s) for slot in slots]
    loads = [view.running + sum(group.waiting for group in view.groups) for view in views]
    if arrivals_per_s <= 0.0 or not sum(loads):
        return views
    return [replace(view, arrivals_per_s=arrivals_per_s * load / sum(loads)) for view, load in zip(views, loads, strict=True)]


def _view(board: Board, slot: Slot, now_s: float) -> QueueView:
    active = slot.active_model
    return QueueView(
        instance=replace(slot.facts, active_model=active, batch=slot.batches.get(active, 0)),
        active_model=active,
        running=slot.running,
        groups=tuple(_group_view(group) for group in board.queue_groups(slot.facts.name)),
        warm_models=slot.warm_models,
        runners=_runners(board, slot, now_s),
        loading_s=max(0.0, now_s - slot.loading_since_s) if slot.loading_since_s > 0.0 else None,
    )


def _group_view(group: Group) -> GroupView:
    key = group.traits.key
    return GroupView(
        group_id=group.group_id,
        model=key.model,
        slo_kind=key.slo_kind,
        slo_class=key.slo_class,
        token_class=key.token_class,
        waiting=group.waiting,
        waiting_prompt_tokens=group.waiting_prompt_tokens,
        first_deadline_s=math.inf if key.slo_kind is SloKind.PRIORITY else group.next_deadline_s,
        band=group.band,
    )


def _runners(board: Board, slot: Slot, now_s: float) -> tuple[RunningView, ...]:
    """Running requests by SLO class and token class, at most `slot.running`, with their reported outputs."""
    reported = slot.runs if slot.runs is not None and now_s - slot.runs.at_s <= REPORT_AGE_MAX_S else None
    produced = 0 if reported is None else reported.made_since(now_s)
    classes: dict[tuple[str, str], list[str]] = {}
    for group_id, kept in sorted(slot.runners.items()):
        if kept.traits.key.model == slot.active_model:
            classes.setdefault((kept.traits.key.slo_class, kept.traits.key.token_class), []).append(group_id)
    found: list[RunningView] = []
    left = slot.running
    lookahead = slot.facts.lookahead_requests > 0 and not _takes_turns(slot, reported)
    for (slo_name, tokens), group_ids in classes.items():
        count = min(sum(slot.runners[group_id].count for group_id in group_ids), left)
        left -= count
        if not count:
            continue
        band, deadline_s = min(_urgency(board, slot, group_id) for group_id in group_ids)
        view = RunningView(
            slo_class=slo_name,
            token_class=tokens,
            count=count,
            band=band,
            deadline_s=deadline_s,
            lookahead=lookahead,
        )
        if reported is not None:
            view = with_reported_outputs(view, [reported.groups.get(group_id) for group_id in group_ids], produced)
        found.append(view)
    return tuple(found)


def _takes_turns(slot: Slot, reported: ReportedRuns | None) -> bool:
    """Whether the policy inside the engine pauses requests for others, so that a new one waits for nobody's end: more have output than the
    engine has seats."""
    outputs = () if reported is None else chain.from_iterable(runs.output_tokens for runs in reported.groups.values())
    return sum(output > 0 for output in outputs) > slot.facts.batch_max


def _urgency(board: Board, slot: Slot, group_id: str) -> tuple[int, float]:
    """The band and the first deadline of a running group."""
    traits, group = slot.runners[group_id].traits, board.groups.get(group_id)
    unbound = group is None or traits.key.slo_kind is SloKind.PRIORITY
    return band_of(traits, board.slo_band), math.inf if unbound or group is None else group.first_deadline_s
