"""Mega prompts: requests of which one alone takes a large part of an engine (QLM section 8, workload W_C).

They have groups of their own, so that the planner sees what they cost and may put them on another instance than what they would hold up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_core.hardware_profile import HardwareProfile
from qlm_core.request import RequestFacts
from qlm_planner.board import Board
from qlm_planner.estimates import Estimates


@dataclass(slots=True, kw_only=True)
class MegaRule:
    """`share`: of the KV of the instance that has most of it, or of the SLO for the prefill of the fastest one."""

    share: float
    _best: dict[str, tuple[int, HardwareProfile] | None] = field(default_factory=dict)

    def forget(self) -> None:
        """Instances or profiles changed."""
        self._best.clear()

    def holds(self, facts: RequestFacts, board: Board, estimates: Estimates) -> bool:
        """O(1), but for the first request of a model since `forget`. False where no instance serves the model."""
        best = self._of(facts.model, board, estimates)
        if best is None:
            return False
        kv_tokens, fastest = best
        if facts.prompt_tokens + facts.predicted_output_tokens > self.share * kv_tokens:
            return True
        return math.isfinite(facts.slo.seconds) and fastest.prefill_s(facts.prompt_tokens) > self.share * facts.slo.seconds

    def _of(self, model: str, board: Board, estimates: Estimates) -> tuple[int, HardwareProfile] | None:
        if model not in self._best:
            able = [estimates.hardware(slot.facts, model) for _, slot in sorted(board.slots.items()) if estimates.can_serve(slot, model)]
            known = [hardware for hardware in able if hardware is not None]
            self._best[model] = (
                (
                    max(hardware.kv_capacity_tokens for hardware in known),
                    min(known, key=lambda hardware: hardware.slowdown * hardware.prefill_ms_per_token),
                )
                if known
                else None
            )
        return self._best[model]
