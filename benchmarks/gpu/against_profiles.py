"""Timings beside QLM's row for this GPU and model: shipped, or arithmetic on their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlm_cli.serve.gpus import profile_name
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec

STEP = (32, 16_000)
"""Sequences and context tokens of the compared decode step; and a prefill of PROMPT tokens."""
PROMPT = 1_000
RATIO_MAX = 2.0
"""Beyond this factor either way a row would mislead the planner."""


def compare_with_row(timed: Mapping[str, Any]) -> dict[str, Any]:
    """Timings over the row's figures, for those that plans rest on; `why` without a row, `off`: those beyond RATIO_MAX."""
    gpu, model, figures = profile_name(timed["device"]), timed["model"], timed["figures"]
    row = shipped_snapshot().hardware_of_pair(gpu, 1, ModelSpec(name=model, profile=model))
    if row is None:
        return {"gpu": gpu, "model": model, "why": f"neither a row nor facts of {model} on {gpu}"}
    sequences, context = STEP
    step_ms = figures["decode_a_ms"] + figures["decode_b_ms_per_seq"] * sequences + figures["decode_c_ms_per_context_token"] * context
    prefill_ms = figures["prefill_base_ms"] + figures["prefill_ms_per_token"] * PROMPT + figures["prefill_ms_per_token_squared"] * PROMPT**2
    pairs = {
        f"decode step, {sequences} sequences with {context:,} tokens, ms": (step_ms, 1e3 * row.decode_step_s(sequences, context)),
        f"prefill of {PROMPT:,} tokens, ms": (prefill_ms, 1e3 * row.prefill_work_s(PROMPT)),
        "KV of a token to host memory, us": (figures["kv_swap_us_per_token"], row.kv_swap_us_per_token),
        "weights from host memory, s": (figures["load_cpu_to_gpu_s"], row.load_cpu_to_gpu_s),
        "KV bytes of a token": (figures["kv_bytes_per_token"], row.kv_bytes_per_token),
    }
    table = {name: {"timed": timed_, "row": said, "ratio": timed_ / said} for name, (timed_, said) in pairs.items()}
    off = [name for name, each in table.items() if not 1 / RATIO_MAX <= each["ratio"] <= RATIO_MAX]
    return {"gpu": gpu, "model": model, "origin": row.origin or "shipped", "table": table, "off": off}
