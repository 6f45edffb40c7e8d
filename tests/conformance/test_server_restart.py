"""A server that restarts, loses its functions, hangs, or is shared by two releases. Only real servers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.request import RequestState
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.port import Queue
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.scripts import library_source
from qlm_queue.values import Bounds

from .conftest import binary_of
from .mirror import Mirror
from .scenario import CANCELLED, Scenario, acceptance, completion, emission, key_of, tokens
from .subjects import MemorySubject, RedisSubject


class Restartable:
    """A server of its own, a mirrored queue on it, and the usual first steps."""

    def __init__(self, server: EmbeddedServer, subject: RedisSubject, scene: Scenario) -> None:
        self.server = server
        self.subject = subject
        self.scene = scene
        self.mirror = scene.mirror


@pytest.fixture(params=["valkey", "redis"])
async def restartable(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Restartable]:
    server = EmbeddedServer(tmp_path / "state", binary=binary_of(request.param))
    subject = RedisSubject(await server.start(), "restarted", Bounds())
    await subject.queue.start()
    scene = await Scenario(Mirror(subject, MemorySubject("restarted", Bounds()))).open()
    yield Restartable(server, subject, scene)
    await subject.stop()
    await server.stop()


async def _one_of_each(scene: Scenario) -> None:
    """A request in every state."""
    await scene.accept("first")
    await scene.queue_up("g", "done", "cancelled", "running", "placed")
    await scene.accept("last", expire_after_s=1_000.0)
    await scene.mirror("read_arrivals", 0, 1)
    pulled = await scene.pull(count=3)
    await scene.mirror("emit", scene.incarnation, [emission(pulled["running"], 0, [1, 2])])
    await scene.mirror("complete", scene.incarnation, [completion(pulled["done"], 0, [3])])
    await scene.mirror("cancel", key_of("cancelled"), CANCELLED)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_everything_is_there_after_a_restart(restartable: Restartable, how: str) -> None:
    scene, mirror = restartable.scene, restartable.mirror
    await _one_of_each(scene)
    before = await mirror.dump()
    await (restartable.server.stop() if how == "stop" else restartable.server.kill())
    with pytest.raises(Unavailable):
        await restartable.subject.queue.accept(acceptance(key_of("meanwhile")))
    await restartable.server.start()
    assert await mirror.dump() == before  # the same connections, the same functions
    await mirror.compare("the restart")
    (running,) = await mirror("owned", scene.incarnation)
    assert running.progress == tokens(1, 2)
    await mirror("complete", scene.incarnation, [completion(running, 2, [4])])
    await scene.queue_up("h", "new")
    assert list(await scene.pull()) == ["placed", "new"]
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 10)] == ["first", "last"]


async def test_the_functions_are_loaded_again_where_they_are_missing(restartable: Restartable) -> None:
    scene, mirror = restartable.scene, restartable.mirror
    await scene.queue_up("g", "r1")
    await restartable.subject.client.function_flush()
    assert list(await scene.pull()) == ["r1"]  # a writing one
    await restartable.subject.client.function_flush()
    assert len(await mirror("owned", scene.incarnation)) == 1  # a reading one


async def test_a_new_server_without_any_data_works(restartable: Restartable) -> None:
    """An own server whose data was wiped under a running queue: nothing hangs, new requests are served."""
    queue = restartable.subject.queue
    await queue.accept(acceptance(key_of("r1")))
    await restartable.subject.client.flushall()
    await restartable.subject.client.function_flush()
    receipt = await queue.accept(acceptance(key_of("r1")))
    assert (receipt.acceptance_number, receipt.duplicate) == (1, False)
    arrived = [*(await queue.read_arrivals(0, 10)), *(await queue.read_arrivals(0, 10))]
    assert [request.queue_id for request in arrived] == [receipt.queue_id]


async def test_a_server_that_hangs_is_unavailable_and_the_call_may_be_repeated(restartable: Restartable, tmp_path: Path) -> None:
    queue = RedisQueue(restartable.server.url, "hangs", call_timeout_s=0.2)
    await queue.start()
    assert restartable.server.pid is not None
    os.kill(restartable.server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable) as refused:
            await queue.accept(acceptance(key_of("r1")))
        assert refused.value.retry_after_s is not None
    finally:
        os.kill(restartable.server.pid, signal.SIGCONT)
    patient: Queue = RedisQueue(restartable.server.url, "hangs")
    await patient.start()
    first = await patient.accept(acceptance(key_of("r1")))
    assert first.acceptance_number == 1  # the lost call happened, or it did not: never twice
    assert (await queue.accept(acceptance(key_of("r1")))).duplicate
    await queue.stop()
    await patient.stop()


async def test_two_releases_share_a_server(restartable: Restartable) -> None:
    other = RedisSubject(restartable.server.url, "restarted", Bounds(), library=library_source() + "\n-- another release\n")
    await other.queue.start()
    await restartable.scene.queue_up("g", "r1")
    assert (await other.queue.find(key_of("r1"))).queue_id == restartable.scene.receipts["r1"].queue_id
    await other.queue.cancel(key_of("r1"), CANCELLED)
    assert (await restartable.subject.queue.find(key_of("r1"))).state is RequestState.CANCELLED
    await other.stop()


async def test_an_unreachable_server_is_unavailable() -> None:
    queue = RedisQueue("redis://127.0.0.1:1/0", "nowhere", call_timeout_s=1.0)
    with pytest.raises(Unavailable):
        await queue.start()
    with pytest.raises(Unavailable):
        await queue.accept(acceptance(key_of("r1")))
    await queue.stop()
