"""What operators call: pages of live requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm.api.v1.request_pb2 import Admission, Request, TokenPrompt
from qlm_core.request import RequestState
from qlm_queue.operator_values import PAGE_BYTES_MAX, LivePage
from qlm_queue.values import BATCH_MAX

from .mirror import Mirror
from .scenario import CANCELLED, Scenario, acceptance, key_of


async def page(mirror: Mirror, after: str = "", count: int = BATCH_MAX) -> LivePage:
    found = await mirror("live_requests", after, count)
    assert isinstance(found, LivePage)
    return found


async def test_live_requests_come_in_pages_in_the_order_of_the_queue(scene: Scenario) -> None:
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
