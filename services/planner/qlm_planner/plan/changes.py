"""Triggers of plan changes, and the change under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_core.vocabulary.overload import Overload
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
"""Expected late requests from which a better order is searched."""
LATE_ROUNDS_MIN = 4
"""Overviews with expected misses after which the fallback decides: better orders were tried by then."""
Answer = tuple[Job, Solved]
"""A job and the solver's answer to it."""


@dataclass(slots=True, kw_only=True)
class Change:
    """A change of the plan under way, and its results so far (`PlanApplied`). `answer`: the solver's answer that it follows, if any.
    `moves`: (source, destination) of groups on another queue."""

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
        """Counts a chunk. `board`: before the chunk."""
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
    """`change`: under way, chunk by chunk. `serving`: serving instances at the last overview, None before the first. `requested`: replans
    of callers; `working`: those that the change answers. `due`: cause of a replan at the next overview. `held`: a solver's answer that
    waits for the end of a change. `stalled`: a chunk was not applied, and the next overview decides. `unsettled`: groups were added since
    the last search. `homeless_left`: more groups must move than one change takes. `done`: changes ended, to report. `baseline`: the
    comparison policy that decides instead, if any. `fallback`: decides while misses are unavoidable, under `Overload.EDF`. `late_rounds`:
    overviews that expected misses, less those that did not."""

    policy: Policy
    table: ClassTable
    jobs: SolverJobs
    baseline: Baseline | None = None
    fallback: Baseline = field(default_factory=EdfFallback)
    late_rounds: int = 0
    change: Change | None = None
    _predicted: Costs = field(default_factory=Costs)
    _unpredicted: tuple[Board, float] | None = None
    serving: tuple[str, ...] | None = None
    requested: list[int] = field(default_factory=list)
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
        """Cost of the plan at the last overview, computed at the first read: policies that never reorder need none."""
        if self._unpredicted is not None:
            (board, now_s), self._unpredicted = self._unpredicted, None
            self._predicted = plan_cost(board, self.table, now_s)
        return self._predicted

    @property
    def target(self) -> Target | None:
        """The wanted queues; None without a change, or until the next overview."""
        return None if self.change is None or self.stalled else self.change.target

    @property
    def deciding(self) -> Baseline | None:
        """The policy that decides instead of QLM's order, if any."""
        if self.baseline is None and self.policy.overload is Overload.EDF and self.late_rounds >= LATE_ROUNDS_MIN:
            return self.fallback
        return self.baseline

    def replan_now(self, board: Board, now_s: float) -> bool:
        """Starts the requested replan at once. False if it must wait for the next overview: the plan changes, a comparison policy decides,
        or the solver is unavailable."""
        if self.deciding is not None or self.change is not None or now_s < self.jobs.blocked_until_s:
            return False
        self._replan(PlanCause.ASKED, board, now_s)
        return not self.requested

    def note_drift(self) -> None:
        """Makes a replan due after the profiles changed an instance's speed."""
        self.due = self.due or PlanCause.DRIFT

    def take_answers(self) -> dict[int, int]:
        """Finished replans -> groups named in their chunks, since the last call."""
        answers, self.answers = self.answers, {}
        return answers

    def take_done(self) -> list[PlanApplied]:
        """Finished changes since the last call."""
        done, self.done = self.done, []
        return done

    def consider(
        self, board: Board, estimates: Estimates, now_s: float, *, in_grace: bool, taking_back: bool, backlog: bool = False
    ) -> None:
        """Decides after an overview, when the board is exact, whether to change the plan. Groups of a lost instance wait until its requests
        are reclaimed (`taking_back`), and an instance `in_grace` keeps its groups. With a `backlog` to place, only requested replans
        reorder."""
        if self.change is not None and self.change.answer is not None:
            self.held = self.change.answer
        self._drop_target(keep_working=self.held is not None)
        reopened = board.take_reopened()
        self._unpredicted = (board, now_s)
        self._update(board, now_s)
        baseline = self.deciding
        if self.attempts >= self.policy.apply_attempts_max:
            # Other writers change the queues faster than overviews follow: the next regular overview tries again.
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
            cause = PlanCause.ASKED if self.requested else None if backlog else self._replan_due(board, now_s)
            if cause is not None:
                self._replan(cause, board, now_s)

    def chunk_applied(self, chunk: ApplyChunk, board: Board) -> None:
        """Counts a chunk. `board`: before the chunk."""
        self.attempts = 0
        self.named += sum(len(segment.group_ids) for segment in chunk.segments)
        if self.change is not None:
            self.change.applied(chunk, board)

    def conflict(self) -> bool:
        """Handles a chunk that was not applied. True to try again at once, on a new overview, with the solver's answer."""
        if not self.stalled:  # else a chunk behind the first failed one
            self.conflicts += 1
            self.attempts += 1
        self.stalled = True
        return self.attempts < self.policy.apply_attempts_max

    def reached(self, board: Board, now_s: float) -> None:
        """Ends the change: the queues equal the target."""
        self._end(whole=True)
        self._judge_held(board, now_s)

    # The solver -------------------------------------------------------------------------------------------------------

    @property
    def repair_s(self) -> float:
        """When the order around new groups is searched; infinite if that is not due."""
        if not self.unsettled or self.change is not None or self.jobs.job is not None or self.deciding is not None:
            return math.inf
        return max(self.repaired_s + self.policy.repair_every_s, self.jobs.blocked_until_s)

    def repair(self, board: Board, now_s: float) -> None:
        """Starts a repair of the order around new groups, if due."""
        if now_s >= self.repair_s:
            self.unsettled = False
            self.repaired_s = now_s
            self.jobs.start(PlanCause.NEW_GROUP, Stage.REPAIR, board, now_s)

    def apply_answer(self, event: Solved | SolveFailed, board: Board, now_s: float) -> None:
        """Takes the solver's answer. During a relocation it is held until that ends."""
        job = self.jobs.take(event)
        if job is None:
            return
        if isinstance(event, SolveFailed):
            self.jobs.failed(job, event.reason, now_s)
            self._answer_if_settled()
            return
        answer = (job, event)
        if self.change is not None and self.change.answer is None:
            self.held = answer
        else:
            self.held = None
            self._judge(answer, board, now_s)
            self._answer_if_settled()

    def _judge(self, answer: Answer, board: Board, now_s: float) -> None:
        """Starts the change of a solver's answer, if it is worth one."""
        job, event = answer
        target = self.jobs.solved(job, event, board, now_s)
        if target is not None and self.deciding is None:
            self._end(whole=False)
            self.begin(job.cause, target, now_s, answer)

    def _judge_held(self, board: Board, now_s: float) -> None:
        """Judges the held answer; answers requested replans if no change follows."""
        held, self.held = self.held, None
        if held is not None:
            self._judge(held, board, now_s)
        if self.change is None:
            self._answer()

    def _answer_if_settled(self) -> None:
        """Answers requested replans when neither a change nor a job is under way."""
        if self.change is None and self.jobs.job is None:
            self._answer()

    def _replan(self, cause: PlanCause, board: Board, now_s: float) -> None:
        job = self.jobs.job
        if job is not None and job.stage is not Stage.REPAIR:
            return  # its answer comes first
        if now_s < self.jobs.blocked_until_s:
            if self.requested:  # answered without a new order
                self.working, self.requested = [*self.working, *self.requested], []
                self._answer()
            return
        self.replanned_s = now_s
        self.due = None
        self.unsettled = False
        self.working, self.requested = self.requested, []
        if not self.jobs.start(cause, Stage.REPLAN, board, now_s, tuple(self.working)):
            self._answer()

    def _follow(self, baseline: Baseline, board: Board, now_s: float, *, backlog: bool) -> None:
        """Reorders as a comparison policy does, on the triggers of QLM's replans."""
        cause = PlanCause.ASKED if self.requested else None if backlog or baseline.by_age else self._replan_due(board, now_s)
        if cause is None:
            return
        self.replanned_s = now_s
        self.due = None
        self.working, self.requested = [*self.working, *self.requested], []
        orders = baseline.reorder(board, self.table, now_s)
        if orders is None:
            self._answer()
        else:
            self.begin(cause, {**board.order(), **{name: list(queue) for name, queue in orders.items()}}, now_s)

    def _update(self, board: Board, now_s: float) -> None:
        """Updates the serving instances and the expectation of misses."""
        if self.baseline is None or not self.baseline.by_age or self.policy.overload is not Overload.BEST_EFFORT:
            expects_misses = self.predicted.late >= MISS_REQUESTS
            self.late_rounds = min(2 * LATE_ROUNDS_MIN, self.late_rounds + 1) if expects_misses else max(0, self.late_rounds - 1)
        serving = tuple(slot.facts.incarnation for slot in board.serving)
        if self.serving is None:
            # A new leader keeps the plan that it finds at first.
            self.replanned_s = now_s
        elif not set(serving) <= set(self.serving):
            self.due = PlanCause.JOINED
        elif not set(self.serving) <= set(serving):
            self.due = self.due or PlanCause.LEFT
        self.serving = serving

    def begin(self, cause: PlanCause, target: Target, now_s: float, answer: Answer | None = None) -> None:
        """Starts a change of the plan."""
        self.change = Change(cause=cause, target=target, began_s=now_s, late_before=self.predicted.late, answer=answer)

    def _end(self, *, whole: bool) -> None:
        change, self.change = self.change, None
        if change is not None and change.chunks:
            self.done.append(change.report(whole=whole))

    def _answer(self) -> None:
        """Answers requested replans."""
        if self.jobs.job is not None and self.jobs.job.replans:
            return
        for replan in self.working:
            self.answers[replan] = self.named
        self.working = []
        self.named = 0

    def _drop_target(self, *, keep_working: bool) -> None:
        """Drops the change; the new overview decides."""
        self._end(whole=False)
        self.stalled = False
        job = self.jobs.job
        if not keep_working and (job is None or not job.replans):
            self.requested = [*self.working, *self.requested]
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
    """Whether an instance is idle while groups that it can serve wait behind another head."""
    serving = [(name, slot) for name, slot in board.slots.items() if slot.serving]
    idle = [slot for name, slot in serving if slot.running == 0 and not board.queues[name]]
    if not idle:
        return False
    waiting = dict.fromkeys(board.groups[each].traits.key.model for name, _ in serving for each in board.queues[name][1:])
    return any(estimates.can_serve(slot, model) for model in waiting for slot in idle)
