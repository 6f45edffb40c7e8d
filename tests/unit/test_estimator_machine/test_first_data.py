"""What is said with no data at all, with one finished request, and after a first answer of an absurd length."""

from __future__ import annotations

import math

import pytest

from predicted_times import predict_request
from qlm_core.prediction_views import QueueView
from qlm_core.profile import ProfileSnapshot
from qlm_core.workload_profile import PRIOR_SAMPLES, WORKLOAD_PRIOR
from qlm_estimator.speed.base_rows import prior_s
from qlm_estimator.speed.factor import MEMORY_S

from .driver import CATALOGUE, INSTANCE, SHIPPED, Driver, duration_s

IDLE = QueueView(instance=INSTANCE, active_model="chat", running=0, groups=())


def completion_s(snapshot: ProfileSnapshot) -> float:
    """Of a request on an idle instance."""
    found = predict_request((IDLE,), CATALOGUE, snapshot, "chat", 500, 8_000, 1e9, slo_class="64s", token_class="1024")
    assert found is not None
    assert all(math.isfinite(each) and each >= 0.0 for each in (found.wait.mean, found.completion.mean, found.completion.variance))
    return found.completion.mean


def test_without_data_the_shipped_rows_and_the_prior_are_believed() -> None:
    driver = Driver()
    driver.seen()
    driver.tick(100.0)
    assert driver.published == [], "there is nothing to tell"
    assert driver.machine.snapshot.workload_for("chat", "64s", "1024") == WORKLOAD_PRIOR
    expected_s = duration_s(round(WORKLOAD_PRIOR.output_tokens_mean))
    assert completion_s(driver.machine.snapshot) == pytest.approx(expected_s, rel=0.1)


def test_one_finished_request_weighs_as_one_beside_the_priors() -> None:
    driver = Driver()
    driver.seen()
    before_s = completion_s(driver.machine.snapshot)
    took_s = duration_s(2_000, slowdown=2.0)
    driver.run(0.0, took_s, output_tokens=2_000)
    driver.tick(took_s + 10.0)
    snapshot = driver.machine.snapshot
    (row,) = [row for row in snapshot.workload if row.key == ("chat", "", "")]
    assert row.samples == 1
    assert row.output_tokens_variance == pytest.approx(0.0, abs=1.0)
    believed = snapshot.workload_for("chat", "", "")
    weight = 1.0 / (1.0 + PRIOR_SAMPLES)
    assert believed.output_tokens_mean == pytest.approx(weight * 2_000 + (1.0 - weight) * WORKLOAD_PRIOR.output_tokens_mean, rel=0.01)
    assert believed.output_tokens_variance > WORKLOAD_PRIOR.output_tokens_variance, "one says little of how much they vary"
    (learned,) = [row for row in snapshot.hardware if row.instance]
    assert learned.samples == 1
    run_s, prior = took_s / 2.0, prior_s(SHIPPED.hardware[0]) * math.exp(-took_s / MEMORY_S)
    assert learned.prior_share == pytest.approx(prior / (run_s + prior), rel=0.05)
    assert learned.slowdown == pytest.approx((2.0 * run_s + prior) / (run_s + prior), rel=0.05)
    # Ten times as long, at half the speed: a third of it is believed of its class, which leans on rows of the same one request.
    assert before_s < completion_s(snapshot) < 7.0 * before_s


def test_a_first_answer_of_an_absurd_length_is_soon_outweighed() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0.0, 100.0, "0", output_tokens=7_900)
    for number in range(1, 101):
        driver.run(100.0 + number, 100.5 + number, str(number), output_tokens=100)
    rows = driver.workload()
    assert set(rows) == {("chat", "", ""), ("chat", "", "1024"), ("chat", "64s", "1024")}
    for row in rows.values():
        assert row.output_curve().median_tokens == pytest.approx(100.0, rel=0.05)
        assert row.output_tokens_mean < 150.0
