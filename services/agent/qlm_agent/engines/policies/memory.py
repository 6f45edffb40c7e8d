"""Policies by the KV that runs need: LARRY and No-Preempt (Kossmann et al., "Is the GPU half-empty or half-full?", 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlm_agent.engines.policies.port import EnginePolicy, EngineView, Sequences

BLOCK_TOKENS = 16
"""Tokens in a block of KV: vLLM's default, and the unit of LARRY's weight."""
REORDER_S = 0.1
"""Time between two orders of LARRY without an arrival: the score depends on the length of the queue."""

TIE = 1e-9
"""Score between neighbours of equal scores, so that every machine sorts them alike."""


class _LatestLoses(EnginePolicy):
    """Names the latest arrivals as victims, as vLLM does."""

    def victims(self, now_s: float, running: Sequences) -> Sequence[str]:
        return running.names(np.argsort(-running.column("arrival"), kind="stable"))


class Larry(_LatestLoses):
    """LARRY, load-adaptive reordering (section 4.1). Waiting runs are admitted in falling order of their score; the first without room ends
    the admission.

    Equation 1 is lost in the text, which states what goes into it: waiting raises the score, in proportion to a weight; the memory of the
    prompt lowers it, in proportion to the length of the queue, since under a long queue a large chunk of memory delays many others and
    under an empty one nobody. The thinnest such score is

        score = weight * seconds waited - blocks of KV of the prompt * waiting runs

    With blocks of 16 tokens, the unit of the scheduler that the paper changes, the weight has the paper's scale: a run of B more blocks
    among Q waiting runs is overtaken by those that arrive within B * Q / weight seconds after it. So nobody is starved, and above a
    weight of 1,000 the order is that of arrival except for neighbours (100 blocks more among 20 waiting runs: 2 s).

    A run that lost its KV waits since its arrival and needs blocks for what it has made too.
    """

    def __init__(self, *, weight: float = 10.0) -> None:
        """Raises ValueError for a weight below 0 or NaN."""
        if not weight >= 0.0:
            raise ValueError(f"the weight is >= 0, got {weight}")
        self._weight = weight
        self._waiting = 0

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        self._waiting = len(waiting)
        blocks = waiting.column("note").copy()  # kept with each run: one column to read instead of two
        for position in np.flatnonzero(blocks < 0).tolist():
            run = waiting[position]
            blocks[position] = run.note = -(-(run.prompt_tokens + run.produced_tokens) // BLOCK_TOKENS)
        cost = blocks * len(waiting) - self._weight * (now_s - waiting.column("arrived_s"))
        return waiting.names(np.argsort(cost + np.arange(len(cost)) * TIE))  # a stable sort takes six times as long

    def next_wakeup_s(self, now_s: float) -> float | None:
        return now_s + REORDER_S if self._waiting > 1 else None


class NoPreempt(_LatestLoses):
    """First come, first served with worst-case KV reserved, so that no run is preempted (section 2.2; ORCA, TensorRT-LLM). The worst case
    is the lesser of the model's context, `context_tokens`, and prompt plus `max_tokens` where it is known. The first run whose reservation
    does not fit holds back all later ones. A run whose worst case is beyond the engine runs alone."""

    def __init__(self, *, context_tokens: int = 8_192) -> None:
        if context_tokens < 1:
            raise ValueError(f"context_tokens is >= 1, got {context_tokens}")
        self._context_tokens = context_tokens
        self._engine: EngineView | None = None

    def reset(self, engine: EngineView) -> None:
        self._engine = engine

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        assert self._engine is not None, "reset precedes every call"
        by_arrival = np.argsort(waiting.column("arrival"), kind="stable")
        reserved = self._blocks(running).sum() + np.cumsum(self._blocks(waiting)[by_arrival])
        fitting = int(np.searchsorted(reserved, self._engine.kv_capacity_tokens // BLOCK_TOKENS, side="right"))
        return waiting.names(by_arrival[: max(fitting, 0 if len(running) else 1)])

    def _blocks(self, runs: Sequences) -> np.ndarray:
        """Worst case of each run."""
        prompt, limit = runs.column("prompt_tokens"), runs.column("max_tokens")
        longest = np.minimum(self._context_tokens, np.where(limit > 0, prompt + limit, np.inf))
        return np.ceil(np.maximum(longest, prompt + runs.column("produced_tokens") + 1) / BLOCK_TOKENS)
