"""The live planner at its work: the real shell and worker on a real server, timed from what happens to what is in the queue."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.figures import Values
from benchmarks.parts import Measured
from benchmarks.planner.figures import LIVE
from benchmarks.planner.live_queue import LARGE, MEDIUM, MODELS, ONE_QUEUE, PROFILES, QUEUE, SMALL, Size, acceptance, live_queue, shrunk
from benchmarks.planner.parts import Plan
from benchmarks.queue.bulk_queue import BulkQueue
from qlm_core.vocabulary.errors import Unavailable
from qlm_load.interruptible import run_interruptible
from qlm_planner.config import PlannerConfig
from qlm_planner.machine.effects import PlanCause
from qlm_planner.machine.events import Tick
from qlm_planner.shell.leadership import Leadership
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.process import PlannerShell
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import AppliedChunk, GroupPlacement, Lease, PlanChunk, RequestPlacement, StepStatus

READY_TIMEOUT_S = 300.0
POLL_S = 0.01
SCRAMBLES_MAX = 20
"""An overview that arrives first drops the change to be written."""

LOOKS_MAX = 30_000
QUIET_S = 0.25
"""Nothing is written for so long: what an event set off is over."""
QUIET_TIMEOUT_S = 60.0
NEW_SLOS_S = (1.0, 16.0, 100.0, 400.0, 30_000.0, 60_000.0)
NEW_PROMPTS_TOKENS = (10, 60, 250, 900, 3_000)
"""No group of these is open, so that each new request opens one."""

EVENT_KEY = "event_to_applied_p99_ms"
EVENTS = 200
ROUNDS = 300
ROUNDS_LARGE = 7
LEASE_TTL_S = 15.0
"""A machine that is busy with something else shall not end the term."""
REPLAN_EVERY_S = 1e6
"""Replans happen only on request, so that one thing is timed at a time."""

Say = Callable[[str], None]


class TimedQueue(RedisQueue):
    """Notes when writes of the plan were answered. `why`: the cause of the change under way. `arrival_s`: of the last write for a new
    group, which is its placement and the moves around it. Others (for groups that have waited too long by then) are
    set off by time."""

    written_s: float = 0.0
    arrival_s: float = 0.0
    chunks: int = 0
    why: Callable[[], PlanCause | None] = staticmethod(lambda: None)

    async def place(self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> Sequence[StepStatus]:
        answer = await super().place(lease, groups, requests)
        self.written_s = self.arrival_s = time.perf_counter()
        return answer

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        why = self.why()
        answer = await super().apply_plan(lease, chunk)
        self.written_s = time.perf_counter()
        if why is PlanCause.NEW_GROUP:
            self.arrival_s = self.written_s
        self.chunks += 1
        return answer


@dataclass(slots=True, kw_only=True)
class Live:
    """A planner that leads, on a filled queue. `caught_up_s`: from its start to knowing the queue, warm-up of the solver beside it."""

    held: BulkQueue
    queue: TimedQueue
    shell: PlannerShell
    caught_up_s: float

    @property
    def term(self) -> Leadership:
        term = self.shell.term
        assert term is not None, "it leads"
        return term

    def why(self) -> PlanCause | None:
        change = self.term.machine.changes.change
        return None if change is None else change.cause

    async def quiet(self) -> float:
        """Waits until nothing is written any more; returns when the last write was answered."""
        began_s = time.perf_counter()
        end_s = began_s + QUIET_TIMEOUT_S
        while time.perf_counter() < max(began_s, self.queue.written_s) + QUIET_S:
            if time.perf_counter() > end_s:
                raise Unavailable(f"the planner writes without end: {QUIET_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)
        return self.queue.written_s


async def _until(holds: Callable[[], bool]) -> None:
    """Polls, since nobody reports the condition."""
    for _ in range(LOOKS_MAX):
        if holds():
            return
        await asyncio.sleep(POLL_S)
    raise Unavailable("the planner did not come up")


@asynccontextmanager
async def live_planner(folder: Path, size: Size, seed: int, say: Say) -> AsyncIterator[Live]:
    """One planner on a queue of this size, warm."""
    say(f"filling a queue with {size.requests:,} requests in {size.groups:,} groups on {size.instances} instances")
    async with live_queue(folder, size, seed) as held:
        models = [{"name": name, "profile": PROFILES[number % len(PROFILES)]} for number, name in enumerate(MODELS)]
        config = PlannerConfig.model_validate(
            {"queue": {"name": QUEUE, "lease_ttl_s": LEASE_TTL_S}, "models": models, "planner": {"replan_every_s": REPLAN_EVERY_S}}
        )
        queue = TimedQueue(held.url, QUEUE, call_timeout_s=30.0)
        shell = PlannerShell(config, queue, PlannerMetrics(), TracerProvider())
        stop = asyncio.Event()
        # As a planner's process does when it starts (`qlm_process.runner`): what filled the queue is none of its garbage.
        gc.collect()
        gc.freeze()
        began_s = time.perf_counter()
        run = asyncio.create_task(shell.run(stop))
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await _until(lambda: shell.term is not None and shell.term.caught_up.is_set())
                caught_up_s = time.perf_counter() - began_s
                await _until(lambda: shell.solver.ready)
            live = Live(held=held, queue=queue, shell=shell, caught_up_s=caught_up_s)
            queue.why = live.why
            say(f"caught up after {caught_up_s:.2f} s")
            await live.term.replan()
            await live.quiet()
            yield live
        finally:
            stop.set()
            await run


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Milliseconds from a request's acceptance, which opens a group. `applied`: to the last write of the plan that it sets off: its group
    at its place, and what the solver then moves around it. `written`: to the last write of any kind before the plan was quiet."""

    applied: list[float]
    written: list[float]


