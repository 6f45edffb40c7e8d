"""Counters summed over the lives of processes that die."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from qlm_load.counters import CounterSums, parse_counters


def test_each_life_counts_from_zero_and_all_lives_count() -> None:
    sums = CounterSums()
    for value in (1.0, 4.0):
        sums.observe("a", 11, {"x_total": value})
    sums.observe("b", 12, {"x_total": 2.0, "y_total": 7.0})
    sums.observe("a", 13, {"x_total": 0.0})
    sums.observe("a", 13, {"x_total": 3.0})
    assert sums.total("x_total") == 9
    assert sums.total("y_total") == 7
    assert sums.total("absent_total") == 0
    assert sums.total_beyond_first("x_total") == 3 + 2 + 1
    assert sums.total_beyond_first("absent_total") == 0


def test_reads_a_real_page() -> None:
    registry = CollectorRegistry()
    swaps = Counter("swaps_total", "Swaps.", ("model",), registry=registry)
    swaps.labels(model="a").inc(2)
    swaps.labels(model="b").inc(3)
    Gauge("running", "Running.", registry=registry).set(9)
    counters = parse_counters(generate_latest(registry).decode())
    assert counters == {'swaps_total{model="a"}': 2.0, 'swaps_total{model="b"}': 3.0}
    sums = CounterSums()
    sums.observe("agent", 1, counters)
    assert sums.total("swaps_total") == 5
    assert sums.total('swaps_total{model="b"}') == 3
    assert sums.total("swaps") == 0
