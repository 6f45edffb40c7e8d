"""`qlm up` on a server of one's own: several queues on it, each durable to disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import qlm
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Durability
from running_cluster import RunningCluster

MODEL = "mistral-7b"
ANSWER_S = 60.0
COMMAND_TIMEOUT_S = 60


@pytest.fixture(params=[Durability.DISK], ids=["disk"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """A server that somebody else runs."""
    server = EmbeddedServer(tmp_path / "own-server", request.param)
    yield await server.start()
    await server.stop()


def cluster_of(folder: Path, url: str, queue: str) -> RunningCluster:
    settings = {
        "queue.url": url,
        "queue.name": queue,
        "queue.durability": "disk",
        "agent.simulated.time_scale": "20",
        "agents": "[{name: a100-0, gpu: A100-80GB, models: [mistral-7b]}]",
    }
    return RunningCluster(folder / queue, settings)


async def test_queues_on_one_server_know_nothing_of_each_other(url: str, tmp_path: Path) -> None:
    one, two = cluster_of(tmp_path, url, "one"), cluster_of(tmp_path, url, "two")
    with one, two:
        assert {process.service for process in one.state.processes} == {"gateway", "planner", "estimator", "agent"}
        with qlm.Client(one.address) as first, qlm.Client(two.address) as second:
            # In one queue, the same id with another body would be refused.
            assert not first.submit(MODEL, "To the first.", request_id="same", slo_s=30, max_tokens=20).duplicate
            assert not second.submit(MODEL, "To the second one.", request_id="same", slo_s=30, max_tokens=20).duplicate
            results = [client.result("same", wait_s=ANSWER_S) for client in (first, second)]
            assert [result and result.state for result in results] == [qlm.RequestState.COMPLETED] * 2
            assert results[0] is not None
            assert results[1] is not None
            assert results[0].token_ids != results[1].token_ids
            assert (first.status().queue, second.status().queue) == ("one", "two")
        assert one.interrupt() == 0, one.log()
        with qlm.Client(two.address) as second:
            assert sum(chunk.count for chunk in second.generate(MODEL, "The other goes on.", slo_s=30, max_tokens=20)) > 0
        assert two.interrupt() == 0, two.log()
    # The server outlived both clusters, with what they had stored.
    queue = RedisQueue(url, "one")
    await queue.start()
    assert (await queue.find(RequestKey("default", "same"))).state is RequestState.COMPLETED
    await queue.stop()


@pytest.mark.parametrize("url", [Durability.PROCESS], ids=["process"], indirect=True)
def test_a_server_that_does_not_keep_the_durability_is_refused(url: str, tmp_path: Path) -> None:
    arguments = ["up", "--state-dir", str(tmp_path / "state"), "--set", f"queue.url={url}", "--set", "queue.durability=disk"]
    ended = subprocess.run(
        [sys.executable, "-m", "qlm_cli", *arguments, "--set", 'gateways=[{name: gateway-0, listen: "127.0.0.1:0"}]'],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "queue.durability 'disk' needs a server with appendonly yes and appendfsync always" in ended.stderr
    assert "Traceback" not in ended.stderr
