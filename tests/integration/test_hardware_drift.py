"""An instance that begins to run otherwise, and one on GPUs that nobody knows: told in the log, the metrics and the profiles."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from qlm_process.wire import profile as profile_wire
from qlm_process.wire.instance import to_body
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import ESTIMATOR_ROLE

from .estimator_rig import A100, Estimator, Rig, until

AS_BEFORE_S = 0.02
SLOWER_S = 0.08
"""Of the server's clock, at a thousand times the speed: runs that take four times as long."""


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(RedisQueue(server.url))
    yield rig
    await rig.queue.stop()


@pytest.fixture
async def estimator(server: EmbeddedServer) -> AsyncIterator[Estimator]:
    estimator = Estimator(server.url)
    await estimator.start()
    yield estimator
    await estimator.stop()


async def leads(rig: Rig, estimator: Estimator) -> None:
    async def leading() -> bool:
        return await rig.queue.leader_address(ESTIMATOR_ROLE) == estimator.address

    await until(leading, "leadership")


async def test_a_change_of_speed_is_measured_and_published(rig: Rig, estimator: Estimator) -> None:
    await rig.start()
    await leads(rig, estimator)
    labels = {"instance": "a100-0", "model": "Mistral-7B"}

    def slowdown() -> float:
        return estimator.metric("qlm_estimator_slowdown_ratio", **labels) or 1.0

    async def learned() -> bool:
        await rig.serve(5, 2_000, seconds=AS_BEFORE_S)
        return (estimator.metric("qlm_estimator_prior_share_ratio", **labels) or 1.0) < 0.2

    await until(learned, "a speed of its own")
    before = slowdown()

    async def follows() -> bool:
        await rig.serve(5, 2_000, seconds=SLOWER_S)
        return slowdown() > 2.0 * before

    await until(follows, "the change")
    snapshot = profile_wire.from_proto(await estimator.profiles())
    (row,) = [row for row in snapshot.hardware if row.instance]
    assert row.slowdown > 2.0 * before


async def test_unknown_gpus_are_told_of_and_take_nothing_else_down(rig: Rig, estimator: Estimator) -> None:
    with capture_logs() as logs:
        await rig.start()
        await leads(rig, estimator)
        unknown = replace(A100, name="odd", gpu="B300")
        await rig.queue.register("odd", "nonce", to_body(unknown), 600.0)

        async def told() -> bool:
            return len(_told(logs)) == 2

        await until(told, "both pairs")
        await rig.serve(10, 40)
        assert A100.name in {queue.instance for queue in (await estimator.assess()).queues}
    assert {(entry["gpu"], entry["model"]) for entry in _told(logs)} == {("B300", "Mistral-7B"), ("B300", "Vicuna-13B")}


def _told(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [entry for entry in logs if entry["event"] == "hardware_unknown"]
