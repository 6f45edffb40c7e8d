"""The planner's state machine: events in, effects out; no IO, no clock, no chance.

One *lane* of calls (overviews, placements, splits, chunks of a plan) has one call under way, or some chunks (`plan.chunks`), so that an
overview holds exactly the planner's own writes; requests gather until the next placement. Outside the lane run at most one each of: a page
of a scan, reads of arrivals and of lifecycle events, and the sweeps (reclaim, expiry, forgetting, shedding).
"""

from __future__ import annotations

import math
from functools import partial
from typing import assert_never

from qlm_core.vocabulary.overload import Overload
from qlm_planner.board.arrivals import ArrivalBuffer
from qlm_planner.board.board import Board
from qlm_planner.board.demand import Demand
from qlm_planner.board.history import History
from qlm_planner.board.sweeps import Sweeps
from qlm_planner.board.tenant_shares import TenantShares
from qlm_planner.cost.estimates import Estimates
from qlm_planner.groups.assignment import GroupAssignment
from qlm_planner.groups.ranks import set_tiers
from qlm_planner.groups.split import GroupSplits
from qlm_planner.machine import effects, events
from qlm_planner.machine.connection import Connection
from qlm_planner.overload.shedding import Shedding
from qlm_planner.plan.changes import PlanChanges
from qlm_planner.plan.chunks import ChunkPipeline, apply_to_board
from qlm_planner.plan.waits import WaitForecast
from qlm_planner.policies.selection import baseline_of
from qlm_planner.policy import Policy


