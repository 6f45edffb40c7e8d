"""Jobs of the solver: stale answers, answers for another board, failures, margins, and plans that must not swing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms
from qlm_planner.effects import ApplyChunk, Outcome, PlanCause, Solve, Stage
from qlm_planner.events import LoadReported, ReplanAsked, Solved, SolveFailed, Tick
from qlm_planner.judging import current, plan_cost, plan_costs, worth
from qlm_planner.policy import Policy
from qlm_planner.problems import reconciled
from qlm_planner.solver import Orders
from qlm_planner.solver_jobs import answer
from qlm_planner.solving import CLEAR, FIRST_RULE
from qlm_planner.solving import Job as Asked
from qlm_planner.timeline import Cost
from qlm_queue.values import Owned, RequeueCause

from .test_drafts import reversed_orders
from .test_policies import Job, serve_by_plan
from .world import LEASE_S, START_S, World

POLICY = Policy()


async def crowded(world: World, *, count: int = 12) -> None:
    """Groups of three models by turns on one instance, the most urgent last."""
    await world.join("a")
    await world.lead()
    for number in range(count):
        await world.submit(("alpha", "beta", "gamma")[number % 3], 4000.0 / (number + 1), count=8)
        await world.settle()
    world.solves.clear()


# The machine ----------------------------------------------------------------------------------------------------------


async def test_a_new_group_is_looked_at_again() -> None:
    world = World()
    await crowded(world, count=3)
    await world.advance(1.0)
    world.solves.clear()
    await world.submit("beta", 20.0)
    await world.settle()
    await world.advance(1.0)
    assert [job.stage for job in world.solves] == [Stage.REPAIR]
    assert world.jobs[-1].cause is PlanCause.NEW_GROUP


async def test_one_job_at_a_time_and_a_replan_takes_the_place_of_a_repair() -> None:
    world = World()
    world.solver = lambda job: None
    await crowded(world)
    machine = world.machine
    assert machine is not None
    await world.advance(1.0)
    repair = machine.reshaping.solving.job
    assert repair is not None
    assert repair.stage is Stage.REPAIR
    await world.tell(ReplanAsked(ask=1))
    asked = machine.reshaping.solving.job
    assert asked is not None
    assert asked.stage is Stage.POLISHED
    before = await world.queues()
    await world.tell(Solved(job=repair.number, orders=reversed_orders(repair.draft), rule="stale"))
    assert machine.reshaping.solving.job is asked, "an answer to what nobody asks any more changes nothing"
    assert await world.queues() == before
    assert not [change for change in world.changes if change.replans]
    await world.tell(answer(world.solves[-1]))
    assert [change.replans for change in world.changes if change.replans] != []
    assert machine.reshaping.solving.job is None


async def test_a_worse_plan_is_not_applied() -> None:
    world = World()
    await crowded(world)
    await world.advance(1.0)
    before = await world.queues()
    world.solver = lambda job: Solved(job=job.job, orders=worst(job), rule="worst")
    await world.tell(ReplanAsked(ask=1))
    assert world.jobs[-1].outcome is Outcome.KEPT
    assert world.jobs[-1].gain < 0.0
    assert await world.queues() == before
    assert world.changes[-1].replans == {1: 0} or any(change.replans == {1: 0} for change in world.changes)


def worst(job: Solve) -> Orders:
    """Least urgent first."""
    problem = job.problem
    order = sorted(range(problem.groups), key=lambda group: -float(problem.deadline_s[group]))
    return Orders.of([order, *([] for _ in range(problem.queues - 1))])


async def test_failures_leave_the_plan_in_force_and_back_off() -> None:
    world = World()
    world.solver = lambda job: SolveFailed(job=job.job, reason="no such solver")
    await world.join("a")
    await world.lead()
    keys = [key for number in range(40) for key in await world.submit(("alpha", "beta")[number % 2], 1.0 + 0.1 * number)]
    await world.settle()
    asked = len(world.solves)
    await world.advance(60.0)
    assert len(world.solves) - asked <= 60.0 / POLICY.solve_retry_max_s + 7, "with longer and longer pauses"
    assert world.jobs
    assert all(job.outcome is Outcome.FAILED and job.reason == "no such solver" for job in world.jobs)
    states = {await world.state(key) for key in keys}
    assert states == {"PLACED"}, "nothing is lost"
    await world.tell(ReplanAsked(ask=1))
    await world.advance(0.1)
    assert any(change.replans == {1: 0} for change in world.changes), "who asks is told that nothing moved"
    world.solver = answer
    await world.advance(40.0)
    assert world.jobs[-1].outcome is not Outcome.FAILED, "it is asked again"


async def test_an_answer_outlives_a_conflict() -> None:
    """The queue changed while a chunk was on its way: the answer is judged anew on the next overview."""
    world = World()
    await crowded(world)
    await world.advance(1.0)
    machine = world.machine
    assert machine is not None
    queue = list(machine.board.queues["a"])
    backwards = {**current(machine.board), "a": [queue[0], *reversed(queue[1:])]}
    machine.reshaping.begin(PlanCause.ASKED, backwards, world.now_s)
    await world.advance(0.1)
    assert await world.group_ids("a") == backwards["a"]
    world.solves.clear()
    world.calls.clear()
    spoilt: list[bool] = []

    async def spoil() -> None:
        if not spoilt:
            spoilt.append(True)
            # Its last request runs at once and comes back: the group is opened again, which the planner has not read yet.
            pulled = await world.pull("a", machine.board.groups[queue[0]].traits.key.model, 100)
            await world.queue.unpull(world.agents["a"][0], [])
            assert pulled

    world.before_chunk = spoil
    await world.tell(ReplanAsked(ask=7))
    await world.advance(1.0)
    assert any(7 in change.replans for change in world.changes)
    assert any(isinstance(call, ApplyChunk) for call in world.calls)


async def test_many_groups_first_get_a_plan_that_is_constructed() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5))
    await crowded(world)
    await world.advance(1.0)
    world.solves.clear()
    await world.tell(ReplanAsked(ask=1))
    stages = [job.stage for job in world.solves]
    assert stages[:2] == [Stage.FIRST, Stage.POLISHED]
    assert [job.rule for job in world.solves[:2]] == [FIRST_RULE, ""], "one rule is quick, and the others are tried when it is polished"
    assert sum(1 in change.replans for change in world.changes) == 1, "answered once, when it is polished"


async def unanswered(changed: bool) -> tuple[World, Asked]:
    """A polished plan of many groups that the solver is at, and the plan in force judged meanwhile; then perhaps a request more."""
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5, replan_every_s=1e6, repair_every_s=1e6))
    await crowded(world)
    await world.advance(1.0)
    world.solver = lambda job: answer(job) if job.stage is Stage.FIRST else None
    await world.tell(ReplanAsked(ask=1))
    machine = world.machine
    assert machine is not None
    solving = machine.reshaping.solving
    assert solving.job is not None
    assert solving.job.stage is Stage.POLISHED
    assert solving.judged is None or solving.judged.job != solving.job.number, "the job leaves before anything else is worked out"
    await world.advance(0.01)
    assert solving.job is not None
    assert solving.judged is not None
    assert solving.judged.job == solving.job.number
    assert solving.judge_s == math.inf, "once a job"
    if changed:
        await world.submit("alpha", 4000.0)
        await world.settle()
    return world, solving.job


@pytest.mark.parametrize("changed", [False, True])
async def test_the_plan_in_force_is_judged_while_the_solver_works(monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    """Once, as long as the board stays as it is; and what comes out is what judging both at once says."""
    world, job = await unanswered(changed)
    machine = world.machine
    assert machine is not None
    solving, plans = machine.reshaping.solving, []

    def counted(board: Board, terms: ClassTerms, now_s: float, orders: Sequence[Mapping[str, Sequence[str]]]) -> list[Cost]:
        plans.append(len(orders))
        return plan_costs(board, terms, now_s, orders)

    assert solving.judged is not None
    at_s = world.now_s if changed else solving.judged.at_s
    target = reconciled(machine.board, job.draft, reversed_orders(job.draft))
    before, after = plan_costs(machine.board, solving.terms, at_s, [current(machine.board), target])
    monkeypatch.setattr("qlm_planner.solving.plan_costs", counted)
    await world.tell(Solved(job=job.number, orders=reversed_orders(job.draft), rule="reversed"))
    assert plans == [2 if changed else 1]
    assert world.jobs[-1].gain == pytest.approx(before.weighed(world.policy) - after.weighed(world.policy), rel=1e-9)


async def test_what_a_plan_costs_changes_with_the_revision_of_the_board_alone() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, replan_every_s=1e6))
    await world.join("b")
    await crowded(world)
    machine = world.machine
    assert machine is not None
    board, terms = machine.board, machine.reshaping.terms
    seen: dict[tuple[int, int], Cost] = {}

    def look() -> None:
        revision = (board.revision, terms.estimates.version)
        cost = plan_cost(board, terms, START_S)
        assert seen.setdefault(revision, cost) == cost

    look()
    pulled = await world.pull("a", "alpha", 3)
    keys = await world.submit("beta", 50.0, count=3)
    requeued = [Owned(queue_id=pulled[0].queue_id, key=pulled[0].key, attempt=pulled[0].attempt)]
    for happens in (
        lambda: world.settle(),
        lambda: world.complete("a", pulled[1:2]),
        lambda: world.queue.requeue(world.agents["a"][0], requeued, RequeueCause.EVICTED, b""),
        lambda: world.cancel(keys[:1]),
        lambda: world.tell(LoadReported(incarnation=world.agents["a"][0], active_model="gamma", warm_models=("beta",))),
        lambda: world.tell(ReplanAsked(ask=1)),
        lambda: world.drain("b"),
        lambda: world.advance(2.0),
        lambda: world.kill("b"),
        lambda: world.advance(2.0 * LEASE_S),
    ):
        await happens()
        await world.settle()
        look()
    assert len(seen) > 5


def test_margins() -> None:
    policy = Policy(replan_gain=0.02, replan_gain_min=100.0)
    assert worth(policy, 10_000.0, 9_700.0)
    assert not worth(policy, 10_000.0, 9_850.0)
    assert not worth(policy, 1_000.0, 910.0)
    assert not worth(policy, 10_000.0, float("nan"))
    assert not worth(policy, float("nan"), 0.0)


async def test_an_adversary_makes_no_swaps() -> None:
    """A-B-A-C: every request is a bit more urgent than all before it, and of another model. Who follows each of them swaps every time."""
    models = ("alpha", "beta", "alpha", "gamma")
    jobs = [Job(arrival_s=0.4 * number, model=models[number % 4], slo_s=700.0 - 1.5 * number) for number in range(120)]
    served = await serve_by_plan(jobs)
    assert served.late == 0
    assert served.swaps <= 12, served


async def scrambled(world: World) -> None:
    """The groups behind the head in the opposite of a good order, and nothing else to do."""
    await crowded(world)
    await world.advance(1.0)
    assert world.machine is not None
    [head, *rest] = world.machine.board.queues["a"]
    world.machine.reshaping.begin(PlanCause.ASKED, {**current(world.machine.board), "a": [head, *rest[::-1]]}, world.now_s)
    await world.tell(Tick())
    for told in (world.solves, world.applied, world.jobs, world.changes):
        told.clear()


async def test_a_first_plan_is_polished_when_it_is_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solver, planner and server share the cores."""
    monkeypatch.setattr("qlm_planner.chunks.BATCH_MAX", 2)
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5, replan_every_s=1e6, repair_every_s=1e6))
    await scrambled(world)
    asked: list[int] = []

    async def look() -> None:
        asked.append(len(world.solves))

    world.before_chunk = look
    await world.tell(ReplanAsked(ask=1))
    assert [job.stage for job in world.solves] == [Stage.FIRST, Stage.POLISHED]
    chunks = world.applied[0].chunks
    assert chunks > 2
    assert asked[:chunks] == [1] * chunks


