"""The estimator's decisions: what to learn from each event, and when to publish. Pure.

Events of the queue's stream arrive in its order, so repeated or misplaced ones are dropped by entry id. Events that were trimmed
before they could be read show as a gap in the acceptance numbers; the runs are then unknown until the next reading of the queue.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from qlm_core.profiles.calibration import CalibrationTable
from qlm_core.profiles.hardware_prior import why_none
from qlm_core.profiles.hardware_profile import HardwareKey, HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.stream import entry_id_of
from qlm_estimator.calibration.feedback import Feedback
from qlm_estimator.events import (
    Effect,
    Ended,
    Event,
    GroupClass,
    HardwareUnknown,
    Imported,
    Lifecycle,
    LifecycleKind,
    Publish,
    QueueSeen,
    ReportedOperation,
    Tick,
)
from qlm_estimator.lengths.requests import RequestLengths
from qlm_estimator.predictions import Predicted
from qlm_estimator.speed.activity import Activity, FinishedRun
from qlm_estimator.speed.base_rows import BaseRows
from qlm_estimator.speed.factor import SpeedLearner

FINISH_SLACK_S = 5.0
"""A finish longer than this before its event, or after it, is not believed, and the event's own time taken."""

UNSEEN_OPERATIONS_MAX = 256
"""Operations of incarnations that no reading of the queue has shown yet, kept until the next one."""

UNKNOWN_PAIRS_MAX = 1_000
"""Pairs of GPUs and model without a profile that are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How the estimator learns. `memory_requests`: finished requests of a class after which an old one weighs 1 / e."""

    publish_every_s: float = 1.0
    memory_requests: float = 1000.0
    workload_rows_max: int = 4096
    hardware_rows_max: int = 4096


@dataclass(slots=True, kw_only=True)
class Counts:
    """For metrics. `missed`: accepted requests whose events were trimmed unread, found in `gaps`."""

    events: int = 0
    lengths: int = 0
    speeds: int = 0
    operations: int = 0
    judged: int = 0
    refused: int = 0
    repeated: int = 0
    gaps: int = 0
    missed: int = 0


