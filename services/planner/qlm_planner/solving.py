"""Jobs of the solver: what is asked, what is under way, and what its answer is worth by the time it comes.

At most one job counts. It works on a draft of the board while the board goes on; the answer is reconciled with the board as it is then
(`problems.reconciled`) and judged by the model of queues (`judging`). So an answer is never thrown away for being late, and never applied
for a board that is gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms
from qlm_planner.effects import JobEnded, Outcome, PlanCause, Solve, Stage
from qlm_planner.events import Solved, SolveFailed
from qlm_planner.judging import Target, current, plan_cost, plan_costs, worth
from qlm_planner.policy import Policy
from qlm_planner.problems import Draft, draft, reconciled
from qlm_planner.solver.problem import Orders, ProblemError
from qlm_planner.timeline import Cost

CLEAR = 1.25
"""A first plan is judged by the solver's own model where that finds one of the two so many times as dear as the other: it comes within a
tenth of the model of queues."""

FIRST_RULE = "join"
"""Of the rules of a construction the best in the mean, and cheap."""

JUDGE_AFTER_S = 1e-3
"""After a job has begun: by then it is on its way to the solver."""

JUDGED_MAX_S = 1.0
"""For so long the cost of a plan counts, where nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One question to the solver. `asks`: replans that were asked for, and that it answers."""

    number: int
    stage: Stage
    cause: PlanCause
    draft: Draft
    moves: int
    began_s: float
    asks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A better order: queues as they should be, for a job."""

    job: Job
    target: Target
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the plan in force cost at a time, on the board of a revision and by the profiles of a version; for a job."""

    job: int
    revision: tuple[int, int]
    at_s: float
    cost: Cost


@dataclass(slots=True, kw_only=True)
class Solving:
    """`job`: the one that counts. `failures`: in a row; until `blocked_until_s` nothing is asked after one. `judged`: the plan in force,
    while the solver worked. `later`: a job that does not leave yet. `rule`: the next first plan is constructed by this one, which the last
    whole plan began with; the load of one replan is much like that of the one before. `effects`: what is to be done, since it was asked
    last."""

    policy: Policy
    terms: ClassTerms
    job: Job | None = None
    number: int = 0
    failures: int = 0
    blocked_until_s: float = -math.inf
    judged: Judged | None = None
    later: Solve | None = None
    rule: str = FIRST_RULE
    effects: list[Solve | JobEnded] = field(default_factory=list)

    def take_effects(self) -> list[Solve | JobEnded]:
        effects, self.effects = self.effects, []
        return effects

    # Asking -----------------------------------------------------------------------------------------------------------

    def repair(self, board: Board, now_s: float) -> None:
        """Looks at the order around new groups again."""
        self._ask(PlanCause.NEW_GROUP, Stage.REPAIR, board, now_s, ())

    def replan(self, cause: PlanCause, board: Board, now_s: float, asks: tuple[int, ...]) -> bool:
        """Looks for a whole new order: many groups first get one that is constructed. Takes the place of a repair. False if there is
        nothing to order, or the board makes no problem."""
        stage = Stage.FIRST if board.open_groups > self.policy.first_groups else Stage.POLISHED
        return self._ask(cause, stage, board, now_s, asks)

    def _ask(self, cause: PlanCause, stage: Stage, board: Board, now_s: float, asks: tuple[int, ...]) -> bool:
        try:
            made = draft(board, self.terms.estimates, self.terms, now_s)
        except (ProblemError, ValueError, ArithmeticError) as error:
            self.number += 1
            self._failed(self.number, stage, cause, now_s, 0, 0, now_s, f"no problem: {error}")
            return False
        if made is None:
            return False
        self.effects.append(self._begin(stage, cause, made, None if stage is Stage.POLISHED else made.orders, now_s, asks))
        return True

    def polish(self, job: Job, now_s: float) -> None:
        """Goes on behind a first order, by all rules, when it is told to."""
        self.later = self._begin(Stage.POLISHED, job.cause, job.draft, None, now_s, job.asks)

    def go_on(self, now_s: float) -> None:
        """What does not leave yet leaves now."""
        if self.later is not None:
            assert self.job is not None, "it is the one that counts"
            self.job = replace(self.job, began_s=now_s)
            self.effects.append(self.later)
            self.later = None

    def _begin(self, stage: Stage, cause: PlanCause, made: Draft, orders: Orders | None, now_s: float, asks: tuple[int, ...]) -> Solve:
        self.number += 1
        self.later = None
        moves = moves_of(self.policy, stage, made.problem.groups)
        self.job = Job(number=self.number, stage=stage, cause=cause, draft=made, moves=moves, began_s=now_s, asks=asks)
        rule = self.rule if stage is Stage.FIRST else ""
        return Solve(job=self.number, stage=stage, problem=made.problem, orders=orders, moves=moves, seed=self.number, rule=rule)

    # Meanwhile --------------------------------------------------------------------------------------------------------

    @property
    def judge_s(self) -> float:
        """When the plan in force is to be judged, beside the solver, so that its answer need not wait for that; infinite where it is not:
        once for each job of many groups that takes longer than that."""
        job = self.job
        if (
            job is None
            or job.stage is Stage.FIRST
            or job.draft.problem.groups <= self.policy.first_groups
            or (self.judged is not None and self.judged.job == job.number)
        ):
            return math.inf
        return job.began_s + JUDGE_AFTER_S

    def judge(self, board: Board, now_s: float) -> None:
        """Judges the plan in force. It counts as long as the board stays as it is."""
        assert self.job is not None, "it is due"
        revision = (board.revision, self.terms.estimates.version)
        self.judged = Judged(job=self.job.number, revision=revision, at_s=now_s, cost=plan_cost(board, self.terms, now_s))

    def _costs(self, board: Board, target: Target, now_s: float) -> tuple[Cost, Cost]:
        """Of the plan in force and of another one, at the same time."""
        judged = self.judged
        revision = (board.revision, self.terms.estimates.version)
        if judged is not None and judged.revision == revision and now_s <= judged.at_s + JUDGED_MAX_S:
            return judged.cost, plan_costs(board, self.terms, judged.at_s, [target])[0]
        before, after = plan_costs(board, self.terms, now_s, [current(board), target])
        return before, after

    def _weighed(self, board: Board, target: Target, now_s: float) -> tuple[float, float]:
        before, after = self._costs(board, target, now_s)
        return before.weighed(self.policy), after.weighed(self.policy)

    # Answers ----------------------------------------------------------------------------------------------------------

    def take(self, event: Solved | SolveFailed) -> Job | None:
        """The job that an answer is for; None for one that another has taken the place of."""
        job = self.job
        if job is None or job.number != event.job:
            return None
        self.job = None
        return job

    def solved(self, job: Job, event: Solved, board: Board, now_s: float) -> Plan | None:
        """What the answer is worth on the board as it is now; None for less than the margin."""
        self.failures = 0
        if job.stage is Stage.POLISHED and event.construction:
            self.rule = event.construction
        try:
            target = reconciled(board, job.draft, event.orders)
            before, after = _clear(event, job, now_s) or self._weighed(board, target, now_s)
        except (ValueError, ArithmeticError) as error:
            self._fail(job, now_s, f"not judged: {error}")
            return None
        better = worth(self.policy, before, after)
        outcome = Outcome.APPLIED if better else Outcome.KEPT
        self.effects.append(_ended(job, outcome, gain=before - after, rule=event.rule))
        return Plan(job=job, target=target, gain=before - after) if better else None

    def failed(self, job: Job, reason: str, now_s: float) -> None:
        """No answer: the next job waits, longer with every failure in a row."""
        self._fail(job, now_s, reason)

    def _fail(self, job: Job, now_s: float, reason: str) -> None:
        self._failed(job.number, job.stage, job.cause, job.began_s, job.draft.problem.groups, job.moves, now_s, reason)

    def _failed(
        self, number: int, stage: Stage, cause: PlanCause, began_s: float, groups: int, moves: int, now_s: float, reason: str
    ) -> None:
        pause_s = min(self.policy.solve_retry_max_s, self.policy.solve_retry_first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        self.blocked_until_s = now_s + pause_s
        self.effects.append(
            JobEnded(
                job=number, stage=stage, cause=cause, outcome=Outcome.FAILED, began_s=began_s, groups=groups, moves=moves, reason=reason
            )
        )


def _clear(event: Solved, job: Job, now_s: float) -> tuple[float, float] | None:
    """What the solver says of the plan in force when it was asked, and of its own; None where that is not enough."""
    if event.costs is None or now_s > job.draft.made_s + JUDGED_MAX_S:
        return None
    low, high = sorted(event.costs)
    return event.costs if high > CLEAR * low else None


def moves_of(policy: Policy, stage: Stage, groups: int) -> int:
    """How many moves a job may try."""
    match stage:
        case Stage.REPAIR:
            return policy.repair_moves
        case Stage.FIRST:
            return 0
        case Stage.POLISHED:
            return min(policy.moves_max, policy.moves_each * max(policy.moves_groups_min, groups))


def _ended(job: Job, outcome: Outcome, *, gain: float, rule: str) -> JobEnded:
    return JobEnded(
        job=job.number,
        stage=job.stage,
        cause=job.cause,
        outcome=outcome,
        began_s=job.began_s,
        groups=job.draft.problem.groups,
        moves=job.moves,
        gain=gain,
        rule=rule,
    )
