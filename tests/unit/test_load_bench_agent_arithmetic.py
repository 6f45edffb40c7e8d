"""The arithmetic of the agent's bench: ratios of pairs, answers that differ, warmings that were hidden."""

from __future__ import annotations

import math
import random
import struct

import pytest
from benchmarks.agent.model_config import vllm_settings
from benchmarks.agent.model_swap import planned_model_swaps
from benchmarks.agent.resuming import INSTANCES, LEFT_TOKENS, EvictionResult, differences, draw_cases
from benchmarks.agent.throughput import ratio_of_pairs
from benchmarks.agent.waiting import WaitSample, tenths

from qlm.internal.v1 import events_pb2
from qlm_core.vocabulary.errors import ConfigError

WARMED, SWAPPED, COMPLETED = events_pb2.EVENT_KIND_MODEL_WARMED, events_pb2.EVENT_KIND_MODEL_SWAPPED, events_pb2.EVENT_KIND_COMPLETED


def test_the_interval_of_a_ratio_by_hand() -> None:
    """Logarithms -1, 0 and 1 of the pairs: mean 0, deviation 1; t at 97.5% with 2 degrees of freedom is 4.3027."""
    ratio = ratio_of_pairs([1.0, 5.0, math.e], [math.e, 5.0, 1.0])
    assert ratio.value == pytest.approx(1.0)
    assert ratio.median == pytest.approx(1.0)
    assert math.log(ratio.high) == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert ratio.low == pytest.approx(1 / ratio.high)


def test_noise_that_both_sides_share_leaves_the_ratio_alone() -> None:
    shared = [1.0, 7.0, 0.2, 3.0]
    ratio = ratio_of_pairs([0.9 * each for each in shared], shared)
    assert [ratio.low, ratio.value, ratio.high] == pytest.approx([0.9, 0.9, 0.9])


def test_nineteen_of_twenty_intervals_hold_the_true_ratio() -> None:
    dice = random.Random(5)
    held = 0
    for _ in range(400):
        ratio = ratio_of_pairs([0.97 * math.exp(dice.gauss(0.0, 0.1)) for _ in range(10)], [1.0] * 10)
        held += ratio.low <= 0.97 <= ratio.high
    assert 365 <= held <= 393


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0]), ([], []), ([1.0, 2.0], [1.0])])
def test_no_interval_without_pairs(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|shorter|longer"):
        ratio_of_pairs(ours, theirs)


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (tokens(1, 2, 3), []),
        (tokens(1, 9, 3), [{"case": 0, "token": 1, "produced": 1}]),
        (tokens(1, 2, 3 + (1 << 24)), [{"case": 0, "token": 2, "produced": 1}]),  # only its last byte differs
        (tokens(1, 2), [{"case": 0, "token": 2, "produced": 1}]),
        (tokens(1, 2, 3, 3), [{"case": 0, "token": 3, "produced": 1}]),
        (b"", [{"case": 0, "token": 0, "produced": 1}]),
    ],
)
def test_where_an_evicted_request_goes_another_way(answer: bytes, found: list[dict[str, int]]) -> None:
    assert differences([tokens(1, 2, 3)], [EvictionResult(answer=answer, produced=4)]) == found


def test_cases_are_drawn_by_the_seed_and_evicted_before_their_end() -> None:
    cases = draw_cases(3, 300, vocabulary=2048)
    assert cases == draw_cases(3, 300, vocabulary=2048) != draw_cases(4, 300, vocabulary=2048)
    assert all(1 <= case.evict_at <= case.output_tokens - LEFT_TOKENS for case in cases)
    assert all(0 <= token < 2048 for case in cases for token in case.prompt)
    assert {(case.first, case.then) for case in cases} == {(first, then) for first in range(INSTANCES) for then in range(INSTANCES)}
    assert len({tuple(case.prompt) for case in cases}) == len(cases)


def event(kind: events_pb2.EventKind.ValueType, model: str, finished_s: float, from_model: str = "") -> events_pb2.RequestEvent:
    return events_pb2.RequestEvent(kind=kind, model=model, finished_s=finished_s, from_model=from_model)


def test_a_warming_is_hidden_if_it_was_done_before_the_batch_had_ended() -> None:
    swaps = planned_model_swaps(
        [
            event(SWAPPED, "a", 1.0),  # the first model replaces none
            event(WARMED, "b", 3.0),
            event(COMPLETED, "a", 4.0),
            event(COMPLETED, "a", 5.0),
            event(SWAPPED, "b", 5.1, "a"),
            event(COMPLETED, "b", 7.0),
            event(WARMED, "a", 7.5),  # too late
            event(SWAPPED, "a", 7.6, "b"),
            event(COMPLETED, "a", 9.0),
            event(SWAPPED, "b", 11.0, "a"),  # its warming was for the swap before
        ]
    )
    assert [(swap.model, swap.hidden) for swap in swaps] == [("b", True), ("a", False), ("b", False)]
    assert [swap.gap_ms for swap in swaps] == [pytest.approx(100.0), pytest.approx(600.0), pytest.approx(2_000.0)]


def test_events_are_read_by_their_time_and_not_by_their_order() -> None:
    events = [event(SWAPPED, "a", 1.0), event(COMPLETED, "a", 5.0), event(SWAPPED, "b", 5.1, "a"), event(WARMED, "b", 3.0)]
    assert [swap.hidden for swap in planned_model_swaps(events)] == [True]


def test_a_number_format_that_vllm_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"agent\.vllm\.dtype"):
        vllm_settings(dtype="float63")


def test_waits_that_drift_are_reported_by_tenths_of_arrival() -> None:
    """Twenty waits, predicted at 5 s each, measured at 0 to 19 s. Means of pairs by hand."""
    found = tenths([WaitSample(predicted_s=5.0, actual_s=float(number)) for number in range(20)])
    assert [each["actual_s"] for each in found] == [0.5 + 2 * number for number in range(10)]
    assert {each["predicted_s"] for each in found} == {5.0}
    assert [each["off_s"] for each in found] == [4.5, 2.5, 0.5, 1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5]
    assert len(tenths([WaitSample(predicted_s=1.0, actual_s=1.0)] * 3)) == 3
    assert tenths([]) == []
