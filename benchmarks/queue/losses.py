"""The parts that kill: the leading planner, agents with running requests, and any process in a campaign."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import grpc.aio

from benchmarks.queue.bulk_queue import BulkQueue
from benchmarks.queue.filling import accept_all
from benchmarks.queue.front import load_settings
from benchmarks.queue.live import LiveCluster, Shape
from benchmarks.queue.prompts import PromptSource
from benchmarks.queue.run import Bench
from benchmarks.queue.schedule import summary_ms
from benchmarks.queue.worker import Report, run_worker
from qlm.api.v1 import planner_pb2, planner_pb2_grpc
from qlm.internal.v1 import events_pb2
from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import Unavailable
from qlm_load.campaign.campaign import Assault, run_campaign
from qlm_load.demo.cluster import serving_pids
from qlm_load.demo.settings import DemoConfig, demo_config_path
from qlm_load.workload.options import demo_workload
from qlm_process.config import load_config
from qlm_queue.overview import Overview
from qlm_queue.values import PLANNER_ROLE

FAILOVER_AGENTS = 4
FAILOVER_BATCH = 64
SLOS_S = (600.0, 1_200.0, 2_400.0, 4_800.0, 9_600.0, 19_200.0)
"""SLOs of different classes, so that there are groups for every instance."""
PLACED_TIMEOUT_S = 120.0
FAILOVER_TIMEOUT_S = 60.0
POLL_S = 0.02
COVERED = 0.99
"""Share of the waiting requests in a plan over all of them: some are pulled between the two readings."""

RECOVER_AGENTS = 3
RECOVER_BATCH = 32
RECOVER_TIME_SCALE = 8.0
"""Loading a model takes 0.6 s: the figure is the time until requests move, not the time of loading weights."""
RECOVER_RATE_PER_S = 20.0
RECOVER_OUTPUT_TOKENS = 2_048
"""At this rate and length (2.5 s) one agent is too few and two are enough: the others can carry a killed one's requests."""
RECOVER_SLO_S = 20.0
HELD_MIN = 5
"""Requests that an agent runs to be killed, while another one runs as many."""
KILL_EVERY_MAX_S = 40.0
KILL_PAUSE_S = (3.0, 6.0)
"""Pause between the recovery of a victim's requests and the next kill: by seed within these."""
RECOVER_TIMEOUT_S = 30.0
EVENTS_MAX = 2_000

CAMPAIGN_TIME_SCALE = 8.0
CAMPAIGN_RATE_PER_S = 7.5
"""Per trace second: 60 requests a real second."""


