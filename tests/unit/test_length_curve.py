"""The distribution of output lengths on fixed bins, against plain samples."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.length_curve import (
    BINS,
    EXACT_TOKENS_MAX,
    LONGEST_OF,
    TOKENS_MAX,
    UPPERS,
    LengthCurve,
    bin_of,
    curve_of_moments,
    packed,
    unpacked,
)

lengths = st.lists(st.integers(1, TOKENS_MAX), min_size=1, max_size=50)


def curve_of(values: list[int]) -> LengthCurve:
    return LengthCurve(np.bincount([bin_of(value) for value in values], minlength=BINS).astype(float))


def test_every_length_is_in_the_bin_that_holds_it() -> None:
    for tokens in [*range(1, 200), 4_095, 4_096, 4_097, TOKENS_MAX]:
        index = bin_of(tokens)
        assert (UPPERS[index - 1] if index else 0) < tokens <= UPPERS[index]
    assert (bin_of(0), bin_of(10 * TOKENS_MAX)) == (0, BINS - 1)


def test_a_large_sample_keeps_its_moments_quantiles_and_tail() -> None:
    values = np.maximum(1, np.random.default_rng(1).lognormal(4.0, 1.0, 200_000)).astype(int)
    curve = curve_of(values.tolist())
    assert curve.output_tokens.mean == pytest.approx(values.mean(), rel=0.01)
    assert curve.output_tokens.variance == pytest.approx(values.var(), rel=0.03)
    for probability in (0.1, 0.5, 0.9, 0.99):
        assert curve.quantile(probability) == pytest.approx(np.quantile(values, probability), rel=0.03)
    for produced in (1, 10, 60, 200, 700):
        longer = values[values > produced]
        left = curve.left(produced)
        assert curve.survival(produced) == pytest.approx(len(longer) / len(values), abs=0.005)
        assert left.mean == pytest.approx(longer.mean() - produced, rel=0.03)
        assert left.deviation == pytest.approx(longer.std(), rel=0.05)


def test_short_outputs_are_exact() -> None:
    curve = curve_of([3, 3, 3, 7, 9])
    assert (curve.median_tokens, curve.output_tokens.mean) == (3.0, 5.0)
    assert curve.left(3).mean == 5.0
    assert curve.left(7).mean == 2.0
    assert curve.left(8).variance == 0.0


@pytest.mark.parametrize("produced", [0, 3, 60, 800])
@pytest.mark.parametrize("most", [1, 2, 50, 700, 5_000])
def test_a_limit_ends_what_is_left(produced: int, most: int) -> None:
    """Against the mean over all lengths that are longer; those of a bin are alike."""
    curve = curve_of([3, 40, 40, 200, 900])
    every = np.arange(1, 2_000)
    share = np.array([curve.shares[bin_of(each)] / (UPPERS[bin_of(each)] - (0, *UPPERS)[bin_of(each)]) for each in every.tolist()])
    share[every <= produced] = 0.0
    left = np.minimum(every - produced, most)
    mean = float(np.average(left, weights=share))
    found = curve.left(produced, most)
    assert found.mean == pytest.approx(mean)
    assert found.variance == pytest.approx(float(np.average((left - mean) ** 2, weights=share)), abs=1e-6)


def test_what_outlived_all_that_was_seen_has_half_as_long_again() -> None:
    curve = curve_of([10, 20])
    assert curve.left(400).mean == 200.0
    assert math.isfinite(curve.left(1e6).variance)


@given(lengths, st.lists(st.floats(0.0, 2.0 * TOKENS_MAX), min_size=1, max_size=20))
def test_the_curve_is_a_distribution(values: list[int], produced: list[float]) -> None:
    curve = curve_of(values)
    assert curve.output_tokens == curve.left(0.0)
    survivals = [curve.survival(tokens) for tokens in sorted(produced)]
    assert survivals == pytest.approx(curve.beyond(np.array(sorted(produced)))[0].tolist(), abs=1e-12)
    assert all(-1e-9 <= survival <= 1.0 + 1e-9 for survival in survivals)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(survivals))
    quantiles = [curve.quantile(probability) for probability in (0.01, 0.25, 0.5, 0.75, 0.99)]
    assert quantiles == sorted(quantiles)
    means, variances = curve.left_of(produced)
    for tokens, mean, variance in zip(produced, means, variances, strict=True):
        alone = curve.left(tokens)
        assert (alone.mean, alone.variance) == (mean, variance)
        assert mean > 0.0
        assert variance >= 0.0


@given(lengths, lengths, st.floats(0.0, 1.0))
def test_a_mixture_survives_as_its_parts_do(some: list[int], others: list[int], weight: float) -> None:
    one, other = curve_of(some), curve_of(others)
    mixed = one.mixed(other, weight)
    for tokens in (0.0, 5.0, 100.0, 10_000.0):
        assert mixed.survival(tokens) == pytest.approx(weight * one.survival(tokens) + (1 - weight) * other.survival(tokens), abs=1e-9)


@given(lengths)
def test_a_message_carries_it(values: list[int]) -> None:
    curve = curve_of(values)
    again = unpacked(*packed(curve.shares))
    np.testing.assert_allclose(again.shares, curve.shares, atol=1e-6)
    assert packed(again.shares)[0] == packed(curve.shares)[0]


def test_moments_alone_stand_for_a_gamma_distribution() -> None:
    curve = curve_of_moments(211.1, 162.9**2)
    assert curve.output_tokens.mean == pytest.approx(211.1, rel=0.01)
    assert curve.output_tokens.deviation == pytest.approx(162.9, rel=0.03)
    assert curve_of_moments(100.0, 0.0).quantile(0.01) > 90.0


@pytest.mark.parametrize("shares", [np.zeros(BINS), np.ones(3), -np.ones(BINS), np.full(BINS, math.nan), np.full(BINS, math.inf)])
def test_no_distribution_is_refused(shares: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite shares"):
        LengthCurve(shares)


@pytest.mark.parametrize("produced", [-1.0, math.nan, math.inf])
def test_no_count_of_tokens_is_refused(produced: float) -> None:
    with pytest.raises(ValueError, match="produced tokens"):
        curve_of([5]).left(produced)


def test_the_longest_of_several_outputs_is_its_mean() -> None:
    """Of outputs of 1 to 16 tokens: P(longest <= a) = (a / 16)^n."""
    even = LengthCurve(np.array([1.0] * EXACT_TOKENS_MAX + [0.0] * (BINS - EXACT_TOKENS_MAX)))
    exact = [sum(1.0 - (tokens / 16.0) ** count for tokens in range(16)) for count in LONGEST_OF]
    assert even.longest().tolist() == pytest.approx(exact)
