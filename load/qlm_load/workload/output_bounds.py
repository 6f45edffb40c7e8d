"""The `max_tokens` of honest clients: a round number well above the answer, since its length is unknown beforehand."""

from __future__ import annotations

OUTPUT_BOUNDS = (512, 1_024, 4_096)
OUTPUT_BOUND_MARGIN = 1.25
"""A client's bound is at least this x its answer."""
BOUNDED_TOKENS_MAX = int(OUTPUT_BOUNDS[-1] / OUTPUT_BOUND_MARGIN)
"""Longest answer with a bound."""


def output_bound(output_tokens: int, level: float) -> int:
    """For an answer of so many tokens: one of the OUTPUT_BOUNDS above it, all equally likely. `level`: in [0, 1). 0, for no bound, if none
    is large enough."""
    able = [bound for bound in OUTPUT_BOUNDS if bound >= OUTPUT_BOUND_MARGIN * output_tokens]
    return able[int(level * len(able))] if able else 0
