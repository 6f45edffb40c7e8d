"""The leader's loop: reads the queue and its events, steps the machine, stores what it publishes. No policy here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import assert_never

import structlog

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import LeaseLost, PreconditionFailed, Unavailable
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.stream import entry_id_of
from qlm_estimator.config import EstimatorSettings
from qlm_estimator.events import Ended, Event, GroupClass, HardwareUnknown, Imported, Publish, QueueSeen, Tick
from qlm_estimator.lifecycle_wire import events_of
from qlm_estimator.machine import EstimatorMachine
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes.report import WINDOW_MAX_S, Outcomes
from qlm_estimator.predictions import Judged
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.instances import instances_in
from qlm_process.queue.leases import LeaseKeeper, RoleElection, Sleep
from qlm_process.queue.polls import QueuePolls
from qlm_process.wire import profile as profile_wire
from qlm_queue.overview import Overview
from qlm_queue.port import Queue
from qlm_queue.values import StreamEntry

CALIBRATION_EVERY_S = 5.0
"""How often the metrics of calibration are worked out."""


class EstimatorShell:
    """Learns while it leads. `outcomes`: of the term, None on a standby."""

    def __init__(
        self,
        *,
        queue: Queue,
        clock: ServerClock,
        settings: EstimatorSettings,
        catalogue: Mapping[str, ModelSpec],
        shipped: ProfileSnapshot,
        metrics: EstimatorMetrics,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._queue = queue
        self._polls = QueuePolls(queue)
        self._clock = clock
        self._settings = settings
        self._catalogue = catalogue
        self._shipped = shipped
        self._metrics = metrics
        self._sleep = sleep
        self.outcomes: Outcomes | None = None
        self._term: tuple[LeaseKeeper, EstimatorMachine] | None = None
        self._turn = asyncio.Lock()
        self._classes: dict[str, str] = {}
        self._calibrated_s = 0.0

    async def run(self, election: RoleElection) -> None:
        """Stands by, leads, and stands by again after a lost lease, until it is cancelled."""
        while True:
            keeper = await election.win()
            try:
                await self._lead(keeper)
            finally:
                self.outcomes = self._term = None
                self._metrics.leader.set(0)
                await keeper.stop(release=True)

    async def take_import(self, snapshot: ProfileSnapshot) -> int:
        """Takes rows that somebody brings; returns the version that holds them, once that is published. Raises PreconditionFailed where
        this process does not lead, and Unavailable."""
        async with self._turn:
            if self._term is None:
                raise PreconditionFailed("this estimator is a standby")
            keeper, machine = self._term
            try:
                await self._step(keeper, machine, Imported(snapshot=snapshot))
            except LeaseLost:
                raise PreconditionFailed("this estimator leads no more") from None
            structlog.get_logger().info("profiles_imported", version=machine.snapshot.version, rows=len(snapshot.hardware))
            return machine.snapshot.version

    async def _lead(self, keeper: LeaseKeeper) -> None:
        """Ends when the lease is lost. A queue that cannot be reached is polled again; only events trimmed meanwhile are lost."""
        machine: EstimatorMachine | None = None
        after, read_again_s = "0", 0.0
        while not keeper.lost.is_set():
            try:
                if machine is None:
                    machine, after = await self._restored()
                    self._term = (keeper, machine)
                now_s = self._clock.now_s()
                if now_s >= read_again_s or read_again_s > now_s + self._settings.overview_every_s:
                    seen = queue_seen(await self._polls.poll(now_s))
                    self._classes = {group_id: group.slo_class for group_id, group in seen.groups.items()}
                    async with self._turn:
                        await self._step(keeper, machine, seen)
                    read_again_s = now_s + self._settings.overview_every_s
                entries = await self._queue.read_events(after, self._settings.read_block_s, self._settings.events_read_max)
                async with self._turn:
                    for entry in entries:
                        after = entry.entry_id
                        await self._learn(keeper, machine, entry)
                        await self._step(keeper, machine, Tick(read_to=entry_id_of(entry.entry_id)))
                    await self._step(keeper, machine, Tick())
                self._report(machine)
                if 0 < len(entries) < self._settings.events_read_max:
                    await self._sleep(self._settings.read_gap_s)
            except Unavailable as error:
                structlog.get_logger().warning("queue_unavailable", error=str(error))
                await self._sleep(self._settings.retry_s)
            except LeaseLost as error:
                structlog.get_logger().warning("lease_lost_at_publication", error=str(error))
                return

    def _report(self, machine: EstimatorMachine) -> None:
        """Sets the metrics; those of calibration now and then, since they are worked out anew from all that is remembered."""
        self._metrics.report_counts(machine.counts)
        now_s = self._clock.now_s()
        due = not 0.0 <= now_s - self._calibrated_s < CALIBRATION_EVERY_S
        if due and self.outcomes is not None:
            self._metrics.report_calibration(self.outcomes.calibration_since(now_s - WINDOW_MAX_S))
            self._calibrated_s = now_s

    async def _restored(self) -> tuple[EstimatorMachine, str]:
        """A machine with what was published last, and the id of the last entry that this was learned from: it reads on after that. Without
        a publication it reads all that is kept."""
        version, body = await self._queue.read_profiles()
        try:
            snapshot = profile_wire.from_body(body) if body else self._shipped
        except ValueError as error:  # of another version of QLM: nothing learned, but its version goes on
            structlog.get_logger().error("profiles_unreadable", version=version, error=str(error))
            snapshot = replace(self._shipped, version=version)
        machine = EstimatorMachine(
            learning=self._settings.learning(), catalogue=self._catalogue, shipped=self._shipped.hardware, restored=snapshot
        )
        # A publication from before any entry was read: from its time on.
        after = snapshot.last_event_id or f"{max(0, round(snapshot.made_s * 1000.0))}-0"
        self.outcomes = Outcomes(since_s=snapshot.made_s or self._clock.now_s())
        self._metrics.new_leader()
        self._metrics.report_snapshot(snapshot)
        self._metrics.leader.set(1)
        structlog.get_logger().info("estimator_leads", version=snapshot.version, rows=len(snapshot.workload))
        return machine, after

    async def _learn(self, keeper: LeaseKeeper, machine: EstimatorMachine, entry: StreamEntry) -> None:
        assert self.outcomes is not None, "a leader has them"
        try:
            happened = events_of(entry, self.outcomes, self._classes)
        except ValueError as error:
            self._metrics.malformed.inc()
            structlog.get_logger().warning("event_malformed", error=str(error))
            return
        for event in happened:
            if isinstance(event, Ended):
                self._metrics.count_outcome(event)
            await self._step(keeper, machine, event)

    async def _step(self, keeper: LeaseKeeper, machine: EstimatorMachine, event: Event) -> None:
        for effect in machine.step(self._clock.now_s(), event):
            match effect:
                case Publish():
                    snapshot = effect.snapshot
                    await self._queue.publish_profiles(keeper.lease, snapshot.version, profile_wire.to_body(snapshot))
                    self._metrics.report_snapshot(snapshot)
                case Judged():
                    assert self.outcomes is not None, "a leader has them"
                    self.outcomes.judge(effect)
                case HardwareUnknown():
                    structlog.get_logger().warning("hardware_unknown", **asdict(effect))
                case _:
                    assert_never(effect)


def queue_seen(overview: Overview) -> QueueSeen:
    """Returns the machine's part of a reading of the queue."""
    instances = instances_in(overview)
    running = {record.instance: record.running for record in overview.virtual_queues}
    return QueueSeen(
        last_event=entry_id_of(overview.last_event_id),
        instances=instances,
        running={facts.incarnation: running.get(facts.name, 0) for facts in instances},
        groups={
            group_id: GroupClass(**{name: record.meta.get(name, "") for name in ("model", "slo_class", "token_class")})
            for group_id, record in overview.groups.items()
        },
    )
