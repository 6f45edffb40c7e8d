"""Answers about the queue and about one request in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qlm.api.v1.gateway_pb2 import GroupStatus, Model, QueueStatusResponse, RequestStatus, VirtualQueueStatus
from qlm.api.v1.gateway_pb2 import HeldBytes as HeldBytesMessage
from qlm.api.v1.gateway_pb2 import Pause as PauseMessage
from qlm.api.v1.prediction_pb2 import Prediction
from qlm.api.v1.request_pb2 import Result
from qlm.api.v1.request_pb2 import SloKind as SloKindNumber
from qlm_core.vocabulary.instance import instance_of
from qlm_core.vocabulary.request import RequestKey, RequestState, SloKind
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.outlook.waits import Outlook, RequestShape
from qlm_gateway.wire import STATES, TOKEN_BYTES, admission_of
from qlm_process.queue.instances import instances_in
from qlm_process.wire import prediction as prediction_wire
from qlm_process.wire.slo import SLO_KIND_NUMBERS, slo_message
from qlm_queue.bounds import HeldBytes
from qlm_queue.overview import Overview
from qlm_queue.port import Queue
from qlm_queue.values import GroupRecord, LiveRequest, TerminalRecord

GROUPS_MAX = 1_000
"""Groups of a virtual queue in one answer."""

_SLO_KINDS: dict[str, SloKindNumber.ValueType] = {kind.value: number for kind, number in SLO_KIND_NUMBERS.items()}


def models_message(catalogue: Mapping[str, ModelEntry], aliases: Mapping[str, str], instances: Mapping[str, int]) -> list[Model]:
    """The served models, and each alias as a model. `instances`: how many live ones serve each model."""
    return [
        Model(
            name=name,
            context_tokens_max=catalogue[model].spec.context_tokens_max,
            token_count="exact" if catalogue[model].exact else "approximate",
            instances=instances.get(model, 0),
        )
        for name, model in [*zip(catalogue, catalogue, strict=True), *aliases.items()]
    ]


def queue_message(
    queue_name: str,
    overview: Overview,
    *,
    planner: str = "",
    estimator: str = "",
    refusal: str = "",
    held: Sequence[HeldBytes] = (),
    loss: str = "",
) -> QueueStatusResponse:
    """`planner`, `estimator`: addresses of the leaders. `refusal`, `held`, `loss`: as of `Queue`."""
    live = instances_in(overview)
    address = {facts.name: facts.address for facts in live}
    active = {facts.name: facts.active_model for facts in live}
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
        refusal=refusal,
        loss=loss,
        damage_count=overview.damage_count,
        pauses=[PauseMessage(**{pause.kind.value: pause.name}, since_s=pause.since_s) for pause in overview.pauses],
        held=[HeldBytesMessage(bound=each.bound, name=each.name, held=max(0, each.held), limit=each.limit) for each in held],
    )


def _group_message(group: GroupRecord) -> GroupStatus:
    return GroupStatus(
        group_id=group.group_id,
        model=group.meta.get("model", ""),
        slo_kind=_SLO_KINDS.get(group.meta.get("slo_kind", ""), SloKindNumber.SLO_KIND_UNSPECIFIED),
        slo_class=group.meta.get("slo_class", ""),
        waiting=group.waiting,
        first_deadline_s=group.first_deadline_s,
    )


async def request_message(queue: Queue, key: RequestKey, outlook: Outlook | None, now_s: float) -> RequestStatus:
    """One request now, by the queue's clock. `outlook`: None: nothing is predicted. Raises NotFound, Unavailable."""
    found = await queue.find(key)
    if isinstance(found, TerminalRecord):
        return _ended_message(found)
    place = await queue.requests_ahead(key) if found.state is RequestState.PLACED else None
    produced = await produced_tokens(queue, found)
    request = shape_of(found)
    prediction = None if outlook is None else predict_live(found, request, outlook, now_s, place=place, produced_tokens=produced)
    deadline_s = request.slo.deadline_s(found.accepted_s)
    return RequestStatus(
        state=STATES[found.state],
        queue_id=found.queue_id,
        group_id=found.group_id,
        instance=instance_of(found.incarnation) if found.incarnation else "" if place is None else place[0],
        requests_ahead=None if place is None else place[1],
        output_tokens=produced,
        attempts=found.attempt,
        accepted_s=found.accepted_s,
        prediction=prediction,
        slo=slo_message(request.slo),
        deadline_s=deadline_s if math.isfinite(deadline_s) else None,
        model=request.model,
        paused=found.state is not RequestState.RUNNING and outlook is not None and outlook.is_paused(request),
    )


async def produced_tokens(queue: Queue, found: LiveRequest) -> int:
    """Output tokens that a request had made when the queue answered, or pieces, from engines that give only text. Raises NotFound,
    Unavailable."""
    if found.state is not RequestState.RUNNING and not found.attempt:
        return 0
    attached = await queue.attach(found.key, "", 0)
    if attached.live is not None and attached.live.text:
        return len(Result.FromString(attached.progress).output_pieces)
    return attached.produced // TOKEN_BYTES


def shape_of(found: LiveRequest) -> RequestShape:
    """A request as it was admitted."""
    model, slo, prompt_tokens, output_tokens_max, predicted_tokens = admission_of(found.body)
    return RequestShape(
        model=model,
        slo=slo,
        prompt_tokens=prompt_tokens,
        output_tokens_max=output_tokens_max,
        predicted_output_tokens=predicted_tokens,
        tenant=found.key.tenant,
    )


def predict_live(
    found: LiveRequest,
    request: RequestShape,
    outlook: Outlook,
    now_s: float,
    *,
    place: tuple[str, int] | None,
    produced_tokens: int = 0,
) -> Prediction | None:
    """When a request that has not ended starts and ends; None where that cannot be said. `place`: its virtual queue and the requests ahead
    of it there, where it waits on one. Whether an earlier first token was in time is not said."""
    if found.state is RequestState.RUNNING:
        predicted = outlook.predict_running(request, instance_of(found.incarnation), produced_tokens)
    elif place is not None:
        predicted = outlook.predict_waiting(request, *place, now_s, produced_tokens)
    else:
        predicted = outlook.predict_new(request, now_s)
    if predicted is None:
        return None
    answered = produced_tokens > 0 and request.slo.kind is SloKind.FIRST_TOKEN
    return prediction_wire.to_proto(predicted, None if answered else request.slo, max(0.0, now_s - found.accepted_s))


def _ended_message(found: TerminalRecord) -> RequestStatus:
    result = Result.FromString(found.result)
    return RequestStatus(
        state=STATES[found.state],
        queue_id=found.queue_id,
        instance=instance_of(result.incarnation),
        output_tokens=len(result.output_token_ids) or len(result.output_pieces),
        attempts=found.attempt,
        accepted_s=result.timing.accepted_s,
        model=result.model,
        error=result.error if result.HasField("error") else None,
        finished_s=result.timing.finished_s,
    )
