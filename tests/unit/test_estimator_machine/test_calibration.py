"""Predictions and their outcomes: learned, published with the snapshot, and taken up again after a restart."""

from __future__ import annotations

import pytest

from qlm_core.profiles.calibration import CalibratedTime, CalibrationProfile
from qlm_core.statistics.distribution import Normal
from qlm_estimator.calibration import feedback
from qlm_estimator.calibration.bias import BiasFactor
from qlm_estimator.events import Count, Ended, LifecycleKind
from qlm_estimator.predictions import AGE_MAX_S, Predicted, quantiles_of

from .driver import BEGAN_MS, INSTANCE, Driver

OWN = Normal(100.0, 25.0)


def predicted(at_s: float, queue_id: str, instance: str = INSTANCE.name) -> Predicted:
    return Predicted(
        queue_id=queue_id,
        at_s=BEGAN_MS / 1e3 + at_s,
        completion=quantiles_of(110.0, 120.0, own=Normal(110.0, 30.0)),
        wait=quantiles_of(100.0, 106.0, own=OWN),
        model="chat",
        gpu=INSTANCE.gpu,
        n_gpu=1,
        instance=instance,
    )


def ended(queue_id: str, at_s: float, latency_s: float, wait_s: float | None = None, state: Count = Count.COMPLETED) -> Ended:
    return Ended(queue_id=queue_id, at_s=BEGAN_MS / 1e3 + at_s, state=state, slo_class="", latency_s=latency_s, wait_s=wait_s)


def served(driver: Driver, at_s: float, wait_s: float) -> None:
    """A request with a prediction, which waited so long and ran for 10 s."""
    prediction = predicted(at_s, str(at_s))
    driver.step(at_s, prediction)
    driver.report(LifecycleKind.PULLED, at_s + wait_s, prediction.queue_id)
    driver.step(at_s + wait_s + 10.0, ended(prediction.queue_id, at_s + wait_s + 10.0, wait_s + 10.0, wait_s))


def learned(wait_s: float = 120.0, count: int = 30) -> Driver:
    driver = Driver()
    driver.seen()
    for number in range(count):
        served(driver, 200.0 * number, wait_s)
    return driver


def row(driver: Driver, time: CalibratedTime = CalibratedTime.WAIT) -> CalibrationProfile:
    driver.tick(driver.now_s + 10.0)
    return driver.published[-1].calibration.row(time, "chat", INSTANCE)


@pytest.mark.parametrize("wait_s", [60.0, 90.0, 120.0, 180.0])
def test_a_bias_that_lasts_is_removed(wait_s: float) -> None:
    driver = learned(wait_s)
    assert row(driver).applied(OWN).mean == pytest.approx(wait_s, rel=0.05)
    assert row(driver, CalibratedTime.COMPLETION).applied(Normal(110.0, 30.0)).mean == pytest.approx(wait_s + 10.0, rel=0.05)


def test_a_bias_is_believed_as_far_as_it_stands_out_from_the_scatter() -> None:
    """The same mean, once from waits that all are as long and once from such that are much shorter and longer."""
    alike, scattered = BiasFactor(), BiasFactor()
    for number in range(10):
        alike.add(alike.apart_s(200.0 * number), 100.0, 120.0)
        scattered.add(scattered.apart_s(200.0 * number), 100.0, 60.0 if number % 2 else 180.0)
    assert alike.level_s(100.0) == pytest.approx(120.0, rel=0.01)
    assert scattered.factor == pytest.approx(alike.factor, rel=0.05)
    assert 105.0 < scattered.level_s(100.0) < 117.0


def test_predictions_that_wait_together_are_one_observation_of_a_bias() -> None:
    one, sixteen = BiasFactor(), BiasFactor()
    one.add(one.apart_s(0.0), 100.0, 120.0)
    for number in range(16):
        sixteen.add(sixteen.apart_s(0.01 * number), 100.0, 120.0)
    assert sixteen.level_s(100.0) == pytest.approx(one.level_s(100.0), abs=0.1)
    assert one.level_s(100.0) == pytest.approx(110.0, abs=0.5), "half of it, as the prior weighs as much"


def test_a_prediction_that_was_too_short_counts_by_the_time_that_it_took() -> None:
    """Requests wait behind the same work for as long as they wait, however long that was thought to be."""
    short, right = BiasFactor(), BiasFactor()
    for number in range(100):
        short.add(short.apart_s(10.0 * number), 100.0, 200.0)
        right.add(right.apart_s(10.0 * number), 200.0, 200.0)
    assert short.pairs == pytest.approx(right.pairs)


def test_short_requests_that_end_before_older_ones_do_not_count_for_them() -> None:
    """Completions of 80 and 140 s in turns, predicted as 110 s, in the order of their ends."""
    kept = feedback.Feedback(slowdown_of=lambda _model, _instance: 1.0)
    ends = sorted((5.0 * number + (80.0 if number % 2 else 140.0), number) for number in range(200))
    for number in range(200):
        kept.predict(predicted(5.0 * number, str(number)))
    for end_s, number in ends:
        kept.end(ended(str(number), end_s, end_s - 5.0 * number, 70.0))
    rows = kept.profiles(BEGAN_MS / 1e3 + ends[-1][0])
    (factor,) = (each.bias_factor for each in rows if each.time is CalibratedTime.COMPLETION and each.instance)
    assert factor == pytest.approx(1.0, abs=0.03)


