"""pull: what an agent takes from its virtual queue, within its budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from qlm.internal.v1.events_pb2 import EventKind, RequestEvents
from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import BATCH_MAX, Bounds, Lease, PullBudget, PullResult, RequeueCause, StepStatus

from .mirror import Mirror, live
from .scenario import FAILURE, ROOMY, Scenario, emission, key_of, owned, placement, tokens

DONE, STALE, GAP, ENDED = StepStatus.DONE, StepStatus.STALE, StepStatus.GAP, StepStatus.ENDED
COUNTED = (RequeueCause.FAILED, RequeueCause.SUSPECTED)


def head_of(result: PullResult) -> tuple[str, str, int]:
    assert result.head is not None
    return result.head.group_id, result.head.model, result.head.waiting


async def test_pull_takes_ownership_and_counts_the_attempt(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2")
    pulled = await scene.pull(count=1)
    request = pulled["r1"]
    assert (request.queue_id, request.acceptance_number) == (scene.receipts["r1"].queue_id, 1)
    assert (request.group_id, request.attempt, request.failed_attempts, request.gateway) == ("g", 1, 0, "g1")
    assert (request.accepted_s, request.progress) == (scene.receipts["r1"].accepted_s, b"")
    found = live(await scene.mirror("find", key_of("r1")))
    assert (found.state, found.incarnation, found.attempt, found.body) == (RequestState.RUNNING, "a/1", 1, request.body)


def models_behind(result: PullResult) -> list[str]:
    return [group.model for group in result.behind]


async def test_pull_takes_from_each_group_of_its_model(scene: Scenario) -> None:
    await scene.queue_up("g1", "r1", "r2")
    await scene.queue_up("g2", "r3")
    await scene.queue_up("other", "r4", model="n")
    await scene.queue_up("g3", "r5")
    result = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert [request.key.request_id for request in result.pulled] == ["r1", "r2", "r3"]
    assert head_of(result) == ("other", "n", 1)
    assert (result.blocked_tokens, models_behind(result)) == (0, ["m"])
    last = RequestEvents.FromString((await scene.mirror("read_events", "0", 0, 100))[-1].payload).events
    assert {(event.kind, event.model) for event in last} == {(EventKind.EVENT_KIND_PULLED, "m")}
    nothing = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert (list(nothing.pulled), head_of(nothing)) == ([], ("other", "n", 1))
    assert list(await scene.pull(model="n")) == ["r4"]
    assert list(await scene.pull()) == ["r5"]
    empty = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert (list(empty.pulled), empty.head, list(empty.behind)) == ([], None, [])


async def test_pull_without_a_model_reports_the_head(scene: Scenario) -> None:
    await scene.queue_up("g", "r1")
    outcome = await scene.mirror("pull", scene.agent, "", ROOMY)
    assert (list(outcome.pulled), head_of(outcome)) == ([], ("g", "m", 1))
    none = await scene.mirror("pull", scene.agent, "m", replace(ROOMY, requests_max=0))
    assert (list(none.pulled), none.blocked_tokens) == ([], 0)


async def test_pull_reports_the_head_group_and_those_behind_it(scene: Scenario) -> None:
    for number, model in enumerate(("m", "n", "m", "o", "n", "p")):
        await scene.queue_up(f"g{number}", f"r{number}", f"s{number}", model=model)
    result = await scene.mirror("pull", scene.agent, "m", replace(ROOMY, requests_max=1))
    assert head_of(result) == ("g0", "m", 1)
    assert (result.head.waiting_prompt_tokens, result.head.meta) == (10, {"model": "m", "slo_class": "32s"})
    assert models_behind(result) == ["n", "m", "o", "n", "p"]
    first_deadlines = {each.group_id: each.first_deadline_s for each in (await scene.mirror.real.queue.overview()).groups.values()}
    assert [(each.waiting, each.slo_class, each.slo_kind) for each in result.behind] == [(2, "32s", "")] * 5
    assert [each.first_deadline_s for each in result.behind] == [first_deadlines[f"g{number}"] for number in range(1, 6)]
    result = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert (head_of(result), models_behind(result)) == (("g1", "n", 2), ["m", "o", "n", "p"])


async def test_as_many_groups_behind_the_head_are_reported_as_the_budget_allows(scene: Scenario) -> None:
    for number in range(4):
        await scene.queue_up(f"g{number}", f"r{number}", model=f"m{number}")
    for behind_max, models in ((0, []), (2, ["m1", "m2"]), (BATCH_MAX + 1, ["m1", "m2", "m3"])):
        result = await scene.mirror("pull", scene.agent, "", replace(ROOMY, behind_max=behind_max))
        assert (head_of(result), models_behind(result)) == (("g0", "m0", 1), models)


async def head_deadline(scene: Scenario, lease: Lease | None = None) -> float:
    """The same in the agent's answer and in the overview."""
    result = await scene.mirror("pull", lease or scene.agent, "", ROOMY)
    assert result.head is not None
    deadline_s: float = result.head.first_deadline_s
    group = (await scene.mirror.real.queue.overview()).groups[result.head.group_id]
    assert group.next_deadline_s == pytest.approx(deadline_s, rel=0, abs=0.01)
    return deadline_s


