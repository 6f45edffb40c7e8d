"""Output so far of an instance's running requests, as its agent reports at each heartbeat, for predictions of waits."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from qlm.api.v1 import instance_pb2
from qlm.field_copies import message_of, value_of
from qlm_core.prediction.reported_runs import GroupRuns, ReportedRuns
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.wire.instance import to_proto

RUNS_MAX = 1024
"""More requests are neither reported nor read."""
TOKEN_MIN_S = 1e-6
"""No engine makes a request's next token sooner."""


def to_body(facts: InstanceFacts, reported: ReportedRuns | None = None) -> bytes:
    """Serializes the body that `describe` of the queue stores."""
    message = to_proto(facts)
    if reported is not None:
        message.running_reported_s, message.token_s = reported.at_s, reported.token_s
        for group_id, runs in sorted(reported.groups.items()):
            message_of(message.running.add, runs, group_id=group_id)
    return message.SerializeToString(deterministic=True)


def from_body(body: bytes) -> ReportedRuns | None:
    """None where an agent reported nothing, or nothing that makes sense."""
    try:
        message = instance_pb2.Instance.FromString(body)
    except DecodeError:
        return None
    at_s, token_s = message.running_reported_s, message.token_s
    sane = 0.0 < at_s < math.inf and TOKEN_MIN_S <= token_s < math.inf
    if not sane or sum(len(each.output_tokens) for each in message.running) > RUNS_MAX:
        return None
    groups = {
        each.group_id: value_of(GroupRuns, each, prefill_left_tokens=min(each.prefill_left_tokens, each.prompt_tokens))
        for each in message.running
        if each.output_tokens
    }
    return ReportedRuns(at_s=at_s, token_s=token_s, groups=groups)