async def measure_failover(bench: Bench) -> None:
    """SIGKILL at the leading planner, beside a standby, with a long queue that is all placed. Ends when the new leader answers a call for a
    replan, once the new order of all groups is applied, and its plan has the waiting groups and requests."""
    count = bench.sizes.failover_queued
    shape = Shape(agents=FAILOVER_AGENTS, planners=2, agent={"batch_max": FAILOVER_BATCH})
    async with LiveCluster(bench.out / "failover", shape, bench.seed, bench.collector) as live, _queue_of(live) as queue:
        bench.say(f"failover: placing {count:,} requests")
        for number, slo_s in enumerate(SLOS_S):
            source = PromptSource(seed=bench.seed, run_id=f"failover-{number}", prompt_tokens=64, output_tokens=256, slo_s=slo_s)
            await accept_all(queue, source, -(-count // len(SLOS_S)))
        await _until(queue, lambda overview: overview.unplaced == 0, PLACED_TIMEOUT_S, "all requests to be placed")
        before = await queue.overview()
        leader = await queue.leader_address(PLANNER_ROLE)
        (pid,) = [process.pid for process in live.now().of("planner") if process.address == leader]
        bench.say("failover: SIGKILL at the leading planner")
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        elected_s, version, plan = await _first_plan(queue, leader, killed_s + FAILOVER_TIMEOUT_S)
        seconds = time.monotonic() - killed_s
        after = await queue.overview()
    waiting, planned = _waiting(after), sum(group.waiting for planned in plan.queues for group in planned.groups)
    if waiting < count / 2 or planned < COVERED * waiting:
        raise Unavailable(f"the first plan shows {planned} of {waiting} waiting requests")
    bench.values["failover_first_plan_s"] = round(seconds, 2)
    bench.details["failover"] = {
        "waiting": waiting,
        "planned": planned,
        "groups": len(after.groups),
        "plan_versions": [before.plan_version, version],
        "elected_after_s": round(elected_s - killed_s, 2),
    }


async def _first_plan(queue: BulkQueue, old_leader: str, deadline_s: float) -> tuple[float, int, planner_pb2.Plan]:
    """When another leader was found, and its first plan. Raises Unavailable if there is none by then."""
    while time.monotonic() < deadline_s:
        address = await queue.leader_address(PLANNER_ROLE)
        if address in ("", old_leader):
            await asyncio.sleep(POLL_S)
            continue
        elected_s = time.monotonic()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = planner_pb2_grpc.PlannerStub(channel)
            try:
                answer = await stub.Replan(planner_pb2.ReplanRequest(why="bench"), timeout=deadline_s - elected_s)
                plan = await stub.GetPlan(planner_pb2.GetPlanRequest(), timeout=deadline_s - elected_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise Unavailable(f"the new leader did not plan: {error.details()}") from error
                await asyncio.sleep(POLL_S)  # it has the lease and does not lead yet
                continue
        return elected_s, answer.plan_version, plan
    raise Unavailable("no other planner leads")


async def measure_recovery(bench: Bench) -> None:
    """SIGKILL at an agent that runs requests, repeatedly, under a load that the others can carry. For each request that it owned: from the
    kill to the event of its pull by another incarnation, both by the server's clock."""
    took_s: list[float] = []
    kills: list[dict[str, object]] = []
    choice = random.Random(bench.seed)
    shape = Shape(agents=RECOVER_AGENTS, time_scale=RECOVER_TIME_SCALE, agent={"batch_max": RECOVER_BATCH})
    async with LiveCluster(bench.out / "recover", shape, bench.seed, bench.collector) as live, _queue_of(live) as queue:
        load = asyncio.create_task(_steady_load(bench, live))
        try:
            for _ in range(bench.sizes.recover_kills):
                await _until_all_serve(live)
                await asyncio.sleep(choice.uniform(*KILL_PAUSE_S))
                overview = await _until(queue, _several_run, KILL_EVERY_MAX_S, "several agents to run requests")
                if load.done():
                    raise Unavailable(f"the load ended too early: {load.result()}")
                holders = sorted(each.instance for each in overview.virtual_queues if each.running >= HELD_MIN)
                victim = choice.choice(holders)
                incarnation = next(each.incarnation for each in overview.instances if each.name == victim)
                pid = serving_pids(live.now())[victim]
                killed_s = await queue.server_time_s()
                os.kill(pid, signal.SIGKILL)
                owned = {each.queue_id for each in await queue.owned(incarnation)}
                bench.say(f"recovery: SIGKILL at {victim}, which runs {len(owned)} requests")
                pulled = await _pulled_by_others(queue, owned, incarnation, f"{int(killed_s * 1000)}-0")
                took_s += [at_s - killed_s for at_s, _ in pulled.values()]
                elsewhere = sum(not by.startswith(f"{victim}/") for _, by in pulled.values())
                kills.append({"agent": victim, "owned": len(owned), "on_other_instances": elsewhere})
        finally:
            load.cancel()
            await asyncio.wait([load])
    bench.values["recover_p99_s"] = round(summary_ms(took_s)["p99"] / 1e3, 2)
    bench.details["recover"] = {"kills": kills, "recover_ms": summary_ms(took_s)}


async def _steady_load(bench: Bench, live: LiveCluster) -> Report:
    """Streams at Poisson times for longer than all kills take."""
    seconds = KILL_EVERY_MAX_S * bench.sizes.recover_kills
    settings = load_settings(
        bench,
        live.gateway,
        "recover",
        output_tokens=RECOVER_OUTPUT_TOKENS,
        slo_s=RECOVER_SLO_S,
        seconds=seconds,
        rate_per_s=RECOVER_RATE_PER_S,
    )
    return await run_worker("open_loop", {**settings, "warmup_s": 0.0}, timeout_s=2 * seconds)


def _several_run(overview: Overview) -> bool:
    return sum(each.running >= HELD_MIN for each in overview.virtual_queues) >= 2


async def _pulled_by_others(queue: BulkQueue, owned: Collection[str], incarnation: str, after: str) -> dict[str, tuple[float, str]]:
    """When, by the server's clock, and by which incarnation each request was first pulled after the loss of its own."""
    pulled: dict[str, tuple[float, str]] = {}
    deadline_s = time.monotonic() + RECOVER_TIMEOUT_S
    while len(pulled) < len(owned):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"{len(owned) - len(pulled)} requests of {incarnation} do not run again after {RECOVER_TIMEOUT_S:g} s")
        for entry in await queue.read_events(after, 0.2, EVENTS_MAX):
            after = entry.entry_id
            at_s = int(entry.entry_id.partition("-")[0]) / 1e3
            for event in events_pb2.RequestEvents.FromString(entry.payload).events:
                if event.kind == events_pb2.EVENT_KIND_PULLED and event.incarnation != incarnation and event.queue_id in owned:
                    pulled.setdefault(event.queue_id, (at_s, event.incarnation))
    return pulled


async def measure_campaign(bench: Bench) -> None:
    """The command `campaign` on the demo's cluster: random SIGKILLs by seed all through a replay."""
    sizes = bench.sizes
    path = demo_config_path()
    overrides = {
        "load.requests": sizes.campaign_requests,
        "load.seed": bench.seed,
        "load.time_scale": CAMPAIGN_TIME_SCALE,
        "load.rate_per_s": CAMPAIGN_RATE_PER_S,
    }
    config = load_config(DemoConfig, path, overrides=overrides)
    workload = demo_workload(config, None, None)
    bench.say(
        f"campaign: {sizes.campaign_requests:,} requests over {workload.duration_s / CAMPAIGN_TIME_SCALE:.0f} s, "
        f"{sizes.campaign_kills} kills, {sizes.campaign_server_kills} of the server"
    )
    out = bench.out / "campaign"
    out.mkdir(parents=True, exist_ok=True)
    assault = Assault(seed=bench.seed, kills=sizes.campaign_kills, server_kills=sizes.campaign_server_kills)
    outcome = await run_campaign(plain_console(stderr=True), config, workload, path, overrides, out, assault, bench.collector.environment)
    bench.values |= {
        "lost": outcome.report.lost,
        "doubled": outcome.report.doubled,
        "hung": outcome.hung,
        "greedy_equal": outcome.greedy_equal / outcome.requests,
    }
    bench.details["campaign"] = {
        "requests": outcome.requests,
        "completed": outcome.report.completed,
        "recovered": outcome.report.recovered,
        "kills": outcome.kills,
        "server_kills": outcome.server_kills,
        "seconds": round(outcome.seconds, 1),
        "failures": list(outcome.failures),
    }


@asynccontextmanager
async def _queue_of(live: LiveCluster) -> AsyncIterator[BulkQueue]:
    queue = BulkQueue(live.state.queue_url, live.state.queue)
    await queue.start()
    try:
        yield queue
    finally:
        await queue.stop()


async def _until(queue: BulkQueue, holds: Callable[[Overview], bool], timeout_s: float, what: str) -> Overview:
    """The first overview that satisfies `holds`. Raises Unavailable."""
    deadline_s = time.monotonic() + timeout_s
    while not holds(overview := await queue.overview()):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"waited {timeout_s:g} s for {what}: {overview.live} live, {overview.unplaced} not placed")
        await asyncio.sleep(10 * POLL_S)
    return overview


async def _until_all_serve(live: LiveCluster) -> None:
    deadline_s = time.monotonic() + KILL_EVERY_MAX_S
    while not live.now().ready:
        if time.monotonic() > deadline_s:
            raise Unavailable("a killed process does not serve again")
        await asyncio.sleep(POLL_S)


def _waiting(overview: Overview) -> int:
    return sum(group.waiting for group in overview.groups.values())
