"""A new leader reads on exactly where the last publication ended, and predicts with its length model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_process.wire import profile as profile_wire
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import ESTIMATOR_ROLE

from .estimator_rig import LEASE_S, Estimator, Rig, learned, until

CHAT: dict[str, Any] = {
    "model": "chat",
    "slo_class": "64s",
    "prompt_tokens_mean": 500.0,
    "prompt_tokens_variance": 0.0,
    "output_tokens_variance": 1.0,
    "samples": 10_000,
}


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(RedisQueue(server.url))
    await rig.start()
    yield rig
    await rig.queue.stop()


async def publish(rig: Rig, snapshot: ProfileSnapshot) -> None:
    """As a leader that stops then."""
    lease = await rig.queue.acquire_lease(ESTIMATOR_ROLE, "other", LEASE_S, "")
    assert lease is not None
    await rig.queue.publish_profiles(lease, snapshot.version, profile_wire.to_body(snapshot))
    await rig.queue.release_lease(lease)


@pytest.mark.parametrize("stated", [True, False], ids=["it says what it read", "it does not"])
async def test_a_new_leader_reads_on_after_the_last_entry_that_was_learned(server: EmbeddedServer, rig: Rig, stated: bool) -> None:
    """A publication holds what was read by then; its time is later than events that it had still to read."""
    await rig.serve(15, 64)
    entries = await rig.queue.read_events("0", 0.0, 10_000)
    await rig.serve(10, 64)
    now_s = await rig.queue.server_time_s()
    last = entries[-1].entry_id if stated else ""
    snapshot = ProfileSnapshot(version=1, made_s=now_s + 0.001, hardware=(), last_event_id=last)
    await publish(rig, snapshot)
    estimator = Estimator(server.url)
    await estimator.start()
    await rig.serve(5, 64)

    async def read() -> bool:
        return (estimator.metric("qlm_estimator_length_samples_total") or 0) >= (15 if stated else 5)

    await until(read, "events since are learned")
    assert round((await learned(estimator, 14 if stated else 4)).samples) == (15 if stated else 5)
    found = profile_wire.from_proto(await estimator.profiles())
    assert found.last_event_id == (await rig.queue.read_events(last or "0", 0.0, 10_000))[-1].entry_id
    assert estimator.metric("qlm_estimator_repeated_events_total") == 0
    await estimator.stop()
