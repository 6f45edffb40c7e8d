"""Kinds of SLOs from decisions to the wire; `qlm_core.vocabulary.slo_rules` has the way back."""

from __future__ import annotations

from collections.abc import Mapping

from qlm.api.v1 import request_pb2
from qlm_core.vocabulary.request import Slo, SloKind

SLO_KIND_NUMBERS: Mapping[SloKind, request_pb2.SloKind.ValueType] = {
    SloKind.COMPLETION: request_pb2.SLO_KIND_COMPLETION,
    SloKind.FIRST_TOKEN: request_pb2.SLO_KIND_FIRST_TOKEN,
    SloKind.PRIORITY: request_pb2.SLO_KIND_PRIORITY,
}


def slo_message(slo: Slo) -> request_pb2.Slo:
    """An SLO with the one figure that its kind has."""
    if slo.kind is SloKind.PRIORITY:
        return request_pb2.Slo(kind=SLO_KIND_NUMBERS[slo.kind], priority=slo.priority)
    return request_pb2.Slo(kind=SLO_KIND_NUMBERS[slo.kind], seconds=slo.seconds)
