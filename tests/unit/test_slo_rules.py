"""The numbers of SLO kinds stand in the core without the stubs: they are those of request.proto."""

from __future__ import annotations

from qlm.api.v1.request_pb2 import SloKind as Wire
from qlm_core.vocabulary.request import SloKind
from qlm_core.vocabulary.slo_rules import SLO_KINDS
from qlm_process.wire.slo import SLO_KIND_NUMBERS


def test_numbers_of_slo_kinds_are_those_of_the_proto() -> None:
    assert {Wire.Name(number): kind for kind, number in SLO_KIND_NUMBERS.items()} == {f"SLO_KIND_{kind.name}": kind for kind in SloKind}
    assert dict(SLO_KINDS) == {number: kind for kind, number in SLO_KIND_NUMBERS.items()}
