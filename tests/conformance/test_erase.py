"""erase: a request ends, and nothing of it is left that a caller can see or a bound counts."""

from __future__ import annotations

import pytest

from qlm_core.vocabulary.errors import NotFound
from qlm_core.vocabulary.request import RequestState
from qlm_queue.bounds import RECORD_BYTES
from qlm_queue.values import ControlKind

from .scenario import CANCELLED, Scenario, acceptance, completion, key_of


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
    told = await mirror("read_control", "a", "0", 0)
    assert [entry.queue_id for entry in told if entry.kind is ControlKind.CANCEL] == [pulled["running"].queue_id]
    assert await mirror("complete", scene.incarnation, [completion(pulled["running"]), completion(pulled["done"])]) == ["stale"] * 2
    assert (await mirror("find", key_of("kept"))).state is RequestState.COMPLETED
    assert await mirror.real.queue.repair(False) == unrelated
    assert await mirror.real.queue.loss() == ""
    again = await mirror("accept", acceptance(key_of("done"), salt="other"))  # the id is free
    assert not again.duplicate
    await mirror("erase", key_of("done"), CANCELLED)
    assert await mirror.real.leftovers() == []
