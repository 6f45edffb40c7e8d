"""Transfers of weights and KV in a simulated engine: the links that carry them, and how an operation ended."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_agent.engines.port import EngineBusy, ModelLoadFailed


class Link:
    """Between two memories: carries transfers one after another in the order of booking. A cancelled transfer still takes its time."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def is_free(self, now_s: float) -> bool:
        return self._free_at_s <= now_s

    def carry(self, now_s: float, took_s: float) -> float:
        """Books a transfer of so many seconds; returns when it is over."""
        self._free_at_s = max(self._free_at_s, now_s) + took_s
        return self._free_at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnded:
    """A load, offload or restore, by its number, ended at `ended_s` after `took_s`. `error`: a load that failed; tiers are unchanged.
    `run_ids`: the runs whose KV was moved."""

    number: int
    ended_s: float
    took_s: float
    run_ids: tuple[str, ...] = ()
    error: EngineBusy | ModelLoadFailed | None = None
