"""SAL and its rivals (Kossmann et al., 2024, sections 3 and 4.2) on columns made by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_core.operations.balancing import (
    Servers,
    freeing_rate,
    least_kv,
    least_loaded,
    prefill_rate,
    random_server,
    server_aware,
    server_waits_s,
    two_servers,
)
from qlm_core.profiles.shipped_profiles import shipped_snapshot


def servers(queued: list[float], kv_used: list[float], capacity: float = 10_000.0, **columns: list[float]) -> Servers:
    """Servers that compute 1,000 prompt tokens and free 500 tokens of KV a second."""
    count = len(queued)
    rates = {"token_rate": [1000.0] * count, "freeing_rate": [500.0] * count, "lead_s": [0.0] * count} | columns
    arrays = {name: np.array(values, dtype=np.float64) for name, values in rates.items()}
    return Servers(queued=np.array(queued), kv_used=np.array(kv_used), kv_capacity=np.full(count, capacity), **arrays)


def test_a_request_waits_for_the_prompts_before_it_or_for_kv_whichever_is_later() -> None:
    waits_s = server_waits_s(servers([3000.0, 0.0, 3000.0], [0.0, 11_000.0, 11_000.0]), 1000.0)
    assert waits_s.tolist() == [4.0, 4.0, 4.0], "(3,000 + 1,000) / 1,000; (11,000 + 1,000 - 10,000) / 500"
    assert server_waits_s(servers([0.0], [8_000.0]), 1000.0).tolist() == [1.0], "KV is free: only its own prompt counts"


def test_the_term_of_kv_decides_for_a_long_prompt_and_not_for_a_short_one() -> None:
    columns = servers([1500.0, 0.0], [2_000.0, 9_000.0])
    assert server_aware(columns, 500.0) == 1, "0.5 s against 2 s"
    assert server_aware(columns, 5_000.0) == 0, "6.5 s against (9,000 + 5,000 - 10,000) / 500 = 8 s"


def test_requests_sent_between_reports_count_in_both_terms() -> None:
    columns = servers([0.0, 0.0], [0.0, 100.0])
    picks = []
    for _ in range(4):
        picks.append(server_aware(columns, 1000.0))
        columns.add(picks[-1], 1000.0)
    assert picks == [0, 1, 0, 1]
    assert columns.queued.tolist() == [2000.0, 2000.0]
    assert columns.kv_used.tolist() == [2000.0, 2100.0]


def test_equal_waits_are_decided_by_kv_in_use() -> None:
    assert server_aware(servers([0.0, 0.0, 0.0], [900.0, 300.0, 400.0]), 100.0) == 1


def test_a_faster_server_takes_more_and_a_model_swap_counts() -> None:
    assert server_aware(servers([2000.0, 1500.0], [0.0, 0.0], token_rate=[4000.0, 1000.0]), 500.0) == 0
    assert server_aware(servers([2000.0, 0.0], [0.0, 0.0], lead_s=[0.0, 10.0]), 500.0) == 0
    assert least_kv(servers([0.0, 0.0, 0.0], [900.0, 0.0, 800.0], lead_s=[0.0, 10.0, 0.0])) == 2


TOKENS = st.integers(0, 100_000)


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8), st.integers(1, 10_000), st.integers(1, 10_000), TOKENS)
def test_more_queued_or_used_never_shortens_a_wait(rows: list[tuple[int, int]], own: int, more: int, longer: int) -> None:
    columns = servers([row[0] for row in rows], [row[1] for row in rows])
    before = server_waits_s(columns, own)
    assert server_waits_s(columns, own).min() == before[server_aware(columns, own)]
    assert (server_waits_s(columns, own + longer) >= before).all()
    columns.add(0, more)
    after = server_waits_s(columns, own)
    assert after[0] > before[0]
    assert (after[1:] == before[1:]).all()


def test_ending_requests_free_prompt_and_output() -> None:
    """100 tokens a second in outputs of 200 end half a request a second, each with 1,000 + 200 tokens of KV."""
    assert freeing_rate(100.0, 1000.0, 200.0) == pytest.approx(600.0)


def test_prompts_share_steps_with_those_who_decode() -> None:
    hardware = shipped_snapshot().hardware[0]
    alone, shared = prefill_rate(hardware, 0.0, 0.0, 1024), prefill_rate(hardware, 64.0, 64_000.0, 1024)
    assert alone == pytest.approx(1024 / (hardware.decode_step_s(0.0, 0.0) + hardware.prefill_work_s(1024)))
    assert shared < alone


def test_random_choices_are_even_and_two_differ() -> None:
    counts = Counter(random_server(4, 7, f"{number}-0") for number in range(4000))
    assert all(900 < count < 1100 for count in counts.values())
    pairs = {tuple(sorted(two_servers(4, 3, f"{number}-0"))) for number in range(500)}
    assert pairs == set(itertools.combinations(range(4), 2))
    assert two_servers(1, 3, "a") == (0, 0)
    assert least_loaded([3, 1, 2, 1]) == 1
