"""Refusal at admission (`planner.overload: refuse`, QLM A.3, c): a request predicted late is refused, and none on a guess."""

from __future__ import annotations

import math

import pytest

from qlm_core.prediction.prediction_views import RequestPrediction
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_gateway.admission.overload import RETRY_MAX_S, WAITS_AGE_MAX_S, late_refusal
from qlm_gateway.config import GatewayConfig


def prediction(wait_s: float, own_s: float = 5.0, ahead: int = 100) -> RequestPrediction:
    return RequestPrediction(
        instance="a",
        wait=Normal(wait_s, 1.0),
        completion=Normal(wait_s + own_s, 2.0),
        requests_ahead=ahead,
        profile_version=1,
        prefill_s=0.5,
    )


def completion(seconds: float) -> Slo:
    return Slo(kind=SloKind.COMPLETION, seconds=seconds)


def test_what_would_be_late_is_refused_with_the_time_that_the_queue_needs() -> None:
    """35 s too late of a wait of 60 s: 35/60 of those ahead have to go first."""
    refusal = late_refusal(prediction(60.0), completion(30.0), age_s=0.1, drain_per_s=2.0)
    assert refusal is not None
    assert refusal.reason == "WOULD_BE_LATE"
    assert refusal.retry_after_s == pytest.approx(100 * 35 / 60 / 2.0, rel=0.01)
    assert "35.0 s beyond its SLO" in refusal.message


def test_what_would_be_in_time_comes_in() -> None:
    assert late_refusal(prediction(20.0), completion(30.0), age_s=0.1, drain_per_s=2.0) is None


def test_a_first_token_is_judged_by_its_wait() -> None:
    slo = Slo(kind=SloKind.FIRST_TOKEN, seconds=10.0)
    assert late_refusal(prediction(5.0, own_s=60.0), slo, age_s=0.0, drain_per_s=1.0) is None
    assert late_refusal(prediction(15.0, own_s=60.0), slo, age_s=0.0, drain_per_s=1.0) is not None


@pytest.mark.parametrize("drain_per_s", [0.0, 1e-9])
def test_a_queue_that_does_not_drain_asks_for_the_longest_pause(drain_per_s: float) -> None:
    refusal = late_refusal(prediction(60.0), completion(30.0), age_s=0.1, drain_per_s=drain_per_s)
    assert refusal is not None
    assert refusal.retry_after_s == RETRY_MAX_S


@pytest.mark.parametrize(
    ("found", "slo", "age_s"),
    [
        (None, completion(30.0), 0.1),
        (prediction(60.0), completion(30.0), WAITS_AGE_MAX_S + 0.1),
        (prediction(60.0), Slo(kind=SloKind.PRIORITY, priority=3), 0.1),
        (prediction(60.0), completion(math.inf), 0.1),
    ],
    ids=["no prediction", "an old look", "a priority", "no deadline"],
)
def test_nothing_is_refused_on_a_guess(found: RequestPrediction | None, slo: Slo, age_s: float) -> None:
    assert late_refusal(found, slo, age_s=age_s, drain_per_s=1.0) is None


def test_the_setting_is_the_planners() -> None:
    assert GatewayConfig().planner.overload is Overload.BEST_EFFORT
    assert GatewayConfig.model_validate({"planner": {"overload": "refuse", "delta": 2}}).planner.overload is Overload.REFUSE
    with pytest.raises(ValueError, match="overload"):
        GatewayConfig.model_validate({"planner": {"overload": "hope"}})