async def test_a_first_plan_that_is_not_written_is_polished_all_the_same() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5, replan_every_s=1e6, repair_every_s=1e6))
    await scrambled(world)
    world.faults = lambda call: "before" if isinstance(call, ApplyChunk) else ""
    await world.tell(ReplanAsked(ask=1))
    assert [job.stage for job in world.solves] == [Stage.FIRST, Stage.POLISHED]


@pytest.mark.parametrize("ratio", [0.5, 0.99 / CLEAR, 0.9, 1.1, 1.01 * CLEAR, 2.0])
async def test_a_first_plan_is_judged_by_the_solver_where_that_is_sure(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Far better or far worse than the plan in force: what the solver says is enough. Else the model of queues decides, which knows that
    the plan which is offered here is the better one."""
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5, replan_every_s=1e6, repair_every_s=1e6))
    await scrambled(world)
    world.solver = lambda job: replace(first(job), costs=(1e9, ratio * 1e9)) if job.stage is Stage.FIRST else None
    await world.tell(ReplanAsked(ask=1))
    [ended] = world.jobs
    sure = not 1.0 / CLEAR <= ratio <= CLEAR
    assert ended.outcome is (Outcome.KEPT if ratio > CLEAR else Outcome.APPLIED)
    assert (ended.gain == pytest.approx((1.0 - ratio) * 1e9)) is sure


async def test_what_the_solver_says_of_both_plans_is_near_the_model_of_queues() -> None:
    """Of a board that nobody changes, both are worth much the same by either."""
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5, replan_every_s=1e6, repair_every_s=1e6))
    await scrambled(world)
    machine = world.machine
    assert machine is not None
    asked: list[Solve] = []
    world.solver = asked.append
    await world.tell(ReplanAsked(ask=1))
    solving, [job] = machine.reshaping.solving, asked
    found = first(job)
    assert solving.job is not None
    assert found.costs is not None
    target = reconciled(machine.board, solving.job.draft, found.orders)
    by_queues = plan_costs(machine.board, solving.terms, world.now_s, [current(machine.board), target])
    for told, cost in zip(found.costs, by_queues, strict=True):
        assert told == pytest.approx(cost.weighed(world.policy), rel=0.1)


async def test_the_next_first_plan_is_constructed_as_the_last_whole_plan_began() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, first_groups=5, replan_every_s=1e6, repair_every_s=1e6))
    await scrambled(world)
    world.solver = lambda job: first(job) if job.stage is Stage.FIRST else replace(first(job), construction="edf", costs=None)
    await world.tell(ReplanAsked(ask=1))
    await world.tell(ReplanAsked(ask=2))
    assert [(job.stage, job.rule) for job in world.solves] == [
        (Stage.FIRST, FIRST_RULE),
        (Stage.POLISHED, ""),
        (Stage.FIRST, "edf"),
        (Stage.POLISHED, ""),
    ]


def first(job: Solve) -> Solved:
    found = answer(job)
    assert isinstance(found, Solved)
    return found
