"""Kinds of SLOs from decisions to the wire; `qlm_core.slo_rules` has the way back."""

from __future__ import annotations

from collections.abc import Mapping

from qlm.api.v1 import request_pb2
from qlm_core.request import SloKind

SLO_KIND_NUMBERS: Mapping[SloKind, request_pb2.SloKind.ValueType] = {
    SloKind.COMPLETION: request_pb2.SLO_KIND_COMPLETION,
    SloKind.FIRST_TOKEN: request_pb2.SLO_KIND_FIRST_TOKEN,
    SloKind.PRIORITY: request_pb2.SLO_KIND_PRIORITY,
}