async def event_to_applied_ms(live: Live, events: int) -> Events:
    """One new group after the other."""
    kinds = list(itertools.product(NEW_SLOS_S, MODELS, NEW_PROMPTS_TOKENS))
    random.Random(1).shuffle(kinds)
    found = Events(applied=[], written=[])
    for number, (slo_s, model, tokens) in enumerate(kinds[:events]):
        before_s = live.queue.arrival_s
        await live.held.accept(acceptance(f"new-{number}", slo_s, model, tokens))
        accepted_s = time.perf_counter()
        end_s = accepted_s + QUIET_TIMEOUT_S
        while live.queue.arrival_s == before_s:
            if time.perf_counter() > end_s:
                raise Unavailable("a request was not placed")
            await asyncio.sleep(POLL_S)
        found.written.append((await live.quiet() - accepted_s) * 1e3)
        found.applied.append((live.queue.arrival_s - accepted_s) * 1e3)
    return found


async def replan_ms(live: Live, rounds: int, seed: int) -> list[float]:
    """Milliseconds from the wish for a new plan until it is in the queue, of one replan after the other. Each round begins with queues in
    no order, so that nearly every group moves."""
    chance = random.Random(seed)
    took: list[float] = []
    for _ in range(rounds):
        await _scramble(live, chance)
        began_s = time.perf_counter()
        _, named = await live.term.replan()
        done_s = await live.quiet()
        if not named:
            raise Unavailable("a plan in no order was found good enough")
        took.append((done_s - began_s) * 1e3)
    return took


async def _scramble(live: Live, chance: random.Random) -> None:
    """All groups but the heads on any queue, in any order."""
    machine = live.term.machine
    queues = {name: list(queue) for name, queue in machine.board.queues.items()}
    names = sorted(machine.board.slots)
    rest = [group_id for name in names for group_id in queues[name][1:]]
    chance.shuffle(rest)
    for number, name in enumerate(names):
        queues[name] = [*queues[name][:1], *rest[number :: len(names)]]
    for _ in range(SCRAMBLES_MAX):
        machine.changes.begin(PlanCause.ASKED, queues, time.time())
        live.term.submit(Tick())
        await live.quiet()
        if machine.board.queues == queues:
            return
    raise Unavailable("the queues did not stay in no order")


def p99(values: Sequence[float]) -> float:
    """The 99th percentile by nearest rank: no more than one in a hundred is greater; the greatest of fewer than a hundred."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 1),
        "p50": round(statistics.median(values), 1),
        "p99": round(p99(values), 1),
        "max": round(max(values), 1),
    }


def measure(plan: Plan) -> Measured:
    """The requested figures of the live planner, each on a queue of its size."""
    return run_interruptible(_measure(plan), uvloop.new_event_loop)  # the loop of a planner's process


async def _measure(plan: Plan) -> Measured:
    values: Values = {}
    details: dict[str, object] = {}
    with TemporaryDirectory() as folder:
        if plan.wants(EVENT_KEY, LIVE):
            async with live_planner(Path(folder, "events"), shrunk(SMALL, plan.scale), plan.seed, plan.say) as live:
                found = await event_to_applied_ms(live, plan.some(EVENTS))
            values[EVENT_KEY] = round(p99(found.applied), 1)
            details["event_to_applied_ms"] = {**summary(found.applied), "any_write": summary(found.written)}
        for key, size, rounds, figure in (
            ("replan_100x2000_p99_ms", MEDIUM, ROUNDS, "p99"),
            ("replan_100x10000_ms", LARGE, ROUNDS_LARGE, "p50"),
            ("replan_1x10000_ms", ONE_QUEUE, ROUNDS_LARGE, "p50"),
        ):
            if not plan.wants(key, LIVE):
                continue
            async with live_planner(Path(folder, key), shrunk(size, plan.scale), plan.seed, plan.say) as live:
                replans = await replan_ms(live, plan.some(rounds), plan.seed)
            values[key] = summary(replans)[figure]
            details[key] = {**summary(replans), "caught_up_s": round(live.caught_up_s, 2)}
    return Measured(values=values, details=details)
