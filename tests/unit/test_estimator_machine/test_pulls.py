"""Pulls of groups that no reading of the queue has told of yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_estimator.events import LifecycleKind

from .driver import BEGAN_MS, INSTANCE, Driver


@pytest.mark.parametrize("told", ["big", ""])
def test_a_pull_of_a_group_not_read_yet_counts_for_its_own_model(told: str) -> None:
    """Up to two seconds pass from one reading of the queue to the next, and a model may become active between them. A queue that does not
    tell the model leaves only that of the last reading."""
    driver = Driver()
    driver.seen(instances=(replace(INSTANCE, active_model="chat"),))
    for number in range(30):
        _run_big(driver, 10.0 * number, str(number), told)
    driver.tell(LifecycleKind.PULLED, 400.0, "long", group_id="new", model=told)
    _run_big(driver, 500.0, "last", told)
    driver.tick(520.0)
    rows = {row.key: row for row in driver.machine.snapshot.workload}
    assert rows["big", "", ""].censored == (told == "big")


def _run_big(driver: Driver, began_s: float, queue_id: str, told: str) -> None:
    """A run of 200 tokens in five seconds."""
    driver.tell(LifecycleKind.PULLED, began_s, queue_id, group_id="new", model=told)
    times = {"first_token_s": BEGAN_MS / 1e3 + began_s + 0.2, "finished_s": BEGAN_MS / 1e3 + began_s + 5.0}
    ended: dict[str, object] = {"group_id": "new", "model": "big", "slo_class": "64s", "output_tokens": 200, **times}
    driver.tell(LifecycleKind.COMPLETED, began_s + 5.0, queue_id, **ended)
