"""A gateway's guess of a request's output at its acceptance, and how it travels with the request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm.api.v1.request_pb2 import Admission, Request, SamplingParams, TokenPrompt, TraceContext
from qlm_core.profiles.profile import ProfileSnapshot, WorkloadProfile
from qlm_core.statistics.length_features import LengthFacts, features_of, hashes_of_text, hashes_of_tokens
from qlm_core.statistics.length_model import LengthModel, LengthScore
from qlm_core.vocabulary.group import group_key
from qlm_core.vocabulary.request import RequestKey, RequestState, Slo, SloKind
from qlm_gateway.admission.entry import guess_length
from qlm_gateway.admission.rules import Admitted
from qlm_gateway.text.prompts import PreparedPrompt
from qlm_gateway.wire import admission_of, body_digest, draft_of, stored_body
from qlm_planner.shell.queue_calls import arrival_of
from qlm_process.wire import lengths as length_wire
from qlm_queue.values import LiveRequest

SLO = Slo(kind=SloKind.COMPLETION, seconds=60.0)
ROW = WorkloadProfile(
    model="chat",
    slo_class="64s",
    token_class="1024",
    prompt_tokens_mean=500.0,
    prompt_tokens_variance=0.0,
    output_tokens_mean=9.0,
    output_tokens_variance=0.0,
    samples=10**6,
    output_first_bin=8,
    output_shares=(1.0,),
)
TEXT = "Dear assistant, " * 40


def profiles(weights: dict[int, float] | None = None) -> ProfileSnapshot:
    scores = (LengthScore(model="chat", used=True, samples=100, median_error_tokens=10.0, model_error_tokens=8.0),)
    model = LengthModel()
    if weights is not None:
        model = LengthModel(features=tuple(weights), weights=tuple(weights.values()), curvatures=(0.0,) * len(weights), scores=scores)
    return ProfileSnapshot(version=1, made_s=0.0, hardware=(), workload=(ROW,), length_model=model)


def request(**fields: object) -> Request:
    return Request(**{"model": "chat", "text": TEXT, "tenant": "acme", "application": "mail", **fields})  # type: ignore[arg-type]


def admitted(most: int = 4_096) -> Admitted:
    return Admitted(key=RequestKey("acme", "1"), slo=SLO, prompt_tokens=500, output_tokens_max=most, expire_after_s=None)


def prompt() -> PreparedPrompt:
    return PreparedPrompt(tokens=500, text=TEXT)


def test_the_median_of_the_group_is_expected_without_a_model() -> None:
    guess = guess_length(draft_of(request()), admitted(), prompt(), profiles())
    assert (guess.expected_tokens, guess.by_model) == (9, False)


def test_the_rival_of_the_model_is_the_median_and_not_the_mean() -> None:
    """Three in ten of the class make far more: a mean would be easy to beat."""
    skewed = replace(ROW, output_shares=(0.7, *(0.0,) * 20, 0.3))
    snapshot = replace(profiles(), workload=(skewed,))
    assert snapshot.output_curve_for("chat", "64s", "1024").output_tokens.mean > 2.0 * 9.0
    guess = guess_length(draft_of(request()), admitted(), prompt(), snapshot)
    assert guess.median_tokens == pytest.approx(9.0, rel=1e-3)
    assert guess.expected_tokens == 9


def test_all_that_is_known_at_arrival_is_used() -> None:
    sampling = SamplingParams(max_tokens=100, temperature=0.0, stop=["\n"])
    guess = guess_length(draft_of(request(sampling=sampling)), admitted(100), prompt(), profiles())
    facts = LengthFacts(
        model="chat",
        tenant="acme",
        application="mail",
        prompt_tokens=500,
        output_tokens_limit=100,
        prompt_hashes=hashes_of_text(TEXT),
        sampling="greedy-stop",
    )
    assert guess.features == features_of(facts)
    assert len(facts.prompt_hashes) == 2


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (SamplingParams(temperature=0.7), ""),
        (SamplingParams(temperature=0.0), "greedy"),
        (SamplingParams(json_schema="{}"), "structured"),
        (SamplingParams(regex="a+"), "structured"),
        (SamplingParams(stop=["."]), "stop"),
    ],
)
def test_how_it_is_sampled_is_used(sampling: SamplingParams, word: str) -> None:
    guess = guess_length(draft_of(request(sampling=sampling, application="")), admitted(), PreparedPrompt(tokens=500, text=""), profiles())
    assert guess.features == features_of(LengthFacts(model="chat", tenant="acme", prompt_tokens=500, sampling=word))


def test_a_prompt_of_token_ids_is_known_by_its_prefixes_too() -> None:
    ids = list(range(500))
    message = Request(model="chat", tokens=TokenPrompt(ids=ids), tenant="acme")
    guess = guess_length(draft_of(message), admitted(), PreparedPrompt(tokens=500, token_ids=ids), profiles())
    known = LengthFacts(model="chat", tenant="acme", prompt_tokens=500, prompt_hashes=hashes_of_tokens(ids))
    assert len(known.prompt_hashes) == 2
    assert guess.features == features_of(known)


def test_the_models_prediction_is_in_the_record_and_no_secret_of_the_estimator() -> None:
    own = features_of(LengthFacts(model="chat", tenant="acme", prompt_tokens=500))[0]
    message = request()
    draft = draft_of(message)
    guess = guess_length(draft, admitted(), prompt(), profiles({own: -1.0}))
    assert (guess.expected_tokens, guess.by_model) == (37, True)
    body = stored_body(message, admitted(), prompt(), TraceContext(), guess)
    model, slo, prompt_tokens, most, predicted = admission_of(body)
    assert (model, slo, prompt_tokens, most, predicted) == ("chat", SLO, 500, 4_096, 37)
    again = length_wire.guess_from_proto(Request.FromString(body).admission.length_guess)
    assert (again.features, again.expected_tokens) == (guess.features, 37)
    assert again.model_tokens == pytest.approx(guess.model_tokens, rel=1e-6)


def test_the_planner_groups_by_what_the_gateway_predicted() -> None:
    own = features_of(LengthFacts(model="chat", tenant="acme", prompt_tokens=500))[0]
    for weights, tokens in ((None, "1024"), ({own: -1.0}, "1024/o64"), ({own: 1.0}, "1024/o1024")):
        message = request()
        guess = guess_length(draft_of(message), admitted(), prompt(), profiles(weights))
        live = LiveRequest(
            queue_id="1-1",
            key=RequestKey("acme", "1"),
            state=RequestState.ACCEPTED,
            acceptance_number=1,
            accepted_s=0.0,
            group_id="",
            incarnation="",
            attempt=0,
            failed_attempts=0,
            gateway="",
            body=stored_body(message, admitted(), prompt(), TraceContext(), guess),
        )
        assert group_key(arrival_of(live).facts).token_class == tokens


def test_a_request_of_an_older_gateway_has_no_prediction() -> None:
    assert length_wire.predicted_output_tokens(Admission(prompt_tokens=5)) == 0


@pytest.mark.parametrize("hint", [1, 50, 10**6, 2**32 - 1])
def test_a_hint_alone_changes_nothing_and_is_kept_within_the_limit(hint: int) -> None:
    guess = guess_length(draft_of(request(expected_output_tokens=hint)), admitted(), prompt(), profiles())
    assert guess.expected_tokens == 9
    assert guess.hint_tokens == min(hint, 4_096)


def test_another_hint_is_another_body() -> None:
    assert body_digest(request(expected_output_tokens=5)) != body_digest(request(expected_output_tokens=6))
