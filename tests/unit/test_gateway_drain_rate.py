"""The retry hint from the measured drain rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_gateway.outlook.drain_rate import PLACES_MAX, PRIOR_PER_S, RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, DrainRate


def watched(per_s: int, seconds: int) -> DrainRate:
    rate = DrainRate()
    for second in range(seconds + 1):
        rate.observe(float(second), second * per_s)
    return rate


def test_the_prior_holds_before_any_data() -> None:
    assert DrainRate().per_s == PRIOR_PER_S
    assert DrainRate().retry_after_s() == pytest.approx(max(RETRY_AFTER_MIN_S, 1 / PRIOR_PER_S))


@pytest.mark.parametrize("per_s", [1, 5, 200, 3000])
def test_it_learns_the_rate(per_s: int) -> None:
    assert watched(per_s, 120).per_s == pytest.approx(per_s, rel=0.1)


def test_those_refused_together_are_sent_away_for_longer_each() -> None:
    rate = watched(2, 200)
    hints = [rate.retry_after_s() for _ in range(4)]
    assert hints == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.05)
    rate.observe(201.0, 402)
    assert rate.retry_after_s() == pytest.approx(0.5, rel=0.05)


def test_a_full_tenant_has_its_share_of_the_ends_and_a_line_of_its_own() -> None:
    rate = watched(10, 200)
    hints = [rate.retry_after_s(share=0.1, place="tenant a") for _ in range(3)]
    assert hints == pytest.approx([1.0, 2.0, 3.0], rel=0.05)
    assert rate.retry_after_s(share=0.5, place="tenant b") == pytest.approx(0.2, rel=0.05)
    assert rate.retry_after_s() == pytest.approx(0.1, rel=0.05)


def test_distinct_places_are_bounded() -> None:
    rate = watched(100, 200)
    for number in range(PLACES_MAX):
        rate.retry_after_s(place=f"tenant {number}")
    hints = [rate.retry_after_s(place=f"tenant {PLACES_MAX + number}") for number in range(30)]
    assert hints[-1] == pytest.approx(0.3, rel=0.05)


def test_a_queue_that_stands_still_gives_the_longest_hint() -> None:
    assert watched(0, 600).retry_after_s() == RETRY_AFTER_MAX_S


def test_a_count_that_fell_starts_afresh() -> None:
    rate = watched(5, 50)
    before = rate.per_s
    rate.observe(51.0, 0)
    assert rate.per_s == before


@given(counts=st.lists(st.integers(0, 10**9), max_size=20), gaps=st.lists(st.floats(0, 1e6), min_size=20, max_size=20))
def test_hints_are_bounded_whatever_is_seen(counts: list[int], gaps: list[float]) -> None:
    rate, now_s = DrainRate(), 0.0
    for count, gap_s in zip(counts, gaps, strict=False):
        now_s += gap_s
        rate.observe(now_s, count)
        assert RETRY_AFTER_MIN_S <= rate.retry_after_s() <= RETRY_AFTER_MAX_S
