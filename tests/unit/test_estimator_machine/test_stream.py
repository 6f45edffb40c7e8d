"""Events that repeat or are missing, and when the machine publishes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predicted_times import predict_request
from qlm_core.prediction.prediction_views import QueueView
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.workload_profile import PRIOR_SAMPLES, WORKLOAD_PRIOR
from qlm_estimator.events import Lifecycle, LifecycleKind, Publish, QueueSeen
from qlm_estimator.machine import EstimatorMachine, Learning
from qlm_estimator.speed.base_rows import prior_s
from qlm_estimator.speed.factor import MEMORY_S

from .driver import BEGAN_MS, CATALOGUE, GROUPS, INSTANCE, SHIPPED, Driver, duration_s

# The stream -----------------------------------------------------------------------------------------------------------


def test_repeated_events_count_once() -> None:
    driver = Driver()
    driver.seen()
    driver.report(LifecycleKind.PULLED, 0.0, "1")
    done = driver.report(LifecycleKind.COMPLETED, 3.0, "1", model="chat", output_tokens=200)
    before = driver.workload()
    for _ in range(3):
        driver.again(done)
    assert driver.workload() == before
    assert (driver.machine.counts.repeated, driver.machine.counts.lengths) == (3, 1)


def test_events_of_one_entry_all_count() -> None:
    driver = Driver()
    driver.seen()
    event = driver.report(LifecycleKind.COMPLETED, 3.0, "1", model="chat", output_tokens=200)
    driver.again(replace(event, index=1, queue_id="2"))
    assert driver.machine.counts.lengths == 2


def test_a_gap_is_noticed_and_counted() -> None:
    driver = Driver()
    driver.seen()
    for number in (5, 6, 7):
        driver.report(LifecycleKind.ACCEPTED, number, str(number), acceptance_number=number)
    assert (driver.machine.counts.gaps, driver.machine.counts.missed) == (0, 0)
    driver.report(LifecycleKind.PULLED, 8.0, "5")
    driver.report(LifecycleKind.ACCEPTED, 20.0, "107", acceptance_number=107)
    assert (driver.machine.counts.gaps, driver.machine.counts.missed) == (1, 99)
    driver.report(LifecycleKind.COMPLETED, 21.0, "5", model="chat", output_tokens=200)
    assert (driver.machine.counts.lengths, driver.machine.counts.speeds) == (1, 0), "who ran beside it is not known"
    driver.seen()
    driver.run(30.0, 33.0, "200")
    assert driver.machine.counts.speeds == 1, "after the next reading it is"


# Publication ----------------------------------------------------------------------------------------------------------


def test_publishes_at_most_so_often_and_only_news() -> None:
    driver = Driver(Learning(publish_every_s=5.0))
    driver.seen()
    driver.tick(100.0)
    assert driver.published == [], "nothing was learned"
    for number in range(40):
        driver.run(100.0 + number, 100.5 + number, str(number))
    times = [snapshot.made_s - BEGAN_MS / 1e3 for snapshot in driver.published]
    assert [snapshot.version for snapshot in driver.published] == list(range(1, len(times) + 1))
    assert len(times) == 8
    assert all(after - before >= 5.0 for before, after in pairwise(times))
    driver.tick(200.0)
    count = len(driver.published)
    driver.tick(300.0)
    assert len(driver.published) == count == 9


def test_a_clock_set_back_does_not_silence_it() -> None:
    driver = Driver(Learning(publish_every_s=5.0))
    driver.seen()
    driver.run(1_000.0, 1_003.0, "1")
    driver.now_s = 500.0
    driver.again(replace(driver.last, entry_id=(BEGAN_MS + 1_004_000, 0), queue_id="2"))
    driver.tick(504.0)
    assert [snapshot.version for snapshot in driver.published] == [1]
    driver.tick(506.0)
    assert [snapshot.version for snapshot in driver.published] == [1, 2]


def test_a_restart_goes_on_from_what_was_published() -> None:
    driver = Driver()
    driver.seen()
    at_s = 0.0
    for number in range(100):
        took_s = duration_s(200, slowdown=1.3)
        driver.run(at_s, at_s + took_s, str(number))
        at_s += took_s + 1.0
    driver.tick(at_s + 10.0)
    last = driver.published[-1]

    restarted = Driver()
    restarted.now_s = at_s + 20.0
    restarted.restore(last)
    restarted.seen()
    assert restarted.published == []
    assert restarted.machine.snapshot == last
    restarted.again(driver.last)
    assert restarted.machine.counts.repeated == 1, "it was learned before"
    restarted.run(at_s + 30.0, at_s + 30.0 + duration_s(200, slowdown=1.3), "1000")
    restarted.tick(at_s + 100.0)
    newest = restarted.published[-1]
    assert newest.version == last.version + 1
    workload = {row.key: row for row in newest.workload}[("chat", "", "")]
    assert 95 <= workload.samples <= 101
    (row,) = [row for row in newest.hardware if row.instance]
    assert row.slowdown == pytest.approx(next(row for row in last.hardware if row.instance).slowdown, rel=0.02)
    assert 95 <= row.samples <= 101


events = st.builds(
    Lifecycle,
    kind=st.sampled_from(LifecycleKind),
    entry_id=st.tuples(st.integers(BEGAN_MS, BEGAN_MS + 100_000), st.integers(0, 3)),
    index=st.integers(0, 2),
    queue_id=st.sampled_from(["1", "2", "3", "4"]),
    group_id=st.sampled_from(["g", "", "gone"]),
    incarnation=st.sampled_from(["a/1", "a/2", "", "x"]),
    attempt=st.integers(0, 3),
    acceptance_number=st.integers(0, 2**60),
    prompt_tokens=st.integers(0, 2**32 - 1),
    model=st.sampled_from(["chat", "big", "", "nobody"]),
    slo_class=st.sampled_from(["64s", ""]),
    output_tokens=st.integers(0, 2**32 - 1) | st.integers(1, 500),
    finished_s=st.floats() | st.floats(BEGAN_MS / 1e3, BEGAN_MS / 1e3 + 100),
)


@given(st.lists(st.tuples(events, st.booleans()), max_size=60), st.booleans())
def test_profiles_stay_sound_under_any_reports(reports: list[tuple[Lifecycle, bool]], ordered: bool) -> None:
    """Any events in any order: no exception, every published figure is finite (the profiles' own checks), and versions grow by one."""
    machine = EstimatorMachine(
        learning=Learning(publish_every_s=0.001, memory_requests=10.0), catalogue=CATALOGUE, shipped=SHIPPED.hardware
    )
    seen = QueueSeen(last_event=(BEGAN_MS, 0), instances=(INSTANCE,), running={"a/1": 1}, groups=GROUPS)
    machine.step(BEGAN_MS / 1e3, seen)
    versions: list[int] = []
    for event, look in sorted(reports, key=lambda item: (item[0].entry_id, item[0].index)) if ordered else reports:
        effects = machine.step(event.entry_id[0] / 1e3, event)
        if look:
            effects += machine.step(event.entry_id[0] / 1e3, replace(seen, last_event=event.entry_id))
        versions += [effect.snapshot.version for effect in effects if isinstance(effect, Publish)]
        for row in machine.snapshot.hardware:
            assert 1 / 16 <= row.slowdown <= 16
    assert versions == list(range(1, len(versions) + 1))


# Predictions with no data at all, with one finished request, and after a first answer of an absurd length -------------


IDLE = QueueView(instance=INSTANCE, active_model="chat", running=0, groups=())


def completion_s(snapshot: ProfileSnapshot) -> float:
    """A request on an idle instance."""
    found = predict_request((IDLE,), CATALOGUE, snapshot, "chat", 500, 8_000, 1e9, slo_class="64s", token_class="1024")
    assert found is not None
    assert all(math.isfinite(each) and each >= 0.0 for each in (found.wait.mean, found.completion.mean, found.completion.variance))
    return found.completion.mean


def test_without_data_the_shipped_rows_and_the_prior_are_believed() -> None:
    driver = Driver()
    driver.seen()
    driver.tick(100.0)
    assert driver.published == [], "there is nothing to report"
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


# Pulls of groups that no reading of the queue has listed yet ----------------------------------------------------------


@pytest.mark.parametrize("pulled_model", ["big", ""])
def test_a_pull_of_a_group_not_read_yet_counts_for_its_own_model(pulled_model: str) -> None:
    """Up to two seconds pass from one reading of the queue to the next, and a model may become active between them. A queue that does not
    name the model leaves only that of the last reading."""
    driver = Driver()
    driver.seen(instances=(replace(INSTANCE, active_model="chat"),))
    for number in range(30):
        _run_big(driver, 10.0 * number, str(number), pulled_model)
    driver.report(LifecycleKind.PULLED, 400.0, "long", group_id="new", model=pulled_model)
    _run_big(driver, 500.0, "last", pulled_model)
    driver.tick(520.0)
    rows = {row.key: row for row in driver.machine.snapshot.workload}
    assert rows["big", "", ""].censored == (pulled_model == "big")


def _run_big(driver: Driver, began_s: float, queue_id: str, pulled_model: str) -> None:
    """A run of 200 tokens in five seconds."""
    driver.report(LifecycleKind.PULLED, began_s, queue_id, group_id="new", model=pulled_model)
    times = {"first_token_s": BEGAN_MS / 1e3 + began_s + 0.2, "finished_s": BEGAN_MS / 1e3 + began_s + 5.0}
    ended: dict[str, object] = {"group_id": "new", "model": "big", "slo_class": "64s", "output_tokens": 200, **times}
    driver.report(LifecycleKind.COMPLETED, began_s + 5.0, queue_id, **ended)
