"""Published waits between the wire (waits.proto) and values (`qlm_core.prediction.planned_waits`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from qlm.internal.v1 import waits_pb2
from qlm_core.prediction.planned_waits import ClassWaits, PlannedWaits, QueueWaits, WaitCurve
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.slo_rules import SLO_KINDS
from qlm_process.wire.slo import SLO_KIND_NUMBERS


def to_body(waits: PlannedWaits) -> bytes:
    """Serializes the body that `publish_waits` of the queue stores."""
    message = waits_pb2.PlannedWaits(
        made_s=waits.made_s,
        plan_version=waits.plan_version,
        profile_version=waits.profile_version,
        counted_to=waits.counted_to,
        queues=[_queue_message(queue) for queue in waits.queues],
        classes=[_class_message(each) for each in waits.classes],
        instances=waits.instances,
    )
    return message.SerializeToString(deterministic=True)


def from_body(body: bytes) -> PlannedWaits:
    """Reads what `read_waits` of the queue returns, if that is not empty. Classes and queues of another version's kind are left out. Raises
    ValueError for what are no waits."""
    try:
        message = waits_pb2.PlannedWaits.FromString(body)
    except DecodeError as error:
        raise ValueError("not a PlannedWaits message") from error
    if not math.isfinite(message.made_s):
        raise ValueError("published waits have a time")
    return PlannedWaits(
        made_s=message.made_s,
        plan_version=message.plan_version,
        profile_version=message.profile_version,
        counted_to=message.counted_to,
        queues=tuple(_queue(queue) for queue in message.queues),
        classes=tuple(_classes(message)),
        instances=dict(message.instances),
    )


def _queue_message(queue: QueueWaits) -> waits_pb2.QueueWaits:
    facts = queue.instance
    return waits_pb2.QueueWaits(
        instance=facts.name,
        gpu=facts.gpu,
        n_gpu=facts.n_gpu,
        time_scale=facts.time_scale,
        batch_max=facts.batch_max,
        active_model=facts.active_model,
        running=queue.running,
        waiting=queue.waiting,
        waiting_alike=queue.alike,
        curve=None if queue.curve is None else _curve_message(queue.curve),
    )


def _class_message(each: ClassWaits) -> waits_pb2.ClassWaits:
    model, slo_kind, slo_class, token_class = each.key
    return waits_pb2.ClassWaits(
        model=model,
        slo_kind=SLO_KIND_NUMBERS[slo_kind],
        slo_class=slo_class,
        token_class=token_class,
        slo_s=each.slo_s,
        instance=each.instance,
        requests_ahead=each.requests_ahead,
        curve=_curve_message(each.curve),
    )


def _curve_message(curve: WaitCurve) -> waits_pb2.WaitCurve:
    return waits_pb2.WaitCurve(
        ahead=curve.ahead,
        wait_s=curve.wait_s,
        wait_variance_s2=curve.wait_variance,
        chunk_s=curve.chunk_s,
        token_s=curve.token_s,
    )


def _queue(message: waits_pb2.QueueWaits) -> QueueWaits:
    return QueueWaits(
        instance=InstanceFacts(
            name=message.instance,
            incarnation="",
            gpu=message.gpu,
            n_gpu=message.n_gpu,
            engine="",
            models=(),
            time_scale=message.time_scale,
            active_model=message.active_model,
            batch_max=message.batch_max,
        ),
        running=message.running,
        waiting=message.waiting,
        alike=message.waiting_alike,
        curve=_curve(message.curve) if message.HasField("curve") else None,
    )


def _classes(message: waits_pb2.PlannedWaits) -> Iterator[ClassWaits]:
    for each in message.classes:
        kind = SLO_KINDS.get(each.slo_kind)
        if kind is not None:
            yield ClassWaits(
                key=(each.model, kind, each.slo_class, each.token_class),
                slo_s=each.slo_s,
                instance=each.instance,
                requests_ahead=each.requests_ahead,
                curve=_curve(each.curve),
            )


def _curve(message: waits_pb2.WaitCurve) -> WaitCurve:
    """Raises ValueError for what is no curve."""
    columns = (message.ahead, message.wait_s, message.wait_variance_s2, message.chunk_s, message.token_s)
    if not all(math.isfinite(sum(column)) for column in columns):
        raise ValueError("the columns of a curve of waits are finite")
    return WaitCurve(*(tuple(column) for column in columns))
