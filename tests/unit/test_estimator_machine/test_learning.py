"""Lengths and speeds that the machine learns from events, and figures that it does not believe."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qlm_estimator.events import LifecycleKind
from qlm_estimator.machine import Learning

from .driver import BEGAN_MS, INSTANCE, Driver, duration_s

# Lengths --------------------------------------------------------------------------------------------------------------


def test_lengths_are_learned_for_class_token_class_and_model() -> None:
    driver = Driver()
    driver.seen()
    for number, output in enumerate((100, 200, 300)):
        driver.run(number, number + 0.5, str(number), output_tokens=output)
    rows = driver.workload()
    assert set(rows) == {("chat", "", ""), ("chat", "", "1024"), ("chat", "64s", "1024")}
    for row in rows.values():
        assert row.output_tokens_mean == pytest.approx(200.0, rel=0.01)
        assert math.sqrt(row.output_tokens_variance) == pytest.approx(math.sqrt(20_000 / 3), rel=0.01)
        assert (row.prompt_tokens_mean, row.prompt_tokens_variance) == (500.0, 0.0)


def test_the_class_comes_from_the_event_or_else_from_the_group() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 1, "1", slo_class="8s")
    driver.run(1, 2, "2", slo_class="")
    driver.report(LifecycleKind.COMPLETED, 3, "3", model="chat", output_tokens=9, slo_class="", group_id="gone")
    assert {key for key in driver.workload() if key[1]} == {("chat", "8s", "1024"), ("chat", "64s", "1024")}
    assert driver.workload()[("chat", "", "")].samples >= 2


def test_old_requests_fade() -> None:
    driver = Driver(Learning(memory_requests=50.0))
    driver.seen()
    for number in range(300):
        driver.run(number, number + 0.5, str(number), output_tokens=100)
    for number in range(300, 500):
        driver.run(number, number + 0.5, str(number), output_tokens=400)
    row = driver.workload()[("chat", "", "")]
    assert row.output_tokens_mean == pytest.approx(100 + 300 * (1 - math.exp(-200 / 50)), rel=0.02)
    assert row.samples <= 50


@pytest.mark.parametrize(
    "absurd",
    [
        {"output_tokens": 0},
        {"output_tokens": 8_193},
        {"output_tokens": 4_000_000_000},
        {"output_tokens": -5},
        {"prompt_tokens": 0},
        {"prompt_tokens": 4_000_000_000},
        {"model": ""},
        {"model": "nobody"},
    ],
)
def test_absurd_completions_teach_nothing(absurd: dict[str, object]) -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 3, "1", **absurd)
    assert driver.workload() == {}
    assert driver.published == []
    assert driver.machine.counts.refused == 1


def test_requests_that_did_not_complete_teach_no_length() -> None:
    driver = Driver()
    driver.seen()
    for kind in (LifecycleKind.ENDED, LifecycleKind.RELEASED):
        driver.report(LifecycleKind.PULLED, driver.now_s + 1, "1")
        driver.report(kind, driver.now_s + 2, "1", model="chat", output_tokens=100)
    assert driver.workload() == {}


def test_classes_are_bounded_and_the_oldest_go() -> None:
    driver = Driver(Learning(workload_rows_max=4))
    driver.seen()
    for number in range(20):
        driver.run(number, number + 0.5, str(number), slo_class=f"{2**number}s")
    rows = driver.workload()
    assert len(rows) == 4
    assert ("chat", "524288s", "1024") in rows
    assert ("chat", "", "") in rows


# Speed ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [0.85, 3.0])
def test_slowdown_of_runs_by_themselves(slowdown: float) -> None:
    driver = Driver()
    driver.seen()
    at_s = 0.0
    for number in range(400):
        took_s = duration_s(200, slowdown=slowdown)
        driver.run(at_s, at_s + took_s, str(number), finished_s=BEGAN_MS / 1e3 + at_s + took_s)
        at_s += took_s + 5.0  # idle times between the runs are not the engine's
    (row,) = driver.learned()
    assert (row.instance, row.model, row.gpu) == ("a", "Mistral-7B", "A100-80GB")
    assert row.slowdown == pytest.approx(slowdown, rel=0.08)
    assert 300 < row.samples <= 400


@pytest.mark.parametrize("scale", [0.5, 20.0])
def test_the_clock_of_an_instance_is_taken_out(scale: float) -> None:
    """A simulated engine that runs so many times as fast as its profile is no faster than it."""
    driver = Driver()
    driver.seen(instances=(replace(INSTANCE, time_scale=scale),))
    took_s = duration_s(200, slowdown=1.5) / scale
    for number in range(200):
        driver.run(10.0 * number, 10.0 * number + took_s, str(number))
    (row,) = driver.learned()
    assert row.slowdown == pytest.approx(1.5, rel=0.08)


def test_a_run_whose_first_token_was_not_reported_teaches_no_speed() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0.0, 3.0, "1", first_token_s=0.0)
    driver.run(4.0, 7.0, "2", output_tokens=1)
    assert (driver.machine.counts.lengths, driver.machine.counts.speeds) == (2, 0)


def test_rows_of_instances_are_bounded_and_the_one_that_ran_least_lately_goes() -> None:
    driver = Driver(Learning(hardware_rows_max=3))
    instances = tuple(replace(INSTANCE, name=name, incarnation=f"{name}/1") for name in "abcd")
    driver.seen(instances=instances)
    for number, name in enumerate("abcad"):
        driver.run(10.0 * number, 10.0 * number + 3.0, str(number), incarnation=f"{name}/1")
    assert [row.instance for row in driver.learned()] == ["a", "c", "d"]


def test_models_of_one_profile_share_a_row() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 3, "1", model="chat")
    driver.run(3, 6, "2", model="code")
    driver.run(6, 9, "3", model="big")
    assert [(row.instance, row.model) for row in driver.learned()] == [("a", "Mistral-7B"), ("a", "Vicuna-13B")]


def test_a_resumed_run_teaches_a_length_and_no_speed() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 3, "1", attempt=2)
    assert driver.machine.counts.speeds == 0
    assert driver.workload()[("chat", "", "")].samples == 1


def test_a_run_whose_pull_was_not_seen_teaches_no_speed() -> None:
    driver = Driver()
    driver.seen(running=3)
    for number in range(3):
        driver.report(LifecycleKind.COMPLETED, number + 1.0, str(number), model="chat", output_tokens=100)
    assert (driver.machine.counts.lengths, driver.machine.counts.speeds) == (3, 0)


@pytest.mark.parametrize("finished_s", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_an_absurd_finish_is_replaced_by_the_time_of_the_event(finished_s: float) -> None:
    driver, sane = Driver(), Driver()
    for each, reported_s in ((driver, finished_s), (sane, BEGAN_MS / 1e3 + 3.0)):
        each.seen()
        each.run(0.0, 3.0, "1", finished_s=reported_s)
    assert driver.learned() == sane.learned()


def test_a_run_of_a_model_that_nobody_knew_at_its_pull_teaches_no_speed() -> None:
    """Its prefill was not counted, nor were the prefills before it."""
    driver = Driver()
    driver.seen()
    driver.report(LifecycleKind.PULLED, 0.0, group_id="not read yet")
    driver.report(LifecycleKind.COMPLETED, 3.0, model="chat", output_tokens=200, slo_class="64s")
    assert (driver.machine.counts.lengths, driver.machine.counts.speeds) == (1, 0)


def test_a_run_of_an_absurd_duration_teaches_no_speed() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0.0, 3_600.0, "1")
    assert driver.machine.counts.speeds == 0
    assert driver.machine.counts.refused == 1


def test_unknown_incarnations_and_gpus_teach_no_speed() -> None:
    driver = Driver()
    driver.seen(instances=(replace(INSTANCE, gpu="B300"),))
    driver.run(0, 3, "1")
    driver.run(4, 7, "2", incarnation="nobody/9")
    assert driver.machine.counts.speeds == 0
    assert driver.machine.counts.lengths == 2


def test_another_gpu_under_the_same_name_begins_afresh() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 10, "1")
    h100 = replace(INSTANCE, incarnation="a/2", gpu="H100-80GB")
    driver.seen(instances=(h100,))
    driver.report(LifecycleKind.PULLED, 20, "2", incarnation="a/2")
    first_s = BEGAN_MS / 1e3 + 20.1
    driver.report(LifecycleKind.COMPLETED, 22, "2", incarnation="a/2", model="chat", output_tokens=200, first_token_s=first_s)
    (row,) = driver.learned()
    assert (row.gpu, row.samples) == ("H100-80GB", 1)


def test_events_before_the_reading_of_the_queue_are_not_counted_twice() -> None:
    """The reading says that two run; their pulls follow it in the stream, but happened before."""
    driver, plain = Driver(), Driver()
    plain.seen()
    driver.seen(running=2, last_event=(BEGAN_MS + 500, 10_000))
    for each in (driver, plain):
        each.report(LifecycleKind.PULLED, 0.1, "1")
        each.report(LifecycleKind.PULLED, 0.2, "2")
        for number in (1, 2):
            first_s = BEGAN_MS / 1e3 + 0.1 * number + 0.05
            each.report(LifecycleKind.COMPLETED, 1.0 + number, str(number), model="chat", output_tokens=100, first_token_s=first_s)
    assert driver.machine.counts.speeds == 0, "who the two were is not known"
    assert plain.machine.counts.speeds == 2
    driver.run(10.0, 12.8, "3")
    plain.run(10.0, 12.8, "3")
    assert driver.machine.counts.speeds == 1
    (row,) = driver.learned()
    assert row.slowdown == pytest.approx(1.0, abs=0.02), "it ran by itself: none of the two is taken to run still"
