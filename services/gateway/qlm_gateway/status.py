"""Answers about the queue and about one request in it."""

from __future__ import annotations

from collections.abc import Mapping

from qlm.api.v1.gateway_pb2 import GroupStatus, Model, QueueStatusResponse, RequestStatus, VirtualQueueStatus
from qlm.api.v1.request_pb2 import Result, SloKind
from qlm_core.instance import instance_of
from qlm_core.prediction import RequestPrediction
from qlm_core.request import RequestKey, RequestState
from qlm_gateway.catalogue import ModelEntry
from qlm_gateway.outlook import Asked, Outlook
from qlm_gateway.wire import STATES, TOKEN_BYTES, admission_of, prediction_message
from qlm_process.slo_wire import SLO_KIND_NUMBERS
from qlm_queue.port import Queue
from qlm_queue.values import GroupRecord, LiveRequest, TerminalRecord

GROUPS_MAX = 1_000
"""Groups of a virtual queue in one answer."""

_SLO_KINDS: dict[str, SloKind.ValueType] = {kind.value: number for kind, number in SLO_KIND_NUMBERS.items()}


def models_message(catalogue: Mapping[str, ModelEntry], outlook: Outlook | None) -> list[Model]:
    return [
        Model(
            name=name,
            context_tokens_max=entry.spec.context_tokens_max,
            token_count="exact" if entry.exact else "approximate",
            instances=0 if outlook is None else outlook.instances_of(name),
        )
        for name, entry in catalogue.items()
    ]


def queue_message(queue_name: str, outlook: Outlook, *, planner: str = "", estimator: str = "") -> QueueStatusResponse:
    """`planner`, `estimator`: addresses of the leaders."""
    overview = outlook.overview
    address = {view.instance.name: view.instance.address for view in outlook.views}
    active = {view.instance.name: view.active_model for view in outlook.views}
    alive = {record.name: record.alive for record in overview.instances}
    queues = [
        VirtualQueueStatus(
            instance=record.instance,
            version=record.version,
            groups=[_group_message(overview.groups[group_id]) for group_id in record.group_ids[:GROUPS_MAX] if group_id in overview.groups],
            running=record.running,
            alive=alive.get(record.instance, False),
            active_model=active.get(record.instance, ""),
            address=address.get(record.instance, ""),
        )
        for record in overview.virtual_queues
    ]
    return QueueStatusResponse(
        queue=queue_name,
        live=overview.live,
        unplaced=overview.unplaced,
        running=sum(record.running for record in overview.virtual_queues),
        virtual_queues=queues,
        planner=planner,
        estimator=estimator,
    )


def _group_message(group: GroupRecord) -> GroupStatus:
    return GroupStatus(
        group_id=group.group_id,
        model=group.meta.get("model", ""),
        slo_kind=_SLO_KINDS.get(group.meta.get("slo_kind", ""), SloKind.SLO_KIND_UNSPECIFIED),
        slo_class=group.meta.get("slo_class", ""),
        waiting=group.waiting,
        first_deadline_s=group.first_deadline_s,
    )


async def request_message(queue: Queue, key: RequestKey, outlook: Outlook) -> RequestStatus:
    """One request now. Raises NotFound, Unavailable."""
    found = await queue.find(key)
    if isinstance(found, TerminalRecord):
        return _ended_message(found)
    ahead = await queue.requests_ahead(key) if found.state is RequestState.PLACED else None
    produced = 0
    if found.state is RequestState.RUNNING or found.attempt:
        produced = (await queue.attach(key, "", 0)).produced // TOKEN_BYTES
    group = outlook.overview.groups.get(found.group_id)
    return RequestStatus(
        state=STATES[found.state],
        queue_id=found.queue_id,
        group_id=found.group_id,
        instance=instance_of(found.incarnation) if found.incarnation else "" if group is None else group.instance,
        requests_ahead=ahead,
        output_tokens=produced,
        attempts=found.attempt,
        accepted_s=found.accepted_s,
        prediction=prediction_message(_predict(found, ahead, outlook)),
    )


def _predict(found: LiveRequest, ahead: int | None, outlook: Outlook) -> RequestPrediction | None:
    if found.state is RequestState.RUNNING:
        return None
    if ahead is not None:
        return outlook.predict_waiting(found.group_id, ahead)
    model, slo, prompt_tokens, output_tokens_max = admission_of(found.body)
    asked = Asked(model=model, slo=slo, prompt_tokens=prompt_tokens, output_tokens_max=output_tokens_max)
    return outlook.predict_new(asked, found.accepted_s)


def _ended_message(found: TerminalRecord) -> RequestStatus:
    result = Result.FromString(found.result)
    return RequestStatus(
        state=STATES[found.state],
        queue_id=found.queue_id,
        instance=instance_of(result.incarnation),
        output_tokens=len(result.output_token_ids) or len(result.output_pieces),
        attempts=found.attempt,
        accepted_s=result.timing.accepted_s,
    )
