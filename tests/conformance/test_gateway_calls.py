"""accept, attach, cancel, expire and the frames that a gateway reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from qlm.api.v1.request_pb2 import Request, Result
from qlm.api.v1.request_pb2 import RequestState as WireState
from qlm.internal.v1.frames_pb2 import FrameBatch
from qlm_core.vocabulary.errors import NotFound, OffsetOutOfRange, QueueFull, RequestIdConflict
from qlm_core.vocabulary.request import RequestState
from qlm_queue.bounds import RECORD_BYTES
from qlm_queue.values import Bounds, ControlKind, LiveRequest, RequeueCause, StreamEntry, TerminalRecord

from .mirror import Mirror, live
from .scenario import CANCELLED, EXPIRED, Scenario, acceptance, completion, emission, key_of, owned, tokens


def frames_of(entries: list[StreamEntry]) -> list[FrameBatch]:
    return [FrameBatch.FromString(entry.payload) for entry in entries]


async def test_acceptance_numbers_and_queue_ids_grow(mirror: Mirror) -> None:
    receipts = [await mirror("accept", acceptance(key_of(f"r{i}"))) for i in range(5)]
    assert [receipt.acceptance_number for receipt in receipts] == [1, 2, 3, 4, 5]
    ids = [tuple(int(part) for part in receipt.queue_id.split("-")) for receipt in receipts]
    assert ids == sorted(set(ids))
    assert all(receipt.state is RequestState.ACCEPTED and not receipt.duplicate for receipt in receipts)
    now_s = await mirror.real.queue.server_time_s()
    assert all(0 <= now_s - receipt.accepted_s < 60 for receipt in receipts)


async def test_a_repeated_acceptance_is_the_same_request_in_every_state(scene: Scenario) -> None:
    mirror = scene.mirror
    wanted = acceptance(key_of("r1"))
    first = await mirror("accept", wanted)
    scene.receipts["r1"] = first
    for state in (RequestState.ACCEPTED, RequestState.PLACED, RequestState.RUNNING):
        again = await mirror("accept", wanted)
        assert (again.queue_id, again.acceptance_number, again.state, again.duplicate) == (first.queue_id, 1, state, True)
        assert again.accepted_s == first.accepted_s
        if state is RequestState.ACCEPTED:
            await scene.place("g", "r1")
        elif state is RequestState.PLACED:
            pulled = await scene.pull()
    await mirror("complete", scene.incarnation, [completion(pulled["r1"])])
    ended = await mirror("accept", wanted)
    assert (ended.queue_id, ended.acceptance_number, ended.accepted_s) == (first.queue_id, 0, 0.0)
    assert (ended.state, ended.duplicate) == (RequestState.COMPLETED, True)


async def test_an_id_with_another_body_is_refused_while_the_window_lasts(scene: Scenario) -> None:
    mirror = scene.mirror
    await mirror("accept", acceptance(key_of("r1")))
    with pytest.raises(RequestIdConflict):
        await mirror("accept", acceptance(key_of("r1"), salt="other"))
    await mirror("cancel", key_of("r1"), CANCELLED)
    with pytest.raises(RequestIdConflict):
        await mirror("accept", acceptance(key_of("r1"), salt="other"))
    await mirror.expire_result(key_of("r1"))
    new = await mirror("accept", acceptance(key_of("r1"), salt="other"))
    assert (new.acceptance_number, new.duplicate) == (2, False)


@pytest.mark.parametrize(
    ("bounds", "bound"),
    [(Bounds(queue_max=2), "queue"), (Bounds(tenant_max=2), "tenant"), (Bounds(class_max=2), "class")],
    ids=["queue", "tenant", "class"],
)
async def test_a_full_queue_refuses_and_has_room_again_after_an_end(make_mirror: Callable[..., Mirror], bounds: Bounds, bound: str) -> None:
    mirror = make_mirror(bounds)
    await mirror.real.queue.start()
    for name in ("r1", "r2"):
        await mirror("accept", acceptance(key_of(name)))
    with pytest.raises(QueueFull) as refused:
        await mirror("accept", acceptance(key_of("r3")))
    name = {"queue": "this queue", "tenant": "tenant 'default'", "class": "class '32s'"}[bound]
    assert refused.value.message == f"the queue is full: 2 live requests of {name}"
    assert (refused.value.details["bound"], refused.value.details["limit"]) == (bound, "2")
    assert (await mirror("accept", acceptance(key_of("r1")))).duplicate  # a repeat needs no room
    if bound != "queue":  # another tenant or class has room of its own
        await mirror("accept", acceptance(key_of("r4", "else" if bound == "tenant" else "default"), slo_class="1s"))
    await mirror("cancel", key_of("r1"), CANCELLED)
    assert not (await mirror("accept", acceptance(key_of("r3")))).duplicate


@pytest.mark.parametrize("bound", ["queue", "tenant", "class"])
async def test_bytes_of_requests_and_results_are_bounded(make_mirror: Callable[..., Mirror], bound: str) -> None:
    first = acceptance(key_of("r1"))
    size = RECORD_BYTES + len(first.body)
    mirror = make_mirror(Bounds(**{f"{bound}_bytes_max": 2 * size + len(CANCELLED)}))
    await mirror.real.queue.start()
    for name in ("r1", "r2"):
        await mirror("accept", acceptance(key_of(name)))
    with pytest.raises(QueueFull) as refused:
        await mirror("accept", acceptance(key_of("r3")))
    details = {"bound": f"{bound}_bytes", "limit": str(2 * size + len(CANCELLED)), "held": str(2 * size)}
    name = {"queue": "", "tenant": "default", "class": first.slo_class}[bound]
    assert refused.value.details == details | ({"name": name} if name else {})
    assert (f"of {bound} {name!r} hold" if name else "of this queue hold") in str(refused.value)
    assert (await mirror("accept", acceptance(key_of("r1")))).duplicate
    if bound != "queue":
        await mirror("accept", acceptance(key_of("r4", "else" if bound == "tenant" else "default"), slo_class="1s"))
    await mirror("cancel", key_of("r1"), CANCELLED)  # its result takes its place, less its body
    await mirror("cancel", key_of("r2"), CANCELLED)
    held = {(each.bound, each.name): each for each in await mirror("held")}
    mine = held[bound, {"queue": "", "tenant": "default", "class": first.slo_class}[bound]]
    assert (mine.held, mine.limit) == (2 * (RECORD_BYTES + len(CANCELLED)), 2 * size + len(CANCELLED))
    with pytest.raises(QueueFull) as refused:
        await mirror("accept", acceptance(key_of("r3")))
    assert 3500 < float(refused.value.details["retry_after_s"]) <= 3600  # the window of the first result
    await mirror.expire_result(key_of("r1"))
    assert not (await mirror("accept", acceptance(key_of("r3")))).duplicate


async def test_no_bound_in_bytes_refuses_nothing(make_mirror: Callable[..., Mirror]) -> None:
    mirror = make_mirror(Bounds(queue_bytes_max=0, tenant_bytes_max=0, class_bytes_max=0))
    await mirror.real.queue.start()
    await mirror("accept", acceptance(key_of("r1")))
    assert [(each.bound, each.name, each.limit) for each in await mirror("held")] == [
        ("queue", "", 0),
        ("tenant", "default", 0),
        ("class", acceptance(key_of("r1")).slo_class, 0),
    ]


async def test_output_is_counted_as_it_is_written(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "r1")
    before = (await mirror("held"))[0].held
    pulled = (await scene.pull())["r1"]
    await mirror("emit", scene.incarnation, [emission(pulled, 0, (1, 2, 3))])
    await mirror("emit", scene.incarnation, [emission(pulled, 1, (2, 3, 4))])  # four new bytes
    assert (await mirror("held"))[0].held == before + 16
    await mirror("requeue", scene.incarnation, [owned(pulled)], RequeueCause.EVICTED, b"")
    assert (await mirror("held"))[0].held == before + 16
    again = (await scene.pull())["r1"]
    end = completion(again, 4, (5,))
    await mirror("complete", scene.incarnation, [end])
    assert (await mirror("held"))[0].held == RECORD_BYTES + len(end.result) + 20


async def test_a_digest_has_16_bytes(mirror: Mirror) -> None:
    for digest in (b"", b"short", b"\x00" * 17):
        with pytest.raises(ValueError, match="16"):
            await mirror("accept", replace(acceptance(key_of("r1")), digest=digest))
    await mirror("accept", replace(acceptance(key_of("r1")), digest=b"\n\x00:{}% \xff" * 2))
    assert (await mirror("accept", replace(acceptance(key_of("r1")), digest=b"\n\x00:{}% \xff" * 2))).duplicate
    await mirror("cancel", key_of("r1"), CANCELLED)
    assert (await mirror("accept", replace(acceptance(key_of("r1")), digest=b"\n\x00:{}% \xff" * 2))).state is RequestState.CANCELLED


async def test_bounds_are_looked_at_in_a_fixed_order(make_mirror: Callable[..., Mirror]) -> None:
    mirror = make_mirror(Bounds(queue_max=1, tenant_max=1, class_max=1))
    await mirror.real.queue.start()
    await mirror("accept", acceptance(key_of("r1")))
    with pytest.raises(QueueFull) as refused:
        await mirror("accept", acceptance(key_of("r2")))
    assert refused.value.details["bound"] == "queue"


async def test_find_reports_the_accepted_request(mirror: Mirror) -> None:
    wanted = acceptance(key_of("r1"), gateway="g7", prompt_tokens=33)
    receipt = await mirror("accept", wanted)
    found = await mirror("find", key_of("r1"))
    assert isinstance(found, LiveRequest)
    assert (found.queue_id, found.acceptance_number, found.body, found.gateway) == (receipt.queue_id, 1, wanted.body, "g7")
    assert (found.state, found.group_id, found.incarnation, found.attempt) == (RequestState.ACCEPTED, "", "", 0)
    with pytest.raises(NotFound):
        await mirror("find", key_of("r2"))
    with pytest.raises(NotFound):
        await mirror("find", key_of("r1", "other"))


async def test_find_reports_when_it_was_first_pulled_and_first_made_output(scene: Scenario) -> None:
    """An eviction does not change these times."""
    mirror = scene.mirror

    async def times() -> tuple[float, float]:
        found = await mirror("find", key_of("r1"))
        assert isinstance(found, LiveRequest)
        return found.started_s, found.first_token_s

    await scene.accept("r1")
    assert live(await mirror("find", key_of("r1"))).placed_s == 0.0
    await scene.mirror.real.pass_time()
    await scene.place("g", "r1")
    placed = live(await mirror("find", key_of("r1")))
    assert placed.placed_s > placed.accepted_s
    assert await times() == (0.0, 0.0)
    request = (await scene.pull())["r1"]
    started_s, _ = await times()
    assert started_s >= request.accepted_s
    await mirror("emit", scene.incarnation, [emission(request, 0, [7])])
    first_token_s = (await times())[1]
    assert first_token_s >= started_s
    await mirror("requeue", scene.incarnation, [owned(request)], RequeueCause.EVICTED, b"")
    await scene.pull()
    assert await times() == (started_s, first_token_s)


async def test_cancel_ends_a_request_in_any_state_and_once(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "running")
    await scene.pull()
    await scene.queue_up("g", "placed")
    await scene.accept("accepted")
    for name in ("accepted", "placed", "running"):
        assert await mirror("cancel", key_of(name), CANCELLED) is RequestState.CANCELLED
        assert await mirror("cancel", key_of(name), b"") is RequestState.CANCELLED
        ended = await mirror("find", key_of(name))
        assert isinstance(ended, TerminalRecord)
        result = Result.FromString(ended.result)
        assert (result.tenant, result.request_id, result.model) == ("default", name, "m")
        assert (result.state, result.error.reason) == (WireState.REQUEST_STATE_CANCELLED, "CANCELLED")
        assert (result.incarnation, result.attempts) == ("", 1 if name == "running" else 0)
        assert 0 < result.timing.accepted_s <= result.timing.finished_s
    with pytest.raises(NotFound):
        await mirror("cancel", key_of("nobody"), CANCELLED)
    assert await mirror.real.leftovers() == []


async def test_a_running_agent_hears_of_the_cancel_and_can_do_nothing_more(scene: Scenario) -> None:
    mirror = scene.mirror
    pulled = await scene.run("r1")
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [5, 6])])
    await mirror("cancel", key_of("r1"), CANCELLED)
    entries = await mirror("read_control", "a", "0", 0)
    assert (entries[-1].kind, entries[-1].queue_id, entries[-1].attempt) == (ControlKind.CANCEL, pulled["r1"].queue_id, 1)
    assert await mirror("emit", scene.incarnation, [emission(pulled["r1"], 2, [7])]) == ["stale"]
    assert await mirror("complete", scene.incarnation, [completion(pulled["r1"], 2)]) == ["stale"]
    ended = await mirror("find", key_of("r1"))
    assert list(Result.FromString(ended.result).output_token_ids) == [5, 6]
    last = frames_of(await mirror("read_frames", "g1", "0", 0))[-1].frames[0]
    assert last.result.error.reason == "CANCELLED"
    assert not last.result.output_token_ids  # the client has them already


async def test_expiry_ends_requests_in_any_state(scene: Scenario) -> None:
    mirror = scene.mirror
    for name in ("running", "placed", "accepted"):
        await scene.accept(name, expire_after_s=1_000.0)
    await scene.accept("never")
    await scene.place("g", "running")
    await scene.pull()
    await scene.place("g", "placed")
    assert await mirror("expire", EXPIRED) == 0
    for name in ("running", "placed", "accepted", "never"):
        await mirror.expire_request(key_of(name))
    assert await mirror("expire", EXPIRED) == 3
    assert await mirror("expire", EXPIRED) == 0
    for name in ("running", "placed", "accepted"):
        assert (await mirror("find", key_of(name))).state is RequestState.EXPIRED
    assert live(await mirror("find", key_of("never"))).state is RequestState.ACCEPTED
    entries = await mirror("read_control", "a", "0", 0)
    assert [entry.queue_id for entry in entries if entry.kind is ControlKind.CANCEL] == [scene.receipts["running"].queue_id]


async def test_expire_takes_at_most_a_batch(make_mirror: Callable[..., Mirror]) -> None:
    mirror = make_mirror()
    await mirror.real.queue.start()
    for number in range(501):
        wanted = acceptance(key_of(f"r{number}"), expire_after_s=0.001, prompt_tokens=1)
        receipts = [await subject.queue.accept(wanted) for subject in (mirror.real, mirror.twin)]
    for clock in (getattr(mirror.real, "clock", None), mirror.twin.clock):
        if clock is not None:
            clock.now_s += 1.0
    while await mirror.real.queue.server_time_s() < receipts[0].accepted_s + 0.01:
        pass  # a few milliseconds of the server's clock
    assert await mirror.real.queue.expire(EXPIRED) == await mirror.twin.queue.expire(EXPIRED) == 500
    assert await mirror.real.queue.expire(EXPIRED) == await mirror.twin.queue.expire(EXPIRED) == 1
    assert await mirror.real.leftovers() == []


async def test_pull_ends_expired_requests_instead_of_running_them(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.accept("late", "later", expire_after_s=1_000.0)
    await scene.accept("fine")
    await scene.place("g", "late", "later", "fine")
    for name in ("late", "later"):
        await mirror.expire_request(key_of(name))
    assert list(await scene.pull(count=1)) == ["fine"]
    ended = await mirror("find", key_of("late"))
    assert (ended.state, Result.FromString(ended.result).error.reason) == (RequestState.EXPIRED, "EXPIRED")
    assert await mirror("expire", EXPIRED) == 0


async def test_attach_gives_progress_from_an_offset_and_rebinds(scene: Scenario) -> None:
    mirror = scene.mirror
    pulled = await scene.run("r1")
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [5, 6, 7])])
    for offset, progress in ((0, tokens(5, 6, 7)), (4, tokens(6, 7)), (12, b"")):
        attached = await mirror("attach", key_of("r1"), "", offset)
        assert (attached.progress, attached.produced, attached.ended) == (progress, 12, None)
    with pytest.raises(OffsetOutOfRange) as refused:
        await mirror("attach", key_of("r1"), "g2", 16)
    assert refused.value.details == {"offset": "16", "produced": "12"}
    assert live(await mirror("find", key_of("r1"))).gateway == "g1"  # a refused attach rebinds nothing

    attached = await mirror("attach", key_of("r1"), "g2", 4)
    assert live(attached.live).gateway == "g2"
    assert live(attached.live).body == Request(model="m").SerializeToString()  # without its prompt
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 3, [8])])
    assert [list(batch.frames[0].token_ids) for batch in frames_of(await mirror("read_frames", "g1", "0", 0))] == [[5, 6, 7]]
    assert [list(batch.frames[0].token_ids) for batch in frames_of(await mirror("read_frames", "g2", "0", 0))] == [[8]]
    entries = await mirror("read_control", "a", "0", 0)
    assert [(entry.kind, entry.queue_id, entry.attempt) for entry in entries][-1] == (
        ControlKind.GATEWAY_REBOUND,
        pulled["r1"].queue_id,
        1,
    )


async def test_attaching_again_to_the_same_gateway_changes_nothing(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.run("r1")
    before = await mirror.dump()
    await mirror("attach", key_of("r1"), "g1", 0)
    assert await mirror.dump() == before


async def test_attach_before_a_request_runs(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.accept("r1")
    for _ in range(2):
        attached = await mirror("attach", key_of("r1"), "g2", 0)
        assert (attached.progress, attached.produced, live(attached.live).gateway) == (b"", 0, "g2")
        with pytest.raises(OffsetOutOfRange):
            await mirror("attach", key_of("r1"), "g2", 1)
        await scene.place("g", "r1")
    with pytest.raises(NotFound):
        await mirror("attach", key_of("r2"), "g2", 0)
    with pytest.raises(OffsetOutOfRange):
        await mirror("attach", key_of("r1"), "g2", -1)


async def test_attach_to_an_ended_request_gives_the_result_and_missing_output(scene: Scenario) -> None:
    mirror = scene.mirror
    pulled = await scene.run("r1", "r2")
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [5, 6])])
    await mirror("complete", scene.incarnation, [completion(pulled["r1"], 2, [7]), completion(pulled["r2"])])
    for offset, progress in ((0, tokens(5, 6, 7)), (4, tokens(6, 7)), (8, tokens(7)), (12, b"")):
        attached = await mirror("attach", key_of("r1"), "g2", offset)
        assert (attached.progress, attached.produced, attached.live) == (progress, 12, None)
        assert attached.ended.state is RequestState.COMPLETED
    with pytest.raises(OffsetOutOfRange):
        await mirror("attach", key_of("r1"), "g2", 13)
    assert (await mirror("attach", key_of("r2"), "g2", 0)).produced == 0


async def test_frames_are_read_in_pages_of_a_thousand(scene: Scenario) -> None:
    mirror = scene.mirror
    pulled = await scene.run("r1")
    with mirror.compared_at_the_end():
        for number in range(1_001):
            await mirror("emit", scene.incarnation, [emission(pulled["r1"], number, [number])])
    first = await mirror("read_frames", "g1", "0", 0)
    assert len(first) == 1_000
    assert len(await mirror("read_frames", "g1", first[-1].entry_id, 0)) == 1


async def test_frames_are_read_after_an_entry(scene: Scenario) -> None:
    mirror = scene.mirror
    assert await mirror("read_frames", "g1", "0", 0) == []
    pulled = await scene.run("r1")
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [5])])
    first = await mirror("read_frames", "g1", "0", 0)
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 1, [6])])
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 2, [7])])
    later = await mirror("read_frames", "g1", first[-1].entry_id, 0)
    assert [list(batch.frames[0].token_ids) for batch in frames_of(later)] == [[6], [7]]
    assert await mirror("read_frames", "g1", later[-1].entry_id, 0) == []
    assert await mirror("read_frames", "g2", "0", 0) == []