async def test_the_deadline_of_the_head_is_that_of_its_waiting_requests(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", first_deadline_s=10.0, slo_least_s=40.0)
    assert await head_deadline(scene) == scene.receipts["r1"].accepted_s + 40.0
    await scene.pull(count=1)
    assert await head_deadline(scene) == scene.receipts["r2"].accepted_s + 40.0
    await scene.queue_up("g", "r3", first_deadline_s=10.0, slo_least_s=30.0)
    await scene.queue_up("g", "r4", first_deadline_s=10.0, slo_least_s=35.0)
    assert await head_deadline(scene) == scene.receipts["r2"].accepted_s + 30.0


async def test_without_an_slo_the_head_has_the_deadline_of_its_group(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", first_deadline_s=10.0, slo_least_s=math.inf)
    assert await head_deadline(scene) == 10.0


async def test_the_head_has_the_deadline_of_its_group_where_that_is_later(scene: Scenario) -> None:
    await scene.accept("r1")
    late_s = scene.receipts["r1"].accepted_s + 500.0
    await scene.place("g", "r1", first_deadline_s=late_s, slo_least_s=20.0)
    assert await head_deadline(scene) == late_s
    b = await scene.register("b")
    await scene.queue_up("priority", "r2", instance="b", first_deadline_s=math.inf, slo_least_s=math.inf)
    assert await head_deadline(scene, b) == math.inf


async def test_a_group_that_a_request_returns_to_is_as_urgent_as_that_request(scene: Scenario) -> None:
    """Opened again for a later request, a group forgets the deadlines of those that run. Times follow the clock of the queue, so
    they are not compared with the twin's."""
    queue = scene.mirror.real.queue
    pulled = await scene.run("r1")
    await scene.accept("r2")
    accepted_s = scene.receipts["r1"].accepted_s
    later = placement("g", first_deadline_s=accepted_s + 900.0, slo_least_s=600.0)
    assert await queue.place(scene.planner, [later], [scene.wanted("r2", "g")]) == [DONE]
    assert (await queue.overview()).groups["g"].first_deadline_s == accepted_s + 900.0
    assert await queue.requeue(scene.incarnation, [owned(pulled["r1"])], RequeueCause.EVICTED, b"") == [DONE]
    group = (await queue.overview()).groups["g"]
    assert (group.first_deadline_s, group.slo_least_s) == (accepted_s + 20.0, 20.0)


async def test_pull_stops_at_the_budget(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", "r3")
    result = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=30, output_reserve_tokens=5))
    assert ([request.key.request_id for request in result.pulled], result.blocked_tokens) == (["r1", "r2"], 15)
    full = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=9, kv_tokens=14, output_reserve_tokens=5))
    assert (list(full.pulled), full.blocked_tokens, head_of(full)) == ([], 15, ("g", "m", 1))
    limited = await scene.mirror("pull", scene.agent, "m", PullBudget(requests_max=1, kv_tokens=15, output_reserve_tokens=5))
    assert ([request.key.request_id for request in limited.pulled], limited.blocked_tokens) == (["r3"], 0)


