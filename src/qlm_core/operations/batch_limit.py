"""A sixth LSO: fewer sequences in the batch while requests with a short completion SLO are served (docs/adr/0018).

A decode step grows with every sequence in it (d(B) = a + b B, QLM section 6), so a full batch may make each token too slow for a short SLO:
the request is late however early it starts. With B limited to

    P + O (a + b B) <= SLO_SHARE x SLO

each of them has time left to wait, at the price of throughput. Where even a small batch is too slow, or a full one fast enough, nothing is
limited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qlm_core.operations.operation import Limits, Means, Situation
from qlm_core.request import SloKind

SLO_SHARE = 0.7
"""Of the SLO, what serving may take; the rest is for waiting and for longer outputs than expected."""

BATCH_MIN = 8
"""No smaller batch: it would give away nearly all of the throughput."""


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """The operation."""

    name: str = "batch_limit"

    def applies(self, situation: Situation, means: Means) -> bool:
        return BATCH_MIN <= self._largest(situation, means) < means.batch_max

    def effect(self, situation: Situation, means: Means) -> Means:
        return replace(means, batch_max=float(self._largest(situation, means)))

    def limits(self, situation: Situation, means: Means) -> Limits:
        return Limits(batch_max=self._largest(situation, means))

    def _largest(self, situation: Situation, means: Means) -> int:
        """B; 0 where it does not matter to the SLO, or none is small enough."""
        if situation.slo_kind is not SloKind.COMPLETION or not math.isfinite(situation.slo_s):
            return 0
        hardware, output_tokens = means.hardware, situation.output.mean
        base_s = hardware.decode_step_s(0.0, 0.0)
        sequence_s = hardware.decode_step_s(1.0, situation.prompt_tokens + 0.5 * output_tokens) - base_s
        left_s = SLO_SHARE * situation.slo_s - hardware.prefill_s(situation.prompt_tokens) - output_tokens * base_s
        if left_s <= 0.0 or output_tokens * sequence_s <= 0.0:
            return 0
        return int(min(left_s / (output_tokens * sequence_s), 1e6))
