"""A sick engine server empties no queue: work moves elsewhere, or waits until the server is sound."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import qlm
from running_cluster import RunningCluster, wait_until
from running_text_server import RunningTextServer
from text_server import KEY, MODEL, POISON, text_prompt

REQUESTS = 40
POISONS = {5, 20}
SICK_S = 4.0
ANSWER_S = 240.0


pytestmark = pytest.mark.xdist_group("sick engine")


@dataclass(frozen=True)
class Site:
    """A cluster with two engine servers; each test says which are sick."""

    servers: tuple[RunningTextServer, RunningTextServer]
    client: qlm.Client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    servers = RunningTextServer().start(), RunningTextServer().start()
    try:
        with cluster_of(tmp_path_factory.mktemp("sick"), *servers) as cluster, qlm.Client(cluster.address) as client:
            yield Site(servers, client)
    finally:
        for server in servers:
            server.kill()


def set_status(server: RunningTextServer, status: int) -> None:
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


def submitted(client: qlm.Client, name: str) -> None:
    for number in range(REQUESTS):
        client.submit("m", text_prompt(number, 10, 5), request_id=f"{name}{number}", slo_s=3600, max_tokens=20)


def results(client: qlm.Client, name: str) -> list[qlm.Result]:
    found = [client.result(f"{name}{number}", wait_s=0.0) for number in range(REQUESTS)]
    return [result for result in found if result is not None]


def all_ended(client: qlm.Client, name: str) -> list[qlm.Result]:
    wait_until(lambda: len(results(client, name)) == REQUESTS, ANSWER_S, "all ended")
    return results(client, name)


def test_requests_wait_for_sick_servers_and_then_complete(site: Site) -> None:
    for server, status in zip(site.servers, (500, 401), strict=True):
        set_status(server, status)
    submitted(site.client, "s")
    time.sleep(SICK_S)
    assert not results(site.client, "s")
    for server in site.servers:
        set_status(server, 0)
    assert {result.state for result in all_ended(site.client, "s")} == {qlm.RequestState.COMPLETED}


def test_work_of_a_sick_server_moves_elsewhere(site: Site) -> None:
    set_status(site.servers[0], 500)
    submitted(site.client, "r")
    assert {result.state for result in all_ended(site.client, "r")} == {qlm.RequestState.COMPLETED}


def test_a_request_that_kills_the_engine_fails_and_no_other(site: Site) -> None:
    """All run on one server; the other one is sick."""
    server, ended = site.servers[1], threading.Event()
    set_status(site.servers[0], 500)

    def keep_running() -> None:
        """As a supervisor of the server does."""
        while not ended.wait(0.1):
            if not server.running:
                server.kill()
                server.start()

    supervisor = threading.Thread(target=keep_running)
    supervisor.start()
    try:
        for number in range(REQUESTS):
            bad = number in POISONS
            prompt = text_prompt(number, 10, 300)
            site.client.submit("m", f"{POISON} {prompt}" if bad else prompt, request_id=f"p{number}", slo_s=3600, max_tokens=400)
        found = all_ended(site.client, "p")
    finally:
        ended.set()
        supervisor.join()
    assert {number for number, result in enumerate(found) if result.state is not qlm.RequestState.COMPLETED} == POISONS
    assert {result.error_reason for result in found} == {"", "ATTEMPTS_EXHAUSTED"}
