"""Instances between the wire (`Instance` of instance.proto) and decisions (`InstanceFacts`)."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from qlm.api.v1 import instance_pb2
from qlm_core.vocabulary.instance import BATCH_MAX_DEFAULT, TIME_SCALE_MAX, TIME_SCALE_MIN, InstanceFacts


def to_proto(facts: InstanceFacts) -> instance_pb2.Instance:
    return instance_pb2.Instance(
        name=facts.name,
        incarnation=facts.incarnation,
        gpu=facts.gpu,
        n_gpu=facts.n_gpu,
        engine=facts.engine,
        models=facts.models,
        address=facts.address,
        time_scale=facts.time_scale,
        draining=facts.draining,
        batch_max=facts.batch_max,
        active_model=facts.active_model,
        warm_models=facts.warm_models,
        loading_since_s=facts.loading_since_s,
        batch=facts.batch,
        started_s=facts.started_s,
        lookahead_requests=facts.lookahead_requests,
    )


def from_proto(message: instance_pb2.Instance) -> InstanceFacts:
    """An absent time scale is 1, an absent batch_max the default. Raises ValueError for an instance without name or GPUs, and for a time
    scale out of its bounds."""
    time_scale = message.time_scale or 1.0
    if not message.name or message.n_gpu < 1 or not TIME_SCALE_MIN <= time_scale <= TIME_SCALE_MAX:
        raise ValueError(
            f"an instance has a name, n_gpu >= 1 and a time_scale from {TIME_SCALE_MIN:g} to {TIME_SCALE_MAX:g}, "
            f"got {message.name!r}, {message.n_gpu}, {time_scale}"
        )
    return InstanceFacts(
        name=message.name,
        incarnation=message.incarnation,
        gpu=message.gpu,
        n_gpu=message.n_gpu,
        engine=message.engine,
        models=tuple(message.models),
        address=message.address,
        time_scale=time_scale,
        draining=message.draining,
        batch_max=message.batch_max or BATCH_MAX_DEFAULT,
        active_model=message.active_model,
        warm_models=tuple(message.warm_models),
        loading_since_s=message.loading_since_s if math.isfinite(message.loading_since_s) else 0.0,
        batch=message.batch,
        started_s=message.started_s if math.isfinite(message.started_s) else 0.0,
        lookahead_requests=message.lookahead_requests,
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
