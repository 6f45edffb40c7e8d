"""Calls of operators: pages of live requests, and pauses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm.api.v1.request_pb2 import Admission, Request, TokenPrompt
from qlm.internal.v1.events_pb2 import EventKind, RequestEvents
from qlm_core.vocabulary.errors import QueueFull
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestState
from qlm_queue.operator_values import HELD_BACK_MAX, PAGE_BYTES_MAX, PAUSES_MAX, LivePage
from qlm_queue.values import BATCH_MAX, LiveRequest, Owned, RequestPlacement, RequeueCause

from .mirror import Mirror, live
from .scenario import CANCELLED, ROOMY, Scenario, acceptance, emission, key_of, placement, segment, tokens


async def page(mirror: Mirror, after: str = "", count: int = BATCH_MAX) -> LivePage:
    found = await mirror("live_requests", after, count)
    assert isinstance(found, LivePage)
    return found


async def test_live_requests_are_listed_in_pages_in_the_order_of_the_queue(scene: Scenario) -> None:
    mirror = scene.mirror
    assert await page(mirror) == LivePage(after="", requests=[])
    for number in range(5):
        scene.receipts[f"r{number}"] = await mirror("accept", acceptance(key_of(f"r{number}"), model=f"m{number % 2}"))
    await scene.place("g", "r0", "r2")
    await scene.pull()
    await mirror("cancel", key_of("r1"), CANCELLED)

    names, after = list[str](), ""
    for size in (2, 2, 0):
        found = await page(mirror, after, 2)
        assert len(found.requests) == size
        names += [request.key.request_id for request in found.requests]
        after = found.after
    assert after == ""
    assert names == ["r0", "r2", "r3", "r4"]
    states = [request.state for request in (await page(mirror)).requests]
    assert states == [RequestState.RUNNING if name in ("r0", "r2") else RequestState.ACCEPTED for name in names]
    with pytest.raises(ValueError, match="500"):
        await mirror("live_requests", "", BATCH_MAX + 1)


async def test_a_page_has_model_and_admission_and_no_prompt(mirror: Mirror) -> None:
    admission = Admission(prompt_tokens=3, output_tokens_max=7)
    said = Request(model="m", tokens=TokenPrompt(ids=[1, 2, 3]), application="secret", admission=admission)
    await mirror("accept", replace(acceptance(key_of("r1")), body=said.SerializeToString()))
    (listed,) = (await page(mirror)).requests
    assert Request.FromString(listed.body) == Request(model="m", admission=admission)


async def test_a_page_of_large_prompts_is_short(mirror: Mirror) -> None:
    for number in range(4):
        body = Request(model="m", text="x" * (PAGE_BYTES_MAX // 2)).SerializeToString()
        await mirror("accept", replace(acceptance(key_of(f"r{number}")), body=body))
    first = await page(mirror)
    assert [request.key.request_id for request in first.requests] == ["r0", "r1"]
    second = await page(mirror, first.after)
    assert [request.key.request_id for request in second.requests] == ["r2", "r3"]


# Pauses -----------------------------------------------------------------------------------------------------------------


async def pulled_names(scene: Scenario, model: str = "m", requests_max: int = 100) -> list[str]:
    result = await scene.mirror("pull", scene.agent, model, replace(ROOMY, requests_max=requests_max))
    return [request.key.request_id for request in result.pulled]


async def accept_all(scene: Scenario, *names: str, tenant: str = "default", model: str = "m") -> None:
    for name in names:
        scene.receipts[name] = await scene.mirror("accept", acceptance(key_of(name, tenant), model=model))


async def state_of(scene: Scenario, name: str, tenant: str) -> LiveRequest:
    return live(await scene.mirror("find", key_of(name, tenant)))


async def place(scene: Scenario, group: str, model: str, **tenants: str) -> None:
    """Requests, each with its tenant, into a group on the instance's queue."""
    requests = [
        RequestPlacement(queue_id=scene.receipts[name].queue_id, key=key_of(name, tenant), group_id=group)
        for name, tenant in tenants.items()
    ]
    await scene.mirror("place", scene.planner, [placement(group, model=model)], requests)


async def test_pauses_are_kept_and_reported_until_they_end(mirror: Mirror) -> None:
    assert await mirror("pause", PauseKind.MODEL, "m")
    assert await mirror("pause", PauseKind.TENANT, "a:b{c}%")
    assert not await mirror("pause", PauseKind.MODEL, "m")
    overview = await mirror("overview")
    assert [(pause.kind, pause.name) for pause in overview.pauses] == [(PauseKind.MODEL, "m"), (PauseKind.TENANT, "a:b{c}%")]
    now_s = await mirror.real.queue.server_time_s()
    assert all(0 <= now_s - pause.since_s < 60 for pause in overview.pauses)
    assert await mirror("resume", PauseKind.MODEL, "m")
    assert not await mirror("resume", PauseKind.MODEL, "m")
    for number in range(PAUSES_MAX - 1):
        await mirror("pause", PauseKind.MODEL, f"m{number}")
    with pytest.raises(QueueFull, match="resume one first"):
        await mirror("pause", PauseKind.MODEL, "m")


