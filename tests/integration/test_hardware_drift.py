"""An instance that begins to run otherwise, and one on GPUs that nobody knows: reported in the log, the metrics and the profiles."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from qlm_process.wire.instance import to_body
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import ESTIMATOR_ROLE

from .estimator_rig import A100, Estimator, Rig, until


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


async def test_unknown_gpus_are_reported_and_take_nothing_else_down(rig: Rig, estimator: Estimator) -> None:
    with capture_logs() as logs:
        await rig.start()
        await leads(rig, estimator)
        unknown = replace(A100, name="odd", gpu="B300")
        await rig.queue.register("odd", "nonce", to_body(unknown), 600.0)

        async def both_reported() -> bool:
            return len(_unknown_hardware(logs)) == 2

        await until(both_reported, "both pairs")
        await rig.serve(10, 40)
        assert (await estimator.profiles()).version > 0
    assert {(entry["gpu"], entry["model"]) for entry in _unknown_hardware(logs)} == {("B300", "Mistral-7B"), ("B300", "Vicuna-13B")}


def _unknown_hardware(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [entry for entry in logs if entry["event"] == "hardware_unknown"]
