"""Log probabilities stay with their tokens, through emit, requeue, pull, attach and complete."""

from __future__ import annotations

import pytest

from qlm.api.v1.request_pb2 import Result
from qlm_queue.values import PullBudget, RequeueCause, StepStatus

from .scenario import CANCELLED, FAILURE, Scenario, completion, emission, frames, key_of, logprobs, owned, result_of, tokens

DONE = StepStatus.DONE


@pytest.mark.parametrize("top", [0, 3])
async def test_logprobs_stay_with_their_tokens(scene: Scenario, top: int) -> None:
    """Over repeats that overlap, a requeue, an attach in the middle and the end: one entry a token, in order."""
    first = (await scene.run("r1"))["r1"]
    assert await scene.mirror("emit", scene.incarnation, [emission(first, 0, [1, 2], top=top)]) == [DONE]
    assert await scene.mirror("emit", scene.incarnation, [emission(first, 1, [2, 3], top=top)]) == [DONE]
    assert await scene.mirror("emit", scene.incarnation, [emission(first, 0, [1, 2, 3], top=top)]) == [DONE]
    attached = await scene.mirror("attach", key_of("r1"), "", 4)
    assert (attached.progress, attached.produced, attached.logprobs) == (tokens(2, 3), 12, logprobs([2, 3], top))
    assert (await scene.mirror("attach", key_of("r1"), "", 12)).logprobs == b""
    (owned_now,) = await scene.mirror("owned", scene.incarnation)
    assert (owned_now.progress, owned_now.logprobs) == (tokens(1, 2, 3), logprobs([1, 2, 3], top))
    await scene.mirror("requeue", scene.incarnation, [owned(first)], RequeueCause.EVICTED, FAILURE)
    second = (await scene.pull())["r1"]
    assert (second.progress, second.logprobs, second.text) == (tokens(1, 2, 3), logprobs([1, 2, 3], top), False)
    assert await scene.mirror("complete", scene.incarnation, [completion(second, 2, [3, 4], top=top)]) == [DONE]
    result = await result_of(scene, "r1")
    assert list(result.output_token_ids) == [1, 2, 3, 4]
    assert result.logprobs == Result.FromString(logprobs([1, 2, 3, 4], top)).logprobs
    assert (await scene.mirror("attach", key_of("r1"), "", 8)).progress == tokens(3, 4)
    *_, (last,) = await frames(scene)
    assert last.logprobs == Result.FromString(logprobs([3, 4], top)).logprobs


async def test_logprobs_that_arrive_only_with_the_end_or_not_at_all(scene: Scenario) -> None:
    pulled = await scene.run("r1", "r2", "r3")
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"], 0, [5], top=2)]) == [DONE]
    assert (await result_of(scene, "r1")).logprobs == Result.FromString(logprobs([5], 2)).logprobs
    await scene.mirror("emit", scene.incarnation, [emission(pulled["r2"], 0, [6], top=2)])
    await scene.mirror("cancel", key_of("r2"), CANCELLED)
    assert (await result_of(scene, "r2")).logprobs == Result.FromString(logprobs([6], 2)).logprobs
    assert await scene.mirror("complete", scene.incarnation, [completion(pulled["r3"], 0, [7])]) == [DONE]
    assert not (await result_of(scene, "r3")).HasField("logprobs")


async def test_logprobs_take_no_room_of_a_pull(scene: Scenario) -> None:
    first = (await scene.run("r1", "r2"))["r1"]
    await scene.mirror("emit", scene.incarnation, [emission(first, 0, [1, 2], top=20)])
    await scene.mirror("requeue", scene.incarnation, [owned(first)], RequeueCause.EVICTED, FAILURE)
    budget = PullBudget(requests_max=1, kv_tokens=12, output_reserve_tokens=0)
    result = await scene.mirror("pull", scene.agent, "m", budget)
    assert [request.key for request in result.pulled] == [key_of("r1")]
