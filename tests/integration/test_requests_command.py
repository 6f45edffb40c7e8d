"""`qlm requests`: list, show and cancel, on a gateway with a scripted agent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

import qlm
from qlm.errors import InvalidRequest
from qlm_cli.root import root

from .gateway_rig import MODEL, GatewayRun, Rig

PROMPT = "marked-secret-prompt"


async def run(gateway: GatewayRun, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, root, ["requests", *words, "--address", gateway.address])


async def listed(gateway: GatewayRun, *words: str) -> dict[str, Any]:
    done = await run(gateway, "list", "--json", *words)
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert isinstance(document, dict)
    return document


async def test_requests_are_listed_by_tenant_model_and_state_without_prompts(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, request_id="r0", slo_s=60, max_tokens=9)
        await rig.agent.start_all()
        await client.submit(MODEL, PROMPT, request_id="r1", tenant="other", slo=qlm.Slo.priority_of(3))
        await rig.agent.place()
        await client.submit(MODEL, PROMPT, request_id="r2", slo_s=60)

    everything = await listed(gateway)
    assert not everything["more"]
    found = everything["requests"]
    assert [(each["request_id"], each["tenant"], each["state"], each["slo_class"], each["instance"]) for each in found] == [
        ("r0", "default", "running", "64s", "a100-0"),
        ("r1", "other", "placed", "p3", "a100-0"),
        ("r2", "default", "accepted", "64s", ""),
    ]
    assert {each["model"] for each in found} == {MODEL}
    assert found[0]["deadline_s"] == pytest.approx(found[0]["accepted_s"] + 60)
    assert found[1]["deadline_s"] is None

    async def ids(*words: str) -> list[str]:
        return [each["request_id"] for each in (await listed(gateway, *words))["requests"]]

    assert await ids("--tenant", "other") == ["r1"]
    assert await ids("--state", "accepted") == ["r2"]
    assert await ids("--model", "another") == []
    assert await ids("--limit", "2") == ["r0", "r1"]
    assert (await listed(gateway, "--limit", "2"))["more"]

    shown = await run(gateway, "list")
    assert [word for word in ("r0", "64s", "running", "other", "a100-0") if word not in shown.output] == []
    assert PROMPT not in shown.output + json.dumps(everything)


async def test_pages_follow_each_other_to_the_end(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        names = [f"r{number}" for number in range(7)]
        for number, name in enumerate(names):
            await client.submit(MODEL, PROMPT, request_id=name, tenant=f"t{number % 2}")
        seen, after = list[str](), ""
        for _ in range(3):
            page = await client.requests(after=after, limit=3)
            seen += [each.request_id for each in page.requests]
            after = page.next_after
        assert seen == names
        assert after == ""
        first = await client.requests(tenant="t1", limit=2)
        second = await client.requests(tenant="t1", limit=2, after=first.next_after)
        assert [each.request_id for each in (*first.requests, *second.requests)] == ["r1", "r3", "r5"]
        for wrong in ({"limit": 501}, {"after": "first"}, {"state": qlm.RequestState.FAILED}, {"tenant": "\n"}):
            with pytest.raises(InvalidRequest, match="must be"):
                await client.requests(**wrong)


async def test_one_request_is_shown_until_after_its_end(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, request_id="r0", slo_s=60)
        waiting = await run(gateway, "show", "r0")
        assert [word for word in ("accepted", MODEL, "completion in 60 s", "age") if word not in waiting.output] == []
        await client.cancel("r0")
    ended = await run(gateway, "show", "r0")
    assert [word for word in ("cancelled", "a client cancelled it [CANCELLED]", "ended after") if word not in ended.output] == []
    document = json.loads((await run(gateway, "show", "r0", "--json")).output)
    assert (document["state"], document["model"], document["error_reason"]) == ("cancelled", MODEL, "CANCELLED")
    assert PROMPT not in waiting.output + ended.output
    unknown = await run(gateway, "show", "nobody")
    assert (unknown.exit_code, "UNKNOWN_REQUEST" in unknown.output) == (1, True)


async def test_cancelling_reports_ended_and_unknown_requests(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, PROMPT, request_id="done", max_tokens=1)
        await rig.agent.start_all()
        await rig.agent.step()
        await client.submit(MODEL, PROMPT, request_id="waits")
        ended = await run(gateway, "cancel", "done", "nobody", "waits")
        assert ended.output.splitlines() == [
            "done: has ended already: completed",
            "nobody: no such request of tenant default",
            "waits: cancelled",
        ]
        assert ended.exit_code == 1
        result = await client.result("waits", 0.0)
        assert result is not None
        assert result.state is qlm.RequestState.CANCELLED
        assert (await run(gateway, "cancel", "waits")).exit_code == 0
