"""Features of a request at arrival, and guesses of the published model from them."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.statistics.length_curve import (
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
from qlm_core.statistics.length_features import (
    BUCKETS,
    LengthFacts,
    features_of,
    hashes_of_text,
    hashes_of_tokens,
    hint_feature,
    hint_value,
)
from qlm_core.statistics.length_model import NO_LENGTH_MODEL, LengthGuess, LengthModel, LengthScore
from qlm_core.vocabulary.group import group_key, prompt_class_of, token_class
from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind

FACTS = LengthFacts(model="chat", tenant="acme", application="mail", prompt_tokens=300, output_tokens_limit=512, prompt_hashes=(7, 8))
facts_of_any_kind = st.builds(
    LengthFacts,
    model=st.text(max_size=20),
    tenant=st.text(max_size=20),
    application=st.text(max_size=20),
    prompt_tokens=st.integers(0, 10**7),
    output_tokens_limit=st.integers(0, 2**32 - 1),
    prompt_hashes=st.tuples(st.integers(0, 2**32 - 1)),
    sampling=st.sampled_from(["", "greedy", "structured-stop"]),
    hint_tokens=st.integers(0, 2**32 - 1),
)


def model_with(more: dict[int, float], *, used: bool = True) -> LengthModel:
    weights = {features_of(FACTS)[0]: 0.0, **more}
    score = LengthScore(model="chat", used=used, samples=100, median_error_tokens=10.0, model_error_tokens=8.0)
    return LengthModel(features=tuple(weights), weights=tuple(weights.values()), curvatures=(0.0,) * len(weights), scores=(score,))


def test_features_are_the_same_in_every_process() -> None:
    names = "from qlm_core.statistics.length_features import *"
    script = f"{names}; print(features_of({FACTS!r}), hint_feature({FACTS!r}), hashes_of_text('x' * 300))"
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)}
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment).stdout.strip()
    assert printed == f"{features_of(FACTS)} {hint_feature(FACTS)} {hashes_of_text('x' * 300)}"


@given(facts_of_any_kind)
def test_features_are_few_and_in_range(facts: LengthFacts) -> None:
    features = features_of(facts)
    assert len(features) == len(set(features)) <= 13
    assert all(0 <= feature < BUCKETS for feature in features)


def test_each_thing_known_at_arrival_is_a_feature() -> None:
    known = [
        {"tenant": "other"},
        {"application": "chat"},
        {"output_tokens_limit": 16},
        {"prompt_tokens": 30_000},
        {"prompt_hashes": (9,)},
        {"sampling": "greedy"},
        {"model": "code"},
    ]
    found = {features_of(FACTS), *(features_of(replace(FACTS, **each)) for each in known)}  # type: ignore[arg-type]
    assert len(found) == len(known) + 1


def test_prompts_are_known_by_their_prefixes() -> None:
    assert hashes_of_text("hi") == ()
    assert hashes_of_text("a" * 64 + "b" * 100)[0] == hashes_of_text("a" * 64 + "c" * 300)[0]
    assert hashes_of_tokens(list(range(64)))[:2] == hashes_of_tokens(list(range(600)))[:2]
    assert len(hashes_of_tokens([2**32 - 1] * 600)) == 3


def test_without_a_model_the_median_is_expected() -> None:
    guess = NO_LENGTH_MODEL.guess(FACTS, 120.4, 4_096)
    assert (guess.median_tokens, guess.model_tokens, guess.expected_tokens, guess.by_model) == (120.4, 120.4, 120, False)


def test_weights_are_factors_on_100_tokens_where_the_model_is_used() -> None:
    tenant = features_of(FACTS)[1]
    guess = model_with({tenant: 1.0}).guess(FACTS, 150.0, 4_096)
    assert (guess.expected_tokens, guess.by_model) == (272, True)
    unused = model_with({tenant: 1.0}, used=False).guess(FACTS, 150.0, 4_096)
    assert (unused.expected_tokens, round(unused.model_tokens), unused.by_model) == (150, 272, False)
    stranger = LengthFacts(model="chat", tenant="other", prompt_tokens=300)
    assert model_with({tenant: 1.0}).guess(stranger, 150.0, 4_096).expected_tokens == 100
    unknown = LengthFacts(model="new", prompt_tokens=300)
    assert model_with({tenant: 1.0}).guess(unknown, 150.0, 4_096).expected_tokens == 150


def test_a_hint_counts_as_far_as_it_is_trusted() -> None:
    hinting = LengthFacts(model="chat", tenant="acme", prompt_tokens=300, hint_tokens=1_000)
    hint = hint_feature(hinting)
    assert model_with({hint: 1.0}).guess(hinting, 100.0, 4_096).expected_tokens == 1_000
    assert model_with({hint: 0.5}).guess(hinting, 100.0, 4_096).expected_tokens == 316
    assert model_with({hint: 0.0}).guess(hinting, 100.0, 4_096).expected_tokens == 100
    assert NO_LENGTH_MODEL.guess(hinting, 100.0, 4_096).expected_tokens == 100


@given(facts_of_any_kind, st.floats(1e-3, 1e9), st.integers(1, 2**32 - 1), st.floats(-1e6, 1e6))
def test_absurd_hints_medians_and_weights_stay_within_the_limit(facts: LengthFacts, median: float, most: int, weight: float) -> None:
    model = model_with(dict.fromkeys((*features_of(facts), hint_feature(facts)), weight))
    guess = model.guess(facts, median, most)
    assert 1 <= guess.expected_tokens <= min(most, TOKENS_MAX)
    assert 1.0 <= guess.model_tokens <= min(most, TOKENS_MAX)
    assert abs(hint_value(guess.hint_tokens, weight)) <= 5.0


@pytest.mark.parametrize(
    "absurd",
    [
        {"median_tokens": float("nan")},
        {"model_tokens": float("inf")},
        {"expected_tokens": 0},
        {"expected_tokens": TOKENS_MAX + 1},
        {"hint_tokens": -1},
        {"features": (BUCKETS,)},
        {"hint_feature": -1},
    ],
)
def test_guesses_that_no_gateway_makes_are_refused(absurd: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"tokens|hint"):
        LengthGuess(**{"median_tokens": 1.0, "model_tokens": 1.0, "expected_tokens": 1, **absurd})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "absurd",
    [{"weights": (float("nan"),)}, {"weights": ()}, {"features": (BUCKETS,)}, {"curvatures": (-1.0,)}, {"curvatures": (float("inf"),)}],
)
def test_models_that_no_estimator_publishes_are_refused(absurd: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="length model"):
        LengthModel(**{"features": (1,), "weights": (0.5,), "curvatures": (1.0,), **absurd})  # type: ignore[arg-type]


def test_a_predicted_output_is_part_of_the_group_key() -> None:
    facts = RequestFacts(
        queue_id="1",
        key=RequestKey("t", "1"),
        acceptance_number=1,
        accepted_s=0.0,
        model="chat",
        slo=Slo(kind=SloKind.COMPLETION, seconds=60.0),
        prompt_tokens=200,
        output_tokens_max=4_096,
        predicted_output_tokens=40,
    )
    assert group_key(facts).token_class == token_class(200, 40) == "256/o64"
    assert (token_class(200), prompt_class_of("256/o64"), prompt_class_of("256")) == ("256", "256", "256")


# The distribution of output lengths on fixed bins, against plain samples ----------------------------------------------


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
    """For outputs of 1 to 16 tokens: P(longest <= a) = (a / 16)^n."""
    even = LengthCurve(np.array([1.0] * EXACT_TOKENS_MAX + [0.0] * (BINS - EXACT_TOKENS_MAX)))
    exact = [sum(1.0 - (tokens / 16.0) ** count for tokens in range(16)) for count in LONGEST_OF]
    assert even.longest().tolist() == pytest.approx(exact)