async def test_an_idle_agent_gets_a_request_that_never_fits(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2")
    tiny = PullBudget(requests_max=9, kv_tokens=1, output_reserve_tokens=5)
    first = await scene.mirror("pull", scene.agent, "m", tiny)
    assert ([request.key.request_id for request in first.pulled], first.blocked_tokens) == (["r1"], 15)
    busy = await scene.mirror("pull", scene.agent, "m", tiny)
    assert (list(busy.pulled), busy.blocked_tokens) == ([], 15)


async def test_an_agent_that_only_keeps_requests_aside_is_idle(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", "r3")
    tiny = PullBudget(requests_max=9, kv_tokens=1, output_reserve_tokens=5)
    first = await scene.mirror("pull", scene.agent, "m", tiny)
    assert [request.key.request_id for request in first.pulled] == ["r1"]
    second = await scene.mirror("pull", scene.agent, "m", replace(tiny, owned_aside=1))
    assert ([request.key.request_id for request in second.pulled], second.blocked_tokens) == (["r2"], 15)
    third = await scene.mirror("pull", scene.agent, "m", replace(tiny, owned_aside=1))
    assert (list(third.pulled), third.blocked_tokens) == ([], 15)


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


async def test_a_suspect_is_pulled_alone(scene: Scenario) -> None:
    await scene.queue_up("g", "bad", "r2", "r3")
    bad = (await scene.pull(count=1))["bad"]
    await scene.mirror("requeue", scene.incarnation, [owned(bad)], RequeueCause.SUSPECTED, FAILURE)
    alone = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert [request.key.request_id for request in alone.pulled] == ["bad"]
    assert not alone.suspect
    others = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert [request.key.request_id for request in others.pulled] == ["r2", "r3"]
    await scene.mirror("unpull", scene.incarnation, [owned(alone.pulled[0])])
    waits = await scene.mirror("pull", scene.agent, "m", ROOMY)
    assert (list(waits.pulled), waits.suspect, waits.blocked_tokens > 0) == ([], True, True)
    joining = await scene.mirror("pull", scene.agent, "m", replace(ROOMY, suspects=True))
    assert [request.key.request_id for request in joining.pulled] == ["bad"]


async def test_a_request_that_failed_twice_shares_no_batch(scene: Scenario) -> None:
    await scene.queue_up("g", "bad", "r2")
    for _ in range(2):
        bad = (await scene.pull(count=1))["bad"]
        await scene.mirror("requeue", scene.incarnation, [owned(bad)], RequeueCause.SUSPECTED, FAILURE)
    assert list(await scene.pull(model="m", count=9)) == ["bad"]
    again = list(await scene.mirror("owned", scene.incarnation))
    assert list(await scene.pull(count=9)) == ["r2"]
    await scene.mirror("unpull", scene.incarnation, [owned(again[0])])
    waits = await scene.mirror("pull", scene.agent, "m", replace(ROOMY, suspects=True))
    assert (list(waits.pulled), waits.suspect) == ([], True)


async def test_a_suspect_is_never_ended_by_what_others_may_have_done(scene: Scenario) -> None:
    await scene.queue_up("g", "r1")
    for failed in (0, 1, 2, 2, 2):
        request = (await scene.pull())["r1"]
        assert request.failed_attempts == failed
        assert await scene.mirror("requeue", scene.incarnation, [owned(request)], RequeueCause.SUSPECTED, FAILURE) == [DONE]
    request = (await scene.pull())["r1"]
    assert await scene.mirror("requeue", scene.incarnation, [owned(request)], RequeueCause.FAILED, FAILURE) == [ENDED]


async def test_the_loss_of_an_agent_is_no_attempt(make_mirror: Callable[..., Mirror]) -> None:
    mirror = make_mirror(Bounds(attempts_max=1, pulls_max=4))
    await mirror.real.queue.start()
    scene = await Scenario(mirror).open()
    await scene.queue_up("g", "r1")
    for attempt in (1, 2, 3, 4):
        request = (await scene.pull())["r1"]
        assert (request.attempt, request.failed_attempts) == (attempt, 0)
        await mirror.expire_lease(scene.incarnation)
        assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 1
        scene.agent = await scene.register("a")
    assert (await mirror("find", key_of("r1"))).state is RequestState.FAILED
