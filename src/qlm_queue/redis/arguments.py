"""Values of the port as arguments of the scripts, flat (see the comment of each function in lua/)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlm_core.vocabulary.request import RequestState
from qlm_queue.keys import Keys
from qlm_queue.values import Completion, Emission, GroupPlacement, Owned, PlanChunk, RequestPlacement, WaitingRequest


def placements(keys: Keys, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> list[Any]:
    """Raises ValueError for a request of a group that is not among the groups."""
    args: list[Any] = [len(groups)]
    index_of = {}
    for index, group in enumerate(groups, start=1):
        index_of[group.group_id] = index
        args += _placement(group)
    for request in requests:
        if request.group_id not in index_of:
            raise ValueError(f"group {request.group_id!r} of a request is not among the groups of the call")
        args += [request.queue_id, keys.request(request.key), index_of[request.group_id]]
    return args


def regrouped(keys: Keys, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]) -> list[Any]:
    return [source, *_placement(into), *(part for each in requests for part in (each.queue_id, keys.request(each.key)))]


def _placement(group: GroupPlacement) -> list[Any]:
    meta = [text for pair in group.meta.items() for text in pair]
    times = (group.first_deadline_s, group.last_deadline_s, group.slo_least_s)
    return [group.group_id, group.instance, group.before, *map(repr, times), len(meta), *meta]


def plan_chunk(chunk: PlanChunk) -> list[Any]:
    args: list[Any] = [chunk.plan_version, len(chunk.versions)]
    for name, version in chunk.versions.items():
        args += [name, version]
    args.append(len(chunk.segments))
    for segment in chunk.segments:
        args += [segment.instance, segment.start, len(segment.group_ids), *segment.group_ids]
    return args


def emissions(keys: Keys, items: Sequence[Emission]) -> list[Any]:
    return [argument for emission in items for argument in _emission(keys, emission)]


def completions(keys: Keys, items: Sequence[Completion]) -> list[Any]:
    """Raises ValueError for a state in which an agent cannot end a request."""
    args: list[Any] = []
    for completion in items:
        if completion.state not in (RequestState.COMPLETED, RequestState.FAILED):
            raise ValueError(f"an agent ends requests as COMPLETED or FAILED, not {completion.state}")
        args += [*_emission(keys, completion.last), completion.state.value, completion.result, completion.event]
    return args


def owned(keys: Keys, items: Sequence[Owned]) -> list[Any]:
    return [argument for item in items for argument in (item.queue_id, keys.request(item.key), item.attempt)]


def _emission(keys: Keys, emission: Emission) -> tuple[Any, ...]:
    return (
        emission.queue_id,
        keys.request(emission.key),
        emission.attempt,
        emission.offset,
        emission.progress,
        emission.frame,
        emission.logprobs or int(emission.text),
    )
