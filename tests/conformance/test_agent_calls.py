"""pull, emit, complete, unpull, requeue, owned and control."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm.api.v1.request_pb2 import RequestState as WireState
from qlm.api.v1.request_pb2 import Result, Timing
from qlm.internal.v1.events_pb2 import EventKind, RequestEvents
from qlm.internal.v1.frames_pb2 import Frame
from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import BATCH_MAX, ControlKind, Emission, RequeueCause, StepStatus

from .mirror import live
from .scenario import CANCELLED, FAILURE, ROOMY, Scenario, completion, emission, frames, key_of, owned, pieces, result_of, tokens

DONE, STALE, GAP, ENDED = StepStatus.DONE, StepStatus.STALE, StepStatus.GAP, StepStatus.ENDED
COUNTED = (RequeueCause.FAILED, RequeueCause.SUSPECTED)


async def test_owned_finds_the_requests_of_a_lost_answer_of_pull(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", "r3")
    pulled = await scene.pull(count=2)
    assert list(await scene.mirror("owned", scene.incarnation)) == list(pulled.values())
    assert await scene.mirror("owned", "nobody/1") == []
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r2"], 0, [1])])
    assert [request.progress for request in await scene.mirror("owned", scene.incarnation)] == [b"", tokens(1)]


async def test_emit_appends_and_sends_one_entry_a_gateway(scene: Scenario) -> None:
    await scene.accept("r1", "r2", gateway="g1")
    await scene.accept("r3", gateway="g2")
    await scene.place("g", "r1", "r2", "r3")
    pulled = await scene.pull()
    emissions = [emission(pulled[name], 0, [number]) for number, name in enumerate(("r1", "r3", "r2"))]
    assert await scene.mirror("emit", scene.incarnation, emissions) == [DONE] * 3
    assert [[frame.queue_id for frame in entry] for entry in await frames(scene, "g1")] == [[pulled["r1"].queue_id, pulled["r2"].queue_id]]
    assert [[list(frame.token_ids) for frame in entry] for entry in await frames(scene, "g2")] == [[[1]]]


async def test_emit_again_sends_nothing_and_a_part_only_new_output(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    first = emission(pulled["r1"], 0, [1, 2])
    assert await scene.mirror("emit", scene.incarnation, [first]) == [DONE]
    assert await scene.mirror("emit", scene.incarnation, [first]) == [DONE]
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 1, [2])]) == [DONE]
    assert len(await frames(scene)) == 1
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 1, [2, 3])]) == [DONE]
    assert (await scene.mirror("attach", key_of("r1"), "", 0)).progress == tokens(1, 2, 3)
    assert [[list(frame.token_ids) for frame in entry] for entry in await frames(scene)] == [[[1, 2]], [[2, 3]]]
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 3, [])]) == [DONE]  # nothing is new in nothing
    assert len(await frames(scene)) == 2


async def test_emit_with_a_gap_changes_nothing(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 1, [2])]) == [GAP]
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1]), emission(pulled["r1"], 1, [2])]) == [DONE, DONE]
    assert (await scene.mirror("attach", key_of("r1"), "", 0)).produced == 8


async def test_progress_may_be_stored_without_showing_it(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1, 2], shown=False)]) == [DONE]
    assert await frames(scene) == []
    assert (await scene.mirror("attach", key_of("r1"), "", 0)).progress == tokens(1, 2)


async def test_another_attempt_or_incarnation_changes_nothing(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    request = pulled["r1"]
    b = await scene.register("b")
    before = await scene.mirror.dump()
    wrong_attempts = [replace(request, attempt=attempt) for attempt in (0, 2)]
    wrong = [(scene.incarnation, other) for other in wrong_attempts]
    wrong += [(b.role, request), ("a/2", request), (scene.incarnation, replace(request, queue_id="1-1"))]
    wrong += [(scene.incarnation, replace(request, key=key_of("r2")))]
    for incarnation, named in wrong:
        assert await scene.mirror("emit", incarnation, [emission(named, 0, [1])]) == [STALE]
        assert await scene.mirror("complete", incarnation, [completion(named)]) == [STALE]
        assert await scene.mirror("unpull", incarnation, [owned(named)]) == [STALE]
        for cause in RequeueCause:
            assert await scene.mirror("requeue", incarnation, [owned(named)], cause, FAILURE) == [STALE]
    assert await scene.mirror.dump() == before


async def test_complete_ends_a_request_with_its_whole_output(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1, 2])])
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 2, [3])]) == [DONE]
    result = await result_of(scene, "r1")
    assert list(result.output_token_ids) == [1, 2, 3]
    assert (result.tenant, result.request_id, result.model, result.queue_id) == ("default", "r1", "m", pulled["r1"].queue_id)
    assert (result.state, result.attempts, result.incarnation) == (WireState.REQUEST_STATE_COMPLETED, 1, "a/1")
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (10, 3)
    assert 0 < result.timing.accepted_s <= result.timing.finished_s
    last = (await frames(scene))[-1][0]
    assert (last.offset, list(last.token_ids), last.attempt) == (2, [3], 1)
    assert (last.result.usage.output_tokens, last.result.request_id, list(last.result.output_token_ids)) == (3, "r1", [])
    assert await scene.mirror.real.leftovers() == []


async def test_complete_keeps_the_model_that_the_caller_names(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    said = Result(model="m:adapter").SerializeToString()
    await scene.mirror("complete", scene.incarnation, [replace(completion(pulled["r1"]), result=said)])
    assert (await result_of(scene, "r1")).model == "m:adapter"


async def test_times_are_those_of_the_placement_the_first_pull_and_the_first_output(scene: Scenario) -> None:
    later = scene.mirror.real.pass_time
    first = (await scene.run("r1"))["r1"]
    pulled_s = await later()
    await scene.mirror("emit", scene.incarnation, [emission(first, 0, [1])])
    emitted_s = await later()
    await scene.mirror("requeue", scene.incarnation, [owned(first)], RequeueCause.EVICTED, FAILURE)
    second = (await scene.pull())["r1"]
    await later()
    said = Result(timing=Timing(started_s=5.0, first_token_s=6.0, finished_s=7.0)).SerializeToString()
    await scene.mirror("complete", scene.incarnation, [replace(completion(second, 1, [2]), result=said)])
    timing = (await result_of(scene, "r1")).timing
    assert 0 < timing.accepted_s <= timing.placed_s <= timing.started_s <= pulled_s < timing.first_token_s <= emitted_s < timing.finished_s


async def test_a_pull_that_was_given_back_is_no_start(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    await scene.mirror("unpull", scene.incarnation, [owned(pulled["r1"])])
    await scene.mirror("cancel", key_of("r1"), b"")
    timing = (await result_of(scene, "r1")).timing
    assert (timing.started_s, timing.first_token_s) == (0.0, 0.0)
    assert timing.accepted_s <= timing.placed_s <= timing.finished_s


async def test_progress_says_whether_it_is_text(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2")
    text = Emission(queue_id=pulled["r1"].queue_id, key=key_of("r1"), attempt=1, offset=0, progress=pieces("a ", "b"), frame=b"", text=True)
    await scene.mirror("emit", scene.incarnation, [text, emission(pulled["r2"], 0, [1])])
    owned_now = await scene.mirror("owned", scene.incarnation)
    assert [request.text for request in owned_now] == [True, False]
    live = (await scene.mirror("attach", key_of("r1"), "", 0)).live
    assert live is not None
    assert live.text


async def test_completing_again_is_done_and_changes_nothing(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    last = completion(pulled["r1"], 0, [1])
    assert await scene.mirror("complete", scene.incarnation, [last]) == [DONE]
    before = await scene.mirror.dump()
    assert await scene.mirror("complete", scene.incarnation, [last]) == [DONE]
    older = replace(last, last=replace(last.last, attempt=0))
    otherwise = replace(last, state=RequestState.FAILED)
    assert await scene.mirror("complete", scene.incarnation, [older, otherwise]) == [STALE, STALE]
    assert await scene.mirror("complete", "b/1", [last]) == [STALE]
    assert await scene.mirror.dump() == before


async def test_an_older_attempt_cannot_end_a_request_of_a_newer_one(scene: Scenario) -> None:
    first = (await scene.run("r1"))["r1"]
    await scene.mirror("requeue", scene.incarnation, [owned(first)], RequeueCause.EVICTED, FAILURE)
    second = (await scene.pull())["r1"]
    assert (first.attempt, second.attempt) == (1, 2)
    assert await scene.mirror("complete", scene.incarnation, [completion(first)]) == [STALE]
    assert await scene.mirror("complete", scene.incarnation, [completion(second)]) == [DONE]
    assert await scene.mirror("complete", scene.incarnation, [completion(first)]) == [STALE]
    assert (await result_of(scene, "r1")).attempts == 2


async def test_complete_stores_only_new_output_and_refuses_a_gap(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2")
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1, 2])])
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 3, [4])]) == [GAP]
    assert live(await scene.mirror("find", key_of("r1"))).state is RequestState.RUNNING
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 1, [2, 3])]) == [DONE]
    assert list((await result_of(scene, "r1")).output_token_ids) == [1, 2, 3]


async def test_a_completion_without_a_frame_gets_one(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1, 2])])
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 2, [], shown=False)]) == [DONE]
    last = (await frames(scene))[-1][0]
    assert (last.queue_id, last.attempt, list(last.token_ids), last.result.attempts) == (pulled["r1"].queue_id, 1, [], 1)


async def test_complete_can_end_as_failed_and_nothing_else(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2")
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], state=RequestState.FAILED)]) == [DONE]
    assert (await scene.mirror("find", key_of("r1"))).state is RequestState.FAILED
    for state in (RequestState.CANCELLED, RequestState.EXPIRED, RequestState.PLACED):
        with pytest.raises(ValueError, match=r".*"):
            await scene.mirror("complete", scene.incarnation, [completion(pulled["r2"], state=state)])


async def test_text_output_is_kept_in_pieces(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2")
    for name in ("r1", "r2"):
        request = pulled[name]
        first = Emission(
            queue_id=request.queue_id,
            key=request.key,
            attempt=1,
            offset=0,
            progress=pieces("zw", "ei, drei"),
            frame=Frame(queue_id=request.queue_id, attempt=1, pieces=["zw", "ei, drei"]).SerializeToString(),
            text=True,
        )
        assert await scene.mirror("emit", scene.incarnation, [first]) == [DONE]
    offset = len(pieces("zw", "ei, drei"))
    last = replace(first, offset=offset, progress=pieces(" \u2603"), frame=b"", queue_id=pulled["r1"].queue_id, key=key_of("r1"))
    assert await scene.mirror("complete", scene.incarnation, [replace(completion(pulled["r1"]), last=last)]) == [DONE]
    assert list((await result_of(scene, "r1")).output_pieces) == ["zw", "ei, drei", " \u2603"]
    assert (await scene.mirror("attach", key_of("r1"), "", offset)).progress == pieces(" \u2603")
    await scene.mirror("cancel", key_of("r2"), CANCELLED)
    assert list((await result_of(scene, "r2")).output_pieces) == ["zw", "ei, drei"]


async def test_unpull_gives_back_to_the_place_and_counts_the_attempt(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2", "r3")
    assert await scene.mirror("unpull", scene.incarnation, [owned(pulled["r2"]), owned(pulled["r1"])]) == [DONE, DONE]
    assert await scene.mirror("unpull", scene.incarnation, [owned(pulled["r2"])]) == [STALE]
    assert [request.key.request_id for request in await scene.mirror("waiting", "g", 0, 9)] == ["r1", "r2"]
    again = await scene.pull()
    assert [(name, request.attempt, request.failed_attempts) for name, request in again.items()] == [("r1", 2, 0), ("r2", 2, 0)]


async def test_requeue_returns_to_the_exact_place_with_progress(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2", "r3", "r4")
    pulled = await scene.pull(count=3)
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r2"], 0, [7, 8])])
    assert await scene.mirror("requeue", scene.incarnation, [owned(pulled["r2"])], RequeueCause.EVICTED, FAILURE) == [DONE]
    assert [request.key.request_id for request in await scene.mirror("waiting", "g", 0, 9)] == ["r2", "r4"]
    again = await scene.pull(count=1)
    assert (again["r2"].progress, again["r2"].attempt, again["r2"].failed_attempts) == (tokens(7, 8), 2, 0)
    assert await scene.mirror("emit", scene.incarnation, [emission(again["r2"], 2, [9])]) == [DONE]


@pytest.mark.parametrize("cause", list(RequeueCause))
async def test_a_drained_group_is_opened_again_at_the_head(scene: Scenario, cause: RequeueCause) -> None:
    await scene.queue_up("g1", "r1")
    pulled = await scene.pull()
    await scene.queue_up("g2", "r2")
    await scene.queue_up("g3", "r3")
    earlier = len(await scene.mirror("read_control", "a", "0", 0))
    assert await scene.mirror("requeue", scene.incarnation, [owned(pulled["r1"])], cause, FAILURE) == [DONE]
    expected = ["g2", "g1", "g3"] if cause is RequeueCause.EVICTED else ["g1", "g2", "g3"]
    assert await scene.queue_of() == expected
    assert [entry.kind for entry in await scene.mirror("read_control", "a", "0", 0)][earlier:] == [ControlKind.WAKE]
    assert live(await scene.mirror("find", key_of("r1"))).failed_attempts == (1 if cause in COUNTED else 0)


@pytest.mark.parametrize("behind_head", [False, True])
async def test_a_drained_group_is_opened_again_before_or_behind_the_head(scene: Scenario, behind_head: bool) -> None:
    await scene.queue_up("g1", "r1")
    pulled = await scene.pull()
    await scene.queue_up("g2", "r2")
    await scene.queue_up("g3", "r3")
    assert await scene.mirror("unpull", scene.incarnation, [owned(pulled["r1"])], behind_head) == [DONE]
    assert await scene.queue_of() == (["g2", "g1", "g3"] if behind_head else ["g1", "g2", "g3"])
    assert live(await scene.mirror("find", key_of("r1"))).failed_attempts == 0


async def test_the_last_failed_attempt_ends_a_request(scene: Scenario) -> None:
    await scene.queue_up("g", "r1")
    for attempt in (1, 2, 3):
        request = (await scene.pull())["r1"]
        assert request.failed_attempts == attempt - 1
        await scene.mirror("emit", scene.incarnation, [emission(request, attempt - 1, [attempt])])
        status = await scene.mirror("requeue", scene.incarnation, [owned(request)], RequeueCause.FAILED, FAILURE)
        assert status == [ENDED if attempt == 3 else DONE]
    result = await result_of(scene, "r1")
    assert (result.state, result.error.reason) == (WireState.REQUEST_STATE_FAILED, "ATTEMPTS_EXHAUSTED")
    assert (list(result.output_token_ids), result.attempts, result.incarnation) == ([1, 2, 3], 3, "a/1")
    assert ControlKind.CANCEL not in [entry.kind for entry in await scene.mirror("read_control", "a", "0", 0)]
    assert (await frames(scene))[-1][0].result.error.reason == "ATTEMPTS_EXHAUSTED"
    assert await scene.mirror.real.leftovers() == []


@pytest.mark.parametrize("cause", [RequeueCause.EVICTED, RequeueCause.DRAINED])
async def test_evictions_and_drains_never_end_a_request(scene: Scenario, cause: RequeueCause) -> None:
    await scene.queue_up("g", "r1")
    for attempt in range(1, 6):
        request = (await scene.pull())["r1"]
        assert (request.attempt, request.failed_attempts) == (attempt, 0)
        assert await scene.mirror("requeue", scene.incarnation, [owned(request)], cause, FAILURE) == [DONE]


async def test_an_owner_whose_lease_is_lost_still_writes_held_output(scene: Scenario) -> None:
    """The agent held frames and completions while the server was away; nobody took the requests from it."""
    pulled = await scene.run("r1", "r2", "r3")
    await scene.mirror.expire_lease(scene.incarnation)
    assert await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1])]) == [DONE]
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 1)]) == [DONE]
    assert await scene.mirror("unpull", scene.incarnation, [owned(pulled["r2"])]) == [DONE]
    assert await scene.mirror("requeue", scene.incarnation, [owned(pulled["r3"])], RequeueCause.DRAINED, FAILURE) == [DONE]


async def test_events_report_the_life_of_a_request(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    await scene.mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.FAILED, FAILURE)
    pulled = await scene.pull()
    await scene.mirror("unpull", scene.incarnation, [owned(pulled["r1"])])
    pulled = await scene.pull()
    await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 0, [1, 2])])
    entries = await scene.mirror("read_events", "0", 0, 100)
    events = [event for entry in entries for event in RequestEvents.FromString(entry.payload).events]
    assert [EventKind.Name(event.kind).removeprefix("EVENT_KIND_") for event in events] == [
        "ACCEPTED", "PULLED", "REQUEUED", "PULLED", "UNPULLED", "PULLED", "COMPLETED",
    ]  # fmt: skip
    assert {(event.queue_id, event.acceptance_number, event.prompt_tokens) for event in events} == {(pulled["r1"].queue_id, 1, 10)}
    assert [event.attempt for event in events] == [0, 1, 1, 2, 2, 3, 3]
    assert [event.incarnation for event in events] == ["", *["a/1"] * 6]
    assert [event.cause for event in events if event.cause] == ["failed"]
    assert [event.group_id for event in events] == ["", *["g"] * 6]
    last = events[-1]
    assert (last.model, last.output_tokens, last.started_s) == ("m", 2, 1.5)
    assert all(event.accepted_ms == int(pulled["r1"].accepted_s * 1000) for event in events)


async def test_events_report_when_the_first_output_of_a_returned_request_was_stored(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2")
    pulled = await scene.pull(count=2)
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [1])])
    await scene.mirror("requeue", scene.incarnation, [owned(pulled["r1"]), owned(pulled["r2"])], RequeueCause.DRAINED, FAILURE)
    pulled = await scene.pull(count=2)
    await scene.mirror("unpull", scene.incarnation, [owned(pulled["r1"]), owned(pulled["r2"])])
    await scene.mirror("cancel", key_of("r1"), CANCELLED)
    await scene.mirror("cancel", key_of("r2"), CANCELLED)
    entries = await scene.mirror("read_events", "0", 0, 100)
    events = [event for entry in entries for event in RequestEvents.FromString(entry.payload).events]
    found = [
        (EventKind.Name(event.kind).removeprefix("EVENT_KIND_"), event.queue_id)
        for event in events
        if event.first_token_s >= pulled["r1"].accepted_s
    ]
    assert found == [(kind, pulled["r1"].queue_id) for kind in ("REQUEUED", "UNPULLED", "CANCELLED")]
    assert sum(event.first_token_s > 0.0 for event in events) == len(found)


async def test_lists_are_bounded_and_may_be_empty(scene: Scenario) -> None:
    pulled = await scene.run("r1")
    request = pulled["r1"]
    for operation, item, rest in (
        ("emit", emission(request, 0, [1]), ()),
        ("complete", completion(request), ()),
        ("unpull", owned(request), ()),
        ("requeue", owned(request), (RequeueCause.EVICTED, FAILURE)),
    ):
        assert await scene.mirror(operation, scene.incarnation, [], *rest) == []
        with pytest.raises(ValueError, match=r".*"):
            await scene.mirror(operation, scene.incarnation, [item] * (BATCH_MAX + 1), *rest)
    for operation, args in (
        ("pull", (scene.agent, "m", replace(ROOMY, requests_max=BATCH_MAX + 1))),
        ("read_arrivals", (0, BATCH_MAX + 1)),
        ("read_unplaced", ("", BATCH_MAX + 1)),
        ("waiting", ("g", 0, BATCH_MAX + 1)),
    ):
        with pytest.raises(ValueError, match=r".*"):
            await scene.mirror(operation, *args)
    assert live(await scene.mirror("find", key_of("r1"))).state is RequestState.RUNNING


async def test_one_call_may_hold_good_and_stale_items(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2", "r3")
    gone = replace(pulled["r2"], attempt=9)
    ends = [completion(pulled["r1"]), completion(gone), completion(pulled["r1"])]
    assert await scene.mirror("complete", scene.incarnation, ends) == [DONE, STALE, DONE]
    items = [owned(gone), owned(pulled["r3"]), owned(pulled["r3"])]
    assert await scene.mirror("requeue", scene.incarnation, items, RequeueCause.EVICTED, FAILURE) == [STALE, DONE, STALE]


async def test_control_is_read_after_an_entry(scene: Scenario) -> None:
    mirror = scene.mirror
    assert await mirror("read_control", "a", "0", 0) == []
    await scene.queue_up("g1", "r1")
    first = await mirror("read_control", "a", "0", 0)
    await scene.queue_up("g2", "r2")
    later = await mirror("read_control", "a", first[-1].entry_id, 0)
    assert [entry.kind for entry in later] == [ControlKind.WAKE]
    assert await mirror("read_control", "a", later[-1].entry_id, 0) == []
    assert await mirror("read_control", "a", "$", 0) == []
    assert await mirror("read_control", "b", "0", 0) == []
