"""Finishes in the order of their starts."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_estimator import start_order as module
from qlm_estimator.length_shift import LengthShift
from qlm_estimator.start_order import StartOrder


def told(number: int) -> tuple[float, float, float]:
    return (1.0, 1.0, float(number))


def numbers(order: StartOrder, number: int) -> list[int]:
    return [int(made) for _, _, made in order.end(str(number), told(number))]


def test_a_finish_waits_for_those_that_started_before() -> None:
    order = StartOrder()
    for number in range(4):
        order.begin(str(number))
    assert [numbers(order, number) for number in (2, 1, 0, 3)] == [[], [], [0, 1, 2], [3]]


def test_one_that_tells_no_length_is_waited_for_no_longer() -> None:
    order = StartOrder()
    for number in range(3):
        order.begin(str(number))
    assert numbers(order, 1) == []
    order.leave("0")
    assert numbers(order, 2) == [1, 2]


def test_one_that_outlasts_many_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_MAX", 3)
    order = StartOrder()
    for number in range(6):
        order.begin(str(number))
    assert [numbers(order, number) for number in (1, 2, 3, 4)] == [[], [], [1, 2, 3], [4]]
    assert numbers(order, 0) == [], "it counts as one that starts now, behind the one that runs"
    assert numbers(order, 5) == [5, 0]


def test_a_start_that_was_not_seen_is_one_of_now() -> None:
    order = StartOrder()
    order.begin("0")
    assert numbers(order, 7) == []
    assert numbers(order, 0) == [0, 7]


def test_what_is_followed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTED_MAX", 2)
    order = StartOrder()
    for number in range(4):
        order.begin(str(number))
    assert numbers(order, 2) == [2]
    assert numbers(order, 3) == [3]


def test_what_was_held_is_forgotten_with_what_was_expected() -> None:
    order = StartOrder()
    for number in range(3):
        order.begin(str(number))
    assert numbers(order, 1) == []
    order.forget_ended()
    assert numbers(order, 0) == [0]
    assert numbers(order, 2) == [2]


@pytest.mark.parametrize("ordered", [True, False])
def test_batches_that_drain_are_no_change(ordered: bool) -> None:
    """Batches of 128 that start at once and end by length, of outputs that never change."""
    rng = np.random.default_rng(1)
    order, shift, alarms = StartOrder(), LengthShift(), 0
    for batch in range(20):
        outputs = rng.lognormal(4.92, 0.6, 128)  # a mean of 164, a median of 137
        for number in range(128):
            order.begin(f"{batch}/{number}")
        for number in np.argsort(outputs).tolist():
            each = (164.0, 137.0, float(outputs[number]))
            due = order.end(f"{batch}/{number}", each) if ordered else iter([each])
            alarms += sum(shift.add(*finish) for finish in due)
    assert alarms == 0 if ordered else alarms > 5
