"""The design's invariants as checks of a dump, independent of both implementations and of the twin.

1. An accepted request reaches exactly one terminal state, or is live in exactly one place.
2. A request is in at most one group, or owned by at most one incarnation. Every open group is on exactly one virtual queue.
3. The queue counts what it holds.
4. Delivered tokens are never retracted: see `check_output`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from qlm.api.v1.request_pb2 import Logprobs, Result
from qlm.api.v1.request_pb2 import RequestState as WireState
from qlm.internal.v1.frames_pb2 import Frame, FrameBatch
from qlm_core.vocabulary.request import RequestState
from qlm_queue.bounds import RECORD_BYTES
from queue_dump import QueueDump, RequestDump

from .scenario import logprobs, tokens


def check_invariants(dump: QueueDump) -> None:
    """Raises AssertionError for a state that no history may lead to."""
    _check_requests(dump)
    _check_groups(dump)
    _check_virtual_queues(dump)
    _check_counters(dump)
    _check_terminals(dump)


def _check_requests(dump: QueueDump) -> None:
    live = {request.queue_id: request for request in dump.requests}
    assert len(live) == len(dump.requests), "two live requests have one queue id"
    numbers = [request.acceptance_number for request in dump.requests]
    assert len(set(numbers)) == len(numbers), "two live requests have one acceptance number"
    assert all(1 <= number <= dump.accepted_count for number in numbers)
    ids = [tuple(map(int, request.queue_id.split("-"))) for request in sorted(dump.requests, key=lambda r: r.acceptance_number)]
    assert ids == sorted(ids), "queue ids and acceptance numbers have different orders"

    waiting = Counter(queue_id for group in dump.groups for queue_id in group.members)
    owned = Counter(queue_id for queue_ids in dump.running.values() for queue_id in queue_ids)
    pending, unread = Counter(dump.arrivals_pending), Counter(dump.arrivals_unread)
    for places in (waiting, owned, pending, unread):
        assert not set(places) - set(live), "a place holds a request that is not live"
    for queue_id, request in live.items():
        counts = (pending[queue_id] + unread[queue_id], waiting[queue_id], owned[queue_id])
        expected = {RequestState.ACCEPTED: (1, 0, 0), RequestState.PLACED: (0, 1, 0), RequestState.RUNNING: (0, 0, 1)}[request.state]
        assert counts == expected, f"{request.key} is {request.state.name} and in (arrivals, groups, running) {counts} times"
        assert (request.group_id == "") == (request.state is RequestState.ACCEPTED)
        assert (request.incarnation == "") == (request.state is not RequestState.RUNNING)
        assert 0 <= request.failed_attempts <= request.attempt
    for incarnation, queue_ids in dump.running.items():
        assert incarnation in dump.incarnations, f"{incarnation} owns requests and may be forgotten by reclaim"
        assert all(live[queue_id].incarnation == incarnation for queue_id in queue_ids)


def _check_groups(dump: QueueDump) -> None:
    live = {request.queue_id: request for request in dump.requests}
    for group in dump.groups:
        mine = [request for request in dump.requests if request.group_id == group.group_id]
        assert group.live == len(mine) > 0, f"group {group.group_id} counts {group.live} live requests and has {len(mine)}"
        members = [live[queue_id] for queue_id in group.members]
        assert all(request.group_id == group.group_id for request in members)
        numbers = [request.acceptance_number for request in members]
        assert numbers == sorted(numbers), f"group {group.group_id} is not in the order of acceptance"
        assert group.waiting_prompt_tokens == sum(request.prompt_tokens for request in members)
        assert bool(group.instance) == bool(members), f"group {group.group_id} is open without waiting requests, or closed with some"
    known = {group.group_id for group in dump.groups}
    assert all(request.group_id in known for request in dump.requests if request.group_id)


def _check_virtual_queues(dump: QueueDump) -> None:
    on_queues = Counter(group_id for queue in dump.virtual_queues for group_id in queue.group_ids)
    open_on = {group.group_id: group.instance for group in dump.groups if group.instance}
    assert on_queues == Counter(open_on.keys()), "an open group is not on exactly one virtual queue"
    for queue in dump.virtual_queues:
        assert all(open_on[group_id] == queue.instance for group_id in queue.group_ids)
    served = {record.name for record in dump.instances}
    assert {queue.instance for queue in dump.virtual_queues} == served | {"unassigned"}


def _check_counters(dump: QueueDump) -> None:
    assert dump.live_total == len(dump.requests)
    assert dict(dump.live_by_tenant) == Counter(request.key.tenant for request in dump.requests)
    assert dict(dump.live_by_class) == Counter(request.slo_class for request in dump.requests)
    check_bytes(dump)


def check_bytes(dump: QueueDump) -> None:
    """Counted bytes are those that live requests and results hold."""
    held = [(request.key.tenant, request.slo_class, _held(request)) for request in dump.requests]
    outputs = {record.queue_id: (record.key.tenant, len(Result.FromString(record.result).output_token_ids)) for record in dump.terminals}
    assert set(dump.kept) == set(outputs), "the results that are counted are not those that are kept"
    for queue_id, (tenant, slo_class, size) in dump.kept.items():
        assert tenant == outputs[queue_id][0]
        assert size >= RECORD_BYTES + 4 * outputs[queue_id][1]
        held.append((tenant, slo_class, size))
    by_tenant, by_class = Counter[str](), Counter[str]()
    for tenant, slo_class, size in held:
        by_tenant[tenant] += size
        by_class[slo_class] += size
    assert (dump.held_total, dump.held_by_tenant, dump.held_by_class) == (by_tenant.total(), by_tenant, by_class)


def _held(request: RequestDump) -> int:
    return RECORD_BYTES + len(request.body) + len(request.progress) + len(request.logprobs)


def _check_terminals(dump: QueueDump) -> None:
    live_keys, live_ids = {request.key for request in dump.requests}, {request.queue_id for request in dump.requests}
    for record in dump.terminals:
        assert record.key not in live_keys, f"{record.key} is live and has ended"
        assert record.queue_id not in live_ids
        try:
            result = Result.FromString(record.result)
        except DecodeError as error:
            raise AssertionError(f"the Result of {record.key} cannot be read") from error
        assert result.state == WireState.Value(f"REQUEST_STATE_{record.state.name}")
        assert (result.tenant, result.request_id, result.queue_id) == (record.key.tenant, record.key.request_id, record.queue_id)
        assert result.attempts == record.attempt
        assert 0 < result.timing.accepted_s <= result.timing.finished_s


def check_histories(before: QueueDump, after: QueueDump) -> None:
    """No step may take back history between two dumps: results stay as they are, live requests do not vanish, output only grows."""
    ended = {record.key: record for record in after.terminals}
    for record in before.terminals:
        assert ended.get(record.key) == record, f"the end of {record.key} was changed"
    live = {request.queue_id: request for request in after.requests}
    ends = {record.queue_id: record for record in after.terminals}
    for request in before.requests:
        assert (request.queue_id in live) != (request.queue_id in ends), f"{request.key} is in no or in two places"
        if request.queue_id in live:
            now = live[request.queue_id]
            assert now.progress.startswith(request.progress), f"output of {request.key} was taken back"
            assert now.attempt >= request.attempt
            assert now.failed_attempts >= request.failed_attempts
            assert (now.key, now.acceptance_number, now.digest, now.body) == (
                request.key,
                request.acceptance_number,
                request.digest,
                request.body,
            )
        else:
            output = tokens(*Result.FromString(ends[request.queue_id].result).output_token_ids)
            assert output.startswith(request.progress), f"the result of {request.key} takes output back"
    assert after.accepted_count >= before.accepted_count
    assert after.plan_version >= before.plan_version
    versions = {queue.instance: queue for queue in after.virtual_queues}
    for queue in before.virtual_queues:
        now_on = versions.get(queue.instance)
        if now_on is not None:
            assert now_on.version >= queue.version
            kept = [group_id for group_id in queue.group_ids if group_id in now_on.group_ids]
            drained_only = list(now_on.group_ids) == kept
            assert now_on.version > queue.version or drained_only, f"the queue of {queue.instance} changed under its version"


def check_output(dump: QueueDump, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Output is a prefix of the answer of its request (by queue id), and the whole answer where it COMPLETED."""
    for request in dump.requests:
        answer = tokens(*expected[request.queue_id])
        assert answer.startswith(request.progress), f"{request.key} has output that is not its answer's"
        said = Result.FromString(request.logprobs).logprobs
        check_logprobs(said, expected[request.queue_id][: len(request.progress) // 4])
    for record in dump.terminals:
        output = tuple(Result.FromString(record.result).output_token_ids)
        answer_ids = expected[record.queue_id]
        assert output == answer_ids[: len(output)]
        check_logprobs(Result.FromString(record.result).logprobs, output)
        assert record.state is not RequestState.COMPLETED or output == answer_ids


def check_logprobs(said: Logprobs, output: tuple[int, ...]) -> None:
    """One entry a token, in order, where there are any."""
    if said.of_token:
        top = len(said.top_token_ids) // len(said.of_token)
        assert said == Result.FromString(logprobs(output, top)).logprobs


def check_frames(dump: QueueDump, expected: Mapping[str, tuple[int, ...]]) -> None:
    """For requests that never changed their gateway: each token was sent once, in order, and the Result last, once, where it ended."""
    sent: dict[str, list[Frame]] = {}
    for batches in dump.frames.values():
        for batch in batches:
            for frame in FrameBatch.FromString(batch).frames:
                sent.setdefault(frame.queue_id, []).append(frame)
    stored = {request.queue_id: request.progress for request in dump.requests}
    ends = {record.queue_id: tokens(*Result.FromString(record.result).output_token_ids) for record in dump.terminals}
    for queue_id, answer in expected.items():
        shown: list[int] = []
        frames = sent.get(queue_id, [])
        for index, frame in enumerate(frames):
            assert not frame.token_ids or frame.offset <= len(shown), f"a gap in the frames of {queue_id}"
            assert tuple(frame.token_ids) == answer[frame.offset : frame.offset + len(frame.token_ids)]
            new = frame.token_ids[len(shown) - frame.offset :] if frame.token_ids else []
            assert new or not frame.token_ids or frame.HasField("result"), f"a frame of {queue_id} was sent again"
            shown += new
            assert frame.HasField("result") == (queue_id in ends and index == len(frames) - 1), f"the Result of {queue_id} is not last"
        assert queue_id not in ends or frames, f"{queue_id} ended and its gateway was not notified"
        assert tokens(*shown) == {**stored, **ends}.get(queue_id, b""), f"the frames of {queue_id} are not its output"
