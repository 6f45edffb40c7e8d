"""pull: what an agent takes from its virtual queue, within its budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_core.errors import LeaseLost
from qlm_core.request import RequestState
from qlm_queue.values import PullBudget, RequeueCause, StepStatus

from .mirror import live
from .scenario import ROOMY, Scenario, emission, key_of, owned, tokens

DONE, STALE, GAP, ENDED = StepStatus.DONE, StepStatus.STALE, StepStatus.GAP, StepStatus.ENDED
COUNTED = (RequeueCause.FAILED, RequeueCause.LOST)


async def test_pull_takes_ownership_and_counts_the_attempt(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2")
    pulled = await scene.pull(count=1)
    request = pulled["r1"]
    assert (request.queue_id, request.acceptance_number) == (scene.receipts["r1"].queue_id, 1)
    assert (request.group_id, request.attempt, request.failed_attempts, request.gateway) == ("g", 1, 0, "g1")
    assert (request.accepted_s, request.progress) == (scene.receipts["r1"].accepted_s, b"")
    found = live(await scene.mirror("find", key_of("r1")))
    assert (found.state, found.incarnation, found.attempt, found.body) == (RequestState.RUNNING, "a/1", 1, request.body)


async def test_pull_goes_through_groups_of_its_model(scene: Scenario) -> None:
    await scene.queue_up("g1", "r1", "r2")
    await scene.queue_up("g2", "r3")
    await scene.queue_up("other", "r4", model="n")
    await scene.queue_up("g3", "r5")
    result = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert [request.key.request_id for request in result.pulled] == ["r1", "r2", "r3"]
    assert (result.head_group, result.head_model, result.blocked_tokens) == ("other", "n", 0)
    nothing = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert (list(nothing.pulled), nothing.head_group, nothing.head_model) == ([], "other", "n")
    assert list(await scene.pull(model="n")) == ["r4"]
    assert list(await scene.pull()) == ["r5"]
    empty = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert (list(empty.pulled), empty.head_group, empty.head_model) == ([], "", "")


async def test_pull_without_a_model_tells_the_head(scene: Scenario) -> None:
    await scene.queue_up("g", "r1")
    told = await scene.mirror("pull", scene.agent, "", ROOMY)
    assert (list(told.pulled), told.head_group, told.head_model) == ([], "g", "m")
    none = await scene.mirror("pull", scene.agent, "m", replace(ROOMY, requests_max=0))
    assert (list(none.pulled), none.blocked_tokens) == ([], 0)


async def test_pull_stops_at_the_budget(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", "r3")
    result = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=30, output_reserve_tokens=5))
    assert ([request.key.request_id for request in result.pulled], result.blocked_tokens) == (["r1", "r2"], 15)
    full = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=14, output_reserve_tokens=5))
    assert (list(full.pulled), full.blocked_tokens, full.head_group) == ([], 15, "g")
    limited = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=1, kv_tokens=15, output_reserve_tokens=5))
    assert ([request.key.request_id for request in limited.pulled], limited.blocked_tokens) == (["r3"], 0)


async def test_an_idle_agent_gets_a_request_that_never_fits(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2")
    tiny = PullBudget(requests_max=9, kv_tokens=1, output_reserve_tokens=5)
    first = await scene.mirror("pull", scene.agent, "m", tiny)
    assert ([request.key.request_id for request in first.pulled], first.blocked_tokens) == (["r1"], 15)
    busy = await scene.mirror("pull", scene.agent, "m", tiny)
    assert (list(busy.pulled), busy.blocked_tokens) == ([], 15)


async def test_produced_tokens_count_for_the_budget(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2")
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r2"], 0, range(7))])
    await scene.mirror("unpull", scene.incarnation, [owned(pulled["r2"])])
    blocked = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=21, output_reserve_tokens=5))
    assert (list(blocked.pulled), blocked.blocked_tokens) == ([], 22)
    fits = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=22, output_reserve_tokens=5))
    assert [request.progress for request in fits.pulled] == [tokens(*range(7))]


async def test_pull_needs_the_live_lease(scene: Scenario) -> None:
    await scene.queue_up("g", "r1")
    with pytest.raises(LeaseLost):
        await scene.mirror("pull", replace(scene.agent, token="1:forged"), "m", ROOMY)
    await scene.mirror.expire_lease(scene.incarnation)
    with pytest.raises(LeaseLost):
        await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert live(await scene.mirror("find", key_of("r1"))).state is RequestState.PLACED
