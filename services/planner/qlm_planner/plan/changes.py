"""When the plan is changed, and a change under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_core.overload import Overload
from qlm_planner.board.board import Board, Target
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import plan_cost
from qlm_planner.groups.ranks import in_rank
from qlm_planner.machine.effects import ApplyChunk, PlanApplied, PlanCause, Stage
from qlm_planner.machine.events import Solved, SolveFailed
from qlm_planner.plan.relocation import homeless, relocate, settle
from qlm_planner.plan.solver_jobs import Job, SolverJobs
from qlm_planner.policies.baseline import Baseline
from qlm_planner.policies.deadlines import EdfFallback
from qlm_planner.policy import Policy
from qlm_planner.search.problem import Costs

MISS_REQUESTS = 0.5
"""Expected late requests from which a better order is looked for."""

LATE_LOOKS_MIN = 4
"""Overviews in a row that expect misses before the fallback decides: better orders were tried meanwhile."""


Answer = tuple[Job, Solved]
"""What the solver said, and to which job."""


@dataclass(slots=True, kw_only=True)
class Change:
    """A change of the plan under way, and what came of it so far (`PlanApplied`). `answer`: the solver's, where it follows one. `moves`: of
    groups that changed their queue, from where to where."""

    cause: PlanCause
    target: Target
    began_s: float
    late_before: float
    answer: Answer | None = None
    plan_version: int = 0
    chunks: int = 0
    named: int = 0
    moves: list[tuple[str, str]] = field(default_factory=list)

    def applied(self, chunk: ApplyChunk, board: Board) -> None:
        """`board`: as it was before the chunk."""
        self.plan_version = chunk.plan_version
        self.chunks += 1
        for segment in chunk.segments:
            self.named += len(segment.group_ids)
            for group_id in segment.group_ids:
                group = board.groups.get(group_id)
                if group is not None and group.open and group.instance != segment.instance:
                    self.moves.append((group.instance, segment.instance))

    def report(self, *, whole: bool) -> PlanApplied:
        return PlanApplied(
            cause=self.cause,
            whole=whole,
            began_s=self.began_s,
            plan_version=self.plan_version,
            chunks=self.chunks,
            groups_named=self.named,
            groups_moved=len(self.moves),
            sources=tuple(sorted({source for source, _ in self.moves})),
            destinations=tuple(sorted({destination for _, destination in self.moves})),
            late_before=self.late_before,
        )


@dataclass(slots=True, kw_only=True)
class PlanChanges:
    """`change`: what is being carried out, chunk by chunk. `serving`: the instances that served at the last overview, None before the
    first. `asks`: replans that were asked for; `working`: those that the change answers. `due`: why a replan is due at the next overview,
    whatever it shows. `held`: an answer of the solver that waits for the end of a change. `stalled`: a chunk was not applied; what becomes
    of the change is seen at the next overview. `unsettled`: groups came since the order was looked at. `homeless_left`: more groups need a
    home than one change gives. `done`: changes that ended, to be told. `baseline`: the comparison policy that decides instead, if any.
    `fallback`: decides while misses are expected that no order avoids, under `Overload.EDF`. `late_looks`: overviews that expected misses,
    less those that did not."""

    policy: Policy
    table: ClassTable
    jobs: SolverJobs
    baseline: Baseline | None = None
    fallback: Baseline = field(default_factory=EdfFallback)
    late_looks: int = 0
    change: Change | None = None
    _predicted: Costs = field(default_factory=Costs)
    _unpredicted: tuple[Board, float] | None = None
    serving: tuple[str, ...] | None = None
    asks: list[int] = field(default_factory=list)
    working: list[int] = field(default_factory=list)
    named: int = 0
    attempts: int = 0
    conflicts: int = 0
    due: PlanCause | None = None
    held: Answer | None = None
    stalled: bool = False
    unsettled: bool = False
    homeless_left: bool = False
    repaired_s: float = -math.inf
    replanned_s: float = -math.inf
    answers: dict[int, int] = field(default_factory=dict)
    done: list[PlanApplied] = field(default_factory=list)

    @classmethod
    def of(cls, policy: Policy, estimates: Estimates, baseline: Baseline | None = None) -> PlanChanges:
        table = ClassTable(estimates=estimates)
        return cls(policy=policy, table=table, jobs=SolverJobs(policy=policy, table=table), baseline=baseline)

    @property
    def predicted(self) -> Costs:
        """Cost of the plan at the last overview, worked out for who asks first: nobody does for a policy that never reorders."""
        if self._unpredicted is not None:
            (board, now_s), self._unpredicted = self._unpredicted, None
            self._predicted = plan_cost(board, self.table, now_s)
        return self._predicted

    @property
    def target(self) -> Target | None:
        """The queues as they are to become, None where nothing is to be changed, or not before the next overview."""
        return None if self.change is None or self.stalled else self.change.target

    @property
    def deciding(self) -> Baseline | None:
        """The policy that decides now in the place of QLM's own order, if any."""
        if self.baseline is None and self.policy.overload is Overload.EDF and self.late_looks >= LATE_LOOKS_MIN:
            return self.fallback
        return self.baseline

    def ask(self, ask: int) -> None:
        self.asks.append(ask)

    def replan_asked(self, board: Board, now_s: float) -> bool:
        """Asks the solver at once for what was asked for. False where that has to wait for the next overview: the plan is being changed, a
        comparison policy decides, or there is no solver."""
        if self.deciding is not None or self.change is not None or now_s < self.jobs.blocked_until_s:
            return False
        self._replan(PlanCause.ASKED, board, now_s)
        return not self.asks

    def drifted(self) -> None:
        """The profiles say that an instance runs otherwise than it did."""
        self.due = self.due or PlanCause.DRIFT

    def take_answers(self) -> dict[int, int]:
        """Replans that are done -> groups named in their chunks."""
        answers, self.answers = self.answers, {}
        return answers

    def take_done(self) -> list[PlanApplied]:
        """Changes of the plan that came to their end."""
        done, self.done = self.done, []
        return done

    def consider(
        self, board: Board, estimates: Estimates, now_s: float, *, in_grace: bool, taking_back: bool, backlog: bool = False
    ) -> None:
        """After an overview, which is when the board is right: decides whether to change the plan. Groups of a lost instance wait until the
        requests that ran there are back with them (`taking_back`), and nothing is taken from an instance `in_grace`. While a `backlog` is
        being placed, the order of what is there by then is only changed where it is asked for."""
        if self.change is not None and self.change.answer is not None:
            self.held = self.change.answer
        self._drop_target(keep_asks=self.held is not None)
        reopened = board.take_reopened()
        self._unpredicted = (board, now_s)
        self._see(board, now_s)
        baseline = self.deciding
        if self.attempts >= self.policy.apply_attempts_max:
            # Others change the queues faster than we read them: the next regular overview tries again.
            self.attempts = 0
            return
        by_age = baseline is not None and baseline.by_age
        moving = homeless(board, estimates, lost_too=not in_grace and not taking_back, by_age=by_age)
        self.homeless_left = len(moving) > self.policy.relocate_max
        if moving:
            moving = moving[: self.policy.relocate_max]
            self.begin(PlanCause.RELOCATE, relocate(board, self.table, moving, now_s, baseline), now_s)
        elif baseline is not None:
            self._follow(baseline, board, now_s, backlog=backlog)
        elif (ranked := in_rank(board, board.queues)) is not None:
            self.begin(PlanCause.RANKED, ranked, now_s)
        elif reopened and (settled := settle(board, self.table, reopened, now_s)) is not None:
            self.begin(PlanCause.EVICTED, settled, now_s)
        elif self.held is not None:
            self._judge_held(board, now_s)
        else:
            cause = PlanCause.ASKED if self.asks else None if backlog else self._replan_due(board, now_s)
            if cause is not None:
                self._replan(cause, board, now_s)

    def chunk_applied(self, chunk: ApplyChunk, board: Board) -> None:
        """`board`: as it was before the chunk."""
        self.attempts = 0
        self.named += sum(len(segment.group_ids) for segment in chunk.segments)
        if self.change is not None:
            self.change.applied(chunk, board)

    def conflict(self) -> bool:
        """A chunk was not applied. True if it should be tried again at once, on a new overview, which goes on with the solver's answer."""
        if not self.stalled:  # else it was a chunk behind the one that was not applied
            self.conflicts += 1
            self.attempts += 1
        self.stalled = True
        return self.attempts < self.policy.apply_attempts_max

    def reached(self, board: Board, now_s: float) -> None:
        """The queues are as the target wants them."""
        self._end(whole=True)
        self._judge_held(board, now_s)

    # The solver -------------------------------------------------------------------------------------------------------

    @property
    def repair_s(self) -> float:
        """When new groups are looked at again; infinite where that is not due."""
        if not self.unsettled or self.change is not None or self.jobs.job is not None or self.deciding is not None:
            return math.inf
        return max(self.repaired_s + self.policy.repair_every_s, self.jobs.blocked_until_s)

    def repair(self, board: Board, now_s: float) -> None:
        """Asks the solver to look at the order around new groups, where that is due."""
        if now_s >= self.repair_s:
            self.unsettled = False
            self.repaired_s = now_s
            self.jobs.ask(PlanCause.NEW_GROUP, Stage.REPAIR, board, now_s)

    def solved(self, event: Solved | SolveFailed, board: Board, now_s: float) -> None:
        """The solver's answer. One that comes while groups find new homes waits until they have them."""
        job = self.jobs.take(event)
        if job is None:
            return
        if isinstance(event, SolveFailed):
            self.jobs.failed(job, event.reason, now_s)
            self._over(job)
            return
        answer = (job, event)
        if self.change is not None and self.change.answer is None:
            self.held = answer
        else:
            self.held = None
            self._judge(answer, board, now_s)
            self._over(job)

    def _judge(self, answer: Answer, board: Board, now_s: float) -> None:
        """Begins the change that an answer of the solver asks for, if that is worth it."""
        job, event = answer
        target = self.jobs.solved(job, event, board, now_s)
        if target is not None and self.deciding is None:
            self._end(whole=False)
            self.begin(job.cause, target, now_s, answer)

    def _judge_held(self, board: Board, now_s: float) -> None:
        """The answer that waited. Who asked for a replan is answered where no change follows."""
        held, self.held = self.held, None
        if held is not None:
            self._judge(held, board, now_s)
        if self.change is None:
            self._answer()

    def _over(self, job: Job) -> None:
        """A job has its answer. Who asked for a replan is answered when the plan is in the queue."""
        if self.change is None and self.jobs.job is None:
            self._answer()

    def _replan(self, cause: PlanCause, board: Board, now_s: float) -> None:
        job = self.jobs.job
        if job is not None and job.stage is not Stage.REPAIR:
            return  # its answer comes first
        if now_s < self.jobs.blocked_until_s:
            if self.asks:  # nothing is ordered anew
                self.working, self.asks = [*self.working, *self.asks], []
                self._answer()
            return
        self.replanned_s = now_s
        self.due = None
        self.unsettled = False
        self.working, self.asks = self.asks, []
        if not self.jobs.ask(cause, Stage.REPLAN, board, now_s, tuple(self.working)):
            self._answer()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _follow(self, baseline: Baseline, board: Board, now_s: float, *, backlog: bool) -> None:
        """A comparison policy says what is ordered anew, where QLM would look for a better order."""
        cause = PlanCause.ASKED if self.asks else None if backlog or baseline.by_age else self._replan_due(board, now_s)
        if cause is None:
            return
        self.replanned_s = now_s
        self.due = None
        self.working, self.asks = [*self.working, *self.asks], []
        orders = baseline.reorder(board, self.table, now_s)
        if orders is None:
            self._answer()
        else:
            self.begin(cause, {**board.order(), **{name: list(queue) for name, queue in orders.items()}}, now_s)

    def _see(self, board: Board, now_s: float) -> None:
        """Which instances serve now, and whether misses are expected."""
        if self.baseline is None or not self.baseline.by_age or self.policy.overload is not Overload.BEST_EFFORT:
            expects_misses = self.predicted.late >= MISS_REQUESTS
            self.late_looks = min(2 * LATE_LOOKS_MIN, self.late_looks + 1) if expects_misses else max(0, self.late_looks - 1)
        serving = tuple(slot.facts.incarnation for slot in board.serving)
        if self.serving is None:
            # A new leader first goes on with the plan that it finds.
            self.replanned_s = now_s
        elif not set(serving) <= set(self.serving):
            self.due = PlanCause.JOINED
        elif not set(self.serving) <= set(serving):
            self.due = self.due or PlanCause.LEFT
        self.serving = serving

    def begin(self, cause: PlanCause, target: Target, now_s: float, answer: Answer | None = None) -> None:
        """Carries out a change of the plan from now on."""
        self.change = Change(cause=cause, target=target, began_s=now_s, late_before=self.predicted.late, answer=answer)

    def _end(self, *, whole: bool) -> None:
        change, self.change = self.change, None
        if change is not None and change.chunks:
            self.done.append(change.report(whole=whole))

    def _answer(self) -> None:
        """What was asked for is done."""
        if self.jobs.job is not None and self.jobs.job.asks:
            return
        for ask in self.working:
            self.answers[ask] = self.named
        self.working = []
        self.named = 0

    def _drop_target(self, *, keep_asks: bool) -> None:
        """What is there now decides anew."""
        self._end(whole=False)
        self.stalled = False
        job = self.jobs.job
        if not keep_asks and (job is None or not job.asks):
            self.asks = [*self.working, *self.asks]
            self.working = []

    def _replan_due(self, board: Board, now_s: float) -> PlanCause | None:
        pause_s = self.policy.replan_every_s * max(1.0, board.open_groups / self.policy.overview_groups)
        if now_s < self.replanned_s + pause_s:
            return None
        if self.due is not None:
            return self.due
        if self.predicted.late >= MISS_REQUESTS:
            return PlanCause.MISS
        return PlanCause.IDLE if _idle_beside_busy(board, self.table.estimates) else None


def _idle_beside_busy(board: Board, estimates: Estimates) -> bool:
    """Somebody has nothing to do while groups that it can serve wait behind another head."""
    serving = [(name, slot) for name, slot in board.slots.items() if slot.serving]
    idle = [slot for name, slot in serving if slot.running == 0 and not board.queues[name]]
    if not idle:
        return False
    waiting = dict.fromkeys(board.groups[each].traits.key.model for name, _ in serving for each in board.queues[name][1:])
    return any(estimates.can_serve(slot, model) for model in waiting for slot in idle)