async def test_a_group_of_a_paused_model_leaves_the_head_and_is_not_pulled(scene: Scenario) -> None:
    mirror = scene.mirror
    await accept_all(scene, "r0", "r1", model="m")
    await accept_all(scene, "r2", model="other")
    await scene.place("g0", "r0", "r1")
    await place(scene, "g1", "other", r2="default")
    await scene.pull(1)
    await mirror("pause", PauseKind.MODEL, "m")

    polled = await mirror("pull", scene.agent, "", ROOMY)
    assert polled.head.group_id == "g1"
    assert await pulled_names(scene, "m") == []
    assert await pulled_names(scene, "other") == ["r2"]
    assert await scene.queue_of(UNASSIGNED) == ["g0"]
    assert (await state_of(scene, "r0", "default")).state is RequestState.RUNNING, "what runs runs on"
    assert (await state_of(scene, "r1", "default")).state is RequestState.PLACED

    await mirror("resume", PauseKind.MODEL, "m")
    await scene.apply(1, segment("a", 0, "g0"), touching=("a", UNASSIGNED))
    assert await pulled_names(scene, "m") == ["r1"]


async def test_a_request_that_is_held_back_keeps_its_place_among_those_that_wait(scene: Scenario) -> None:
    """Before a younger one that no planner has read."""
    mirror = scene.mirror
    for name in ("r0", "r1"):
        await accept_all(scene, name, tenant="t")
    await place(scene, "g", "m", r0="t")
    await mirror("pause", PauseKind.TENANT, "t")
    assert await pulled_names(scene) == []
    assert [each.key.request_id for each in await mirror("read_unplaced", "", 10)] == ["r0", "r1"]
    assert [each.key.request_id for each in await mirror("read_unplaced", "", 1)] == ["r0"]


async def test_requests_of_a_paused_tenant_leave_the_way_of_others(scene: Scenario) -> None:
    mirror = scene.mirror
    tenants = {"r0": "t", "r1": "u", "r2": "t", "r3": "t", "r4": "u"}
    for name, tenant in tenants.items():
        await accept_all(scene, name, tenant=tenant)
    await place(scene, "g", "m", **tenants)
    await mirror("pause", PauseKind.TENANT, "t")
    assert await pulled_names(scene) == ["r1", "r4"]
    for name in ("r0", "r2", "r3"):
        assert (await state_of(scene, name, "t")).state is RequestState.ACCEPTED
    assert [each.key.request_id for each in await mirror("read_unplaced", "", 10)] == ["r0", "r2", "r3"]
    events = [event for entry in await mirror("read_events", "0", 0, 100) for event in RequestEvents.FromString(entry.payload).events]
    assert [event.group_id for event in events if event.kind == EventKind.EVENT_KIND_UNPLACED] == ["g"] * 3

    await place(scene, "g2", "m", r0="t", r2="t", r3="t")
    assert await pulled_names(scene) == []
    await mirror("resume", PauseKind.TENANT, "t")
    await place(scene, "g3", "m", r0="t", r2="t", r3="t")
    assert await pulled_names(scene) == ["r0", "r2", "r3"]


async def test_a_request_that_is_held_back_keeps_its_output(scene: Scenario) -> None:
    mirror = scene.mirror
    await accept_all(scene, "r0")
    await scene.place("g", "r0")
    first = (await scene.pull())["r0"]
    await mirror("emit", scene.incarnation, [emission(first, 0, [1, 2])])
    await mirror("pause", PauseKind.TENANT, "default")
    owned = [Owned(queue_id=first.queue_id, key=first.key, attempt=first.attempt)]
    await mirror("requeue", scene.incarnation, owned, RequeueCause.EVICTED, b"")
    assert await pulled_names(scene) == []
    await mirror("resume", PauseKind.TENANT, "default")
    await scene.place("g", "r0")
    again = (await scene.pull())["r0"]
    assert (again.progress, again.attempt) == (tokens(1, 2), 2)


async def test_a_pull_holds_back_a_bounded_number(scene: Scenario) -> None:
    mirror = scene.mirror
    names = [f"r{number}" for number in range(HELD_BACK_MAX + 5)]
    with mirror.compared_at_the_end():
        await accept_all(scene, *names, tenant="t")
        await accept_all(scene, "last", tenant="u")
        await place(scene, "g", "m", **dict.fromkeys(names, "t"), last="u")
    await mirror("pause", PauseKind.TENANT, "t")
    assert await pulled_names(scene) == []
    assert (await mirror("overview")).unplaced == HELD_BACK_MAX
    assert await pulled_names(scene) == ["last"]


@pytest.mark.parametrize("requests_max", [1, 2])
async def test_a_paused_group_behind_pulled_requests_is_no_head(scene: Scenario, requests_max: int) -> None:
    mirror = scene.mirror
    await accept_all(scene, "r0", "r1")
    await accept_all(scene, "r2", model="paused")
    await accept_all(scene, "r3")
    await scene.place("g0", "r0", "r1")
    await place(scene, "g1", "paused", r2="default")
    await place(scene, "g2", "m", r3="default")
    await mirror("pause", PauseKind.MODEL, "paused")
    for expected in (["r0"], ["r1"], ["r3"]) if requests_max == 1 else (["r0", "r1"], ["r3"]):
        assert await pulled_names(scene, requests_max=requests_max) == expected
