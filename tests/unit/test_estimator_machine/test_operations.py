"""How long loads of models and moves of KV take on an instance: what is learned of them, and what is not believed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qlm_core.hardware_profile import AS_PROFILED, ORIGIN_MEASURED
from qlm_core.importable_profiles import SLOWDOWN_MAX
from qlm_core.profile import ProfileSnapshot
from qlm_estimator.events import OperationKind
from qlm_estimator.machine import UNSEEN_OPERATIONS_MAX, Learning

from .driver import INSTANCE, Driver, duration_s
from .operations import A100, COLD_S, KV_MOVED, SWAPPED_COLD, SWAPPED_WARM, WARM_S, WARMED, learned, loads


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.seen()
    return driver


# What is learned ------------------------------------------------------------------------------------------------------


def test_slow_loads_are_believed_by_and_by(driver: Driver) -> None:
    believed = []
    at_s = 0.0
    for count in (1, 3, 4, 24):
        at_s = loads(driver, count, 2.0, from_s=at_s)
        believed.append(learned(driver).swap_s(warm=True) / WARM_S)
    assert believed == sorted(believed)
    assert 1.2 < believed[0] < 1.6, "one is not believed alone"
    assert believed[2] > 1.8
    assert believed[3] == pytest.approx(2.0, rel=0.03)
    row = learned(driver)
    assert (row.swap_warm.samples, row.swap_cold, row.kv_swap) == (32, AS_PROFILED, AS_PROFILED)
    assert row.swap_warm.prior_share < 0.05
    assert row.swap_s(warm=False) == COLD_S, "loads from disk are another thing"
    assert driver.machine.counts.operations == 32


def test_a_row_of_operations_alone_leaves_runs_as_they_are(driver: Driver) -> None:
    loads(driver, 4, 2.0)
    row = learned(driver)
    assert (row.instance, row.slowdown, row.samples, row.prior_share) == ("a", 1.0, 0, 1.0)
    assert row.decode_step_s(8, 4_000) == A100.decode_step_s(8, 4_000)
    driver.run(1_000.0, 1_000.0 + duration_s(200, slowdown=1.2))
    assert learned(driver).samples == 1
    assert learned(driver).swap_warm == row.swap_warm


def test_loads_from_disk_are_learned_from_swaps_and_from_warmings(driver: Driver) -> None:
    at_s = loads(driver, 8, 3.0, kind=SWAPPED_COLD)
    assert learned(driver).swap_s(warm=False) / COLD_S == pytest.approx(2.66, rel=0.05)
    assert learned(driver).swap_s(warm=True) == WARM_S
    other = Driver()
    other.seen()
    loads(other, 16, 3.0, kind=WARMED)
    loads(other, 16, 3.0, from_s=at_s)
    loads(other, 16, 3.0, from_s=2_000.0, kind=WARMED)
    assert learned(other).swap_s(warm=False) / COLD_S == pytest.approx(2.8, rel=0.1)


def test_a_warming_is_a_load_from_disk_without_what_was_learned_of_the_rest(driver: Driver) -> None:
    """From disk as profiled, and from there three times as long: so much in all takes a load from disk to the GPU."""
    at_s = loads(driver, 24, 3.0)
    loads(driver, 32, 1.0, from_s=at_s, kind=WARMED)
    assert learned(driver).swap_s(warm=False) == pytest.approx(COLD_S - WARM_S + 3.0 * WARM_S, rel=0.04)


def test_moves_of_kv_are_held_against_their_size(driver: Driver) -> None:
    """Of requests and of tokens: each request costs as much as a thousand tokens here."""
    based = replace(A100, origin=ORIGIN_MEASURED, kv_swap_base_ms=A100.kv_swap_us_per_token)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(based,)))
    sizes = random.Random(1)
    for number in range(16):
        requests = sizes.randint(1, 20)
        tokens = requests * sizes.randint(100, 6_000)
        took_s = 1.5 * A100.kv_swap_us_per_token * 1e-6 * (1_000 * requests + tokens)
        driver.operation(KV_MOVED, float(number), took_s, requests=requests, tokens=tokens)
    row = learned(driver)
    assert row.kv_swap_s(4_000) == pytest.approx(1.5 * A100.kv_swap_us_per_token * 1e-6 * 5_000, rel=0.07)
    assert row.kv_swap.samples == 16


def test_what_takes_no_longer_than_a_turn_of_the_process_tells_little(driver: Driver) -> None:
    """On an engine with a fast clock a load takes a millisecond, and what measures it half of that."""
    fast = replace(INSTANCE, time_scale=1_000.0)
    driver.seen(instances=(fast,))
    for number in range(8):
        driver.operation(SWAPPED_WARM, float(number), 2.0 * WARM_S / fast.time_scale)
    assert 1.0 < learned(driver).swap_warm.slowdown < 1.3
    assert learned(driver).swap_warm.prior_share > 0.5


def test_each_instance_and_model_has_its_own(driver: Driver) -> None:
    other = replace(INSTANCE, name="b", incarnation="b/1")
    driver.seen(instances=(INSTANCE, other))
    loads(driver, 8, 2.0)
    for number in range(8):
        driver.operation(SWAPPED_WARM, 1_000.0 + number, 0.5 * WARM_S, incarnation="b/1")
        driver.operation(SWAPPED_WARM, 1_000.5 + number, 0.85, incarnation="b/1", model="big")
    rows = {(row.instance, row.model): row.swap_warm.slowdown for row in driver.learned()}
    assert set(rows) == {("a", "Mistral-7B"), ("b", "Mistral-7B"), ("b", "Vicuna-13B")}
    assert rows["a", "Mistral-7B"] > 1.8
    assert rows["b", "Mistral-7B"] < 0.6


def test_an_instance_on_other_gpus_is_learned_anew(driver: Driver) -> None:
    loads(driver, 8, 2.0)
    driver.seen(instances=(replace(INSTANCE, gpu="A10"),))
    driver.operation(SWAPPED_WARM, 1_000.0, 1.0)
    (row,) = driver.learned()
    assert (row.gpu, row.swap_warm.samples) == ("A10", 1)


def test_learned_rows_are_bounded_and_the_oldest_goes() -> None:
    driver = Driver(Learning(hardware_rows_max=3))
    instances = tuple(replace(INSTANCE, name=f"i{number}", incarnation=f"i{number}/1") for number in range(5))
    driver.seen(instances=instances)
    for number in range(5):
        driver.operation(SWAPPED_WARM, float(number), 2.0, incarnation=f"i{number}/1")
    assert [row.instance for row in driver.learned()] == ["i2", "i3", "i4"]


# Outliers and what is not believed --------------------------------------------------------------------------------------


def test_one_load_in_four_from_a_cold_cache_moves_little(driver: Driver) -> None:
    for number in range(32):
        driver.operation(SWAPPED_COLD, 60.0 * number, (9.0 if number % 4 == 0 else 1.0) * COLD_S)
    assert learned(driver).swap_cold.slowdown < 1.2


@pytest.mark.parametrize("took_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e9])
def test_what_is_no_duration_is_refused(driver: Driver, took_s: float) -> None:
    driver.operation(SWAPPED_WARM, 1.0, took_s)
    assert driver.learned() == []
    assert (driver.machine.counts.operations, driver.machine.counts.refused) == (0, 1)
    assert driver.published == []


@pytest.mark.parametrize("fields", [{"model": "nobody"}, {"incarnation": "a/0"}])
def test_operations_of_nobody_teach_nothing(driver: Driver, fields: dict[str, object]) -> None:
    driver.operation(SWAPPED_WARM, 1.0, 2.0, **fields)
    driver.seen()
    driver.seen()
    assert driver.learned() == []
    assert (driver.machine.counts.operations, driver.machine.counts.refused) == (0, 1)


def test_a_move_without_size_is_refused(driver: Driver) -> None:
    driver.operation(KV_MOVED, 1.0, 2.0)
    assert (driver.learned(), driver.machine.counts.refused) == ([], 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(OperationKind),
            st.floats() | st.floats(1e-6, 1e3),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            st.floats(-1e6, 1e6),
        ),
        max_size=60,
    )
)
@example([(SWAPPED_COLD, 5e-324, 0, 0, 0.0), (KV_MOVED, 5e-324, 2**32 - 1, 2**64 - 1, 1.0)])
def test_whatever_comes_times_stay_sound(told: list[tuple[OperationKind, float, int, int, float]]) -> None:
    driver = Driver()
    driver.seen()
    for kind, took_s, requests, tokens, at_s in told:
        driver.operation(kind, at_s, took_s, requests=requests, tokens=tokens)
    for row in driver.learned():
        for operation in (row.swap_warm, row.swap_cold, row.kv_swap):
            assert 1.0 / SLOWDOWN_MAX * 0.999 <= operation.slowdown <= SLOWDOWN_MAX * 1.001
        assert row.swap_s(warm=False) > 0.0


def test_an_instance_that_just_came_is_waited_for() -> None:
    """Its first load is told before the queue is read again."""
    driver = Driver()
    driver.seen(instances=())
    driver.operation(SWAPPED_COLD, 1.0, 2.0 * COLD_S)
    assert driver.learned() == []
    driver.seen()
    assert learned(driver).swap_cold.samples == 1
    for number in range(UNSEEN_OPERATIONS_MAX + 10):
        driver.operation(SWAPPED_COLD, 2_000.0 + number, 2.0 * COLD_S, incarnation="z/1")
    driver.seen(instances=(INSTANCE, replace(INSTANCE, name="z", incarnation="z/1")))
    assert driver.machine.counts.operations == 1 + UNSEEN_OPERATIONS_MAX


def test_an_event_that_comes_again_counts_once(driver: Driver) -> None:
    told = driver.operation(SWAPPED_WARM, 1.0, 2.0)
    driver.told(told)
    assert learned(driver).swap_warm.samples == 1
    assert driver.machine.counts.repeated == 1


def test_a_change_is_followed_after_some_loads(driver: Driver) -> None:
    changed_s = loads(driver, 20, 1.0)
    loads(driver, 24, 3.0, from_s=changed_s)
    assert learned(driver).swap_warm.slowdown == pytest.approx(3.0, rel=0.1)
