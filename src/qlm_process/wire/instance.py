"""Instances between the wire (`Instance` of instance.proto) and decisions (`InstanceFacts`)."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from qlm.api.v1 import instance_pb2
from qlm.field_copies import message_of, value_of
from qlm_core.vocabulary.instance import BATCH_MAX_DEFAULT, TIME_SCALE_MAX, TIME_SCALE_MIN, InstanceFacts


def to_proto(facts: InstanceFacts) -> instance_pb2.Instance:
    return message_of(instance_pb2.Instance, facts)


def from_proto(message: instance_pb2.Instance) -> InstanceFacts:
    """An absent time scale is 1, an absent batch_max the default. Raises ValueError for an instance without name or GPUs, and for a time
    scale out of its bounds."""
    time_scale = message.time_scale or 1.0
    if not message.name or message.n_gpu < 1 or not TIME_SCALE_MIN <= time_scale <= TIME_SCALE_MAX:
        raise ValueError(
            f"an instance has a name, n_gpu >= 1 and a time_scale from {TIME_SCALE_MIN:g} to {TIME_SCALE_MAX:g}, "
            f"got {message.name!r}, {message.n_gpu}, {time_scale}"
        )
    return value_of(
        InstanceFacts,
        message,
        time_scale=time_scale,
        batch_max=message.batch_max or BATCH_MAX_DEFAULT,
        loading_since_s=message.loading_since_s if math.isfinite(message.loading_since_s) else 0.0,
        started_s=message.started_s if math.isfinite(message.started_s) else 0.0,
    )


def to_body(facts: InstanceFacts) -> bytes:
    """Serializes the body that `register` and `describe` of the queue store."""
    return to_proto(facts).SerializeToString(deterministic=True)


def from_body(body: bytes, incarnation: str = "") -> InstanceFacts:
    """Reads an `InstanceRecord.body`; `incarnation`, which a body written before registration cannot know, wins over the body's. Raises
    ValueError for what is no instance."""
    try:
        message = instance_pb2.Instance.FromString(body)
    except DecodeError as error:
        raise ValueError("not an Instance message") from error
    if incarnation:
        message.incarnation = incarnation
    return from_proto(message)
