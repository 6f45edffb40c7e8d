"""Jobs of the solver: questions, the job under way, and the value of its answer.

At most one job counts. It solves a draft of the board; the answer is reconciled with the later board (`solver_problem.reconciled`), judged
by its cost there (`virtual_queues.plan_costs`). So a late answer is still of use, and an outdated board is never applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_planner.board.board import Board, Target
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import plan_costs
from qlm_planner.machine.effects import JobEnded, Outcome, PlanCause, Solve, Stage
from qlm_planner.machine.events import Solved, SolveFailed
from qlm_planner.plan.solver_problem import Draft, draft, reconciled
from qlm_planner.policy import Policy
from qlm_planner.search.problem import ProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One question to the solver. `replans`: the requested replans that it answers."""

    number: int
    stage: Stage
    cause: PlanCause
    draft: Draft
    moves: int
    began_s: float
    replans: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class SolverJobs:
    """`job`: under way. `failures`: in a row; after one, no job starts before `blocked_until_s`. `effects`: since they were last taken."""

    policy: Policy
    table: ClassTable
    job: Job | None = None
    number: int = 0
    failures: int = 0
    blocked_until_s: float = -math.inf
    effects: list[Solve | JobEnded] = field(default_factory=list)

    def take_effects(self) -> list[Solve | JobEnded]:
        effects, self.effects = self.effects, []
        return effects

    def start(self, cause: PlanCause, stage: Stage, board: Board, now_s: float, replans: tuple[int, ...] = ()) -> bool:
        """Starts a job in place of one under way. False if fewer than two groups wait, or the profiles give no problem."""
        try:
            drafted = draft(board, self.table.estimates, self.table, now_s)
        except (ProblemError, ValueError, ArithmeticError) as error:
            self.number += 1
            self._pause(now_s)
            reason, outcome = f"no problem: {error}", Outcome.FAILED
            self.effects.append(
                JobEnded(job=self.number, stage=stage, cause=cause, outcome=outcome, began_s=now_s, groups=0, moves=0, reason=reason)
            )
            return False
        if drafted is None:
            return False
        repairs = stage is Stage.REPAIR
        moves = self.policy.repair_moves if repairs else self.policy.replan_moves(drafted.problem.groups)
        self.number += 1
        self.job = Job(number=self.number, stage=stage, cause=cause, draft=drafted, moves=moves, began_s=now_s, replans=replans)
        orders = drafted.orders if repairs else None
        self.effects.append(Solve(job=self.number, stage=stage, problem=drafted.problem, orders=orders, moves=moves, seed=self.number))
        return True

    def take(self, event: Solved | SolveFailed) -> Job | None:
        """The job of an answer; None for a replaced one."""
        job = self.job
        if job is None or job.number != event.job:
            return None
        self.job = None
        return job

    def solved(self, job: Job, event: Solved, board: Board, now_s: float) -> Target | None:
        """The wanted queues on the present board; None for a gain below the margin."""
        self.failures = 0
        try:
            present, target = board.order(), reconciled(board, job.draft, event.orders)
            plans = [present, target] if target != present else []
            before, after = (cost.total for cost in plan_costs(board, self.table, now_s, plans)) if plans else (0.0, 0.0)
        except (ValueError, ArithmeticError) as error:
            self.failed(job, f"not judged: {error}", now_s)
            return None
        better = is_worth(self.policy, before, after)
        self._ended(job, Outcome.APPLIED if better else Outcome.KEPT, gain=before - after, rule=event.rule)
        return target if better else None

    def failed(self, job: Job, reason: str, now_s: float) -> None:
        """Ends a job without an answer; the next one waits longer with each failure in a row."""
        self._pause(now_s)
        self._ended(job, Outcome.FAILED, reason=reason)

    def _pause(self, now_s: float) -> None:
        pause_s = min(self.policy.solve_retry_max_s, self.policy.solve_retry_first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        self.blocked_until_s = now_s + pause_s

    def _ended(self, job: Job, outcome: Outcome, *, gain: float = 0.0, rule: str = "", reason: str = "") -> None:
        self.effects.append(
            JobEnded(
                job=job.number,
                stage=job.stage,
                cause=job.cause,
                outcome=outcome,
                began_s=job.began_s,
                groups=job.draft.problem.groups,
                moves=job.moves,
                gain=gain,
                rule=rule,
                reason=reason,
            )
        )


def is_worth(policy: Policy, before: float, after: float) -> bool:
    """Whether a plan saves the stated share of the cost and the least gain: a change has a cost, and figures are predictions. False for
    NaN."""
    return before - after > max(policy.replan_gain_min, policy.replan_gain * before)
