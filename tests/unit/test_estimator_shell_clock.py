"""The leader's loop on the memory twin of the queue's server, whose clock steps; and its loads before it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_estimator.config import EstimatorSettings
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.predictions import Judged, Predicted, quantiles_of
from qlm_estimator.shell import EstimatorShell
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.leases import RoleElection
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.overview import Overview
from qlm_queue.values import ESTIMATOR_ROLE, Bounds

PATIENCE_S = 30.0
LOOK_EVERY_S = 1_000.0


class World(MemoryQueue):
    """A server whose clock a test sets, and a count of readings of its queue."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0
        self.polls = 0
        super().__init__("test", Bounds(), lambda: self.now_s)

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        self.polls += 1
        return await super().overview(group_ids)


class WorldClock(ServerClock):
    """The server's clock, as it is."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._world = world

    def now_s(self) -> float:
        return self._world.now_s


async def until(condition: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.005)


async def test_a_clock_set_back_by_an_hour_silences_nothing() -> None:
    world, metrics = World(), EstimatorMetrics()
    shell = EstimatorShell(
        queue=world,
        clock=WorldClock(world),
        settings=EstimatorSettings(overview_every_s=LOOK_EVERY_S, read_block_s=0.01),
        catalogue={"chat": ModelSpec(name="chat", profile="Mistral-7B")},
        shipped=shipped_snapshot(),
        metrics=metrics,
    )

    def judge() -> None:
        assert shell.outcomes is not None
        predicted = Predicted(queue_id="1", at_s=world.now_s, completion=quantiles_of(2.0, 4.0), model="chat", gpu="A100-80GB", n_gpu=1)
        shell.outcomes.judge(Judged(predicted=predicted, at_s=world.now_s, completion_s=3.0))

    def shown() -> float | None:
        labels = {"time": "completion", "depth": "0"}
        return metrics.registry.get_sample_value("qlm_estimator_calibration_samples", labels)

    task = asyncio.create_task(shell.run(RoleElection(world, ESTIMATOR_ROLE, "h:1", ttl_s=1e6, renew_s=1e5)))
    try:
        await until(lambda: shell.outcomes, "it leads")
        judge()
        world.now_s += 10.0
        await until(lambda: shown() == 1.0, "the metrics of calibration")
        assert world.polls == 1
        world.now_s -= 3_600.0
        judge()
        await until(lambda: shown() == 2.0, "the metrics after the step")
        await until(lambda: world.polls == 2, "a look after the step")
        world.now_s += LOOK_EVERY_S
        await until(lambda: world.polls == 3, "the next look")
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
