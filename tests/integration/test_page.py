"""The page for operators and its JSON, at a real gateway: who sees what, one reading for all, timelines, and nothing of a prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import qlm
from browser import opened_tab
from identity_files import add_key
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_gateway.front import timeline
from qlm_process.identity.keys import Role

from .gateway_rig import MODEL, PATIENCE_S, Rig
from .http_rig import HTTP, http_gateway

SECRET = "the code of the safe is 8812"
JSON_PATHS = ("/page/cluster", "/page/request?id=x")
HOSTILE = '<img src=x onerror="document.title=1">'


async def get(url: str, path: str, key: str = "") -> tuple[int, Any]:
    """Status and document."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url + path, headers=headers) as answer:
        assert answer.headers["Content-Type"].startswith("application/json")
        if answer.status == 200:
            assert (answer.headers["Cache-Control"], answer.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
        return answer.status, await answer.json()


async def submitted(rig: Rig, address: str, request_id: str, tenant: str = "default") -> None:
    async with qlm.AsyncClient(address) as client:
        await client.submit(MODEL, SECRET, slo_s=60.0, max_tokens=20, request_id=request_id, tenant=tenant)


async def test_without_keys_loopback_sees_the_cluster_and_no_prompt(rig: Rig) -> None:
    gateway = await http_gateway(rig)
    await submitted(rig, gateway.address, "r1", tenant="acme")
    await rig.agent.place()
    status, document = await get(gateway.gateway.http_url, "/page/cluster")
    assert status == 200
    assert (document["queue"], document["live"], document["unplaced"]) == ("test", 1, 0)
    (instance,) = document["instances"]
    (group,) = instance["groups"]["shown"]
    assert (instance["name"], group["model"], group["waiting"]) == ("a100-0", MODEL, 1)
    assert [part["name"] for part in document["parts"]] == ["gateway", "planner", "estimator"]
    assert [part["problem"] for part in document["parts"]] == ["", "not known", "not known"]
    (request,) = document["requests"]
    assert {name: request[name] for name in ("tenant", "request_id", "model", "state", "instance")} == {
        "tenant": "acme", "request_id": "r1", "model": MODEL, "state": "placed", "instance": "a100-0",
    }  # fmt: skip
    assert [each["waiting"] for each in document["models"]] == [1]
    assert "safe" not in json.dumps(document)


async def test_the_queue_is_read_once_for_any_number_of_browsers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second all get one reading, byte for byte."""
    monkeypatch.setattr("qlm_gateway.front.http.page.routes.READ_EVERY_S", 3_600.0)
    gateway = await http_gateway(rig)
    found = await asyncio.gather(*(get(gateway.gateway.http_url, "/page/cluster") for _ in range(20)))
    assert {status for status, _ in found} == {200}
    assert len({json.dumps(document) for _, document in found}) == 1
    monkeypatch.setattr("qlm_gateway.front.http.page.routes.READ_EVERY_S", 0.0)
    _, later = await get(gateway.gateway.http_url, "/page/cluster")
    assert later["at_s"] > found[0][1]["at_s"]


async def statuses(url: str, *paths: str, key: str = "") -> list[int]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        return [(await session.get(path)).status for path in paths]


async def test_an_admin_port_takes_the_page_and_the_metrics_off_the_public_one(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    client, operator = add_key(file, "acme"), add_key(file, "ops", Role.OPERATOR)
    gateway = await rig.gateway(security={"key_file": str(file)}, http={**HTTP, "admin_listen": "127.0.0.1:0"})
    public, admin = gateway.gateway.http_url, gateway.gateway.admin_url
    assert await statuses(public, "/page", "/page/cluster", "/metrics", "/v1/models", key=operator) == [404, 404, 404, 200]
    assert await statuses(admin, "/page", "/page/cluster", "/metrics", "/v1/models", key=operator) == [200, 200, 200, 404]
    assert await statuses(admin, "/page", "/page/cluster", "/metrics", key=client) == [200, 403, 403]
    assert await statuses(admin, "/page", "/page/cluster", "/metrics") == [200, 401, 401]


async def test_without_an_admin_port_only_loopback_serves_them(rig: Rig) -> None:
    gateway = await http_gateway(rig)
    assert await statuses(gateway.gateway.http_url, "/page", "/metrics", "/v1/models") == [200, 200, 200]
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.gateway.http_url}/metrics") as answer:
        assert "qlm_gateway_http_answers_total" in await answer.text()
    others = await rig.gateway(security={"no_auth": True}, http={**HTTP, "listen": "0.0.0.0:0"})
    url = others.gateway.http_url.replace("0.0.0.0", "127.0.0.1")
    assert await statuses(url, "/page", "/page/cluster", "/metrics", "/v1/models") == [404, 404, 404, 200]


async def test_only_operators_see_it_where_there_are_keys(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    client, operator, service = add_key(file, "acme"), add_key(file, "ops", Role.OPERATOR), add_key(file, "services", Role.SERVICE)
    gateway = await rig.gateway(security={"key_file": str(file)}, http=HTTP)
    url = gateway.gateway.http_url
    for path in JSON_PATHS:
        assert [(await get(url, path, key))[0] for key in ("", "qlm_nonsense", client, service)] == [401, 401, 403, 403], path
    assert (await get(url, "/page/cluster", operator))[0] == 200
    async with qlm.AsyncClient(gateway.address, credentials=qlm.Credentials(api_key=client)) as sdk:
        await sdk.submit(MODEL, SECRET, max_tokens=20, request_id="theirs")
    status, document = await get(url, "/page/request?id=theirs&tenant=acme", operator)
    assert (status, document["request"]["state"]) == (200, "accepted")
    assert (await get(url, "/page/request?id=theirs", operator))[0] == 404, "an operator has a tenant of its own"


async def test_the_page_holds_no_data_and_runs_nothing_but_itself(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "acme")
    gateway = await rig.gateway(security={"key_file": str(file)}, http=HTTP)
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.gateway.http_url}/page") as answer:
        policy, html = answer.headers["Content-Security-Policy"], await answer.text()
    assert answer.status == 200
    assert "'unsafe" not in policy
    for rule in ("default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "innerHTML" not in html
    assert "://" not in html, "it works offline"


async def test_a_timeline_shows_each_attempt(rig: Rig) -> None:
    gateway = await http_gateway(rig)
    url = gateway.gateway.http_url
    await submitted(rig, gateway.address, "other")
    await submitted(rig, gateway.address, "mine")
    await rig.agent.start_all()
    await rig.agent.step(5)
    status, document = await get(url, "/page/request?id=mine")
    request = document["request"]
    assert (status, request["state"], request["output_tokens"], request["error"], request["finished"]) == (200, "running", 5, None, None)
    assert [each["what"] for each in document["timeline"]["recorded"]] == ["accepted", "placed", "first pull", "first token"]
    await rig.agent.evict_all()
    await rig.agent.pull()
    await rig.agent.step(15)
    async with asyncio.timeout(PATIENCE_S):
        while (await rig.queue.find(RequestKey("default", "mine"))).state is not RequestState.COMPLETED:
            await asyncio.sleep(0.01)
    _, document = await get(url, "/page/request?id=mine")
    record = document["timeline"]
    assert (document["request"]["state"], document["request"]["attempts"]) == ("completed", 2)
    assert [each["what"] for each in record["recorded"]] == ["accepted", "placed", "first pull", "first token", "completed"]
    assert [(each["what"], each["instance"], each["attempt"]) for each in record["events"] if each["what"] != "predicted"] == [
        ("pulled", "a100-0", 1), ("requeued: evicted", "a100-0", 1), ("pulled", "a100-0", 2),
    ]  # fmt: skip
    assert (record["accepted_seen"], record["more"]) == (True, False)
    times = [each["at_s"] for each in record["recorded"]]
    assert times == sorted(times)
    assert all(times[0] - 0.01 <= each["at_s"] <= times[-1] + 0.01 for each in record["events"])
    text = json.dumps(document)
    assert "safe" not in text
    assert document["request"]["result"] is None


async def test_a_long_timeline_is_read_in_pages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await http_gateway(rig)
    for number in range(6):
        await submitted(rig, gateway.address, f"r{number}")
    await rig.agent.start_all()
    await rig.agent.evict_all()
    url = gateway.gateway.http_url
    _, whole = await get(url, "/page/request?id=r2")
    assert len(whole["timeline"]["events"]) >= 2
    monkeypatch.setattr(timeline, "EVENTS_AT_ONCE", 2)
    monkeypatch.setattr(timeline, "CALLS_MAX", 1)
    events, after, pages = list[Any](), "", 0
    while True:
        _, document = await get(url, f"/page/request?id=r2&after={after}")
        events += document["timeline"]["events"]
        after, pages = document["timeline"]["position"], pages + 1
        if not document["timeline"]["more"]:
            break
    assert events == whole["timeline"]["events"]
    assert pages > 2


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("id=unknown", 404, "unknown_request"),
        ("id=", 400, "invalid_field"),
        ("id=x&after=0", 400, "invalid_field"),
        ("id=x&after=1-1%0a", 400, "invalid_field"),
        ("id=x&tenant=%ff", 400, "invalid_field"),
    ],
)
async def test_a_timeline_that_cannot_be_shown_is_an_error(rig: Rig, query: str, status: int, code: str) -> None:
    gateway = await http_gateway(rig)
    found, document = await get(gateway.gateway.http_url, f"/page/request?{query}")
    assert (found, document["error"]["code"]) == (status, code)


async def test_a_browser_wants_an_operators_key_and_shows_hostile_names_as_text(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    client, operator = add_key(file, HOSTILE), add_key(file, "ops", Role.OPERATOR)
    gateway = await rig.gateway(security={"key_file": str(file)}, http=HTTP)
    async with qlm.AsyncClient(gateway.address, credentials=qlm.Credentials(api_key=client)) as sdk:
        await sdk.submit(MODEL, SECRET, slo_s=0.5, max_tokens=20, request_id=HOSTILE)
    await rig.agent.place(within_s=0.5)
    async with opened_tab(tmp_path) as tab:
        await tab.open(f"{gateway.gateway.http_url}/page")
        for key, words in ((client, "not the key of an operator"), ("qlm_nonsense", "unknown or revoked")):
            await tab.until("document.activeElement?.id === 'key'", "it asks for a key")
            await tab.type(key)
            await tab.press("Enter")
            await tab.until(f"document.getElementById('login-text').textContent.includes({words!r})", words)
        assert await tab.evaluate("document.getElementById('all').hidden")
        await tab.until("document.activeElement?.id === 'key'", "it asks for a key")
        await tab.type(operator)
        await tab.press("Enter")
        await tab.until("!document.getElementById('all').hidden", "the cluster is shown")
        assert await tab.evaluate("document.querySelector('#requests button').textContent") == HOSTILE
        await tab.until("document.querySelector('#queues .late td:last-child')?.textContent === 'overdue'", "what is late stands out")
        await tab.evaluate("document.querySelector('#requests button').focus()")
        await tab.press("Enter")
        shown = await tab.until("document.querySelector('#story table') && document.getElementById('story').textContent", "a timeline")
        assert f"tenant {HOSTILE}" in shown
        assert await tab.evaluate("document.images.length + document.querySelectorAll('#all script').length") == 0
        assert await tab.evaluate("document.title") == "QLM"
        kept = await tab.evaluate("location.href + JSON.stringify([{...localStorage}, {...sessionStorage}]) + document.cookie")
        assert operator not in kept
        await gateway.stop()
        await tab.until("document.getElementById('down').textContent.startsWith('The gateway is not reachable')", "it says that it is away")
        # Refused keys and the gateway that left are all that a console shows; nothing broke the policy.
        assert not [problem for problem in tab.problems if "Security Policy" in problem or "exception" in problem.lower()]
