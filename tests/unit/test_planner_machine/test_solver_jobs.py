"""Jobs of the solver: stale answers, answers for another board, failures, margins, and plans that must not swing."""

from __future__ import annotations

from qlm_planner.machine.effects import ApplyChunk, Outcome, PlanCause, Solve, Stage
from qlm_planner.machine.events import ReplanRequested, Solved, SolveFailed
from qlm_planner.plan.solver_jobs import is_worth
from qlm_planner.policy import Policy
from qlm_planner.search import Orders
from qlm_planner.shell.solver_requests import answer

from .test_solver_problem import reversed_orders
from .world import World

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
    repair = machine.changes.jobs.job
    assert repair is not None
    assert repair.stage is Stage.REPAIR
    await world.deliver(ReplanRequested(number=1))
    replan = machine.changes.jobs.job
    assert replan is not None
    assert replan.stage is Stage.REPLAN
    before = await world.queues()
    await world.deliver(Solved(job=repair.number, orders=reversed_orders(repair.draft), rule="stale"))
    assert machine.changes.jobs.job is replan, "an answer to a replaced job changes nothing"
    assert await world.queues() == before
    assert not [change for change in world.changes if change.replans]
    await world.deliver(answer(world.solves[-1]))
    assert [change.replans for change in world.changes if change.replans] != []
    assert machine.changes.jobs.job is None


async def test_the_present_plan_is_kept_without_a_gain() -> None:
    world = World()
    await crowded(world)
    await world.advance(1.0)
    machine = world.machine
    assert machine is not None
    present, lists = machine.board.order(), []

    def same(job: Solve) -> Solved:
        draft = machine.changes.jobs.job
        assert draft is not None
        lists.append(draft.draft.lists(draft.draft.orders))
        return Solved(job=job.job, orders=draft.draft.orders, rule="same")

    world.solver = same
    await world.deliver(ReplanRequested(number=1))
    assert {name: present[name] for name in lists[-1]} == lists[-1]
    assert (world.jobs[-1].outcome, world.jobs[-1].gain) == (Outcome.KEPT, 0.0)
    assert machine.board.order() == present


async def test_a_worse_plan_is_not_applied() -> None:
    world = World()
    await crowded(world)
    await world.advance(1.0)
    before = await world.queues()
    world.solver = lambda job: Solved(job=job.job, orders=worst(job), rule="worst")
    await world.deliver(ReplanRequested(number=1))
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
    before = len(world.solves)
    await world.advance(60.0)
    assert len(world.solves) - before <= 60.0 / POLICY.solve_retry_max_s + 7, "with longer and longer pauses"
    assert world.jobs
    assert all(job.outcome is Outcome.FAILED and job.reason == "no such solver" for job in world.jobs)
    states = {await world.state(key) for key in keys}
    assert states == {"PLACED"}, "nothing is lost"
    await world.deliver(ReplanRequested(number=1))
    await world.advance(0.1)
    assert any(change.replans == {1: 0} for change in world.changes), "the answer is that nothing moved"
    world.solver = answer
    await world.advance(40.0)
    assert world.jobs[-1].outcome is not Outcome.FAILED, "the solver runs again"


async def test_an_answer_outlives_a_conflict() -> None:
    """The queue changed while a chunk was on its way: the answer is judged anew on the next overview."""
    world = World()
    await crowded(world)
    await world.advance(1.0)
    machine = world.machine
    assert machine is not None
    queue = list(machine.board.queues["a"])
    backwards = {**machine.board.order(), "a": [queue[0], *reversed(queue[1:])]}
    machine.changes.begin(PlanCause.ASKED, backwards, world.now_s)
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
    await world.deliver(ReplanRequested(number=7))
    await world.advance(1.0)
    assert any(7 in change.replans for change in world.changes)
    assert any(isinstance(call, ApplyChunk) for call in world.calls)


def test_margins() -> None:
    policy = Policy(replan_gain=0.02, replan_gain_min=100.0)
    assert is_worth(policy, 10_000.0, 9_700.0)
    assert not is_worth(policy, 10_000.0, 9_850.0)
    assert not is_worth(policy, 1_000.0, 910.0)
    assert not is_worth(policy, 10_000.0, float("nan"))
    assert not is_worth(policy, float("nan"), 0.0)
