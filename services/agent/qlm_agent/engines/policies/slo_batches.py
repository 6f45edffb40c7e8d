"""Static batches by SLO and length (UELLM, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlm_agent.engines.policies.port import QUANTILE_LEVELS, EnginePolicy, Sequences, SequenceView
from qlm_core.operations.batching import BATCH_MAX, BatchRequests, OdbsRule, slo_odbs

MEDIAN = QUANTILE_LEVELS.index(0.5)
SLO_MAX_S = 1_000.0
"""A longer SLO, or none, counts for so much: ten of them are within the threshold."""


class SloOdbs(EnginePolicy):
    """SLO-ODBS: the first batch of `qlm_core.operations.batching.slo_odbs` over the waiting runs of the lowest band; nobody joins until it
    has ended. The SLO is what is left of it, the length the predicted median; without predictions lengths count nothing. `w1` weighs
    tokens, `w2` seconds: SLO-DBS has w1 = 0, ODBS w2 = 0."""

    def __init__(self, *, w1: float = 0.5, w2: float = 1.0, threshold: float = 15_000.0, batch_max: int = BATCH_MAX) -> None:
        self._rule = OdbsRule(w1=w1, w2=w2, threshold=threshold, batch_max=batch_max)

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        if running or not waiting:
            return ()
        priority = waiting.column("priority")
        band = np.flatnonzero(priority == priority.min())
        requests = BatchRequests(
            slo_s=np.minimum(waiting.column("deadline_s")[band] - now_s, SLO_MAX_S),
            prompt_tokens=waiting.column("prompt_tokens")[band].astype(np.int64),
            output_tokens=np.nan_to_num(waiting.quantiles()[band, MEDIAN]).astype(np.int64),
        )
        return waiting.names(band[list(slo_odbs(requests, self._rule)[0])])

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=lambda run: run.deadline_s, reverse=True)]