def test_a_new_instance_begins_as_its_model_and_leaves_it_alone() -> None:
    kept = feedback.Feedback(slowdown_of=lambda _model, _instance: 1.0)

    def wait(instance: str, at_s: float, actual_s: float) -> dict[str, float]:
        kept.predict(predicted(at_s, str(at_s), instance))
        kept.end(ended(str(at_s), at_s + actual_s, actual_s + 10.0, actual_s))
        rows = [row for row in kept.profiles(BEGAN_MS / 1e3 + at_s + actual_s) if row.time is CalibratedTime.WAIT and row.instance]
        return {row.instance: row.bias_factor for row in rows}

    for number in range(20):
        first = wait("a", 200.0 * number, 120.0)["a"]
    assert first == pytest.approx(1.2, rel=0.05)
    factors = wait("b", 4_000.0, 60.0)
    assert factors["a"] == first
    assert 1.0 < factors["b"] < first


def test_the_factor_is_clamped() -> None:
    assert row(learned(2_000.0)).bias_factor <= 2.0


def test_spans_are_wide_before_any_outcome_and_narrow_where_all_were_as_predicted() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0.0, 3.0)
    assert row(driver).applied(OWN).quantile(0.9) > 130.0
    assert row(learned(100.0, 200)).applied(OWN).quantile(0.9) < 103.0


def test_one_that_still_waits_beyond_its_quantile_is_a_miss_at_once() -> None:
    """Their p90 is 106 s, and none has started after 107 s."""
    driver = learned(100.0, 40)
    before = row(driver)
    began_s = driver.now_s
    for number in range(90):
        driver.step(began_s + number, predicted(began_s + number, f"late {number}"))
    driver.tick(began_s + 99.0)
    assert driver.published[-1].calibration.row(CalibratedTime.WAIT, "chat", INSTANCE) == before
    driver.tick(began_s + 210.0)
    assert row(driver).applied(OWN).quantile(0.9) > 110.0


def test_one_that_an_engine_has_waits_no_longer() -> None:
    """Its wait ends at the start that its completion names; from the pull on it misses no quantile."""
    driver = learned(100.0, 40)
    before = row(driver)
    began_s = driver.now_s
    for number in range(90):
        driver.step(began_s + number, predicted(began_s + number, f"pulled {number}"))
        driver.report(LifecycleKind.PULLED, began_s + number + 1.0, f"pulled {number}")
    driver.tick(began_s + 199.0)
    assert row(driver).applied(OWN) == before.applied(OWN)


def test_one_that_an_engine_took_beyond_its_quantile_was_a_miss() -> None:
    """No publication fell between its p90 and its pull, and it has not completed."""
    driver = learned(100.0, 40)
    began_s = driver.now_s
    for number in range(90):
        driver.step(began_s + number, predicted(began_s + number, f"late {number}"))
    for number in range(90):
        driver.report(LifecycleKind.PULLED, began_s + 150.0 + number, f"late {number}")
    assert row(driver).applied(OWN).quantile(0.9) > 110.0


def test_cancelled_before_it_is_decided_says_nothing() -> None:
    driver = learned(100.0, 50)
    before = row(driver)
    began_s = driver.now_s
    driver.step(began_s, predicted(began_s, "gone"))
    driver.step(began_s + 50.0, ended("gone", began_s + 50.0, 50.0, state=Count.CANCELLED))
    driver.tick(began_s + 1_000.0)
    assert row(driver) == before


def test_a_restored_machine_goes_on_from_the_published_rows() -> None:
    again = Driver()
    again.restore(learned().published[-1])
    again.seen()
    again.now_s = 1e6
    served(again, 1e6, 120.0)
    assert row(again).applied(OWN).mean == pytest.approx(120.0, rel=0.03)


def test_a_restored_machine_is_as_sure_as_it_was() -> None:
    again = Driver()
    again.restore(learned(100.0, 200).published[-1])
    again.seen()
    again.now_s = 1e6
    served(again, 1e6, 100.0)
    assert row(again).applied(OWN).quantile(0.9) < 103.0


def test_judged_predictions_are_counted() -> None:
    assert learned(count=7).machine.counts.judged == 7


def test_predictions_made_before_the_speed_changed_are_no_bias() -> None:
    """The engine becomes half as fast: requests that wait meanwhile are late, which is no fault of present predictions."""
    driver = Driver()
    driver.seen()
    for number in range(60):
        driver.run(10.0 * number, 10.0 * number + 3.0, str(number))
    driver.step(600.0, predicted(600.0, "before"))
    for number in range(60, 160):
        driver.run(10.0 * number, 10.0 * number + 6.0, str(number))
    driver.step(1_610.0, ended("before", 1_600.0, 210.0, 200.0))
    assert row(driver).bias_factor == 1.0


def test_what_never_ends_is_given_up_and_all_that_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "OUTSTANDING_MAX", 100)
    monkeypatch.setattr(feedback, "ROWS_MAX", 10)
    kept = feedback.Feedback(slowdown_of=lambda _model, _instance: 1.0)
    for number in range(1_000):
        prediction = predicted(10.0 * number, str(number))
        kept.predict(prediction)
        assert kept.end(ended(str(number), 10.0 * number + 1.0, 1.0, 1.0)) is not None
        assert not kept._followed
    for number in range(1_000):
        kept.predict(predicted(20_000.0, f"lost {number}"))
    assert len(kept._followed) <= 102
    kept.pass_time(BEGAN_MS / 1e3 + 20_000.0 + AGE_MAX_S + 1.0)
    assert not kept._followed
