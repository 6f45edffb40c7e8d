"""Pages of the requests that have not ended."""

from __future__ import annotations

import math
import re

from google.protobuf.message import DecodeError

from qlm.api.v1 import gateway_pb2
from qlm.api.v1.gateway_pb2 import ListRequestsRequest, ListRequestsResponse
from qlm_core.vocabulary.errors import invalid_field
from qlm_core.vocabulary.group import slo_class
from qlm_core.vocabulary.instance import instance_of
from qlm_core.vocabulary.name_rules import checked_tenant
from qlm_core.vocabulary.request import RequestState
from qlm_gateway.front.status import shape_of
from qlm_gateway.wire import STATES
from qlm_queue.overview import Overview
from qlm_queue.port import Queue
from qlm_queue.values import LiveRequest

LIMIT_MAX = 500
LIMIT_DEFAULT = 100
READ_AT_ONCE = 100
"""Requests that one call of the queue reads: it holds the server for some 1.5 ms."""
CALLS_MAX = 50
"""Calls of the queue for one page."""

_LIVE = {STATES[state]: state for state in (RequestState.ACCEPTED, RequestState.PLACED, RequestState.RUNNING)}
_QUEUE_ID = re.compile(r"\d{1,18}-\d{1,18}", re.ASCII)


async def listed(queue: Queue, request: ListRequestsRequest, overview: Overview, now_s: float) -> ListRequestsResponse:
    """The page that a client wants; `overview` says where groups are. `now_s`: of the queue's clock. Raises InvalidRequest, Unavailable."""
    if request.state and request.state not in _LIVE:
        raise invalid_field("state", "ACCEPTED, PLACED or RUNNING")
    if request.after and not _QUEUE_ID.fullmatch(request.after):
        raise invalid_field("after", "a queue id, <milliseconds>-<sequence>")
    if request.limit > LIMIT_MAX:
        raise invalid_field("limit", f"at most {LIMIT_MAX}", request.limit)
    tenant = checked_tenant(request.tenant) if request.tenant else ""
    limit = request.limit or LIMIT_DEFAULT
    chosen = bool(tenant or request.model or request.state)
    answer = ListRequestsResponse(now_s=now_s, next_after=request.after)
    for _ in range(CALLS_MAX):
        page = await queue.live_requests(answer.next_after, READ_AT_ONCE if chosen else min(READ_AT_ONCE, limit - len(answer.requests)))
        for found in page.requests:
            if (tenant and found.key.tenant != tenant) or (request.state and STATES[found.state] != request.state):
                continue
            message = _message(found, overview)
            if request.model and message.model != request.model:
                continue
            answer.requests.append(message)
            if len(answer.requests) == limit:
                answer.next_after = found.queue_id
                return answer
        answer.next_after = page.after
        if not page.after:
            break
    return answer


def _message(found: LiveRequest, overview: Overview) -> gateway_pb2.ListedRequest:
    """One whose body is damaged has no model and no class; a repair ends it."""
    group = overview.groups.get(found.group_id)
    message = gateway_pb2.ListedRequest(
        tenant=found.key.tenant,
        request_id=found.key.request_id,
        queue_id=found.queue_id,
        state=STATES[found.state],
        accepted_s=found.accepted_s,
        instance=instance_of(found.incarnation) if found.incarnation else "" if group is None else group.instance,
        attempts=found.attempt,
    )
    try:
        shape = shape_of(found)
    except (DecodeError, LookupError):
        return message
    message.model, message.slo_class = shape.model, slo_class(shape.slo)
    deadline_s = shape.slo.deadline_s(found.accepted_s)
    if math.isfinite(deadline_s):
        message.deadline_s = deadline_s
    return message
