"""The figures of `benchmarks agent`: their names and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.figures import Figure

THROUGHPUT, URGENT, RESUME, KV_SWAP, MODEL_SWAP, WAIT, SIMULATOR, POLICIES, BATCH = (
    "throughput",
    "urgent",
    "resume",
    "kv_swap",
    "model_swap",
    "wait",
    "simulator",
    "policies",
    "batch",
)
SCHEDULERS = ("qlm", "stock_fcfs", "stock_priority")
BATCH_MODES = ("slo", "max")
CONTEXTS = (64, 256, 1024)
"""Tokens whose KV is moved or computed again."""
SWAP_POINTS = (
    *(f"{way}_ms_at_{context}" for context in CONTEXTS for way in ("kv_swap", "recompute")),
    "switch_over_tokens",
)

FIGURES: Sequence[Figure] = (
    Figure(key="throughput_ratio", part=THROUGHPUT, target="ratio >= 0.97", points=("ratio", "low", "high"), least={"ratio": 0.97}),
    Figure(key="urgent_ttft_ratio", part=URGENT, target="qlm <= 3", points=SCHEDULERS, most={"qlm": 3.0}),
    Figure(key="resume_equal", part=RESUME, target="200 of 200", least={"": 200}),
    Figure(key="kv_swap_vs_recompute", part=KV_SWAP, target="stated", points=SWAP_POINTS),
    Figure(
        key="swap_ms",
        part=MODEL_SWAP,
        target="stated; hidden >= 0.9",
        points=("active_from_warm", "active_from_cold", "active_from_cold_in_place", "warm_from_cold", "warm_hidden_share"),
        least={"warm_hidden_share": 0.9},
    ),
    Figure(key="r2_wait", part=WAIT, target=">= 0.97", least={"": 0.97}),
    Figure(key="sim_attainment_gap", part=SIMULATOR, target="<= 3 points", most={"": 3.0}),
    Figure(key="sim_wait_p50_err", part=SIMULATOR, target="<= 15%", most={"": 0.15}),
    Figure(key="sim_wait_p99_err", part=SIMULATOR, target="<= 15%", most={"": 0.15}),
    Figure(key="urgent_in_time", part=BATCH, target="stated", points=BATCH_MODES),
    Figure(key="engine_policy_order", part=POLICIES, target="as simulated: 1", least={"": 1.0}),
    Figure(key="engine_policy_steps", part=POLICIES, target="stated", points=("fcfs", "edf", "larry", "fastserve")),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}
