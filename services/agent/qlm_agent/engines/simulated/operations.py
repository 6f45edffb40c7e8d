"""Operations of a simulated engine that take time, and how each ended."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_agent.engines.port import EngineBusy, ModelLoadFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnded:
    """A load, offload or restore, by its number, ended at `ended_s` after `took_s`. `error`: a load that failed; tiers are unchanged.
    `run_ids`: the runs whose KV was moved."""

    number: int
    ended_s: float
    took_s: float
    run_ids: tuple[str, ...] = ()
    error: EngineBusy | ModelLoadFailed | None = None
