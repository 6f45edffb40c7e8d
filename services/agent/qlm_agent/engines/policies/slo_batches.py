"""Static batches by SLO and length (UELLM, section 4.2), and by length alone (S3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from qlm_agent.engines.policies.port import MEDIAN, EnginePolicy, EngineView, Sequences, SequenceView
from qlm_core.operations.batching import BATCH_MAX, BatchRequests, OdbsRule, slo_odbs

SLO_MAX_S = 1_000.0
"""A longer SLO, or none, counts for so much: ten of them are within the threshold."""


class SloOdbs(EnginePolicy):
    """SLO-ODBS: the first batch of `qlm_core.operations.batching.slo_odbs` over the waiting runs of the lowest band; nobody joins until it
    has ended. With `joins` its batches, band by band, are only the order of admission, for engines that batch continuously. The SLO is
    what is left of it, the length the predicted median; without predictions lengths count nothing. `w1` weighs tokens, `w2` seconds:
    SLO-DBS has w1 = 0, ODBS w2 = 0."""

    def __init__(
        self, *, w1: float = 0.5, w2: float = 1.0, threshold: float = 15_000.0, batch_max: int = BATCH_MAX, joins: bool = False
    ) -> None:
        self._rule = OdbsRule(w1=w1, w2=w2, threshold=threshold, batch_max=batch_max)
        self._joins = joins

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        if not waiting or (running and not self._joins):
            return ()
        priority = waiting.column("priority")
        band = np.arange(len(priority)) if self._joins else np.flatnonzero(priority == priority.min())
        requests = BatchRequests(
            slo_s=np.minimum(waiting.column("deadline_s")[band] - now_s, SLO_MAX_S),
            prompt_tokens=waiting.column("prompt_tokens")[band].astype(np.int64),
            output_tokens=np.nan_to_num(waiting.quantiles()[band, MEDIAN]).astype(np.int64),
        )
        batches = slo_odbs(requests, self._rule)
        if not self._joins:
            return waiting.names(band[list(batches[0])])
        admitted = np.array(list(chain.from_iterable(batches)))
        return waiting.names(admitted[np.argsort(priority[admitted], kind="stable")])

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=lambda run: run.deadline_s, reverse=True)]


class S3(EnginePolicy):
    """S3 (Jin et al., 2023), UELLM's rival: static batches of the shortest runs by predicted length that fit into the KV together, SLOs
    ignored. Its supervisor takes a run beyond its predicted length out of the batch while others wait; it returns for twice that length,
    with what it has made. A run without a prediction has a batch of its own and is not taken out."""

    def __init__(self, *, batch_max: int = BATCH_MAX) -> None:
        self._batch_max = batch_max
        self._due_s: float | None = None

    def reset(self, engine: EngineView) -> None:
        self._engine = engine

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        self._due_s = None
        if not waiting:
            return ()
        left = _allowed(running) - running.column("produced_tokens")
        chosen = np.zeros(0, np.intp)
        if not (left > 0).any():
            tokens = waiting.column("prompt_tokens") + _allowed(waiting)
            shortest = np.argsort(tokens, kind="stable")[: self._batch_max]
            fitting = int((np.cumsum(tokens[shortest]) <= self._engine.kv_capacity_tokens).sum())
            chosen = shortest[: max(1, fitting)]
            left = (_allowed(waiting) - waiting.column("produced_tokens"))[chosen]
        soon = left[(left > 0) & np.isfinite(left)]
        if len(soon) and len(chosen) < len(waiting):
            self._due_s = now_s + float(soon.min()) * self._engine.expected_step_s(len(left), 0, ())
        return waiting.names(chosen)

    def pause(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        if not waiting:
            return ()
        over = np.flatnonzero(running.column("produced_tokens") >= _allowed(running))
        for place in over.tolist():
            running[place].note = max(running[place].note, 0) + 1
        return running.names(over)

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=lambda run: run.arrival, reverse=True)]

    def next_wakeup_s(self, now_s: float) -> float | None:
        return self._due_s


def _allowed(runs: Sequences) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Tokens that the supervisor lets each run make; `note` counts its corrections."""
    predicted = np.nan_to_num(np.maximum(runs.quantiles()[:, MEDIAN], 1.0), nan=np.inf)
    return np.asarray(predicted * 2.0 ** np.maximum(runs.column("note"), 0.0))
