"""Features of a request at arrival, and what the published model makes of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.group import group_key, prompt_class_of, token_class
from qlm_core.length_curve import TOKENS_MAX
from qlm_core.length_features import BUCKETS, LengthFacts, features_of, hashes_of_text, hashes_of_tokens, hint_feature, hint_value
from qlm_core.length_model import NO_LENGTH_MODEL, LengthGuess, LengthModel, LengthScore
from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind

FACTS = LengthFacts(model="chat", tenant="acme", application="mail", prompt_tokens=300, output_tokens_asked=512, prompt_hashes=(7, 8))
facts_of_any_kind = st.builds(
    LengthFacts,
    model=st.text(max_size=20),
    tenant=st.text(max_size=20),
    application=st.text(max_size=20),
    prompt_tokens=st.integers(0, 10**7),
    output_tokens_asked=st.integers(0, 2**32 - 1),
    prompt_hashes=st.tuples(st.integers(0, 2**32 - 1)),
    sampling=st.sampled_from(["", "greedy", "structured-stop"]),
    hint_tokens=st.integers(0, 2**32 - 1),
)


def model_with(more: dict[int, float], *, used: bool = True) -> LengthModel:
    weights = {features_of(FACTS)[0]: 0.0, **more}
    score = LengthScore(model="chat", used=used, samples=100, median_error_tokens=10.0, model_error_tokens=8.0)
    return LengthModel(features=tuple(weights), weights=tuple(weights.values()), curvatures=(0.0,) * len(weights), scores=(score,))


def test_features_are_the_same_in_every_process() -> None:
    script = f"from qlm_core.length_features import *; print(features_of({FACTS!r}), hint_feature({FACTS!r}), hashes_of_text('x' * 300))"
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment).stdout.strip()
    assert told == f"{features_of(FACTS)} {hint_feature(FACTS)} {hashes_of_text('x' * 300)}"


@given(facts_of_any_kind)
def test_features_are_few_and_in_range(facts: LengthFacts) -> None:
    features = features_of(facts)
    assert len(features) == len(set(features)) <= 13
    assert all(0 <= feature < BUCKETS for feature in features)


def test_each_thing_known_at_arrival_is_a_feature() -> None:
    known = [
        {"tenant": "other"},
        {"application": "chat"},
        {"output_tokens_asked": 16},
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
    told = hint_feature(hinting)
    assert model_with({told: 1.0}).guess(hinting, 100.0, 4_096).expected_tokens == 1_000
    assert model_with({told: 0.5}).guess(hinting, 100.0, 4_096).expected_tokens == 316
    assert model_with({told: 0.0}).guess(hinting, 100.0, 4_096).expected_tokens == 100
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
