"""Preemption at every step: the runs of the least keys have the seats, the others are paused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from qlm_agent.engines.policies.port import EnginePolicy, EngineView, Flags, KvRule, Numbers, Positions, Residence, Sequences, SequenceView

PATIENCE_S = 5.0
"""A run whose KV did not return in this time is seated all the same, and the step waits for its KV."""

_ARRIVALS = 2.0**32
"""Arrivals below it break ties of whole keys."""


class LeastKeyFirst(EnginePolicy):
    """A subclass gives keys, which no two runs share. A run whose KV is in host memory gets its seat when the KV is back."""

    def __init__(self, *, kv: str = "proactive") -> None:
        self.kv = KvRule(kv)
        self._engine: EngineView | None = None
        self._leave: list[str] = []

    def reset(self, engine: EngineView) -> None:
        self._engine = engine

    @property
    def engine(self) -> EngineView:
        assert self._engine is not None, "reset comes first"
        return self._engine

    @abstractmethod
    def keys(self, now_s: float, waiting: Sequences, running: Sequences) -> tuple[Numbers, Numbers]:
        """Keys of the waiting and of the running runs, at the beginning of a decision."""

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        waiting_keys, running_keys = self.keys(now_s, waiting, running)
        ready = np.flatnonzero(self._is_ready(now_s, waiting, waiting_keys))
        keys = np.concatenate((running_keys, waiting_keys[ready]))
        seats = min(self.engine.seats, len(keys))
        first = np.argpartition(keys, seats - 1)[:seats] if seats < len(keys) else np.arange(len(keys))
        first = first[np.argsort(keys[first])]
        stays = np.zeros(len(running_keys), bool)
        stays[first[first < len(running_keys)]] = True
        self._leave = running.names(np.flatnonzero(~stays))
        starts = ready[first[first >= len(running_keys)] - len(running_keys)]
        self.decided(now_s, waiting, running, starts, stays)
        return waiting.names(starts)

    def decided(self, now_s: float, waiting: Sequences, running: Sequences, starts: Positions, stays: Flags) -> None:
        """The waiting runs at positions `starts` get seats, the running ones of `stays` keep theirs."""
        return

    def pause(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        return self._leave

    def _is_ready(self, now_s: float, waiting: Sequences, keys: Numbers) -> Flags:
        residence = waiting.column("residence")
        ready: Flags = residence != Residence.MOVING
        if self.kv is KvRule.PROACTIVE:
            ready &= (residence != Residence.HOST) | (now_s - waiting.column("waiting_since_s") > PATIENCE_S)
        elif self.kv is KvRule.DEFER:
            needed = np.where(residence == Residence.NONE, waiting.column("prompt_tokens") + waiting.column("produced_tokens"), 0.0)
            by_key = np.argsort(keys)
            ready[by_key] = np.cumsum(needed[by_key]) <= self.engine.kv_free_tokens
            ready |= residence == Residence.GPU
        return ready


class FixedPriority(LeastKeyFirst):
    """The shortest prompt first, at every step (the strawman of FastServe, section 4.1)."""

    def keys(self, now_s: float, waiting: Sequences, running: Sequences) -> tuple[Numbers, Numbers]:
        return _prompt_keys(waiting), _prompt_keys(running)

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [run.run_id for run in sorted(running, key=lambda run: (-run.prompt_tokens, -run.arrival))]


def _prompt_keys(runs: Sequences) -> Numbers:
    return runs.column("prompt_tokens") * _ARRIVALS + runs.column("arrival")
