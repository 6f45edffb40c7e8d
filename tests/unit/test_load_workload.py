"""The generated workload has the shape it claims, and is the same wherever it is made."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, answer_length, answer_token, prompt_digest
from qlm_load.workload import azure_shape
from qlm_load.workload.output_bounds import OUTPUT_BOUND_MARGIN, OUTPUT_BOUNDS, output_bound
from qlm_load.workload.trace import Trace, TraceRow
from qlm_load.workload.workload import SLO_CLASSES, ModelShare, Workload, generate_rows, make_workload

MODELS = (ModelShare(name="small", share=3.0), ModelShare(name="large", share=1.0, context_tokens_max=2048))
COUNT = 19_366


def kolmogorov_smirnov(sample: list[int], levels: tuple[float, ...], quantiles: tuple[int, ...]) -> float:
    """Largest distance between the share of the sample at or below each knot and the knot's level. Knots with equal
    quantiles are judged by the highest level."""
    ordered = sorted(sample)
    return max(
        abs(sum(value <= quantile for value in ordered) / len(ordered) - level)
        for (level, quantile), (_, following) in pairwise([*zip(levels, quantiles, strict=True), (2.0, -1)])
        if quantile != following
    )


@pytest.fixture(scope="module")
def rows() -> tuple[TraceRow, ...]:
    return generate_rows(COUNT, seed=1).rows


def test_input_tokens_follow_their_own_quantiles(rows: tuple[TraceRow, ...]) -> None:
    sample = [row.input_tokens for row in rows]
    # 1.63 / sqrt(n) is the 1% critical value of the one-sample test; rounding to whole tokens adds to it where many requests have the
    # same length.
    assert kolmogorov_smirnov(sample, azure_shape.INPUT_LEVELS, azure_shape.INPUT_QUANTILES) < 1.63 / COUNT**0.5 + 0.01
    assert 1_100 < fmean(sample) < 1_220
    assert max(sample) > 6_000


def test_output_tokens_follow_their_quantiles_given_the_input(rows: tuple[TraceRow, ...]) -> None:
    edges = (0, *azure_shape.OUTPUT_INPUT_EDGES, 1 << 30)
    for (low, high), quantiles in zip(pairwise(edges), azure_shape.OUTPUT_QUANTILES, strict=True):
        sample = [row.output_tokens for row in rows if low <= row.input_tokens < high]
        assert 0.10 < len(sample) / COUNT < 0.15
        assert kolmogorov_smirnov(sample, azure_shape.OUTPUT_LEVELS, quantiles) < 1.63 / len(sample) ** 0.5 + 0.02
    assert 200 < fmean(row.output_tokens for row in rows) < 225


def test_arrivals_are_as_fast_and_bursty_as_fitted(rows: tuple[TraceRow, ...]) -> None:
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(rows)]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(1 / azure_shape.TRACE_RATE_PER_S, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.09, abs=0.04)
    counts = Counter(int(row.arrival_s / 10) for row in rows)
    per_10_s = [counts[window] for window in range(int(rows[-1].arrival_s / 10))]
    assert 3.0 < pstdev(per_10_s) ** 2 / fmean(per_10_s) < 4.5
    # The profile's parts are found: the busiest twelfth of the hour is about twice the quietest.
    span_s = COUNT / azure_shape.TRACE_RATE_PER_S
    parts = Counter(min(23, int(24 * row.arrival_s / span_s)) for row in rows)
    for part, fitted in enumerate(azure_shape.RATE_PROFILE):
        assert parts[part] == pytest.approx(fitted, rel=0.2)


def test_rate_is_as_requested_at_any_size() -> None:
    trace = generate_rows(2_400, seed=5, rate_per_s=9.0)
    assert len(trace.rows) / trace.duration_s == pytest.approx(9.0, rel=0.06)


def test_models_and_classes_have_their_shares() -> None:
    workload = make_workload(generate_rows(8_000, seed=2), MODELS, seed=2)
    models = Counter(request.model for request in workload.requests)
    assert models["small"] / 8_000 == pytest.approx(0.75, abs=0.02)
    classes = Counter(request.slo_class for request in workload.requests)
    for each in SLO_CLASSES:
        assert classes[each.name] / 8_000 == pytest.approx(each.share, abs=0.02)
    assert {request.slo_s for request in workload.requests} == {20.0, 60.0, 3600.0}
    for request in workload.requests:
        limit = 2048 if request.model == "large" else 8192
        assert request.input_tokens >= 1
        assert request.output_tokens >= 1
        assert request.input_tokens + request.output_tokens <= limit
    assert any("cut to their model's context" in note for note in workload.notes)


def test_a_model_may_have_its_own_classes() -> None:
    models = (ModelShare(name="chat", share=1.0, class_shares={"interactive": 3.0, "batch-2": 1.0}), ModelShare(name="other", share=1.0))
    workload = make_workload(generate_rows(4_000, seed=2), models, seed=2)
    chat = Counter(request.slo_class for request in workload.requests if request.model == "chat")
    assert set(chat) == {"interactive", "batch-2"}
    assert chat["interactive"] / sum(chat.values()) == pytest.approx(0.75, abs=0.03)
    assert {request.slo_class for request in workload.requests if request.model == "other"} == {"interactive", "batch-1", "batch-2"}
    with pytest.raises(ConfigError, match="no SLO class batch-9"):
        make_workload(generate_rows(5, seed=1), (ModelShare(name="m", share=1.0, class_shares={"batch-9": 1.0}),), seed=1)


def test_prompts_ask_for_the_answer_that_is_expected() -> None:
    workload = make_workload(generate_rows(50, seed=3), MODELS, seed=3)
    for request in workload.requests:
        ids = workload.prompt_ids(request)
        assert len(ids) == request.input_tokens
        assert all(token < 32_000 for token in ids[:-1])
        assert ids[-1] == LENGTH_TOKEN_BASE + request.output_tokens
        assert answer_length(ids) == request.output_tokens
        expected = workload.expected_output(request)
        assert len(expected) == request.output_tokens
        digest = prompt_digest(request.model, ids)
        assert [answer_token(digest, index, 32_000) for index in range(3)] == list(expected[:3])[:3]


def test_arrivals_are_scaled_to_the_requested_rate() -> None:
    trace = Trace(rows=tuple(TraceRow(arrival_s=2.0 * n, input_tokens=5, output_tokens=5) for n in range(101)))
    workload = make_workload(trace, MODELS, seed=1, rate_per_s=10.0)
    assert workload.rate_per_s == pytest.approx(10.0)
    assert workload.duration_s == pytest.approx(10.1)
    assert any("scaled from 0.505 to 10" in note for note in workload.notes)


def test_a_traces_own_models_are_mapped_the_busiest_first() -> None:
    names = ["b"] * 5 + ["a"] * 3 + ["c"] * 2 + [None]
    trace = Trace(rows=tuple(TraceRow(arrival_s=n, input_tokens=5, output_tokens=5, model=name) for n, name in enumerate(names)))
    workload = make_workload(trace, MODELS, seed=1)
    assert [request.model for request in workload.requests[:10]] == ["small"] * 5 + ["large"] * 3 + ["small"] * 2
    served = Trace(rows=(TraceRow(arrival_s=0, input_tokens=5, output_tokens=5, model="large"),))
    assert make_workload(served, MODELS, seed=1).requests[0].model == "large"


def test_refuses_what_cannot_be_made() -> None:
    trace = generate_rows(5, seed=1)
    for models in ((), (ModelShare(name="x", share=0.0),)):
        with pytest.raises(ConfigError, match="positive shares"):
            make_workload(trace, models, seed=1)
    with pytest.raises(ConfigError, match="1 to"):
        generate_rows(0, seed=1)
    with pytest.raises(ConfigError, match="positive number"):
        generate_rows(5, seed=1, rate_per_s=float("nan"))


FINGERPRINT = """
from qlm_load.workload.workload import ModelShare, generate_rows, make_workload
import hashlib
def fingerprint(seed):
    models = (ModelShare(name="small", share=3.0), ModelShare(name="large", share=1.0, context_tokens_max=2048))
    workload = make_workload(generate_rows(300, seed=seed), models, seed=seed)
    text = repr(workload.requests) + repr([workload.prompt_ids(r) for r in workload.requests[:20]])
    return hashlib.sha256(text.encode()).hexdigest()
"""


def fingerprint(workload: Workload) -> str:
    text = repr(workload.requests) + repr([workload.prompt_ids(request) for request in workload.requests[:20]])
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_same_seed_is_the_same_workload_in_another_process() -> None:
    here = fingerprint(make_workload(generate_rows(300, seed=11), MODELS, seed=11))
    program = FINGERPRINT + "print(fingerprint(11))"
    for hash_seed in ("0", "1"):
        there = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True, timeout=60
        )
        assert there.stdout.strip() == here
    assert fingerprint(make_workload(generate_rows(300, seed=12), MODELS, seed=12)) != here


def test_no_client_names_the_length_of_its_answer() -> None:
    workload = make_workload(generate_rows(2_000, 3), MODELS, 3, run_id="r")
    for request in workload.requests:
        assert request.output_tokens_max in (0, *OUTPUT_BOUNDS)
        assert not request.output_tokens_max or request.output_tokens_max >= OUTPUT_BOUND_MARGIN * request.output_tokens
    assert {request.output_tokens_max for request in workload.requests} == set(OUTPUT_BOUNDS)
    assert output_bound(3_000, 0.99) == output_bound(3_000, 0.0) == 4_096
    assert output_bound(3_300, 0.5) == 0, "none has room"
