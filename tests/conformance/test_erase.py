"""erase: a request ends, and nothing of it is left that a caller can see or a bound counts."""

from __future__ import annotations

import pytest

from qlm.api.v1.request_pb2 import Result
from qlm_core.vocabulary.errors import NotFound
from qlm_core.vocabulary.request import RequestState
from qlm_queue.bounds import RECORD_BYTES
from qlm_queue.values import ControlKind, RequeueCause

from .scenario import CANCELLED, Scenario, acceptance, completion, emission, key_of, owned


async def test_erase_ends_a_request_in_any_state_and_leaves_nothing_of_it(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "done", "running", "kept")
    pulled = await scene.pull()
    for name in ("done", "kept"):
        await mirror("complete", scene.incarnation, [completion(pulled[name], 0, (5, 6))])
    await scene.queue_up("h", "placed")
    await scene.accept("accepted")
    unrelated, before = await mirror.real.queue.repair(False), (await mirror("held"))[0].held
    for name, state in (
        ("done", RequestState.COMPLETED),
        ("running", RequestState.CANCELLED),
        ("placed", RequestState.CANCELLED),
        ("accepted", RequestState.CANCELLED),
    ):
        with pytest.raises(NotFound):
            await mirror("erase", key_of(name, "other"), CANCELLED)
        assert await mirror("erase", key_of(name), CANCELLED) is state
        for operation, *more in (("find",), ("erase", CANCELLED), ("cancel", CANCELLED), ("attach", "", 0)):
            with pytest.raises(NotFound):
                await mirror(operation, key_of(name), *more)
    held = {(each.bound, each.name): each.held for each in await mirror("held")}
    kept = RECORD_BYTES + len(completion(pulled["kept"], 0, (5, 6)).result) + 8
    assert held["queue", ""] == held["tenant", "default"] == kept < before
    entries = await mirror("read_control", "a", "0", 0)
    assert [entry.queue_id for entry in entries if entry.kind is ControlKind.CANCEL] == [pulled["running"].queue_id]
    assert await mirror("complete", scene.incarnation, [completion(pulled["running"]), completion(pulled["done"])]) == ["stale"] * 2
    assert (await mirror("find", key_of("kept"))).state is RequestState.COMPLETED
    assert await mirror.real.queue.repair(False) == unrelated
    assert await mirror.real.queue.loss() == ""
    again = await mirror("accept", acceptance(key_of("done"), salt="other"))  # the id is free
    assert not again.duplicate
    await mirror("erase", key_of("done"), CANCELLED)
    assert await mirror.real.leftovers() == []


async def test_the_agent_of_an_erased_request_has_no_hold_on_the_next_one_of_its_id(scene: Scenario) -> None:
    mirror = scene.mirror
    old = (await scene.run("r1"))["r1"]
    await mirror("emit", scene.incarnation, [emission(old, 0, (1, 2))])
    await mirror("erase", key_of("r1"), CANCELLED)
    scene.receipts["r1"] = await mirror("accept", acceptance(key_of("r1"), salt="other"))
    await scene.place("g2", "r1")
    new = (await scene.pull())["r1"]
    assert (new.attempt, new.progress) == (1, b"")
    assert await mirror("emit", scene.incarnation, [emission(old, 2, (3,))]) == ["stale"]
    assert await mirror("complete", scene.incarnation, [completion(old, 2)]) == ["stale"]
    assert await mirror("requeue", scene.incarnation, [owned(old)], RequeueCause.EVICTED, b"") == ["stale"]
    await mirror("complete", scene.incarnation, [completion(new, 0, (7,))])
    assert list(Result.FromString((await mirror("find", key_of("r1"))).result).output_token_ids) == [7]
