"""The figures of the benchmark `queue`: keys, parts and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.figures import Figure

LEASE_TTL_S = 3.0
"""Life of a lease in the clusters of the bench: the default."""

RATES = ("at_200", "at_400")
"""Requests per second."""

FIGURES: Sequence[Figure] = (
    Figure(key="accepts_per_s", part="accepts", target=">= 1,500", least={"": 1_500}),
    Figure(key="accepts_per_s_disk", part="accepts", target="stated"),
    Figure(key="added_p50_ms", part="added", target="at 200/s <= 4", points=RATES, most={"at_200": 4.0}),
    Figure(key="added_p99_ms", part="added", target="at 200/s <= 15", points=RATES, most={"at_200": 15.0}),
    Figure(key="bare_p50_ms", part="added", target="stated", points=RATES),
    Figure(key="bare_p99_ms", part="added", target="stated", points=RATES),
    Figure(key="added_p50_ratio", part="added", target="at 200/s <= 2", points=RATES, most={"at_200": 2.0}),
    Figure(key="added_p99_ratio", part="added", target="at 200/s <= 2.5", points=RATES, most={"at_200": 2.5}),
    Figure(key="cpu_ms_per_request", part="added", target="at 200/s <= 2.5", points=RATES, most={"at_200": 2.5}),
    Figure(key="fanout_tokens_per_s", part="fanout", target=">= 15,000", least={"": 15_000}),
    Figure(key="itl_p99_ms", part="fanout", target="<= 60", most={"": 60.0}),
    Figure(key="pull_100_p99_ms", part="pulls", target="<= 6", most={"": 6.0}),
    Figure(
        key="redis_bytes_per_request",
        part="bytes",
        target="<= 450, 600, 300",
        points=("full", "after_churn", "finished"),
        most={"full": 450.0, "after_churn": 600.0, "finished": 300.0},
    ),
    Figure(key="failover_first_plan_s", part="failover", target=f"<= {LEASE_TTL_S + 5:g}", most={"": LEASE_TTL_S + 5}),
    Figure(key="recover_p99_s", part="recover", target=f"<= {LEASE_TTL_S + 1:g}", most={"": LEASE_TTL_S + 1}),
    Figure(key="lost", part="campaign", target="0", most={"": 0}),
    Figure(key="doubled", part="campaign", target="0", most={"": 0}),
    Figure(key="hung", part="campaign", target="0", most={"": 0}),
    Figure(key="greedy_equal", part="campaign", target="1.0", least={"": 1.0}),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}
