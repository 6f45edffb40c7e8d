"""Fills a queue with requests in the state that gateways and planner leave, without either."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.queue.bulk_queue import BulkQueue, acceptance_of, chunks
from benchmarks.queue.prompts import MODEL, PromptSource
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.values import Acceptance, GroupPlacement, Lease, RequestPlacement

GROUP_REQUESTS_MAX = 1_000
"""Requests of a group: with the planner's defaults four batches of 256."""
GROUPS_EACH_MIN = 4
"""Groups of each instance, however short the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledRequest:
    """An accepted request: its place in the fill, its key, its id and the bytes of its body."""

    index: int
    key: RequestKey
    queue_id: str
    body_bytes: int


async def accept_all(queue: BulkQueue, source: PromptSource, count: int) -> list[FilledRequest]:
    """Accepts requests 0 to `count` of a source, in order."""
    prompts = source.admitted()
    sizes: list[int] = []

    def acceptance(index: int) -> Acceptance:
        request = prompts[index % len(prompts)]
        request.request_id = source.request_id(index)
        found = acceptance_of(request)
        sizes.append(len(found.body))
        return found

    receipts = await queue.accept_all(acceptance, count)
    return [
        FilledRequest(index=index, key=RequestKey("default", source.request_id(index)), queue_id=receipt.queue_id, body_bytes=sizes[index])
        for index, receipt in enumerate(receipts)
    ]


async def place_all(queue: BulkQueue, lease: Lease, instances: Sequence[str], filled: Sequence[FilledRequest]) -> int:
    """Places requests in groups of at most GROUP_REQUESTS_MAX, the instances in turn. Returns the number of groups."""
    groups = list(chunks(filled, min(GROUP_REQUESTS_MAX, -(-len(filled) // (GROUPS_EACH_MIN * len(instances))))))
    deadline_s = time.time() + 3_600.0
    placements = [
        GroupPlacement(
            group_id=f"g{number}",
            instance=instances[number % len(instances)],
            before="",
            first_deadline_s=deadline_s + number,
            meta={"model": MODEL, "slo_class": "4096s"},
        )
        for number in range(len(groups))
    ]
    requests = [
        [RequestPlacement(queue_id=each.queue_id, key=each.key, group_id=placement.group_id) for each in group]
        for placement, group in zip(placements, groups, strict=True)
    ]
    await queue.place_all(lease, zip(placements, requests, strict=True))
    return len(groups)
