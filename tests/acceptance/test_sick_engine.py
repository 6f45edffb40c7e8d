"""A sick engine server empties no queue: work goes elsewhere, or waits until the server is sound."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import qlm
from running_cluster import RunningCluster
from running_text_server import RunningTextServer
from text_server import KEY, MODEL, POISON, text_prompt

REQUESTS = 40
POISONS = {5, 20}
SICK_S = 4.0
ANSWER_S = 60.0


@pytest.fixture
def server() -> Iterator[RunningTextServer]:
    server = RunningTextServer().start()
    yield server
    server.kill()


def told(server: RunningTextServer, status: int) -> None:
    """All completions are answered with this from now on; 0: they are served."""
    body = json.dumps({"name": "none", "count": 0, "status": status}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    urlopen(Request(f"{server.url}/fault", data=body, headers=headers)).close()


def cluster_of(folder: Path, *servers: RunningTextServer) -> RunningCluster:
    agents = ", ".join(f"{{name: i{at}, openai: {{base_url: '{server.url}'}}}}" for at, server in enumerate(servers))
    settings = {
        "models": "[{name: m, profile: Mistral-7B, context_tokens_max: 2048}]",
        "agent.gpu": "A100-80GB",
        "agent.engine": "openai",
        "agent.models": "[m]",
        "agent.openai.output": "text",
        "agent.openai.api_key_env": "SERVER_KEY",
        "agent.openai.models": f"{{m: {{remote: {MODEL}}}}}",
        "agent.openai.kv_capacity_tokens": "20000",
        "agents": f"[{agents}]",
    }
    return RunningCluster(folder / "cluster", settings, {"SERVER_KEY": KEY})


def submitted(client: qlm.Client) -> None:
    for number in range(REQUESTS):
        client.submit("m", text_prompt(number, 10, 5), request_id=f"r{number}", slo_s=3600, max_tokens=20)


def states(client: qlm.Client) -> list[qlm.RequestState]:
    results = [client.result(f"r{number}", wait_s=0.0) for number in range(REQUESTS)]
    return [result.state for result in results if result is not None]


def all_completed(client: qlm.Client) -> None:
    deadline_s = time.monotonic() + ANSWER_S
    while len(states(client)) < REQUESTS and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert states(client) == [qlm.RequestState.COMPLETED] * REQUESTS


@pytest.mark.parametrize("status", [500, 401])
def test_requests_wait_for_a_sick_server_and_then_complete(server: RunningTextServer, tmp_path: Path, status: int) -> None:
    told(server, status)
    with cluster_of(tmp_path, server) as cluster, qlm.Client(cluster.address) as client:
        submitted(client)
        time.sleep(SICK_S)
        assert states(client) == []
        told(server, 0)
        all_completed(client)


def test_work_of_a_sick_server_goes_elsewhere(server: RunningTextServer, tmp_path: Path) -> None:
    sound = RunningTextServer().start()
    try:
        with cluster_of(tmp_path, server, sound) as cluster, qlm.Client(cluster.address) as client:
            told(server, 500)
            submitted(client)
            all_completed(client)
    finally:
        sound.kill()


def test_who_kills_the_engine_fails_and_nobody_else(server: RunningTextServer, tmp_path: Path) -> None:
    ended = threading.Event()

    def keep_running() -> None:
        """As a supervisor of the server does."""
        while not ended.wait(0.1):
            if not server.running:
                server.kill()
                server.start()

    supervisor = threading.Thread(target=keep_running)
    with cluster_of(tmp_path, server) as cluster, qlm.Client(cluster.address) as client:
        supervisor.start()
        try:
            for number in range(REQUESTS):
                bad = number in POISONS
                prompt = text_prompt(number, 10, 300)
                client.submit("m", f"{POISON} {prompt}" if bad else prompt, request_id=f"r{number}", slo_s=3600, max_tokens=400)
            deadline_s = time.monotonic() + ANSWER_S
            while len(states(client)) < REQUESTS and time.monotonic() < deadline_s:
                time.sleep(0.2)
        finally:
            ended.set()
            supervisor.join()
        results = [client.result(f"r{number}", wait_s=0.0) for number in range(REQUESTS)]
    found = {number for number, result in enumerate(results) if result is None or result.state is not qlm.RequestState.COMPLETED}
    assert found == POISONS
    assert {result.error_reason for result in results if result is not None} == {"", "ATTEMPTS_EXHAUSTED"}
