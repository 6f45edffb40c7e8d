"""The order of service against simpler ones, on a small cluster that serves batch after batch (QLM section 2.4, insight 3; figure 5)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_planner.policy import Policy

from .world import LEASE_S, START_S, World

SWAP_S = 10.0
REQUEST_S = 0.022
"""Engine time of a request of `world.profiles()` on "big"."""

BATCH = 100


@dataclass(frozen=True)
class Job:
    arrival_s: float
    model: str
    slo_s: float


@dataclass
class Served:
    swaps: int = 0
    late: int = 0
    done: int = 0


def overload(seed: int, *, models: Sequence[str] = ("alpha", "beta", "gamma"), seconds: int = 120, bursts: int = 60) -> list[Job]:
    """Bursts of one model each, with short and long objectives, at about the rate that one engine serves without swaps."""
    chance = random.Random(seed)
    jobs: list[Job] = []
    for _ in range(bursts):
        arrival_s, model = chance.uniform(0, seconds), chance.choice(models)
        slo_s = chance.choice((30.0, 60.0, 120.0))
        jobs.extend(Job(arrival_s=arrival_s, model=model, slo_s=slo_s) for _ in range(chance.randrange(40, 90)))
    return sorted(jobs, key=lambda job: job.arrival_s)


def serve_in_order(jobs: Sequence[Job], key: str) -> Served:
    """One engine takes the first batch of one model by arrival ("fcfs") or deadline ("edf"), as a policy without groups would."""
    waiting: list[Job] = []
    left = list(jobs)
    now_s, active, served = 0.0, "", Served()
    while left or waiting:
        if not waiting:
            now_s = max(now_s, left[0].arrival_s)
        while left and left[0].arrival_s <= now_s:
            waiting.append(left.pop(0))
        waiting.sort(key=lambda job: job.arrival_s if key == "fcfs" else job.arrival_s + job.slo_s)
        model = waiting[0].model
        batch = [waiting[0]]
        for job in waiting[1:BATCH]:
            if job.model != model:
                break
            batch.append(job)
        if model != active:
            now_s, active, served.swaps = now_s + SWAP_S, model, served.swaps + 1
        now_s += REQUEST_S * len(batch)
        for job in batch:
            served.done += 1
            served.late += now_s > job.arrival_s + job.slo_s
            waiting.remove(job)
    return served


async def serve_by_plan(jobs: Sequence[Job], policy: Policy | None = None) -> Served:
    """The same engine, pulling from the virtual queue that the planner orders."""
    world = World(policy or Policy(lease_ttl_s=LEASE_S))
    await world.join("a")
    await world.lead()
    left = list(jobs)
    deadlines: dict[str, float] = {}
    active, served, idle = "", Served(), 0
    while left or len(deadlines) > served.done:
        now_s = world.now_s - START_S
        while left and left[0].arrival_s <= now_s:
            job = left.pop(0)
            [key] = await world.submit(job.model, job.slo_s)
            deadlines[key.request_id] = job.arrival_s + job.slo_s
        await world.settle()
        queue = (await world.queues())["a"]
        if not queue:
            idle += 1
            assert idle < 10_000
            await world.advance(0.1)
            continue
        if queue[0] != active:
            active, served.swaps = queue[0], served.swaps + 1
            await world.advance(SWAP_S)
        pulled = await world.pull("a", active, BATCH)
        await world.advance(REQUEST_S * len(pulled))
        await world.complete("a", pulled)
        for each in pulled:
            served.done += 1
            served.late += world.now_s - START_S > deadlines[each.key.request_id]
    return served


async def test_batching_by_model_beats_edf_on_swaps_and_fcfs_on_lateness() -> None:
    jobs = overload(0)
    fcfs, edf, planned = serve_in_order(jobs, "fcfs"), serve_in_order(jobs, "edf"), await serve_by_plan(jobs)
    assert fcfs.done == edf.done == planned.done == len(jobs)
    assert planned.swaps < 0.6 * edf.swaps, (fcfs, edf, planned)
    assert planned.late < 0.7 * fcfs.late, (fcfs, edf, planned)
    assert planned.late < edf.late, (fcfs, edf, planned)


async def test_no_thrash_between_two_models() -> None:
    """A-B-A-C: single requests of three models in turn, each with an earlier deadline than the one before. Plain EDF swaps at every one."""
    models = ("alpha", "beta", "alpha", "gamma")
    jobs = [Job(arrival_s=0.5 * number, model=models[number % 4], slo_s=900.0 - 2.0 * number) for number in range(100)]
    edf = serve_in_order(jobs, "edf")
    planned = await serve_by_plan(jobs)
    assert edf.swaps >= 15, edf
    assert planned.swaps <= edf.swaps / 3, (edf, planned)
    assert planned.late == 0
