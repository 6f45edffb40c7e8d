"""Fills a queue with requests in the state that gateways and planner leave, without either."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from benchmarks.queue.bulk_queue import BulkQueue, chunks, in_bulk
from benchmarks.queue.prompts import MODEL, PromptSource
from qlm_core.vocabulary.group import slo_class
from qlm_core.vocabulary.request import RequestKey, Slo, SloKind
from qlm_queue.values import BATCH_MAX, Acceptance, AcceptReceipt, GroupPlacement, Lease, RequestPlacement

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


async def accept_all(queue: BulkQueue, source: PromptSource, count: int, gateway: str = "") -> list[FilledRequest]:
    """Accepts requests 0 to `count` of a source, in order."""
    prompts = source.admitted()
    named = slo_class(Slo(kind=SloKind.COMPLETION, seconds=source.slo_s))

    def acceptance(index: int) -> Acceptance:
        request = prompts[index % len(prompts)]
        request.request_id = source.request_id(index)
        body = request.SerializeToString()
        return Acceptance(
            key=RequestKey("default", request.request_id),
            body=body,
            digest=blake2b(body, digest_size=16).digest(),
            gateway=gateway,
            slo_class=named,
            prompt_tokens=source.prompt_tokens,
        )

    found: list[FilledRequest] = []
    sizes: list[int] = []

    async def accept(index: int) -> AcceptReceipt:
        each = acceptance(index)
        sizes.append(len(each.body))
        return await queue.accept(each)

    async for receipts in in_bulk(accept, range(count)):
        for receipt in receipts:
            index = len(found)
            key = RequestKey("default", source.request_id(index))
            found.append(FilledRequest(index=index, key=key, queue_id=receipt.queue_id, body_bytes=sizes[index]))
    return found


async def place_all(queue: BulkQueue, lease: Lease, instances: Sequence[str], filled: Sequence[FilledRequest]) -> int:
    """Places requests in groups of at most GROUP_REQUESTS_MAX, the instances in turn. Returns the number of groups."""
    size = min(GROUP_REQUESTS_MAX, -(-len(filled) // (GROUPS_EACH_MIN * len(instances))))
    deadline_s = time.time() + 3_600.0

    async def place(batch: Sequence[FilledRequest]) -> None:
        number = batch[0].index // size
        group = GroupPlacement(
            group_id=f"g{number}",
            instance=instances[number % len(instances)],
            before="",
            first_deadline_s=deadline_s + number,
            meta={"model": MODEL, "slo_class": "4096s"},
        )
        await queue.place(
            lease, [group], [RequestPlacement(queue_id=each.queue_id, key=each.key, group_id=group.group_id) for each in batch]
        )

    batches = [batch for group in chunks(filled, size) for batch in chunks(group, BATCH_MAX)]
    async for _ in in_bulk(place, batches):
        pass
    return -(-len(filled) // size)
