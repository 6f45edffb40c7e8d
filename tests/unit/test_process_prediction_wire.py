"""What a prediction says on the wire: quantiles, and how likely a request is late."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from qlm_core.distribution import Normal
from qlm_core.prediction_views import RequestPrediction
from qlm_core.request import Slo, SloKind
from qlm_process.wire.prediction import to_proto

FOUND = RequestPrediction(
    instance="a", wait=Normal(10.0, 3.0**2), completion=Normal(30.0, 4.0**2), requests_ahead=7, profile_version=5, prefill_s=2.0
)


def test_quantiles_are_those_of_the_times() -> None:
    told, dice = to_proto(FOUND), np.random.default_rng(3)
    waits_s, completions_s = dice.normal(10.0, 3.0, 200_000), dice.normal(30.0, 4.0, 200_000)
    assert (told.wait_p50_s, told.wait_p90_s) == pytest.approx(tuple(np.quantile(waits_s, (0.5, 0.9))), abs=0.05)
    assert (told.completion_p50_s, told.completion_p90_s) == pytest.approx(tuple(np.quantile(completions_s, (0.5, 0.9))), abs=0.05)
    assert (told.requests_ahead, told.profile_version) == (7, 5)
    assert not told.HasField("probability_late"), "nothing judges it"


@pytest.mark.parametrize(
    ("slo", "elapsed_s", "expected"),
    [
        (Slo(kind=SloKind.COMPLETION, seconds=32.0), 0.0, norm.sf(32.0, 30.0, 4.0)),
        (Slo(kind=SloKind.COMPLETION, seconds=32.0), 5.0, norm.sf(27.0, 30.0, 4.0)),  # it has waited for some of it
        (Slo(kind=SloKind.COMPLETION, seconds=32.0), 32.0, 1.0),
        (Slo(kind=SloKind.FIRST_TOKEN, seconds=13.0), 0.0, norm.sf(13.0, 12.0, 3.0)),  # the end of the prefill
        (Slo(kind=SloKind.FIRST_TOKEN, seconds=13.0), 4.0, norm.sf(9.0, 12.0, 3.0)),
    ],
)
def test_late_is_beyond_what_is_left_of_the_slo(slo: Slo, elapsed_s: float, expected: float) -> None:
    assert to_proto(FOUND, slo, elapsed_s).probability_late == pytest.approx(expected)


def test_without_a_deadline_nothing_is_late() -> None:
    for slo in (Slo(kind=SloKind.PRIORITY, priority=1), Slo(kind=SloKind.COMPLETION)):
        assert not to_proto(FOUND, slo).HasField("probability_late")
