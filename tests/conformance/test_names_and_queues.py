"""Hostile names, and several queues on one server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qlm.api.v1.request_pb2 import Result
from qlm_core.vocabulary.errors import NotFound
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.keys import escape, unescape
from qlm_queue.values import PullBudget, RequestPlacement, StepStatus

from .mirror import Mirror
from .scenario import CANCELLED, Scenario, acceptance, completion, placement

HOSTILE = (":", "{", "}", "%", "a:b", "{x}", "%3A", "%25", "}:{", "::", "a b*?[c]\\", "req:default:r1", "1", "-", "\u00fc\u2603", "\n")


@pytest.mark.parametrize("text", HOSTILE)
def test_escaping_is_undone(text: str) -> None:
    assert unescape(escape(text)) == text
    assert not set(escape(text)) & set(":{}")


@pytest.mark.parametrize("text", HOSTILE)
async def test_hostile_tenants_and_request_ids_live_a_whole_life(scene: Scenario, text: str) -> None:
    mirror = scene.mirror
    keys = [RequestKey(text, "r"), RequestKey("t", text), RequestKey(text, text)]
    receipts = [await mirror("accept", acceptance(key)) for key in keys]
    assert len({receipt.queue_id for receipt in receipts}) == 3
    wanted = [RequestPlacement(queue_id=receipt.queue_id, key=key, group_id="g") for key, receipt in zip(keys, receipts, strict=True)]
    assert await mirror("place", scene.planner, [placement("g")], wanted) == [StepStatus.DONE] * 3
    pulled = await mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=1_000_000, output_reserve_tokens=1))
    assert [request.key for request in pulled.pulled] == keys
    assert await mirror("complete", scene.incarnation, [completion(request) for request in pulled.pulled[:2]]) == [StepStatus.DONE] * 2
    await mirror("cancel", keys[2], CANCELLED)
    for key in keys:
        result = Result.FromString((await mirror("find", key)).result)
        assert (result.tenant, result.request_id) == (key.tenant, key.request_id)
    assert await mirror.real.leftovers() == []


async def test_names_that_would_collide_without_escaping_are_different_requests(mirror: Mirror) -> None:
    keys = [RequestKey("a:b", "c"), RequestKey("a", "b:c"), RequestKey("a%3Ab", "c"), RequestKey("a", "b%3Ac")]
    receipts = [await mirror("accept", acceptance(key)) for key in keys]
    assert [receipt.acceptance_number for receipt in receipts] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", HOSTILE)
async def test_hostile_instances_groups_gateways_and_classes(mirror: Mirror, text: str) -> None:
    scene = Scenario(mirror)
    await scene.open()
    agent = await scene.register(text)
    await scene.accept("r1", gateway=text, slo_class=text, model=text)
    assert await scene.place(text, "r1", instance=text, model=text) == [StepStatus.DONE]
    assert await scene.queue_of(text) == [text]
    pulled = await scene.pull(lease=agent, model=text)
    await mirror("complete", agent.role, [completion(pulled["r1"])])
    assert len(await mirror("read_frames", text, "0", 0)) == 1
    assert len(await mirror("read_control", text, "0", 0)) == 1
    assert await mirror.real.leftovers() == []


@pytest.mark.parametrize("names", [("one", "two"), ("x", "x:queue"), ("a", "{a}"), ("%", "%25"), ("*", "?")])
async def test_queues_on_one_server_know_nothing_of_each_other(make_mirror: Callable[..., Mirror], names: tuple[str, str]) -> None:
    scenes = []
    for name in names:
        mirror = make_mirror(name=name)
        await mirror.real.queue.start()
        assert mirror.real.queue.name == name
        scenes.append(await Scenario(mirror).open())
    await scenes[0].queue_up("g", "r1", "r2")
    with pytest.raises(NotFound):
        await scenes[1].mirror("find", RequestKey("default", "r1"))
    await scenes[1].queue_up("g", "r1")
    assert list(await scenes[0].pull()) == ["r1", "r2"]
    other = await scenes[1].pull()
    assert list(other) == ["r1"]
    await scenes[1].mirror("complete", scenes[1].incarnation, [completion(other["r1"])])
    assert await scenes[1].mirror.real.leftovers() == []
    assert len(await scenes[0].mirror("owned", scenes[0].incarnation)) == 2
    for scene in scenes:
        await scene.mirror.compare("all")