class PlannerMachine:
    """The leader's state from its election (`fence`, at `now_s`) to the loss of its lease. Needs a `Tick` no later than `wake_s`."""

    def __init__(self, policy: Policy, fence: int, now_s: float) -> None:
        self.policy = policy
        self.board = Board(slo_band=policy.slo_band)
        self.estimates = Estimates(policy)
        self.baseline = baseline_of(policy)
        self.changes = PlanChanges.of(policy, self.estimates, self.baseline)
        self.arrivals = ArrivalBuffer(policy=policy)
        self.sweeps = Sweeps(policy=policy, next_expiry_s=now_s)
        self._assignment = GroupAssignment.of(policy, self.changes.table, fence, self.baseline)
        self.tenant_shares = TenantShares(tenants=policy.tenants, window_s=policy.share_window_s)
        self._connection = Connection(policy=policy, grace_until_s=now_s + policy.lease_ttl_s, answered_s=now_s)
        self._history = History(policy=policy)
        self.demand = Demand(now_s)
        self._shedding = Shedding(policy=policy)
        self.splits = GroupSplits(policy=policy)
        self._lane: effects.Call | None = None
        self._pipeline = ChunkPipeline()
        self._again_s = math.inf
        self._repeat: effects.Place | None = None
        self._reading_arrivals = False
        self._reading_events = False
        self._events_due_s = -math.inf
        self._forecast = WaitForecast(due_s=now_s, holds_waits=policy.publishes_waits)
        self._counted_to = 0
        self._loaded = False
        self._doubt = True
        self._overview_due_s = now_s
        self._overview_last_s = -math.inf
        self._changed = False

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it knows the queue and the profiles, and places requests."""
        return self._loaded and self.estimates.ready

    @property
    def caught_up(self) -> bool:
        """Whether it is ready and every request accepted before its election has a group."""
        return self.ready and not self.arrivals.scanning and not self.arrivals.pending and self._idle_lane

    @property
    def wake_s(self) -> float:
        """Time of the next step without an answer; not before the last step."""
        if not self._connection.up:
            return self._connection.retry_s if self._idle_lane else math.inf
        times: list[float] = []
        if self._idle_lane:
            times.append(self._overview_s)
        if self._loaded and not self.sweeps.expiring:
            times.append(self.sweeps.next_expiry_s)
        if self.sweeps.reclaim_pending and not self.sweeps.reclaiming:
            times.append(self._connection.grace_until_s)
        if self._loaded and not self._reading_events:
            times.append(self._events_due_s)
        if self.ready:
            times.append(self._forecast.wake_s)
            times.append(self.changes.repair_s if self._again_s == math.inf else self._again_s)
        return min(times, default=math.inf)

    # Events -----------------------------------------------------------------------------------------------------------

    def step(self, now_s: float, event: events.Event) -> list[effects.Effect]:
        """Applies one event; returns the effects. `now_s`: seconds of the queue's clock."""
        self._changed = False
        self._take(now_s, event)
        found: list[effects.Effect] = []
        if self._connection.may_call(now_s):
            found.extend(self._calls(now_s))
        # A placement is sent first: the next step repairs the order around it.
        placing = self._again_s == math.inf and any(isinstance(effect, effects.Place) for effect in found)
        sending = self._pipeline.room and any(isinstance(effect, effects.ApplyChunk) for effect in found)
        self._again_s = now_s if sending or (placing and self.changes.repair_s <= now_s) else math.inf
        if self.ready and not placing:
            self.changes.repair(self.board, now_s)
        found.extend(self._publish(now_s) if not placing and self._connection.may_call(now_s) else ())
        found.extend(self.changes.jobs.take_effects())
        answered = self.changes.take_answers()
        if self._changed or answered:
            found.append(effects.PlanChanged(plan_version=self.board.plan_version, replans=answered))
        found.extend(self.changes.take_done())
        return found

    def _take(self, now_s: float, event: events.Event) -> None:
        if isinstance(event, events.Answer) and self._connection.answered(now_s):
            self._doubt = True
        match event:
            case events.Tick():
                pass
            case events.ProfilesRead(catalogue=catalogue, profiles=profiles):
                self._forecast.load(catalogue, profiles)
                if self.estimates.load(catalogue, profiles):
                    self.changes.note_drift()
                    self._doubt = True
            case events.OverviewRead(snapshot=snapshot):
                self._history.view = snapshot
                self._events_due_s = min(now_s, self._events_due_s)
            case events.UnplacedRead(arrivals=arrivals, read_to=read_to):
                self.demand.record(arrival.facts for arrival in self.arrivals.add_page(arrivals, read_to))
            case events.ArrivalsRead(arrivals=arrivals):
                self._reading_arrivals = False
                self.demand.record(arrival.facts for arrival in self.arrivals.add_arrivals(arrivals))
            case events.EventsRead(entries=entries):
                self._reading_events = False
                gap_s = self.policy.events_gap_s if 0 < len(entries) < self.policy.events_max else 0.0
                self._events_due_s = now_s + gap_s
                self._history.read(entries, self.board)
                # After an eviction an overview follows soon: the group may cost two swaps.
                self._doubt = self._doubt or self._history.overflowed or bool(self.board.reopened)
                self._changed = bool(entries)
            case events.PlaceAnswered():
                self._lane = None
                self.board.apply_placement(event.call, event.done)
                self._changed = True
            case events.ChunkAnswered():
                self._chunk_answered(event)
            case events.Reclaimed(incarnation=incarnation, count=count):
                # Reclaimed requests reopened groups on queues without an instance.
                self._doubt = self.sweeps.reclaimed(incarnation, count) or self._doubt
            case events.ExpirySwept(count=count):
                self.sweeps.swept(count, now_s)
            case events.ShedAnswered():
                self._shedding.answered()
            case events.Regrouped():
                self._lane = None
                # Events of the moved requests may be missed: compare both groups soon.
                self._history.pages.mark(self.splits.answered(event, self.board))
                self._doubt = self._changed = True
            case events.Forgotten():
                self._doubt = True
            case events.WaitsPublished():
                self._forecast.publishing = False
            case events.Solved() | events.SolveFailed():
                self.changes.apply_answer(event, self.board, now_s)
            case events.CallFailed(call=call):
                self._failed(call, now_s)
            case events.InstanceAnnounced(facts=facts):
                slot = self.board.slots.get(facts.name)
                self._doubt = self._doubt or slot is None or slot.facts != facts.lasting or not slot.alive
            case events.LoadReported():
                self._doubt = not self.board.apply_report(event) or self._doubt
            case events.ReplanRequested(number=number):
                self.changes.requested.append(number)
                # The answer is judged on the board as it is then.
                known = self.ready and not self._doubt and self._connection.up
                self._doubt = not (known and self.changes.replan_now(self.board, now_s)) or self._doubt
            case _:
                assert_never(event)
        if self._history.complete:
            self._lane = None
            self._load(now_s)

    def _load(self, now_s: float) -> None:
        assert self._history.view is not None
        unplaced = self._history.view.unplaced
        before = self.board.order()
        if not self._history.load(self.board, now_s):
            self._doubt = True
            return
        self._rank(now_s)
        self._loaded = True
        self._doubt = self._history.whole
        self._overview_due_s = now_s + self.policy.overview_period_s(len(self.board.groups), backlog=self.arrivals.backlog)
        self.sweeps.start_round(self.board)
        self.arrivals.compare(unplaced)
        self.board.expect(self.demand.by_model(now_s))
        if self.estimates.ready:
            self.changes.consider(
                self.board,
                self.estimates,
                now_s,
                in_grace=self._connection.in_grace(now_s),
                taking_back=self.sweeps.reclaim_pending and not self._connection.in_grace(now_s),
                backlog=self.arrivals.backlog,
            )
            if self.changes.deciding is None and not self.arrivals.backlog:
                self.splits.find_due(self.board, self.estimates)
            if self.policy.overload is Overload.SHED and not self.arrivals.backlog:
                self._shedding.find_late(self.board, self.changes.table, now_s)
        self._changed = before != self.board.order()

    def _rank(self, now_s: float) -> None:
        """Updates the tenants' shares and the tiers of groups."""
        if self.baseline is None:
            self.tenant_shares.update((slot for _, slot in sorted(self.board.slots.items())), now_s)
            self._assignment.above = self.tenant_shares.above
            set_tiers(self.board, self.tenant_shares.above, self.policy, now_s)

    def _chunk_answered(self, event: events.ChunkAnswered) -> None:
        self._pipeline.answered(applied=event.applied)
        if event.applied:
            self.changes.chunk_applied(event.call, self.board)
            apply_to_board(self.board, event.call)
            self.board.plan_version = event.call.plan_version
            self.board.versions.update(event.versions)
            self._changed = True
        else:
            self._doubt = self.changes.conflict() or self._doubt

    def _failed(self, call: effects.Call, now_s: float) -> None:
        """Handles a failed call, which may have happened: its effects are read again. Only a placement is repeated as it was: that is
        safe."""
        self._connection.failed(now_s)
        self._doubt = self._history.whole = True
        match call:
            case effects.Place():
                self._lane = None
                self._repeat = call
            case effects.ReadOverview():
                self._lane = None
                self._history.overview_failed()
            case effects.ApplyChunk():
                self._pipeline.answered(applied=False)
                self.changes.conflict()
            case effects.ReadUnplaced():
                self.arrivals.page_failed()
            case effects.ReadArrivals():
                self._reading_arrivals = False
                self.arrivals.rescan()
            case effects.ReadEvents():
                self._reading_events = False
                if self._history.view is not None:
                    self._lane = None
                    self._history.overview_failed()
            case effects.Reclaim():
                self.sweeps.reclaiming = ""
            case effects.Expire():
                self.sweeps.expiring = False
            case effects.Shed():
                self._shedding.answered()
            case effects.Regroup():
                self._lane = None
            case effects.Forget():
                self.sweeps.forgetting = ""
            case effects.PublishWaits():
                self._forecast.publishing = False
            case _:
                assert_never(call)

    # Calls ------------------------------------------------------------------------------------------------------------

    def _calls(self, now_s: float) -> list[effects.Effect]:
        first = self._next_in_lane(now_s)
        calls: list[effects.Effect] = [] if first is None else [first]
        if not self._loaded:
            return calls
        page = self.arrivals.next_page() if self.ready else None
        if page is not None:
            calls.append(page)
        if not self._reading_arrivals and not self.arrivals.scanning and self.arrivals.has_room:
            self._reading_arrivals = True
            calls.append(effects.ReadArrivals(count=self.policy.arrivals_max, block_s=self.policy.read_block_s))
        if not self._reading_events and now_s >= self._events_due_s:
            self._reading_events = True
            after = "{}-{}".format(*self._history.read_to)
            calls.append(effects.ReadEvents(after=after, count=self.policy.events_max, block_s=self.policy.read_block_s))
        sweeps = (
            self.sweeps.expire(now_s),
            None if self._connection.in_grace(now_s) else self.sweeps.reclaim(),
            self.sweeps.forget(self.board, now_s),
            self._shedding.call(now_s),
        )
        calls.extend(call for call in sweeps if call is not None)
        return calls

    def _publish(self, now_s: float) -> list[effects.Effect]:
        if not self.ready or now_s < self._forecast.wake_s:
            return []
        period_s = self.policy.overview_period_s(len(self.board.groups), backlog=self.arrivals.backlog)
        joins = partial(self._assignment.joins, self.board, self.estimates)
        done = self._forecast.publish(self.board, self.demand, joins, self._counted_to, period_s, now_s)
        return [] if done is None else [done]

    @property
    def _idle_lane(self) -> bool:
        return self._lane is None and self._pipeline.under_way == 0

    @property
    def _overview_s(self) -> float:
        """When the next overview is due; later while a change of the plan is computed or written."""
        changing = self.changes.target is not None or self.changes.jobs.job is not None
        due_s = self._overview_due_s + (self.policy.overview_every_s if changing else 0.0)
        return min(due_s, self._overview_last_s + self.policy.overview_gap_s) if self._doubt else due_s

    def _next_in_lane(self, now_s: float) -> effects.Call | None:
        if self._lane is not None:
            return None
        # Before further chunks: a placement to repeat, and an overview that is due.
        due = now_s >= self._overview_s
        if (due or self._repeat is not None) and self._pipeline.under_way:
            return None  # once the chunks are answered
        first: effects.Call | None = self._repeat or (self._history.begin_overview(self.board) if due else None)
        if first is None and self.ready:
            chunk = self._chunk(now_s)
            if chunk is not None or self._pipeline.under_way:
                return chunk
            if self.arrivals.pending:
                self._assignment.baseline = self.changes.deciding
                taken = self.arrivals.take()
                self._counted_to = max(self._counted_to, *(each.facts.acceptance_number for each in taken))
                first = self._assignment.place(taken, self.board, self.estimates, now_s)
                self.changes.unsettled = self.changes.unsettled or bool(first.opened)
            else:
                first = self.splits.call(self.board, self.estimates, self._assignment, now_s)
        self._lane = first
        if first is not None and first is self._repeat:
            self._repeat = None
        elif isinstance(first, effects.ReadOverview):
            self._overview_last_s = now_s
        return first

    def _chunk(self, now_s: float) -> effects.ApplyChunk | None:
        """The next chunk of the change under way."""
        while (target := self.changes.target) is not None:
            chunk = self._pipeline.more(self.board, target)
            if chunk is not None or self._pipeline.under_way:
                return chunk
            self.changes.reached(self.board, now_s)
            self._doubt = self._doubt or self.changes.homeless_left
        return None
