"""SIGKILL of the server under load, with a slowed fsync: what was acknowledged is there after the restart (invariant 1).

At `process` (appendfsync no) and `disk` (always). With `everysec` nothing of the kind is promised: the server then postpones writes while
an fsync runs, which is why that setting is refused (redis_server_check.py).
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis.asyncio as redis

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_core.vocabulary.request import TERMINAL_STATES, RequestState
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import PLANNER_ROLE, Durability, Lease, PullBudget, RequestPlacement, StepStatus, TerminalRecord
from queue_dump_redis import dump_redis

from .conftest import binary_of
from .invariants import check_invariants
from .scenario import TTL_S, acceptance, completion, emission, key_of, placement, tokens

WORKERS = 8
ACKNOWLEDGED_BEFORE_THE_KILL = 300
DEADLINE_S = 120.0
ONE = PullBudget(requests_max=1, kv_tokens=1_000, output_reserve_tokens=1)
STAGES = ("accepted", "placed", "pulled", "emitted", "completed")


class Load:
    """Requests that go through the whole queue; remembers how far each was acknowledged to be."""

    def __init__(self, queue: RedisQueue) -> None:
        self.queue = queue
        self.acknowledged: dict[str, int] = {}
        self.steps = 0

    def _acknowledge(self, name: str, stage: str) -> None:
        self.acknowledged[name] = STAGES.index(stage)
        self.steps += 1

    async def work(self, worker: int, planner: Lease) -> None:
        """One worker with an instance of its own, until the server is away."""
        instance = f"i{worker}"
        _, agent = await self.queue.register(instance, "n", b"", TTL_S)
        for number in range(100_000):
            name = f"{worker}-{number}"
            receipt = await self.queue.accept(acceptance(key_of(name)))
            self._acknowledge(name, "accepted")
            if number % 3 == 2:
                continue  # stays unplaced
            wanted = RequestPlacement(queue_id=receipt.queue_id, key=key_of(name), group_id=f"g-{name}")
            await self.queue.place(planner, [placement(f"g-{name}", instance)], [wanted])
            self._acknowledge(name, "placed")
            (request,) = (await self.queue.pull(agent, "m", ONE)).pulled
            self._acknowledge(name, "pulled")
            await self.queue.emit(agent.role, [emission(request, 0, [number, 7])])
            self._acknowledge(name, "emitted")
            if number % 3 == 1:
                continue  # stays running: the next pull of this instance starts on the requests after it
            assert await self.queue.complete(agent.role, [completion(request, 2)]) == [StepStatus.DONE]
            self._acknowledge(name, "completed")

    async def check(self) -> None:
        """Everything acknowledged is there."""
        for name, stage in sorted(self.acknowledged.items()):
            receipt = await self.queue.accept(acceptance(key_of(name)))
            assert receipt.duplicate, f"{name} was acknowledged as {STAGES[stage]} and is gone"
            found = await self.queue.find(key_of(name))
            reached = {RequestState.ACCEPTED: 0, RequestState.PLACED: 1, RequestState.RUNNING: 3}.get(found.state, 4)
            assert reached >= stage or (reached, stage) == (3, 2), f"{name} was acknowledged as {STAGES[stage]} and is {found.state}"
            assert (found.state in TERMINAL_STATES) == isinstance(found, TerminalRecord)
            if stage >= STAGES.index("emitted"):
                number = int(name.partition("-")[2])
                assert (await self.queue.attach(key_of(name), "", 0)).progress == tokens(number, 7)


@pytest.fixture
def slow_fsync(tmp_path: Path) -> tuple[list[str], Path]:
    """A launcher under which every fsync takes 20 ms longer, and the file that records it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the shim that slows fsync")
    library, trace = tmp_path / "slow_fsync.so", tmp_path / "fsyncs"
    source = Path(__file__).with_name("slow_fsync.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    return ["env", f"LD_PRELOAD={library}", f"SLOW_FSYNC_TRACE={trace}"], trace


@pytest.mark.parametrize("server", ["valkey", "redis"])
@pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.DISK])
async def test_acknowledged_calls_survive_the_kill_of_the_server(
    durability: Durability, server: str, slow_fsync: tuple[list[str], Path], tmp_path: Path
) -> None:
    launcher, trace = slow_fsync
    embedded = EmbeddedServer(tmp_path / "state", durability, binary=binary_of(server), launcher=launcher)
    queue = RedisQueue(await embedded.start(), "kill", durability=durability, call_timeout_s=10.0)
    try:
        await queue.start()
        planner = await queue.acquire_lease(PLANNER_ROLE, "p", TTL_S, "")
        assert planner is not None
        load = Load(queue)
        workers = [asyncio.create_task(load.work(worker, planner)) for worker in range(WORKERS)]
        deadline_s = time.monotonic() + DEADLINE_S
        while load.steps < ACKNOWLEDGED_BEFORE_THE_KILL:
            assert time.monotonic() < deadline_s, f"only {load.steps} steps were acknowledged"
            await asyncio.sleep(0.001)
        await embedded.kill()
        ended = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(error, Unavailable) for error in ended), ended
        with pytest.raises(Unavailable):
            await queue.accept(acceptance(key_of("nobody hears")))

        await embedded.start()
        check_invariants(await dump_redis(queue))
        await load.check()
        assert len(load.acknowledged) >= ACKNOWLEDGED_BEFORE_THE_KILL // len(STAGES)
        if durability is Durability.DISK:
            assert trace.stat().st_size >= 10, "the shim did not slow the fsyncs"
    finally:
        await queue.stop()
        await embedded.stop()


@pytest.mark.parametrize(
    ("durability", "appendfsync"), [(Durability.PROCESS, "everysec"), (Durability.DISK, "everysec"), (Durability.DISK, "no")]
)
async def test_a_server_that_may_lose_acknowledged_writes_is_refused(durability: Durability, appendfsync: str, tmp_path: Path) -> None:
    embedded = EmbeddedServer(tmp_path / "state", Durability.PROCESS)
    url = await embedded.start()
    queue = RedisQueue(url, "refused", durability=durability)
    client = redis.Redis.from_url(url)
    try:
        await client.config_set("appendfsync", appendfsync)
        with pytest.raises(ConfigError, match="appendfsync"):
            await queue.start()
        await client.config_set("appendfsync", "always")
        await queue.start()
        await queue.accept(acceptance(key_of("r1")))
    finally:
        await queue.stop()
        await client.aclose()
        await embedded.stop()
