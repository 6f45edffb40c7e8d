"""The estimator beside the engines: its own machine learns from the events that the queue would write, and its snapshot predicts each
request at its arrival from nothing but what was seen by then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.estimator.predictions import Prediction, predicted
from benchmarks.estimator.queue_lines import Group, Known, Line, runners
from benchmarks.estimator.truth import Happened, Kind
from benchmarks.estimator.workloads import OUTPUT_TOKENS_MAX, SLO, Arrival
from qlm_agent.decisions.runs import Run
from qlm_core.prediction.assessment import Assessment
from qlm_core.prediction.planned_waits import KNOTS_MAX, ClassWaits, PlannedWaits
from qlm_core.prediction.prediction_views import GroupView, QueueView, RequestPrediction
from qlm_core.prediction.queue_reader import QueueReader
from qlm_core.prediction.queue_times import queue_times
from qlm_core.profiles.calibration import LEVELS
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot
from qlm_core.statistics.length_features import LengthFacts
from qlm_core.vocabulary.group import GroupKey, group_key, prompt_class, slo_class
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_estimator.events import Count, Ended, GroupClass, Lifecycle, LifecycleKind, OperationKind, QueueSeen, ReportedOperation, Tick
from qlm_estimator.machine import EstimatorMachine, Learning
from qlm_estimator.predictions import Predicted
from qlm_gateway.outlook.waits import AcceptedSince, Outlook, RequestShape
from qlm_planner.plan.waits import queue_waits

LEARNING = Learning(publish_every_s=5.0)
"""As configured by default, but that snapshots are made less often: that is most of the work of a run."""
SEEN_EVERY_S = 2.0
"""How often the estimator reads the queue, as its configuration has it."""

_LIFECYCLES = {Kind.ARRIVED: LifecycleKind.ACCEPTED, Kind.PULLED: LifecycleKind.PULLED, Kind.COMPLETED: LifecycleKind.COMPLETED}


RunsOf = Callable[[str], Iterable[Run]]
"""The runs of an instance, as its agent knows them."""


class Follower:
    """Sees what happens, in order, and predicts. Groups are those of the planner's key; the requests of one objective are served in the
    order of arrival."""

    def __init__(
        self,
        requests: Sequence[Arrival],
        instances: Sequence[InstanceFacts],
        catalogue: Mapping[str, ModelSpec],
        shipped: tuple[HardwareProfile, ...],
        runs_of: RunsOf,
    ) -> None:
        self.lines = {facts.name: Line(facts=facts) for facts in instances}
        self._requests = requests
        self._catalogue = catalogue
        self._runs_of = runs_of
        self._machine = EstimatorMachine(learning=LEARNING, catalogue=catalogue, shipped=shipped)
        self._known: dict[int, Known] = {}
        self._group_of: dict[int, str] = {}
        self._instance_of: dict[int, str] = {}
        self._predicted: dict[int, Predicted] = {}
        self._started_s: dict[int, float] = {}
        self._first_token_s: dict[int, float] = {}
        self._cached_tokens: dict[int, int | None] = {}
        self._sequence = 0
        self._seen_s = -math.inf

    @property
    def snapshot(self) -> ProfileSnapshot:
        """The newest that was published."""
        return self._machine.snapshot

    def arrive(self, request: Arrival) -> GroupKey:
        """Returns the key of the group of a request that arrives now, by the gateway's guess of its output."""
        snapshot = self.snapshot
        curve = snapshot.output_curve_for(request.model, slo_class(SLO), prompt_class(request.prompt_tokens))
        facts = LengthFacts(model=request.model, tenant=request.tenant, prompt_tokens=request.prompt_tokens)
        guess = snapshot.length_model.guess(facts, curve.median_tokens, OUTPUT_TOKENS_MAX)
        key = group_key(request.facts(guess.class_tokens))
        self._known[request.number] = Known(key, guess)
        return key

    def predict(self, request: Arrival, now_s: float) -> Prediction | None:
        """A request that has arrived, before it is put on a queue. All have the same objective, so it comes behind all others."""
        key = self._known[request.number].key
        views = [self._view(line, now_s) for line in self.lines.values()]
        alone = GroupView(
            group_id="",
            model=request.model,
            slo_class=key.slo_class,
            token_class=key.token_class,
            waiting=1,
            waiting_prompt_tokens=request.prompt_tokens,
            first_deadline_s=math.inf,
            output_tokens_max=float(OUTPUT_TOKENS_MAX),
        )
        (place,) = Assessment(self._catalogue, self.snapshot, views).alone([alone], now_s, (0.0,))
        if place is None:
            return None
        view, ahead, curve = place
        shape = self._shape(request)
        newcomers = ClassWaits(key=shape.key, slo_s=SLO.seconds, instance=view.instance.name, requests_ahead=ahead, curve=curve)
        return self._kept(request, self._outlook(views, (newcomers,), now_s).predict_new(shape, now_s), now_s)

    def predict_placed(self, request: Arrival, now_s: float) -> Prediction | None:
        """A request that was just put into a group, as the last of its turn: inside a turn the agent pulls in the order of arrival."""
        group_id, instance = self._group_of[request.number], self._instance_of[request.number]
        view = self._view(self.lines[instance], now_s, group_id)
        place = next(number for number, group in enumerate(view.groups) if group.group_id == group_id)
        ahead = sum(group.waiting for group in view.groups[: place + 1]) - 1
        found = self._outlook([view], (), now_s).predict_waiting(self._shape(request), instance, ahead, now_s)
        return self._kept(request, found, now_s)

    def _outlook(self, views: Sequence[QueueView], classes: tuple[ClassWaits, ...], now_s: float) -> Outlook:
        """The basis of a gateway's predictions, as if the planner published it now."""
        assessment = Assessment(self._catalogue, self.snapshot, views)
        queues = tuple(queue_waits(view, None if classes else assessment.queue_curve(view.instance.name, KNOTS_MAX)) for view in views)
        waits = PlannedWaits(
            made_s=now_s,
            plan_version=0,
            profile_version=self.snapshot.version,
            counted_to=0,
            queues=queues,
            classes=classes,
            instances={},
        )
        return Outlook(waits, self._catalogue, self.snapshot, AcceptedSince(), read_s=now_s)

    def _shape(self, request: Arrival) -> RequestShape:
        return RequestShape(
            model=request.model,
            slo=SLO,
            prompt_tokens=request.prompt_tokens,
            output_tokens_max=OUTPUT_TOKENS_MAX,
            predicted_output_tokens=self._known[request.number].guess.class_tokens,
            tenant=request.tenant,
        )

    def _kept(self, request: Arrival, found: RequestPrediction | None, now_s: float) -> Prediction | None:
        if found is None:
            return None
        wait_s, completion_s = zip(*(found.quantiles_s(level) for level in LEVELS), strict=True)
        made = Prediction(
            instance=found.instance,
            depth=found.requests_ahead,
            version=found.profile_version,
            wait_s=wait_s,
            completion_s=completion_s,
            own_wait=found.own_wait or found.wait,
            own_completion=found.own_completion or found.completion,
        )
        prediction = self._predicted[request.number] = predicted(request, made, now_s, self.lines[made.instance].facts)
        self._machine.step(now_s, prediction)
        return made

    def ends_s(self, now_s: float) -> dict[str, float]:
        """When each instance would have done all that it has to do, in seconds from now."""
        ends: dict[str, float] = {}
        for name, line in self.lines.items():
            groups = QueueReader(self._catalogue, self.snapshot).read([self._view(line, now_s)])[1]
            ends[name] = float(queue_times(groups).end_s.max()) if groups.count.size else 0.0
        return ends

    def place(self, request: Arrival, instance: str, turn: int) -> None:
        """A request was put on an instance's queue, among those of this turn: into the group of its key."""
        line = self.lines[instance]
        key = self._known[request.number].key
        group_id = f"{turn}:{key.model}:{key.token_class}"
        group = line.groups.get(group_id)
        if group is None:
            group = line.groups[group_id] = Group(group_id, turn, key, request.facts().deadline_s)
        group.waiting += 1
        group.prompt_tokens += request.prompt_tokens
        line.arrivals_s.append(request.arrival_s)
        self._group_of[request.number] = group_id
        self._instance_of[request.number] = instance

    def see(self, happened: Happened) -> None:
        """Something happened; an arrival is placed after it was seen."""
        if happened.at_s - self._seen_s >= SEEN_EVERY_S:
            self._poll(happened.at_s)
        if happened.took_s > 0.0:
            self._machine.step(happened.at_s, self._operation(happened))
        if happened.kind is Kind.SWAPPED:
            self._swapped(happened)
        elif happened.kind is Kind.STARTED:
            self._started_s[happened.number] = happened.at_s
            self._first_token_s[happened.number] = happened.first_token_s
            self._cached_tokens[happened.number] = happened.cached_tokens
        elif happened.kind is Kind.PULLED:
            self._pulled(happened)
        elif happened.kind is Kind.COMPLETED:
            self.lines[happened.instance].running -= 1
        kind = _LIFECYCLES.get(happened.kind)
        if kind is not None:
            self._machine.step(happened.at_s, self._lifecycle(kind, happened))
        if happened.kind is Kind.COMPLETED:
            self._judge(happened)
        self._machine.step(happened.at_s, Tick())

    def _pulled(self, happened: Happened) -> None:
        line = self.lines[happened.instance]
        line.running += 1
        group = line.groups[self._group_of[happened.number]]
        group.waiting -= 1
        group.prompt_tokens -= self._requests[happened.number].prompt_tokens
        if not group.waiting:
            del line.groups[group.group_id]

    def _swapped(self, happened: Happened) -> None:
        line = self.lines[happened.instance]
        line.active = happened.model
        line.facts = replace(line.facts, active_model=happened.model)
        self._poll(happened.at_s)

    def _judge(self, happened: Happened) -> None:
        """Reports the outcome of a prediction to the machine, as the estimator's shell does."""
        prediction = self._predicted.pop(happened.number, None)
        started_s = self._started_s.pop(happened.number)
        if prediction is not None:
            ended = Ended(
                queue_id=prediction.queue_id,
                at_s=happened.at_s,
                state=Count.COMPLETED,
                slo_class="",
                latency_s=happened.at_s - prediction.at_s,
                wait_s=max(0.0, started_s - prediction.at_s),
            )
            self._machine.step(happened.at_s, ended)

    def _poll(self, at_s: float) -> None:
        self._seen_s = at_s
        lines = self.lines.values()
        self._machine.step(
            at_s,
            QueueSeen(
                last_event=(round(at_s * 1000.0), self._sequence),
                instances=tuple(line.facts for line in lines),
                running={line.facts.incarnation: line.running for line in lines},
                groups={
                    group.group_id: GroupClass(model=group.key.model, slo_class=group.key.slo_class, token_class=group.key.token_class)
                    for line in lines
                    for group in line.groups.values()
                },
            ),
        )

    def _view(self, line: Line, now_s: float, last: str = "") -> QueueView:
        return line.view(now_s, runners(self._runs_of(line.facts.name), self._known), last)

    def _operation(self, happened: Happened) -> ReportedOperation:
        swapped = OperationKind.SWAPPED_WARM if happened.from_warm else OperationKind.SWAPPED_COLD
        self._sequence += 1
        return ReportedOperation(
            kind=OperationKind.WARMED if happened.kind is Kind.WARMED else swapped,
            entry_id=(round(happened.at_s * 1000.0), self._sequence),
            index=0,
            incarnation=self.lines[happened.instance].facts.incarnation,
            model=happened.model,
            took_s=happened.took_s,
        )

    def _lifecycle(self, kind: LifecycleKind, happened: Happened) -> Lifecycle:
        request = self._requests[happened.number]
        self._sequence += 1
        line = self.lines.get(happened.instance)
        known = self._known.pop(happened.number) if kind is LifecycleKind.COMPLETED else None
        done = known is not None
        return Lifecycle(
            kind=kind,
            entry_id=(round(happened.at_s * 1000.0), self._sequence),
            index=0,
            queue_id=str(happened.number),
            group_id=self._group_of.get(happened.number, ""),
            incarnation="" if line is None else line.facts.incarnation,
            attempt=0 if line is None else 1,
            acceptance_number=request.number + 1 if kind is LifecycleKind.ACCEPTED else 0,
            prompt_tokens=request.prompt_tokens,
            model=request.model if done else "",
            slo_class=slo_class(SLO) if done else "",
            output_tokens=request.output_tokens if done else 0,
            first_token_s=self._first_token_s.pop(happened.number) if done else 0.0,
            finished_s=happened.at_s if done else 0.0,
            cached_tokens=self._cached_tokens.pop(happened.number) if done else None,
            length_guess=None if known is None else known.guess,
        )