class EstimatorMachine:
    """One queue's estimator. `restored`: the newest snapshot that was published, for all events up to its `last_event_id`."""

    def __init__(
        self,
        *,
        learning: Learning,
        catalogue: Mapping[str, ModelSpec],
        shipped: tuple[HardwareProfile, ...],
        restored: ProfileSnapshot | None = None,
    ) -> None:
        self.counts = Counts()
        self._learning = learning
        self._catalogue = catalogue
        self._lengths = RequestLengths(memory=learning.memory_requests, rows_max=learning.workload_rows_max, made=self._made)
        self._base = BaseRows(shipped=shipped, facts={spec.profile: spec.facts for spec in catalogue.values()})
        self._speeds = SpeedLearner(base=self._base, rows_max=learning.hardware_rows_max)
        self._unseen_operations: deque[ReportedOperation] = deque(maxlen=UNSEEN_OPERATIONS_MAX)
        self._feedback = Feedback(slowdown_of=self._slowdown)
        self._snapshot = restored or ProfileSnapshot(version=0, made_s=0.0, hardware=shipped)
        self._published_s = -float("inf")
        self._learned = False
        self._read = entry_id_of(self._snapshot.last_event_id)
        self._last = (self._read, sys.maxsize)  # entry and index of an event
        self._last_accepted = 0
        self._instances: dict[str, InstanceFacts] = {}
        self._activities: dict[str, Activity] = {}
        self._groups: Mapping[str, GroupClass] = {}
        self._unknown: set[HardwareKey] = set()
        self._restore(self._snapshot)

    @property
    def snapshot(self) -> ProfileSnapshot:
        """The newest snapshot that was published or restored."""
        return self._snapshot

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Takes an event at `now_s` of the queue's clock. A publication that failed is not retried: the next one replaces it. None
        is made between the events of an entry, so that each holds all events up to its `last_event_id`, and nothing after it."""
        effects: list[Effect] = []
        match event:
            case Lifecycle() | ReportedOperation():
                self._learn(event)
            case QueueSeen():
                self._see(event)
                effects += self._unknown_hardware(event.instances)
            case Imported():
                self._restore(event.snapshot)
                self._learned, self._published_s = True, -float("inf")
            case Predicted() | Ended():
                judged = self._feedback.predict(event) if isinstance(event, Predicted) else self._feedback.end(event)
                if judged is not None:
                    self.counts.judged += 1
                    self._learned = True
                    effects.append(judged)
            case Tick():
                self._read = max(self._read, event.read_to)
            case _:
                assert_never(event)
        if isinstance(event, QueueSeen | Imported | Tick):
            effects += self._publish_if_due(now_s)
        return effects

    def _unknown_hardware(self, instances: tuple[InstanceFacts, ...]) -> Iterator[Effect]:
        """Each pair once."""
        for instance in instances:
            for spec in (self._catalogue[model] for model in instance.models if model in self._catalogue):
                key = (instance.gpu, instance.n_gpu, spec.profile)
                if key in self._unknown or self._base.of(*key) is not None or len(self._unknown) >= UNKNOWN_PAIRS_MAX:
                    continue
                self._unknown.add(key)
                why = why_none(*key, spec.facts)
                yield HardwareUnknown(instance=instance.name, gpu=instance.gpu, n_gpu=instance.n_gpu, model=spec.profile, why=why)

    def _slowdown(self, model: str, instance: str) -> float:
        spec = self._catalogue.get(model)
        return 1.0 if spec is None else self._speeds.slowdown(instance, spec.profile)

    def _publish_if_due(self, now_s: float) -> list[Effect]:
        if now_s < self._published_s:  # the clock was set back
            self._published_s = now_s
        if now_s - self._published_s < self._learning.publish_every_s:
            return []
        self._learned |= self._feedback.pass_time(now_s)
        if not self._learned:
            return []
        self._learned = False
        self._published_s = now_s
        self._snapshot = ProfileSnapshot(
            version=self._snapshot.version + 1,
            made_s=now_s,
            hardware=self._speeds.profiles(),
            workload=self._lengths.profiles(),
            length_model=self._lengths.predictor.model(),
            calibration=CalibrationTable(self._feedback.profiles(now_s)),
            last_event_id="{}-{}".format(*self._read) if self._read > (0, 0) else "",
        )
        return [Publish(snapshot=self._snapshot)]

    def _restore(self, snapshot: ProfileSnapshot) -> None:
        self._feedback.restore(snapshot.calibration.rows)
        self._lengths.restore(snapshot)
        self._speeds.restore(snapshot.hardware)

    def _see(self, seen: QueueSeen) -> None:
        """Incarnations that are new to the machine begin with what the reading says of them; others go on by their events."""
        self._groups = seen.groups
        self._instances = {facts.incarnation: facts for facts in seen.instances}
        self._activities = {
            incarnation: self._activities.get(incarnation)
            or Activity(since=max(seen.last_event, self._last[0]), running=seen.running.get(incarnation, 0))
            for incarnation in self._instances
        }
        for operation in self._unseen_operations:  # operations unknown by now are gone
            self._learn_operation(operation)
        self._unseen_operations.clear()

    def _learn(self, event: Lifecycle | ReportedOperation) -> None:
        self.counts.events += 1
        if (event.entry_id, event.index) <= self._last:
            self.counts.repeated += 1
            return
        self._last = (event.entry_id, event.index)
        if isinstance(event, ReportedOperation):
            if event.incarnation in self._instances:
                self._learn_operation(event)
            else:
                self._unseen_operations.append(event)
            return
        match event.kind:
            case LifecycleKind.ACCEPTED:
                self._notice_gap(event.acceptance_number)
            case LifecycleKind.PULLED:
                self._pulled(event)
                if event.attempt == 1:
                    self._feedback.pulled(event.queue_id, event.entry_id[0] / 1000.0)
            case LifecycleKind.RELEASED:
                self._lengths.released(event)
                self._leave(event)
            case LifecycleKind.ENDED:
                self._lengths.ended(event)
                self._leave(event)
            case LifecycleKind.COMPLETED:
                self._completed(event)
            case _:
                assert_never(event.kind)

    def _learn_operation(self, operation: ReportedOperation) -> None:
        instance, spec = self._instances.get(operation.incarnation), self._catalogue.get(operation.model)
        added = instance is not None and spec is not None and self._speeds.add_operation(instance, spec.profile, operation)
        self._learned = self._learned or added
        self.counts.operations += added
        self.counts.refused += not added

    def _notice_gap(self, number: int) -> None:
        """Acceptance numbers have no holes, and each is reported once, in order."""
        expected = self._last_accepted + 1
        if self._last_accepted and number > expected:
            self.counts.gaps += 1
            self.counts.missed += number - expected
            self._activities = {}
            self._lengths.missed()
        self._last_accepted = max(self._last_accepted, number)

    def _pulled(self, event: Lifecycle) -> None:
        activity = self._activities.get(event.incarnation)
        if activity is None or not activity.covers(event.entry_id):
            return
        group = self._groups.get(event.group_id)
        instance = self._instances[event.incarnation]
        # The event names the model, and so does a group that was read.
        model = event.model or (group.model if group is not None else instance.active_model)
        spec = self._catalogue.get(model)
        share = 1.0 if spec is None else self._lengths.pulled(event, spec, group)
        hardware = None if spec is None else self._speeds.hardware(instance, spec.profile)
        seats = instance.batch_max if instance.lookahead_requests else 0
        activity.pull(event.entry_id[0] / 1000.0, event.queue_id, event.attempt, event.prompt_tokens, hardware, seats, share)

    def _made(self, incarnation: str, queue_id: str) -> float:
        activity = self._activities.get(incarnation)
        return 0.0 if activity is None else activity.made(queue_id)

    def _leave(self, event: Lifecycle, output_tokens: int = 0) -> FinishedRun | None:
        """A request leaves its agent, having made so many tokens there (0: not known). An event taken after the owner was cleared does not
        name it."""
        activity = self._activities.get(event.incarnation)
        if activity is None and not event.incarnation:
            activity = next((each for each in self._activities.values() if each.holds(event.queue_id)), None)
        if activity is None or not activity.covers(event.entry_id):
            return None
        reported_s = event.entry_id[0] / 1000.0
        believed = reported_s - FINISH_SLACK_S <= event.finished_s <= reported_s
        ended_s = event.finished_s if believed else reported_s
        return activity.leave(reported_s, event.queue_id, ended_s, output_tokens, event.first_token_s, event.paused_s)

    def _completed(self, event: Lifecycle) -> None:
        spec = self._catalogue.get(event.model)
        if (
            spec is None
            or not 1 <= event.output_tokens <= spec.context_tokens_max
            or not 1 <= event.prompt_tokens <= spec.context_tokens_max
        ):
            self._leave(event)
            self._lengths.refused(event)
            self.counts.refused += 1
            return
        # A run that took over the output of an earlier one made less than its request.
        run = self._leave(event, event.output_tokens if event.attempt == 1 else 0)
        group = self._groups.get(event.group_id)
        slo_class = event.slo_class or (group.slo_class if group is not None else "")
        self._lengths.completed(event, spec.name, slo_class)
        self.counts.lengths += 1
        self._learned = True
        instance = self._instances.get(event.incarnation)
        if instance is not None and run is not None and run.run.attempt == event.attempt == 1:
            added = self._speeds.add(instance, spec.profile, run, event.output_tokens)
            self.counts.speeds += added
            self.counts.refused += not added
