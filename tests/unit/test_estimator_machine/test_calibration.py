"""Predictions and what came of them: learned, published with the snapshot, and taken up again after a restart."""

from __future__ import annotations

from dataclasses import replace

from qlm_core.calibration import CalibratedTime
from qlm_core.distribution import Normal
from qlm_estimator.predictions import Judged, Predicted, told

from .driver import BEGAN_MS, INSTANCE, Driver

OWN = Normal(100.0, 25.0)


def judged(at_s: float, wait_s: float) -> Judged:
    clock_s = BEGAN_MS / 1e3 + at_s
    predicted = Predicted(
        queue_id="1",
        at_s=clock_s,
        completion=told(110.0, 120.0, own=Normal(110.0, 30.0)),
        wait=told(100.0, 106.0, own=OWN),
        model="chat",
        gpu=INSTANCE.gpu,
        n_gpu=1,
        instance=INSTANCE.name,
    )
    return Judged(predicted=predicted, at_s=clock_s + wait_s, completion_s=wait_s + 10.0, wait_s=wait_s)


def learned() -> Driver:
    driver = Driver()
    driver.seen()
    for number in range(200):
        driver.now_s = 200.0 * number
        driver.judge(judged(driver.now_s, 120.0))
    return driver


def test_pairs_are_published_as_rows_that_put_predictions_right() -> None:
    table = learned().published[-1].calibration
    made = table.row(CalibratedTime.WAIT, "chat", INSTANCE).applied(OWN)
    assert 115.0 < made.mean < 121.0
    assert 100.0 < table.row(CalibratedTime.COMPLETION, "chat", INSTANCE).applied(Normal(110.0, 30.0)).mean < 131.0


def test_an_instance_of_one_model_is_believed_sooner() -> None:
    """The waits of both came as they were predicted: once, which is no proof."""
    deviations = []
    for models in (("chat",), ("chat", "code")):
        driver = Driver()
        driver.seen(instances=(replace(INSTANCE, models=models),))
        driver.now_s = 200.0
        driver.judge(judged(200.0, 100.0))
        row = driver.published[-1].calibration.row(CalibratedTime.WAIT, "chat", INSTANCE)
        deviations.append(row.applied(Normal(1000.0)).deviation)
    assert deviations[0] < 0.8 * deviations[1]


def test_a_restored_machine_goes_on_from_the_published_rows() -> None:
    first = learned()
    again = Driver()
    again.restore(first.published[-1])
    again.seen()
    again.judge(judged(1e6, 120.0))
    rows = again.published[-1].calibration
    assert 115.0 < rows.row(CalibratedTime.WAIT, "chat", INSTANCE).applied(OWN).mean < 122.0


def test_judged_predictions_are_counted() -> None:
    assert learned().machine.counts.judged == 200


def test_what_was_told_before_the_work_changed_teaches_no_spread() -> None:
    """Answers become four times as long: those who waited meanwhile come late, which is no fault of what predictions say now."""
    driver = Driver()
    driver.seen(instances=(replace(INSTANCE, active_model="chat"),))
    for number in range(100):
        driver.run(number, number + 0.5, str(number), output_tokens=100)
    driver.judge(judged(50.0, 120.0))
    for number in range(100, 300):
        driver.run(number, number + 0.5, str(number), output_tokens=400)
    driver.tick(400.0)
    before = driver.published[-1].calibration
    driver.judge(judged(60.0, 400.0))
    assert driver.published[-1].calibration == before, "told at 60 s, before the change"
    driver.now_s = 500.0
    driver.judge(judged(450.0, 120.0))
    assert driver.published[-1].calibration != before
