"""Prefills of a step: whole, or in chunks of a token budget (Sarathi-Serve, OSDI 2024; vLLM)."""

from __future__ import annotations

from enum import StrEnum


class PrefillRule(StrEnum):
    """The budget of a step in prompt tokens. BESIDE: all of it, beside the decodes. SHARED: less one token of each decode, as in vLLM; it
    is at least the number of seats, so that a seated prefill always advances. WHOLE: a prompt is computed in one step; several are only
    where all fit in the budget (Orca; FastServe)."""

    BESIDE = "beside"
    SHARED = "shared"
    WHOLE = "whole"

    def budget(self, step_tokens_max: int, decoding: int) -> int:
        """Prompt tokens of a step with so many decodes."""
        return step_tokens_max - decoding if self is PrefillRule.SHARED else step_tokens_max

    def chunk(self, left_tokens: int, budget: int, *, first: bool) -> int:
        """Tokens of the next prefill, of which `left_tokens` are left; 0 for none. `first`: of the step."""
        if self is PrefillRule.WHOLE:
            return left_tokens if first or left_tokens <= budget else 0
        return max(0, min(budget, left_tokens))
