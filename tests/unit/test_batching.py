"""Static batches: UELLM's algorithm 1 under each reading (section 4.2, figure 3), and S3's packing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.evaluate.static_batches import ODBS, SLO_DBS, decoded_tokens, first_come, pack_lengths, padding_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qlm_core.operations.batching import SLO_ODBS, BatchRequests, OdbsRule, Reading, slo_odbs


def requests(slo_s: list[float], prompts: list[int], outputs: list[int]) -> BatchRequests:
    return BatchRequests(slo_s=np.array(slo_s, dtype=float), prompt_tokens=np.array(prompts), output_tokens=np.array(outputs))


FIGURE_3 = requests([10.0, 20.0, 30.0], [9, 7, 5], [58, 8, 8])
"""Outputs of 58, 8 and at most 8; prompts such that the default pads 6 tokens."""
BY_LENGTH = OdbsRule(w1=1.0, w2=0.0, threshold=150.0)


def test_figure_3_default_batching_pads_6_and_decodes_174_tokens() -> None:
    batches = first_come(FIGURE_3)
    assert (padding_tokens(FIGURE_3.prompt_tokens, batches), decoded_tokens(FIGURE_3.output_tokens, batches)) == (6, 174)


@pytest.mark.parametrize(
    ("reading", "expected"),
    [(Reading.PROGRAM, (2, 74)), (Reading.EQUATION_2, (2, 74)), (Reading.LINE_7, (2, 124))],
)
def test_figure_3_uellm_pads_2_and_decodes_74_tokens(reading: Reading, expected: tuple[int, int]) -> None:
    """Not with line 7 as printed: behind the longest request in order of SLO each shorter one has a cost below 0."""
    batches = slo_odbs(FIGURE_3, replace(BY_LENGTH, reading=reading))
    assert (padding_tokens(FIGURE_3.prompt_tokens, batches), decoded_tokens(FIGURE_3.output_tokens, batches)) == expected


def test_w1_of_0_is_slo_dbs_and_w2_of_0_is_odbs() -> None:
    """Section 4.2 names them so; line 8 has the weights the other way round."""
    queue = requests([40.0, 10.0, 30.0, 20.0], [1, 1, 1, 1], [5, 50, 6, 500])
    assert slo_odbs(queue, replace(SLO_DBS, batch_max=2)) == ((1, 3), (2, 0))
    assert slo_odbs(queue, replace(ODBS, batch_max=2)) == ((0, 2), (1, 3))
    swapped = OdbsRule(w1=0.0, w2=1.0, threshold=150.0, reading=Reading.LINE_8)
    assert slo_odbs(queue, swapped) == slo_odbs(queue, replace(swapped, w1=1.0, w2=0.0, reading=Reading.EQUATION_2))
    assert slo_odbs(queue, swapped) != slo_odbs(queue, replace(swapped, reading=Reading.EQUATION_2))


def test_a_heavy_request_makes_its_batch_small() -> None:
    """Line 20: threshold / CM requests at most."""
    queue = requests([1.0] * 6, [1] * 6, [100] * 6)
    sizes = [len(batch) for batch in slo_odbs(queue, OdbsRule(w1=1.0, w2=0.0, threshold=300.0))]
    assert sizes == [3, 3]
    assert [len(batch) for batch in slo_odbs(queue, SLO_ODBS)] == [6]


def test_the_program_compares_growth_and_equation_2_sums_with_the_threshold() -> None:
    """110 s behind 100 s: 10 of growth, 210 in all, times two requests and 1.2."""
    queue, rule = requests([120.0, 100.0, 110.0], [1] * 3, [1] * 3), OdbsRule(w1=0.0, w2=1.0, threshold=400.0)
    assert slo_odbs(queue, rule) == ((1, 2, 0),)
    assert slo_odbs(queue, replace(rule, reading=Reading.EQUATION_2)) == ((1,), (2,), (0,))


def test_s3_fills_bins_by_length_and_gives_a_longer_request_its_own() -> None:
    queue = requests([1.0] * 5, [1] * 5, [30, 2_000, 70, 60, 40])
    assert pack_lengths(queue, capacity_tokens=100) == ((1,), (2, 0), (3, 4))


queues = st.lists(
    st.tuples(st.floats(1.0, 1e4), st.integers(1, 4096), st.integers(1, 4096)),
    min_size=0,
    max_size=40,
).map(lambda rows: requests([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(queue=queues, batch_max=st.integers(1, 12), threshold=st.floats(0.0, 1e6), reading=st.sampled_from(Reading))
def test_each_request_is_in_one_batch_of_at_most_batch_max(
    queue: BatchRequests, batch_max: int, threshold: float, reading: Reading
) -> None:
    rule = OdbsRule(batch_max=batch_max, threshold=threshold, reading=reading)
    packed = pack_lengths(queue, capacity_tokens=1024, batch_max=batch_max)
    for batches in (slo_odbs(queue, rule), first_come(queue, batch_max), packed):
        assert sorted(place for batch in batches for place in batch) == list(range(len(queue)))
        assert all(1 <= len(batch) <= batch_max for batch in batches)
    assert all(len(batch) == 1 or queue.output_tokens[list(batch)].sum() <= 1024 for batch in packed)
    for batch in slo_odbs(queue, rule):
        heaviest = max(rule.w1 * queue.output_tokens[place] + rule.w2 * queue.slo_s[place] for place in batch)
        assert len(batch) == 1 or reading is Reading.LINE_8 or len(batch) * heaviest <= threshold * (1 + 1e-9)
